"""Exports models as `torch.export` programs (.pt2) or ONNX, and compares each file with its model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from inline_attention.models.base import VisionModel, input_shape

Format = Literal["onnx", "pt2"]
FORMATS: tuple[Format, ...] = ("onnx", "pt2")
OPSET = 20
# Runtimes sum in different orders. A larger difference means that the graph is wrong.
TOLERANCE = 1e-4


class Check(NamedTuple):
    """The difference between the file's and the model's output, for one input."""

    shape: tuple[int, ...]  # of the input
    difference: float  # largest, absolute

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE  # False for NaN


class Exported(NamedTuple):
    path: Path
    covers: str  # which inputs, in words
    checks: list[Check]


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
    img_size: tuple[int, int] | None = None,
    dynamic_batch: bool = False,
    dynamic_size: bool = False,
) -> Exported:
    """Writes a model to a file and compares the file's output with the model's.

    Args:
        model: of this library, or a linearised one of timm, in eval mode.
        path: of the file to write.
        format: "onnx" (needs the `export` extra) or "pt2", which `torch.export.load` reads.
        img_size: (height, width) of the input. Default: the model's. With `dynamic_size` it is the size that the graph
            is traced at, and no side may be smaller than the model's `minimum_size()`.
        dynamic_batch: any number of images.
        dynamic_size: any height and width, from the model's `minimum_size()` on. Models of timm have one size.

    Returns:
        The path, the inputs it covers, and the largest difference from the model: at the exported size, and at another
        batch and other sizes where these are dynamic.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}; expected one of {', '.join(FORMATS)}")
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before exporting it")
    if format == "onnx":
        for package in ("onnxscript", "onnxruntime"):
            _require(package)
    path = Path(path)
    channels, *own_size = input_shape(model)
    height, width = img_size or own_size
    covers = f"{'any number of' if dynamic_batch else '1'} × {channels} × "
    if dynamic_size:
        if not isinstance(model, VisionModel):
            raise ValueError(f"{type(model).__name__} is a model of timm, which is exported at one size")
        smallest = model.minimum_size()
        if img_size is not None and min(img_size) < smallest:
            raise ValueError(
                f"img_size={img_size}: a graph of this model with dynamic sizes begins at {smallest}, where every map "
                "has more than one window; export smaller sizes one by one, without dynamic sizes"
            )
        height, width = max(height, smallest), max(width, smallest)
        covers += f"any height and width of at least {smallest}"
    else:
        covers += f"{height} × {width}"
    # The tracer takes a size of one for a constant, and two equal sizes for one symbol.
    traced = (height, width + 32) if dynamic_size else (height, width)
    example = _example(model, traced, batch=2 if dynamic_batch else 1)
    dynamic: dict[int, Any] = {}
    if dynamic_batch:
        dynamic[0] = torch.export.Dim.DYNAMIC
    if dynamic_size:
        dynamic[2] = dynamic[3] = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=(dynamic,))
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "pt2":
        torch.export.save(program, path)
        run = _load_pt2(path)
    else:
        _save_onnx(program, path)
        run = _load_onnx(path)

    inputs = [_example(model, (height, width), batch=1)]
    if dynamic_batch:
        inputs.append(_example(model, (height, width), batch=3))
    if dynamic_size:
        # Not a multiple of any stride, and different from the traced size on both sides.
        inputs.append(_example(model, (height + 37, width + 75), batch=1))
    checks = []
    for x in inputs:
        with torch.no_grad():
            difference = (run(x).to(x.device) - model(x)).abs().max().item()
        checks.append(Check(tuple(x.shape), difference))
    return Exported(path, covers, checks)


def _load_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def _save_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    onnx_program = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=["image"], output_names=["output"], verbose=False
    )
    assert onnx_program is not None
    onnx_program.save(path)


def _load_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    session = _require("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.cpu().numpy()})[0])

    return run


def _require(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"ONNX files need {name}: pip install 'inline-attention[export]'") from error
