"""Parts that are taken away are missing, and come back."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from inline_attention import create_model
from inline_attention.tasks.classification.classifier import load_classifier
from study import ablation
from study.__main__ import main


@pytest.mark.parametrize("attention", ["inline", "linear", "softmax"])
def test_without_both_a_token_is_told_only_the_mean(attention: str) -> None:
    """And after the block the model is as before."""
    torch.manual_seed(0)
    model = create_model("inline_deit_tiny", img_size=32, depth=1, attention=attention, num_classes=2).eval()
    images = torch.randn(1, 3, 32, 32)
    attn, seen = model.blocks[0].attn, []
    attn.proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        whole = model(images)
        with ablation.ablated(model, residual=True, attention=True):
            model(images)
        mean = seen[-1]
        torch.testing.assert_close(mean, mean[:, :1].expand_as(mean))
        with ablation.ablated(model, residual=False, attention=True):
            model(images)
        assert torch.equal(seen[-1], mean) == (attn.local is None)
        torch.testing.assert_close(model(images), whole)


def test_an_even_spread_leaves_out_absent_tokens() -> None:
    attn = create_model("inline_deit_tiny", img_size=32, depth=1, num_classes=2).blocks[0].attn
    qkv = torch.randn(1, 5, 3, 3, 64)
    mask = torch.tensor([[True, True, False, True, False]])
    found = ablation.attend_to_all_alike(attn, [qkv], grid=(2, 2), token_mask=mask, local_weight=None)
    torch.testing.assert_close(found[:, :1], qkv[:, [0, 1, 3], 2].mean(1, keepdim=True))


def test_command(tmp_path: Path) -> None:
    names = load_classifier(ablation.SHIPPED, "pretrained").class_names
    assert names is not None
    for name in names[:2]:
        folder = tmp_path / "val" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64), "red").save(folder / "0.png")
    assert main(["ablation", "--data", str(tmp_path), "--json", str(tmp_path / "table.json")]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["model"] == "inline_deit_study"
    assert [row["title"] for row in content["rows"]] == list(ablation.CONDITIONS)
    assert content["rows"][0]["lost"] == content["rows"][0]["changed"] == 0
