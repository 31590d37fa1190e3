"""ONNX, and OpenVINO's own files, which are made from it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from .route import Request, Route, Run, quiet

OPSET = 20


def _write_onnx(request: Request, path: Path) -> None:
    if request.example.dtype != torch.float32:  # onnxruntime lacks operations in the other types
        raise ValueError(f"the model is in {request.example.dtype}; ONNX is written in float32: call model.float()")
    with quiet("onnxscript"):  # warns of constants that it does not fold
        program = torch.onnx.export(
            request.program(),
            dynamo=True,
            opset_version=OPSET,
            input_names=["image"],
            output_names=["output"],
            dynamic_shapes=({**request.axes},),  # names the axes, which are dynamic in the program already
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props.update(request.about)
    program.save(path)


def _load_onnx(path: Path, request: Request) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.cpu().numpy()})[0])

    return run


def _write_openvino(request: Request, path: Path) -> None:
    """Convert through ONNX, because OpenVINO's reader of torch.export lacks the arithmetic of symbolic sizes."""
    import openvino

    with TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        _write_onnx(request, file)
        converted = openvino.convert_model(file)
    for key, value in request.about.items():
        converted.set_rt_info(value, ["model_info", key])
    openvino.save_model(converted, path, compress_to_fp16=False)


def _load_openvino(path: Path, request: Request) -> Run:
    import openvino

    # Some CPUs would compute in bfloat16 by default.
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(compiled(x.cpu().numpy())[0].copy())

    return run


ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ONNX = Route(
    _write_onnx, _load_onnx, ".onnx", packages=ONNX_PACKAGES, install="inline-attention[export]", is_dynamic=True
)
OPENVINO = Route(
    _write_openvino, _load_openvino, ".xml",
    packages=("openvino", "onnx", "onnxscript"), install="inline-attention[openvino]", is_dynamic=True,
)  # fmt: skip
