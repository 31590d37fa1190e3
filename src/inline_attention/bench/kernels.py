"""The Triton kernels one by one: the time of each, over the time to move its bytes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inline_attention.printing import table

from .op import CONTENDERS, Case, bind, draw_sets
from .timing import profiled

# Bytes that a kernel must read and write, in units of one of q, k, v, if φ is the identity. Its other data (states,
# sums, local weights) do not grow with the tokens.
UNITS = {
    "forward_kernel": 4,  # q, k, v → out
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


@dataclass(frozen=True)
class KernelResult:
    """One kernel in one forward and backward pass, on inputs that are in no cache."""

    case: str
    kernel: str
    seconds: float
    units: int
    floor_seconds: float


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
        ])  # fmt: skip
    return table(["batch, map, heads×d", "kernel", "µs", "units", "floor, µs", "× floor"], rows)
