"""The report of `inline linearize`: which attentions are timed, and what it says about them."""

from copy import deepcopy
from typing import Any

import pytest
import timm
import torch
from small import create_small
from torch import nn

from inline_attention.bench import linearization
from inline_attention.bench.linearization import (
    STUDENT,
    TEACHER,
    AttentionSpeed,
    LinearizationReport,
    Quality,
    Speed,
    time_attentions,
    write_report,
)
from inline_attention.bench.timing import Timing
from inline_attention.linearize import linearize
from inline_attention.linearize.calibration import observed
from inline_attention.linearize.convert import linearized_modules

CPU = torch.device("cpu")


def report_on(*attention: AttentionSpeed) -> LinearizationReport:
    quality = [Quality("teacher", 50.0, None, 100.0, 100.0, 10)]
    speed = [Speed(name, (64, 64), batch, 10.0, 2**20) for batch in (1, 4) for name in (TEACHER, STUDENT)]
    return LinearizationReport("model", {"cpu": "x", "dtype": "fp32"}, "layers", quality, speed, list(attention), {})


def test_a_report_of_a_model_whose_softmax_is_always_faster(tmp_path: Any) -> None:
    """No number of tokens makes the linear form faster, and the report is written all the same."""
    names = ["blocks.0.attn", "blocks.1.attn"]
    report = report_on(*(AttentionSpeed(names, "Attention", 17, batch, 1e-3, 2e-3, is_slower=True) for batch in (1, 4)))
    files = write_report(report, tmp_path)
    assert {path.name for path in files} == {"report.json", "report.md", "report.png"}
    text = (tmp_path / "report.md").read_text()
    for images in ("1 image", "4 images"):
        assert f"With {images}, the linear form is slower than softmax here in: blocks.0.attn and 1 more." in text
    assert "| blocks.0.attn and 1 more | Attention | 17   | 1      | 1.000       | 2.000      | 0.50" in text


def test_the_batch_decides() -> None:
    of_one = AttentionSpeed(["a"], "Attention", 17, 1, 1e-3, 2e-3, is_slower=True)
    of_four = AttentionSpeed(["a"], "Attention", 17, 4, 2e-3, 1e-3)
    failed = AttentionSpeed(["b"], "Attention", 17, 4, error="out of memory")
    text = report_on(of_one, of_four, failed).as_text()
    assert "With 1 image, the linear form is slower than softmax here in: a." in text
    assert "With 4 images, the linear form is slower than softmax in none of the layers that were timed." in text
    assert "out of memory" in text


@pytest.mark.parametrize(("softmax", "linear", "slower"), [((2, 1, 3), (5, 4, 6), True), ((2, 1, 5), (5, 4, 6), False)])
def test_slower_is_more_than_the_spread(softmax: Any, linear: Any, slower: bool) -> None:
    call = linearization._Call(["a"], (), {}, 17)
    outcome: dict[str, Timing | str] = {"softmax": Timing(*softmax, 5), "linear": Timing(*linear, 5)}
    found = AttentionSpeed.of(call, "Attention", 1, outcome)
    assert (found.softmax, found.linear, found.is_slower) == (2, 5, slower)
    assert AttentionSpeed.of(call, "Attention", 1, outcome | {"linear": "out of memory"}).error == "out of memory"


def test_without_linear_layers_nothing_is_said_about_them() -> None:
    assert "slower" not in report_on().as_text()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls that would be timed are made once, and their outputs recorded."""
    made: list[dict[str, Any]] = []

    def measure(steps: dict[str, Any], **options: Any) -> dict[str, Timing | str]:
        made.append({})
        for form, step in steps.items():
            module, call, _ = step.args
            step()
            made[-1] |= {form: module, "call": call}
        return dict.fromkeys(steps, "not timed")

    monkeypatch.setattr(linearization, "measure", measure)
    return made


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    student = deepcopy(model)
    linearize(student)
    return model.eval(), student.eval()


def test_windows_are_timed_with_their_masks_and_biases(timed: list[dict[str, Any]]) -> None:
    small: dict[str, Any] = dict(img_size=56, embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=5)
    teacher, student = pair(timm.create_model("swin_tiny_patch4_window7_224", **small))
    results = time_attentions(teacher, student, (56, 56), device=CPU, dtype=torch.float32)
    names = ["layers.0.blocks.0.attn"], ["layers.0.blocks.1.attn"], [f"layers.1.blocks.{n}.attn" for n in (0, 1)]
    assert [(one.layers, one.keys, one.batch) for one in results] == [
        (list(layers), 49, batch) for batch in (1, 4) for layers in names
    ]
    masks = [one["call"].kwargs.get("mask") for one in timed]
    assert [mask is not None for mask in masks] == [False, True, False] * 2  # the second stage is one window
    assert all(one["call"].args[0].shape[1] == 49 for one in timed)


def test_the_modules_that_are_timed_are_the_teachers_and_the_students(timed: list[dict[str, Any]]) -> None:
    """The student's module computes softmax, if asked to, and then both outputs are the same."""
    for name in ("softmax_pvt_tiny", "softmax_cswin_tiny", "softmax_swin_tiny"):
        timed.clear()
        teacher, student = pair(create_small(name))
        results = time_attentions(teacher, student, (64, 64), device=CPU, dtype=torch.float32)
        assert sum(len(one.layers) for one in results if one.batch == 1) == len(linearized_modules(student))
        for one, result in zip(timed, results, strict=True):
            call = one["call"]
            softmax = {result.layers[0]: lambda module, call: module.softmax_form(call)}
            with torch.no_grad(), observed(student, softmax):
                torch.testing.assert_close(
                    one["linear"](*call.args, **call.kwargs), one["softmax"](*call.args, **call.kwargs)
                )


def test_reduced_keys_are_counted(timed: list[dict[str, Any]]) -> None:
    teacher, student = pair(create_small("softmax_pvt_tiny"))
    results = time_attentions(teacher, student, (64, 64), device=CPU, dtype=torch.float32)
    assert all(one.keys < 64 for one in results)


def test_a_batch_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = pair(create_small("softmax_deit_tiny"))
    logged: list[str] = []

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(linearization, "_calls_of_attentions", fail)
    assert time_attentions(teacher, student, (64, 64), device=CPU, dtype=torch.float32, log=logged.append) == []
    assert "not timed: RuntimeError: out of memory" in logged
