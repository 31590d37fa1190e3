"""Every kernel has its place in the table of kernels."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from inline_attention.bench import kernels
from inline_attention.bench.op import Case
from inline_attention.bench.timing import Effort
from inline_attention.ops.kernels import backward, forward, short


def test_every_kernel_has_its_bytes() -> None:
    launched = {name for module in (forward, backward, short) for name in vars(module) if name.endswith("_kernel")}
    assert launched == kernels.UNITS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are compiled")
def test_the_mlp_beside_the_compiled_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    results = kernels.run_mlp(
        Case.parse("1,2x3+1,1x16"), device=torch.device("cpu"), dtype=torch.float32, bandwidth=1e9,
        effort=Effort(rounds=2, seconds=0.0),
    )  # fmt: skip
    assert [r.kernel for r in results] == [kernels.MLP, kernels.COMPILED]
    assert len(compiled) == 1
    assert all(r.seconds > 0 and r.flops == 2 * 2 * 7 * 16 * 64 for r in results)
    for projected in (False, True):
        inputs = kernels.draw_mlp(3, 16, 24, device=torch.device("cpu"), dtype=torch.float32, projected=projected)
        with torch.no_grad():
            fast, plain = (make(inputs)[1]() for make in (kernels.mlp_calls, kernels.compiled_calls))
        torch.testing.assert_close(fast, plain)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "expected"), [("1024,7,3x32", 2), ("2,40,6x32", 6)])
def test_kernels_are_found_in_the_profile(case: str, expected: int) -> None:
    device = torch.device("cuda")
    results = kernels.run_case(Case.parse(case), device=device, dtype=torch.bfloat16, bandwidth=4e12)
    times = {r.kernel: r.seconds for r in results}
    assert len(times.keys() - {kernels.REST}) == expected
    assert all(0 < seconds < 0.1 for seconds in times.values())
    assert kernels.kernel_table([dataclasses.asdict(r) for r in results]).count("\n") == 1 + len(results)
