"""The Triton kernels one by one: the time of each, over the time to move its bytes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.ops import Backend, OutputProjection, add_mlp
from inline_attention.ops.backends import fused_mlp
from inline_attention.printing import table

from .op import CONTENDERS, Case, bind, draw_sets, in_turn
from .timing import Call, Effort, Timing, measure, profiled

# Bytes that a kernel must read and write, in units of one of q, k, v, if φ is the identity. Its other data (states,
# sums, local weights) do not grow with the tokens.
UNITS = {
    "forward_kernel": 4,  # q, k, v → out
    "short_kernel": 4,  # the same, in inference
    "state_kernel": 2,  # k, v →
    "finish_kernel": 0,
    "output_kernel": 3,  # q, v → out
    "backward_kernel": 7,  # q, k, v, g → dq, dk, dv
    "grad_state_kernel": 3,  # q, v, g →
    "grad_finish_kernel": 0,
    "grad_kernel": 6,  # k, v, g → dq, dk, dv
}
REST = "everything else"
TURNS = 16  # passes over the sets of inputs

# The MLP half of a block, as one kernel and as what torch.compile makes of the reference.
MLP = "mlp_kernel"
COMPILED = "MLP, compiled reference"


@dataclass(frozen=True)
class KernelResult:
    """One kernel in one forward and backward pass, on inputs that are in no cache."""

    case: str
    kernel: str
    seconds: float
    units: int
    floor_seconds: float
    flops: int = 0  # of matrix products, where they may be the limit


def run_case(case: Case, *, device: torch.device, dtype: torch.dtype, bandwidth: float) -> list[KernelResult]:
    calls = [bind(CONTENDERS["fused"], x, "forward+backward") for x in draw_sets(case, device=device, dtype=dtype)]
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()

    def turn() -> None:
        for call in calls:
            call()

    seconds: dict[str, float] = defaultdict(float)
    for kernel in profiled(turn, device=device, calls=TURNS):
        seconds[kernel.name if kernel.name in UNITS else REST] += kernel.seconds / len(calls)
    unit = case.elements * dtype.itemsize
    return [
        KernelResult(str(case), name, seconds[name], units, units * unit / bandwidth)
        for name, units in {**UNITS, REST: 0}.items()
        if seconds[name]
    ]


@dataclass(frozen=True)
class MlpInputs:
    """Calls of `add_mlp`. The stream and the norm are float32 and the rest half, as under autocast."""

    calls: list[tuple[Tensor, OutputProjection | None]]  # x, and the end of the attention before
    norm: list[Tensor]
    weights: list[Tensor]  # of the two linear layers, in the dtype of the products
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Of the matrix products of a call"""
        x, projection = self.calls[0]
        hidden, width = self.weights[0].shape
        return 2 * x.numel() * (2 * hidden + (0 if projection is None else width))


def draw_mlp(
    rows: int, width: int, hidden: int, *, device: torch.device, dtype: torch.dtype, projected: bool = False
) -> MlpInputs:
    """Random inputs (rows, width). Parameters are float32 and cast in every call, as under autocast.

    There are several, as in `draw_sets`, but no more than 16: few rows stay in the cache in a model, too.
    """
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = min(16, max(2, math.ceil(4 * cache / (4 * rows * width))))

    def normal(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(shape, device=device) * scale

    norm = [1 + normal(width), normal(width)]
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    weights = [normal(*shape, scale=0.2 if len(shape) == 1 else width**-0.5) for shape in shapes]
    last = [normal(width, width, scale=width**-0.5), normal(width)]
    calls = [
        (normal(rows, width, scale=1), OutputProjection(normal(rows, width).to(dtype), *last) if projected else None)
        for _ in range(sets)
    ]
    return MlpInputs(calls, norm, weights, dtype)


def mlp_calls(inputs: MlpInputs, tile: "fused_mlp.Tile | None" = None) -> list[Call]:
    """The kernel on each of the inputs."""
    return [
        partial(fused_mlp.add_mlp, x, inputs.norm, inputs.weights, last, 1e-6, inputs.dtype, tile)
        for x, last in inputs.calls
    ]


def compiled_calls(inputs: MlpInputs) -> list[Call]:
    """What runs without the kernel, compiled. A projection is followed by what `add_mlp` chooses without one."""
    torch.compiler.reset()  # PyTorch compiles a function for eight sizes, and runs it uncompiled at the ninth

    def mlp(x: Tensor, *last: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, inputs.dtype, enabled=inputs.dtype != torch.float32):
            if last:
                x = x + F.linear(*last)
            backend: Backend = "auto" if last else "reference"
            return add_mlp(x, *inputs.norm, *inputs.weights, eps=1e-6, backend=backend)

    compiled = torch.compile(mlp, dynamic=False)
    return [partial(compiled, x, *(last or ())) for x, last in inputs.calls]


def run_mlp(
    case: Case, *, device: torch.device, dtype: torch.dtype, bandwidth: float, effort: Effort
) -> list[KernelResult]:
    """The MLP half of a block of the case's tokens and width, with four times as many hidden channels."""
    rows, width = case.batch * case.tokens, case.heads * case.head_dim
    inputs = draw_mlp(rows, width, 4 * width, device=device, dtype=dtype)
    calls = {MLP: mlp_calls(inputs), COMPILED: compiled_calls(inputs)}
    timings = measure({name: in_turn(each, device)[0] for name, each in calls.items()}, device=device, effort=effort)
    results = []
    for name, timing in timings.items():
        if not isinstance(timing, Timing):
            raise RuntimeError(f"{name}: {timing}")
        floor = 2 * 4 * rows * width / bandwidth  # x → out, float32
        seconds = timing.shared(len(inputs.calls)).median
        results.append(KernelResult(str(case), name, seconds, 2, floor, inputs.flops))
    return results


def kernel_table(results: Sequence[dict]) -> str:
    """A row for each case and kernel."""
    rows = []
    for r in results:
        floor = r["floor_seconds"]
        rows.append([
            r["case"],
            r["kernel"],
            f"{r['seconds'] * 1e6:.1f}",
            str(r["units"] or ""),
            f"{floor * 1e6:.1f}" if floor else "",
            f"{r['seconds'] / floor:.2f}" if floor else "",
            f"{r['flops'] / r['seconds'] / 1e12:.0f}" if r.get("flops") else "",
        ])  # fmt: skip
    return table(["batch, map, heads×d", "kernel", "µs", "units", "floor, µs", "× floor", "TFLOP/s"], rows)
