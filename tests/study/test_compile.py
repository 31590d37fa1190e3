"""Rows of the grid as they are trained: compiled as one graph, in half precision."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention import create_model
from inline_attention.layers.drop import SampledDepth
from study.grid import BASELINES, FEATURE_MAPS, MAIN, ROWS

SMALL = {"img_size": 16, "patch_size": 4, "num_classes": 10, "embed_dim": 16, "depth": 2, "num_heads": 2}
SMALL_SWIN = {"img_size": 32, "num_classes": 10, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2]}
WINDOWED = ["swin_window2", "swin_window2_residual"]


def build(row: str) -> nn.Module:
    wanted = ROWS[row]
    torch.manual_seed(0)
    options = {**wanted.kwargs, **(SMALL if wanted.is_deit else SMALL_SWIN), "drop_path_rate": 0.2}
    return create_model(wanted.model, **options).train()


def losses(model: nn.Module, images: Tensor) -> list[float]:
    """Of three updates."""
    labels = torch.arange(len(images))
    depth, adamw = SampledDepth(model, device="cpu"), torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(3):
        depth.draw(labels, key=step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("row", [*MAIN, *FEATURE_MAPS, *BASELINES, *WINDOWED])
def test_compiled_training_is_one_graph_and_learns_alike(row: str) -> None:
    torch.compiler.reset()
    model = build(row)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    images = torch.randn(4, 3, *model.img_size)  # type: ignore[misc]  # of our models
    # Linear attention with φ = identity divides by numbers near zero: rounding decides how its losses go on.
    first = 1 if row == "linear_identity" else 3
    assert losses(compiled, images)[:first] == pytest.approx(losses(model, images)[:first], rel=0.02)


@pytest.mark.parametrize("row", ["linear_relu_affine", "inline_relu_affine"])
def test_a_learned_feature_map_keeps_the_type_of_autocast(row: str) -> None:
    images = torch.randn(4, 3, 16, 16)
    assert losses(build(row), images)[0] == pytest.approx(2.3, abs=1)
