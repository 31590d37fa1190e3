"""Core ML packages: an image in, classes and their probabilities out, as Apple's Vision expects.

Core ML runs on macOS only. Elsewhere the check reads the written package and evaluates its program with PyTorch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .mil import evaluate
from .route import Request, Route, Run, quiet

_IMAGE = "image"


def _statistics(request: Request) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels in 0..255, as (C, 1, 1)"""
    mean, std = (torch.tensor(json.loads(request.about[key])) * 255 for key in ("mean", "std"))
    return mean[:, None, None], std[:, None, None]


def _to_pixels(x: Tensor, request: Request) -> Tensor:
    """A model's input → the pixels 0..255 it stands for"""
    mean, std = _statistics(request)
    return (x.cpu().float() * std + mean).round().clamp(0, 255)


class _OnPixels(nn.Module):
    """The model on pixels of 0..255. With class names its outputs are probabilities, without them logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.model: nn.Module = request.model
        mean, std = _statistics(request)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.is_classifier = _is_classifier(request)

    def forward(self, pixels: Tensor) -> Tensor:
        out = self.model((pixels - self.mean) / self.std)
        return out.softmax(-1) if self.is_classifier else out


def _is_classifier(request: Request) -> bool:
    """Core ML's classifiers name one class for each image. Others give logits."""
    return "class_names" in request.about and request.about["multi_label"] == "false"


def _coremltools() -> Any:
    with quiet("coremltools"):  # warns of other versions of libraries, and of what is missing outside macOS
        import coremltools

    return coremltools


def _write_coreml(request: Request, path: Path) -> None:
    layouts = {3: "RGB", 1: "G"}
    if request.model.in_chans not in layouts:
        raise ValueError(f"the model takes {request.model.in_chans} channels; an image of Core ML has 3 or 1")
    coremltools = _coremltools()
    pixels = _to_pixels(request.example, request)
    with torch.no_grad():
        program = torch.export.export(_OnPixels(request).eval(), (pixels,)).run_decompositions({})
    names = json.loads(request.about["class_names"]) if _is_classifier(request) else None
    with quiet("coremltools"):
        converted = coremltools.convert(
            program,
            inputs=[coremltools.ImageType(_IMAGE, shape=pixels.shape, color_layout=layouts[pixels.shape[1]])],
            classifier_config=None if names is None else coremltools.ClassifierConfig(names),
            # Sums over an image of products of keys and values leave the range of half precision.
            compute_precision=coremltools.precision.FLOAT32,
            minimum_deployment_target=coremltools.target.iOS16,
            skip_model_load=True,
        )
    converted.user_defined_metadata.update(request.about)
    converted.short_description = request.about["architecture"]
    converted.save(str(path))


def _load_coreml(path: Path, request: Request) -> Run:
    """Log probabilities, because probabilities of a thousand classes are all small; logits without class names"""
    is_classifier = _is_classifier(request)
    run = _on_a_mac if sys.platform == "darwin" else _elsewhere
    return lambda x: _comparable(run(path, _to_pixels(x, request)), is_probability=is_classifier)


def _reference(request: Request) -> Run:
    model = _OnPixels(request).eval()
    return lambda x: _comparable(model(_to_pixels(x, request)), is_probability=model.is_classifier)


def _comparable(output: Tensor, *, is_probability: bool) -> Tensor:
    return output.clamp(min=torch.finfo(output.dtype).tiny).log() if is_probability else output


def _on_a_mac(path: Path, pixels: Tensor) -> Tensor:
    from torchvision.transforms.functional import to_pil_image

    model = _coremltools().models.MLModel(str(path))
    outputs = model.predict({_IMAGE: to_pil_image(pixels[0].to(torch.uint8))})
    for value in outputs.values():
        if isinstance(value, dict):  # by class name, in the order of the classes
            return torch.tensor([list(value.values())])
    return torch.from_numpy(next(iter(outputs.values())))


def _elsewhere(path: Path, pixels: Tensor) -> Tensor:
    from coremltools.converters.mil.frontend.milproto.load import load

    model = _coremltools().models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    program = load(spec, spec.specificationVersion, file_weights_dir=model.weights_dir)
    return evaluate(program, pixels)


COREML = Route(
    _write_coreml, _load_coreml, ".mlpackage",
    packages=("coremltools",), install="inline-attention[coreml]", reference=_reference,
    note="" if sys.platform == "darwin" else "checked by evaluating the program: Core ML itself runs on macOS only",
)  # fmt: skip
