"""LiteRT (TensorFlow Lite) files, for phones and small devices."""

import json
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from .route import METADATA, Request, Route, Run, quiet


def _write_litert(request: Request, path: Path) -> None:
    with quiet("litert_torch"):
        import litert_torch

        litert_torch.convert(request.model, (request.example,)).export(str(path))
    # The format allows a zip archive with metadata after the model. Interpreters do not read it.
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA, json.dumps(request.about))
        if "class_names" in request.about:
            archive.writestr("labels.txt", "\n".join(json.loads(request.about["class_names"])))


def _load_litert(path: Path, request: Request) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    (name,) = runner.get_input_details()

    def run(x: Tensor) -> Tensor:
        (output,) = runner(**{name: x.cpu().numpy()}).values()
        return torch.from_numpy(output)

    return run


LITERT = Route(
    _write_litert, _load_litert, ".tflite", packages=("litert_torch", "ai_edge_litert"), install="litert-torch"
)
