"""The Triton kernels one by one: the time of each, over the time to move its bytes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inline_attention.ops import add_perceptron
from inline_attention.ops.backends import fused_perceptron
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

# The perceptron half of a block, as one kernel and as what torch.compile makes of the reference.
PERCEPTRON = "perceptron_kernel"
COMPILED = "perceptron, compiled reference"


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


def draw_perceptron(
    rows: int, width: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs (rows, width) and the parameters of the layer norm and of the two linear layers.

    There are several inputs, as in `draw_sets`, but no more than 16: few rows stay in the cache in a model, too.

    The stream and the norm are float32 and the weights in `dtype`, as under autocast once the weights are cast.
    """
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = min(16, max(2, math.ceil(4 * cache / (4 * rows * width))))
    xs = [torch.randn(rows, width, device=device) for _ in range(sets)]
    norm = [1 + torch.randn(width, device=device) / 5, torch.randn(width, device=device) / 5]
    hidden = 4 * width
    w1, w2 = (torch.randn(shape, device=device) * width**-0.5 for shape in ((hidden, width), (width, hidden)))
    biases = (torch.randn(n, device=device) / 5 for n in (hidden, width))
    weights = [t.to(dtype) for pair in zip((w1, w2), biases, strict=True) for t in pair]
    return xs, norm + weights


def perceptron_calls(
    xs: Sequence[Tensor], tensors: Sequence[Tensor], dtype: torch.dtype, tile: "fused_perceptron.Tile | None" = None
) -> list[Call]:
    """The kernel on each of the inputs."""
    norm, weights = tensors[:2], tensors[2:]
    return [partial(fused_perceptron.add_perceptron, x, norm, weights, 1e-6, dtype, tile) for x in xs]


def compiled_calls(xs: Sequence[Tensor], tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Call]:
    """The reference on each of the inputs, compiled."""
    torch.compiler.reset()  # PyTorch compiles a function for eight sizes, and runs it uncompiled at the ninth

    def reference(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            return add_perceptron(x, *tensors, eps=1e-6, backend="reference")

    compiled = torch.compile(reference, dynamic=False)
    return [partial(compiled, x) for x in xs]


def run_perceptron(
    case: Case, *, device: torch.device, dtype: torch.dtype, bandwidth: float, effort: Effort
) -> list[KernelResult]:
    """The perceptron half of a block of the case's tokens and width, with four times as many hidden channels."""
    rows, width = case.batch * case.tokens, case.heads * case.head_dim
    xs, tensors = draw_perceptron(rows, width, device=device, dtype=dtype)
    calls = {PERCEPTRON: perceptron_calls(xs, tensors, dtype), COMPILED: compiled_calls(xs, tensors, dtype)}
    timings = measure({name: in_turn(each, device)[0] for name, each in calls.items()}, device=device, effort=effort)
    results = []
    for name, timing in timings.items():
        if not isinstance(timing, Timing):
            raise RuntimeError(f"{name}: {timing}")
        floor = 2 * 4 * rows * width / bandwidth  # x → out, float32
        flops = 4 * rows * width * 4 * width
        results.append(KernelResult(str(case), name, timing.shared(len(xs)).median, 2, floor, flops))
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
