"""Every kernel has its place in the table of kernels."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from inline_attention.bench import kernels
from inline_attention.bench.op import Case
from inline_attention.ops.kernels import backward, forward


def test_every_kernel_has_its_bytes() -> None:
    launched = {name for module in (forward, backward) for name in vars(module) if name.endswith("_kernel")}
    assert launched == kernels.UNITS.keys()


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "expected"), [("1024,7,3x32", 2), ("2,40,6x32", 6)])
def test_kernels_are_found_in_the_profile(case: str, expected: int) -> None:
    device = torch.device("cuda")
    results = kernels.run_case(Case.parse(case), device=device, dtype=torch.bfloat16, bandwidth=4e12)
    times = {r.kernel: r.seconds for r in results}
    assert len(times.keys() - {kernels.REST}) == expected
    assert all(0 < seconds < 0.1 for seconds in times.values())
    assert kernels.kernel_table([dataclasses.asdict(r) for r in results]).count("\n") == 1 + len(results)
