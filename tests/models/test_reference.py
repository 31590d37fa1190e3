"""The 15 published models against the official ones: names, shapes, counts and outputs."""

from typing import Any

import official
import pytest
import torch

import inline_attention
from inline_attention.models.base import VisionModel

MODELS = sorted(official.manifest()["models"])
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "swin_t_IIIS_w7": ("inline_swin_tiny", dict(window_size=7)),
    "swin_t_SSSS_w56_softmax7": ("inline_swin_tiny", dict(window_size=56, attention="SSSS")),
    "pvt_t_SSSS": ("inline_pvt_tiny", dict(attention="SSSS")),
    "cswin_t_SSSS": ("inline_cswin_tiny", dict(attention="SSSS")),
}
LOGITS = [
    pytest.param(name, marks=pytest.mark.slow if name == "inline_swin_base" else [])
    for name in official.outputs()
    if name in MODELS
]


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_counts(name: str) -> None:
    facts = official.manifest()["models"][name]
    with torch.device("meta"):
        model = inline_attention.create_model(name)
        official_state = {n: torch.empty(shape) for n, shape in (facts["parameters"] | facts["buffers"]).items()}
    adapted = model.adapt_state_dict(official_state)
    assert {n: x.shape for n, x in adapted.items()} == {n: x.shape for n, x in model.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) == facts["params"]
    assert model.img_size == (facts["img_size"],) * 2


def check_outputs(name: str, shapes: dict[str, list[int]], expected: torch.Tensor, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisionModel, "init_weights", lambda model: None)  # every weight is replaced below
        model = inline_attention.create_model(name, **options).eval()
    model.load_state_dict(model.adapt_state_dict(official.state_dict(shapes)))
    x = official.image(2, *model.img_size)
    with torch.inference_mode():
        single = model(x)[:, :: official.CLASS_STEP]
        double = model.double()(x.double())[:, :: official.CLASS_STEP]
    torch.testing.assert_close(double, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(single.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", LOGITS)
def test_logits(name: str) -> None:
    check_outputs(name, official.manifest()["models"][name]["parameters"], official.outputs()[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    name, options = VARIANTS[variant]
    check_outputs(name, official.manifest()["variants"][variant], official.outputs()[variant], **options)
