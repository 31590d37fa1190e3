import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inline_attention.tasks.classification import plots


def test_confusion_matrix(tmp_path: Path) -> None:
    plots.draw_confusion(torch.tensor([[9, 1], [0, 0]]), ["cat", "dog"], tmp_path / "confusion.png")
    assert np.asarray(Image.open(tmp_path / "confusion.png").convert("L")).std() > 5  # something was drawn
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("classes", "name"),
    [
        (2, "{}"),
        (2, "brown bear, bruin, Ursus arctos {}"),
        (10, "golden retriever {}"),
        (30, "brown bear, bruin, Ursus arctos {}"),
        (30, "${} \\frac_^\x1b[1m"),
    ],
)
def test_names_in_the_confusion_matrix_stay_apart(
    name: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names may be long and may contain dollar signs, which matplotlib would read as mathematics."""
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    names = [name.format(label) for label in range(classes)]
    plots.draw_confusion(torch.eye(classes), names, tmp_path / "confusion.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    axes = figure.axes[0]
    for labels, low, high in ((axes.get_xticklabels(), "x0", "x1"), (axes.get_yticklabels(), "y0", "y1")):
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: getattr(box, low))
        gaps = [getattr(right, low) - getattr(left, high) for left, right in itertools.pairwise(boxes)]
        assert min(gaps) > 0
    side = axes.get_window_extent().height / figure.dpi
    assert side > 0.15 * classes + 0.5  # the names leave room for the matrix (inches)
