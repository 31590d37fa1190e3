"""Whole models, backbone and heads, from weights files."""

from pathlib import Path

from torch import Tensor, nn

from inline_attention.models.weights import local_path, read_checkpoint, read_metadata
from inline_attention.training.task import weights_source


def task_file(source: str, task: str) -> tuple[Path, dict[str, str]] | None:
    """The file (fetched, where `source` is a URL) and its metadata, if it holds a whole model of that task."""
    path = local_path(source)
    metadata = read_metadata(path) if path.suffix == ".safetensors" else {}
    return (path, metadata) if metadata.get("task") == task else None


def find_weights(weights: str | None, task: str) -> tuple[Path | None, str | None]:
    """What `model.weights` names: the file of a whole model of that task, or where the weights of a backbone are."""
    if weights is None or weights == "pretrained":
        return None, weights
    source = weights_source(weights)
    whole = task_file(source, task)
    return (None, source) if whole is None else (whole[0], None)


def load_whole(model: nn.Module, path: Path, *, backbone_only: bool = False) -> None:
    """Load a file of such a model, or its `backbone` alone. ValueError where it does not fit: nothing is loaded."""
    found = read_checkpoint(path)
    target = model
    if backbone_only:
        target = model.get_submodule("backbone")
        found = {name.removeprefix("backbone."): v for name, v in found.items() if name.startswith("backbone.")}
    own = target.state_dict()
    misfits = sorted(name for name in own.keys() | found.keys() if _shape(own.get(name)) != _shape(found.get(name)))
    if misfits:
        hint = "" if backbone_only else "; for other classes or another head set model.reset_head=true"
        raise ValueError(f"{path} does not fit the model: {len(misfits)} tensors differ, such as {misfits[0]}{hint}")
    target.load_state_dict(found)


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
