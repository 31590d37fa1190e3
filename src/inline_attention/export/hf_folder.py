"""A folder in the layout of the Hugging Face hub. timm and transformers build its model with this library."""

import json
from pathlib import Path

import timm

from inline_attention.models.base import VisionModel
from inline_attention.models.hub import save_for_hf

from .route import Request, Route, Run


def _write_hf(request: Request, path: Path) -> None:
    names = json.loads(request.about.get("class_names", "null"))
    prepared = {key: json.loads(request.about[key]) for key in ("mean", "std")}
    prepared |= {key: request.about[key] for key in ("interpolation", "crop_mode")}
    prepared["crop_pct"] = float(request.about["crop_pct"])
    assert isinstance(request.model, VisionModel)  # `export_model` refuses others
    several = json.loads(request.about["multi_label"])
    save_for_hf(request.model, path, class_names=names, preprocessing=prepared, multi_label=several)


def _load_hf(path: Path, request: Request) -> Run:
    return timm.create_model(f"local-dir:{path}", pretrained=True).to(request.example.dtype).eval()


HF = Route(
    _write_hf, _load_hf, "",
    is_dynamic=True, covers="any batch and size, as the model itself",
    note="import inline_attention before timm or transformers open the folder",
)  # fmt: skip
