"""The page's models, small enough to run in milliseconds."""

from typing import Any

import pytest
from small import SIZE, create_small

from inline_attention.data import DataConfig
from inline_attention.explore import Subject

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax_deit_tiny", {}),
    "linear": ("inline_deit_tiny", {"attention": "linear"}),
    "inline": ("inline_deit_tiny", {}),
}


@pytest.fixture(scope="session")
def subjects() -> list[Subject]:
    """A map of 4×4 tokens, three layers, two heads."""
    data = DataConfig(img_size=[SIZE, SIZE])
    return [
        Subject(
            kind,
            name,
            create_small(name, **kwargs),
            data,
            None if kind == "linear" else f"{kind}_deit_study.safetensors",
        )
        for kind, (name, kwargs) in MODELS.items()
    ]
