"""Pictures of benchmarks show what was measured, whatever its order."""

from pathlib import Path
from typing import Any

import pytest

from inline_attention.bench.contenders import OF_CLASSIFIERS

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from inline_attention.bench.picture import COLOURS, draw_bars, draw_sweep


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures instead of files."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    return figures


def result(contender: str, speed: float | None, **changes: object) -> dict[str, Any]:
    values = {"model": "inline_deit_tiny", "img_size": 224, "batch": 64, "task": "infer", "mode": "eager"}
    timing = None if speed is None else {"median": 64 / speed}
    values |= {"contender": contender, "images_per_second": speed, "timing": timing, "peak_bytes": 2**30}
    return {**values, **changes}


def test_a_line_follows_the_sizes(drawn: list[Figure]) -> None:
    draw_sweep([result("peer", speed, img_size=size) for size, speed in ((96, 5.0), (32, 9.0), (64, 7.0))], Path())
    (line,) = drawn[0].axes[0].lines
    assert line.get_xydata().tolist() == [[32, 9], [64, 7], [96, 5]]


def test_of_several_batches_the_fastest_is_drawn_with_its_ratio(drawn: list[Figure]) -> None:
    speeds = {("fused", 8): 30.0, ("peer", 8): 10.0, ("fused", 64): 20.0, ("peer", 64): 16.0}
    draw_sweep([result(name, speed, batch=batch) for (name, batch), speed in speeds.items()], Path())
    (axes,) = drawn[0].axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[30], [16]]
    assert [text.get_text() for text in axes.texts] == ["3.00×"]


def test_contenders_have_colours_of_their_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert COLOURS.keys() == set(OF_CLASSIFIERS)


@pytest.mark.parametrize(("peak", "panels"), [(2**30, 2), (None, 1)])
def test_what_is_not_measured_has_no_bar(drawn: list[Figure], peak: int | None, panels: int) -> None:
    models = ("fpn-pvt_tiny", "mask_rcnn-pvt_tiny")
    results = [result("fused", 100.0, model=model, peak_bytes=peak) for model in models]
    results += [result("softmax", 50.0, model=models[0], peak_bytes=peak), result("softmax", None, model=models[1])]
    draw_bars(results, Path())
    assert len(drawn[0].axes) == panels
    for axes in drawn[0].axes:
        assert len(axes.patches) == len(axes.texts) == 3
        assert "0" not in [text.get_text() for text in axes.texts]
