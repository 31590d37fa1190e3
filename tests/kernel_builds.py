"""Builds the Triton kernels for GPUs that are not there, and prints what each takes of its GPU:

    PYTHONPATH=src python tests/kernel_builds.py                             # every case for every GPU, half an hour
    PYTHONPATH=src python tests/kernel_builds.py --gpus sm_90 --cases inline-bf16-32 --json builds.json

The operators run on tensors without memory, and their launches are recorded. So a kernel is built with the parameters
that it is launched with on such a GPU. Nothing is executed: Triton's wheel has all that it takes, for NVIDIA and AMD.

A kernel passes if it builds and fits the shared memory. "stack" are bytes that a thread keeps in memory, because its
registers are spent (spills) or because an index is not known to the compiler. Exits with 1 if a kernel does not pass.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter builds nothing

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from inline_attention.ops import fused, fused_local_weight, fused_mlp, fused_norm_linear, gpu
from inline_attention.ops.fused import short
from inline_attention.ops.fused.arguments import Options, Tensors
from inline_attention.ops.fused.backward import run_backward
from inline_attention.ops.fused.forward import run_forward
from inline_attention.ops.fused.plan import make_plan
from inline_attention.ops.gpu import Limits
from inline_attention.ops.projections import OutputProjection


class GPU(NamedTuple):
    target: GPUTarget
    limits: Limits


KiB = 1024
GPUS = {
    "sm_80": GPU(GPUTarget("cuda", 80, 32), Limits(108, 163 * KiB)),  # A100
    "sm_86": GPU(GPUTarget("cuda", 86, 32), Limits(84, 99 * KiB)),  # A10, RTX 3090
    "sm_89": GPU(GPUTarget("cuda", 89, 32), Limits(142, 99 * KiB)),  # L40S, RTX 4090
    "sm_90": GPU(GPUTarget("cuda", 90, 32), Limits(132, 227 * KiB)),  # H100, H200
    "sm_100": GPU(GPUTarget("cuda", 100, 32), Limits(148, 227 * KiB)),  # B200
    "sm_120": GPU(GPUTarget("cuda", 120, 32), Limits(170, 99 * KiB)),  # RTX 5090
    "gfx942": GPU(GPUTarget("hip", "gfx942", 64), Limits(304, 64 * KiB)),  # MI300X
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded_launches(limits: Limits) -> Iterator[list[Launch]]:
    """Launches inside the block are kept and not made, as for a GPU with these limits."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: launches.append(Launch(kernel, grid, args, options))

    before = gpu.launch, gpu.limits_of
    gpu.launch, gpu.limits_of = record, lambda device: limits
    try:
        yield launches
    finally:
        gpu.launch, gpu.limits_of = before


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    dtype: torch.dtype,
    head_dim: int,
    normalization: str = "subtract",
    feature_map: str = "identity",
    *,
    anchored: bool = False,
    masked: bool = False,
    packed: bool = False,
) -> None:
    """Both paths, forward and backward, with the local residual."""
    heads, grid, prefix = 6, (14, 14), 1
    batch, tokens = 4, prefix + grid[0] * grid[1]
    # Many samples of short sequences take one program each, few take several.
    for samples in (batch * 256, batch):
        rows = (1, samples * tokens) if packed else (samples, tokens)
        qkv = meta(*rows, 3, heads, head_dim, dtype=dtype)
        mask = meta(*rows, dtype=torch.bool) if masked else None
        sequences = meta(samples, 4, dtype=torch.int64) if packed else None
        offset = meta(samples, 1, heads, head_dim, dtype=torch.float32) if anchored else None
        tensors = Tensors(meta(samples, heads, head_dim, 9, dtype=dtype), mask, mask, sequences, None, offset)
        grids = [*grid] * samples if packed else [*grid]
        options = Options(normalization, feature_map, anchored, head_dim**-0.5, grids, prefix)
        if fused.why_not_widths(head_dim, head_dim, qkv.device) is not None:
            return  # the reference runs there
        out, state, means, scores, lse = run_forward([qkv], tensors, options, save=True)
        if anchored:
            tensors = tensors._replace(shares=scores)
        run_backward(torch.empty_like(out), [qkv], tensors, state, means, lse, options, grad_of_local=True)


def one_launch(dtype: torch.dtype, head_dim: int, *, tiles: Sequence[short.Tile] | None = None) -> None:
    """One image, the local weight made inside. By default with the tile of what was not measured."""
    heads, grid, prefix = 6, (14, 14), 1
    tokens = prefix + grid[0] * grid[1]
    qkv = meta(1, tokens, 3, heads, head_dim, dtype=dtype)
    if fused.why_not_widths(head_dim, head_dim, qkv.device) is not None:
        return  # the reference runs there
    shapes = [(1, tokens, heads * head_dim), (heads, head_dim, head_dim), (heads, head_dim)]
    shapes += [(heads, 9 * head_dim, head_dim), (heads, 9 * head_dim)]
    source = [meta(*shape, dtype=dtype) for shape in shapes]
    options = Options("subtract", "identity", False, head_dim**-0.5, grid, prefix)
    if tiles is None:
        q, k, v = qkv.unbind(2)
        plan = make_plan(q, k, v, None, grid, prefix)
        tiles = [short.choose_tile(plan, dtype, gpu.limits_of(qkv.device).multiprocessors)]
    for tile in tiles:
        short.run([qkv], source, Tensors(None, None, None, None, None, None), options, tile)


def local_weight(dtype: torch.dtype, head_dim: int) -> None:
    heads = 6
    shapes = [(8, heads * head_dim), (heads, head_dim, head_dim), (heads, head_dim)]
    shapes += [(heads, 9 * head_dim, head_dim), (heads, 9 * head_dim)]
    tensors = [meta(*shape, dtype=dtype) for shape in shapes]
    fused_local_weight.run(*tensors, dtype)
    fused_local_weight.run_backward(meta(8, heads, head_dim, 9, dtype=dtype), *tensors[:4])


def mlp(
    dtype: torch.dtype,
    width: int,
    *,
    rows: int | None = None,
    save: bool = False,
    projected: bool = False,
    weight: torch.dtype | None = None,
) -> None:
    """The tile that is launched for so many rows; by default every tile that fits."""
    if fused_mlp._why_not_memory(width, dtype, torch.device("cuda")):
        return  # the reference runs there
    x, vector = meta(rows or 1, width, dtype=dtype), meta(width, dtype=dtype)
    hidden, casts, weight = 4 * width, weight is not None, weight or dtype
    weights = [meta(*shape, dtype=weight) for shape in ((hidden, width), (hidden,), (width, hidden), (width,))]
    projection = OutputProjection(x, *(meta(*shape, dtype=weight) for shape in ((width, width), (width,))))
    limits = gpu.limits_of(x.device)
    fitting = [tile for tile in fused_mlp.TILES if fused_mlp.fits(tile, width, dtype, limits, casts=casts)]
    for tile in fitting if rows is None else [None]:
        fused_mlp.run(x, (vector, vector), weights, projection if projected else None, 1e-6, dtype, tile, save)


def norm_linear(dtype: torch.dtype, width: int, *, weight: torch.dtype | None = None, rows: int | None = None) -> None:
    """As `mlp`."""
    x, vector = meta(rows or 1, width, dtype=torch.float32), meta(width, dtype=torch.float32)
    tensors = [meta(*shape, dtype=weight or dtype) for shape in ((3 * width, width), (3 * width,))]
    limits, casts = gpu.limits_of(x.device), weight is not None
    fitting = [tile for tile in fused_mlp.TILES if fused_mlp.fits(tile, width, dtype, limits, casts=casts)]
    for tile in fitting if rows is None else [None]:
        fused_norm_linear.run(x, (vector, vector), *tensors, 1e-6, dtype, tile)


CASES: dict[str, Callable[[], None]] = {
    "inline-bf16-32": lambda: attention(torch.bfloat16, 32),
    "inline-bf16-64": lambda: attention(torch.bfloat16, 64),
    "inline-bf16-128": lambda: attention(torch.bfloat16, 128),
    "inline-fp16-32-packed": lambda: attention(torch.float16, 32, packed=True),
    "inline-fp32-32-masked": lambda: attention(torch.float32, 32, masked=True),
    "inline-fp32-64": lambda: attention(torch.float32, 64),
    "inline-fp32-128": lambda: attention(torch.float32, 128),
    "linear-bf16-32": lambda: attention(torch.bfloat16, 32, "divide", "relu"),
    "mala-bf16-32": lambda: attention(torch.bfloat16, 32, "magnitude", "elu_plus_one"),
    "mala-fp32-64": lambda: attention(torch.float32, 64, "magnitude", "elu_plus_one"),
    "tangent-bf16-32": lambda: attention(torch.bfloat16, 32, anchored=True),
    "tangent-bf16-64": lambda: attention(torch.bfloat16, 64, anchored=True),
    "tangent-fp32-64": lambda: attention(torch.float32, 64, anchored=True),
    "tangent-fp32-32-masked": lambda: attention(torch.float32, 32, anchored=True, masked=True),
    "one_launch-bf16-32": lambda: one_launch(torch.bfloat16, 32),
    "one_launch-bf16-32-tiles": lambda: one_launch(torch.bfloat16, 32, tiles=short.TILES),
    "one_launch-bf16-64-tiles": lambda: one_launch(torch.bfloat16, 64, tiles=short.TILES),
    "one_launch-fp16-64": lambda: one_launch(torch.float16, 64),
    "one_launch-fp32-32": lambda: one_launch(torch.float32, 32),
    "one_launch-bf16-128": lambda: one_launch(torch.bfloat16, 128),
    "local_weight-bf16-32": lambda: local_weight(torch.bfloat16, 32),
    "local_weight-fp32-128": lambda: local_weight(torch.float32, 128),
    "mlp-bf16-192": lambda: mlp(torch.bfloat16, 192, rows=50_432),
    "mlp-bf16-192-few": lambda: mlp(torch.bfloat16, 192, rows=197),
    "mlp-bf16-192-tiles": lambda: mlp(torch.bfloat16, 192),
    "mlp-bf16-192-save": lambda: mlp(torch.bfloat16, 192, rows=50_432, save=True),
    "mlp-bf16-192-save-tiles": lambda: mlp(torch.bfloat16, 192, save=True),
    "mlp-bf16-384-save-tiles": lambda: mlp(torch.bfloat16, 384, save=True),
    "mlp-fp16-512-save-tiles": lambda: mlp(torch.float16, 512, save=True),
    "mlp-bf16-384-tiles": lambda: mlp(torch.bfloat16, 384),
    "mlp-fp16-512-tiles": lambda: mlp(torch.float16, 512),
    "mlp-bf16-192-projected-tiles": lambda: mlp(torch.bfloat16, 192, projected=True),
    "mlp-bf16-384-projected-tiles": lambda: mlp(torch.bfloat16, 384, projected=True),
    "mlp-fp16-320-projected": lambda: mlp(torch.float16, 320, rows=25_088, projected=True),
    "mlp-bf16-192-casts-tiles": lambda: mlp(torch.bfloat16, 192, weight=torch.float32),
    "mlp-bf16-192-projected-casts-tiles": lambda: mlp(torch.bfloat16, 192, projected=True, weight=torch.float32),
    "mlp-bf16-384-casts-tiles": lambda: mlp(torch.bfloat16, 384, weight=torch.float32),
    "norm_linear-bf16-192": lambda: norm_linear(torch.bfloat16, 192, rows=50_432),
    "norm_linear-bf16-192-tiles": lambda: norm_linear(torch.bfloat16, 192),
    "norm_linear-bf16-192-casts-tiles": lambda: norm_linear(torch.bfloat16, 192, weight=torch.float32),
    "norm_linear-bf16-384-tiles": lambda: norm_linear(torch.bfloat16, 384),
    "mlp-fp32-96": lambda: mlp(torch.float32, 96, rows=50_432),
}


@dataclasses.dataclass
class Build:
    gpu: str
    case: str
    kernel: str
    settings: str  # what differs between the launches of a kernel
    shared: int | None = None  # bytes of a program; None if it does not build
    registers: int | None = None  # of a thread
    stack: int | None = None  # bytes of a thread
    limit: int = 0  # most shared memory
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.shared is not None and self.shared <= self.limit


class Driver:
    """All that Triton asks a driver for when it builds and does not launch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return GPUS[self.name].target

    def get_current_device(self) -> int:
        return list(GPUS).index(self.name)  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    if "cubin" in asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
        assert found is not None, said
        return int(found[1]), int(found[2])
    numbers = [re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"]) for name in ("vgpr_count", "private_segment_fixed_size")]
    assert all(numbers), asm["amdgcn"][-2000:]
    registers, stack = (int(number[1]) for number in numbers if number)
    return registers, stack


SETTINGS = ("BN", "BM", "BH", "SPLITS", "num_warps", "num_stages")


def build(name: str, case: str, wanted: list[str] | None = None) -> Iterator[Build]:
    limits = GPUS[name].limits
    with recorded_launches(limits) as launches:
        CASES[case]()
    triton.runtime.driver.set_active(Driver(name))
    for kernel, grid, args, options in launches:
        if wanted is not None and kernel.__name__ not in wanted:
            continue
        if GPUS[name].target.backend == "hip":
            options.pop("maxnreg", None)  # an option of NVIDIA's compiler
        settings = " ".join(f"{key}={options[key]}" for key in SETTINGS if key in options)
        one = Build(name, case, kernel.__name__, settings, limit=limits.shared_memory)
        try:
            built = kernel.warmup(*args, grid=grid, **options)
            registers, stack = resources(built.asm)
            yield dataclasses.replace(one, shared=built.metadata.shared, registers=registers, stack=stack)
        except Exception as error:  # a kernel that does not build is a result
            yield dataclasses.replace(one, error=f"{type(error).__name__}: {error}"[:500])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS), metavar="GPU", help=", ".join(GPUS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these, such as output_kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")
    print("| gpu | case | kernel | settings | shared, bytes | registers | stack, bytes |")
    print("|---|---|---|---|---|---|---|")
    builds = []
    for name in args.gpus:
        for case in args.cases:
            for one in build(name, case, args.kernels):
                builds.append(one)
                shared = one.error if one.shared is None else f"{one.shared}{'' if one.passed else ' TOO MUCH'}"
                cells = [name, case, one.kernel, one.settings, shared, one.registers, one.stack]
                print("|", " | ".join("" if x is None else str(x) for x in cells), "|", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in builds], indent=1) + "\n")
    failed = sum(not one.passed for one in builds)
    print(f"{len(builds)} kernels with Triton {triton.__version__}, {failed} failed")
    return 1 if failed or not builds else 0


if __name__ == "__main__":
    sys.exit(main())
