"""Files for PyTorch itself: torch.export programs, with int8 weights too, and TorchScript."""

import copy
import json
import warnings
from pathlib import Path

import torch

from .route import METADATA, Request, Route, Run


def _write_program(program: torch.export.ExportedProgram, request: Request, path: Path) -> None:
    torch.export.save(program, path, extra_files={METADATA: json.dumps(request.about)})


def _write_pt2(request: Request, path: Path) -> None:
    _write_program(request.program(), request, path)


def _load_pt2(path: Path, request: Request) -> Run:
    return torch.export.load(path).module()


def _write_torchscript(request: Request, path: Path) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # sizes become constants, as they should
        warnings.filterwarnings("ignore", message="`torch.jit", category=Warning)  # recommends torch.export
        # `export_model` compares the file with the model; PyTorch's own check would trace a second time.
        traced = torch.jit.trace(request.model, request.example, check_trace=False)
        torch.jit.save(traced, path, _extra_files={METADATA: json.dumps(request.about)})


def _load_torchscript(path: Path, request: Request) -> Run:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit", category=Warning)
        return torch.jit.load(path)


def _quantize(request: Request) -> Request:
    """The request with int8 weights in the linear layers: a scale for each output channel, activations as they were."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(request.model)
    quantize_(model, Int8WeightOnlyConfig())
    return request._replace(model=model)


def _write_int8(request: Request, path: Path) -> None:
    from torchao.utils import unwrap_tensor_subclass

    # Plain tensors instead of torchao's, so that the file opens without torchao.
    plain = request._replace(model=unwrap_tensor_subclass(copy.deepcopy(request.model)))
    _write_program(plain.program().run_decompositions({}), request, path)


PT2 = Route(_write_pt2, _load_pt2, ".pt2", is_dynamic=True)
TORCHSCRIPT = Route(_write_torchscript, _load_torchscript, ".pt")
INT8 = Route(
    _write_int8,
    _load_pt2,
    "-int8.pt2",
    packages=("torchao",),
    install="inline-attention[int8]",
    is_dynamic=True,
    prepare=_quantize,
)
