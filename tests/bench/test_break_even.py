"""The number of tokens from which the linear form is faster."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from inline_attention.bench.break_even import BreakEvenResult, break_even, describe_break_even, tangent
from inline_attention.bench.op import Case, Inputs, tangent_textbook
from inline_attention.cli import main
from inline_attention.ops import local_residual


def results(*faster: bool) -> list[BreakEvenResult]:
    """Sizes of 10, 20, … tokens, at which the linear form is faster or not."""
    return [
        BreakEvenResult(10 * n, 1, 1, 8, softmax=2.0, linear=1.0 if each else 3.0) for n, each in enumerate(faster, 1)
    ]


@pytest.mark.parametrize(
    ("faster", "tokens", "words"),
    [
        ((False, True, True), 20, "faster from 20 tokens on"),
        ((True, False, True), 30, "faster from 30 tokens on"),
        ((True, True, True), 10, "10 tokens on, the fewest that were tried"),
        ((True, True, False), None, "softmax is faster up to 30 tokens, the most that were tried"),
    ],
)
def test_from_how_many_tokens_on(faster: tuple[bool, ...], tokens: int | None, words: str) -> None:
    assert break_even(results(*faster)) == tokens
    assert words in describe_break_even(results(*faster))


def test_a_size_that_failed_says_nothing() -> None:
    failed = BreakEvenResult(40, 1, 1, 8, softmax=None, linear=1.0, error="out of memory")
    assert break_even([*results(False, True), failed]) == 20
    assert describe_break_even([*results(True, False), failed]).startswith("softmax is faster up to 20 tokens")
    assert describe_break_even([failed]) == "no size could be timed"


def test_what_is_timed_is_the_tangent_of_softmax() -> None:
    torch.manual_seed(0)
    inputs = Inputs.draw(Case(2, 3, 3, 0, 2, 4), device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(tangent(inputs), tangent_textbook(inputs))


def test_what_is_timed_with_several_anchors_nears_softmax() -> None:
    torch.manual_seed(0)
    inputs = Inputs.draw(Case(2, 3, 3, 0, 2, 4), device=torch.device("cpu"), dtype=torch.float64)
    grid = (3, 3)
    expected = softmax_with_residual(inputs, grid)
    torch.testing.assert_close(tangent(inputs, anchors=9), expected)
    assert not torch.allclose(tangent(inputs, anchors=2), expected)


def softmax_with_residual(x: Inputs, grid: tuple[int, int]) -> torch.Tensor:
    q, k, v = (rows.transpose(1, 2) for rows in x.qkv.unbind(2))
    out = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return out + local_residual(v.transpose(1, 2), x.local_weight, grid=grid)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "even.json"
    options = ["--quick", "--device", "cpu", "--json", str(path)]
    assert main(["bench", "break-even", "--heads", "1x8", "2x4", "--sides", "2", "3", "--anchors", "2", *options]) == 0
    assert "1×8: " in capsys.readouterr().out
    assert [(r["heads"], r["tokens"]) for r in json.loads(path.read_text())["results"]] == [
        (1, 4),
        (1, 9),
        (2, 4),
        (2, 9),
    ]
    assert main(["bench", "table", str(path)]) == 0
    assert "| 2×4     | 9 " in capsys.readouterr().out
    assert main(["bench", "break-even", "--anchors", "0"]) == 2
    assert "--anchors 0: expected 1 or more" in capsys.readouterr().err
    assert main(["bench", "break-even", "--batch-size", "0"]) == 2
    assert "--batch-size 0: expected 1 or more" in capsys.readouterr().err
    assert main(["bench", "break-even", "--heads", "1x8", "--sides", "2", "3", "--batch-size", "1", *options]) == 0
    assert [r["batch"] for r in json.loads(path.read_text())["results"]] == [1, 1]
    assert main(["bench", "break-even", "--heads", "6"]) == 2
    assert "--heads 6: expected heads and their size, such as 6x64" in capsys.readouterr().err
