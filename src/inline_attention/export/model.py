"""The entry point: writes a model in a format, runs the file, and compares it with the model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inline_attention.models.base import VisionModel, input_shape, to_pair

from .coreml_files import COREML
from .describe import describe
from .hf_folder import HF
from .litert_files import LITERT
from .onnx_files import ONNX, OPENVINO
from .route import Check, Exported, Request, Route
from .torch_files import INT8, PT2, TORCHSCRIPT

Format = Literal["onnx", "pt2", "torchscript", "pt2-int8", "openvino", "coreml", "litert", "hf"]
ROUTES: dict[Format, Route] = {
    "onnx": ONNX,
    "pt2": PT2,
    "torchscript": TORCHSCRIPT,
    "pt2-int8": INT8,
    "openvino": OPENVINO,
    "coreml": COREML,
    "litert": LITERT,
    "hf": HF,
}
FORMATS: tuple[Format, ...] = tuple(ROUTES)


def _example(model: nn.Module, img_size: tuple[int, int], *, batch: int) -> Tensor:
    reference = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, input_shape(model)[0], *img_size, generator=generator)
    return x.to(device=reference.device, dtype=reference.dtype)


def export_model(
    model: nn.Module,
    path: str | Path,
    *,
    format: Format = "onnx",
    img_size: int | Sequence[int] | None = None,
    dynamic_batch: bool = False,
    dynamic_size: bool = False,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    multi_label: bool = False,
) -> Exported:
    """Writes a model to a file and compares the file's output with the model's.

    Args:
        model: of this library, or a linearised one of timm, in eval mode.
        path: of the file to write. "hf" and "coreml" write a folder, "openvino" a second file with the weights.
        format: one of `FORMATS`; docs/export.md says what each is for. "onnx", "openvino", "coreml", "litert" and
            "pt2-int8" need packages, which the error names.
        img_size: input size, an int or (height, width). Default: the model's. With `dynamic_size` it is the size that
            the graph is traced at, and no side may be smaller than the model's `minimum_size()`.
        dynamic_batch: any number of images.
        dynamic_size: any height and width, from the model's `minimum_size()` on. Models of timm have one size.
        class_names: one name for each class, to be written into the file.
        preprocessing: replaces entries of the model's `pretrained_cfg` in the file: mean, std, interpolation, crop_pct
            and crop_mode, as timm defines them.
        multi_label: an image may have several classes: their probabilities are sigmoids of the outputs.

    Returns:
        The path, the inputs it covers, and the largest difference from the model: at the exported size, and at another
        batch and other sizes where these are dynamic.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}; expected one of {', '.join(FORMATS)}")
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before exporting it")
    if next(model.parameters()).is_meta:
        raise ValueError("the model is on the meta device, which holds no values: load its weights on the CPU first")
    route = ROUTES[format]
    if (dynamic_batch or dynamic_size) and not route.is_dynamic:
        able = ", ".join(name for name in FORMATS if ROUTES[name].is_dynamic)
        raise ValueError(f"format={format!r} takes no dynamic batch or size; {able} do")
    if format == "hf" and (hasattr(model, "linearization") or not isinstance(model, VisionModel)):
        raise ValueError("format='hf': timm and transformers cannot build a linearised model; choose another format")
    about = describe(model, class_names=class_names, preprocessing=preprocessing, multi_label=multi_label)
    route.check_packages()
    path = Path(path)
    channels, *own_size = input_shape(model)
    height, width = to_pair(own_size if img_size is None else img_size)
    covers = f"{'any number of' if dynamic_batch else '1'} × {channels} × "
    if dynamic_size:
        if not isinstance(model, VisionModel):
            raise ValueError(f"{type(model).__name__} is a model of timm, which is exported at one size")
        smallest = model.minimum_size()
        if img_size is not None and min(height, width) < smallest:
            raise ValueError(
                f"img_size={img_size}: a graph of this model with dynamic sizes begins at {smallest}, where every map "
                "has more than one window; export smaller sizes one by one, without dynamic sizes"
            )
        height, width = max(height, smallest), max(width, smallest)
        covers += f"any height and width of at least {smallest}"
    else:
        covers += f"{height} × {width}"
        if route.covers is None:
            about["input_size"] = json.dumps([channels, height, width])
    # The tracer takes a size of one for a constant, and two equal sizes for one symbol.
    traced = (height, width + 32) if dynamic_size else (height, width)
    axes = {0: "batch"} if dynamic_batch else {}
    if dynamic_size:
        axes |= {2: "height", 3: "width"}
    request = route.prepare(Request(model, _example(model, traced, batch=2 if dynamic_batch else 1), axes, about))
    path.parent.mkdir(parents=True, exist_ok=True)
    route.write(request, path)

    inputs = [_example(model, (height, width), batch=1)]
    if dynamic_batch:
        inputs.append(_example(model, (height, width), batch=3))
    if dynamic_size:
        # Not a multiple of any stride, and different from the traced size on both sides.
        inputs.append(_example(model, (height + 37, width + 75), batch=1))
    run, reference = route.load(path, request), route.reference(request)
    checks = []
    with torch.no_grad():
        for x in inputs:
            expected = reference(x)
            checks.append(Check(tuple(x.shape), (run(x).to(expected.device) - expected).abs().max().item()))
        note = route.note
        if request.model is not model:
            exact = model(inputs[0])
            error = (request.model(inputs[0]) - exact).norm() / exact.norm()
            note = f"int8 weights change the outputs by {error:.1%} of their norm, on noise"
    return Exported(path, route.covers or covers, checks, about, note)
