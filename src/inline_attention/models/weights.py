"""Weights in and out of models: official checkpoints, safetensors, downloads.

Files are read without executing anything in them and checked against the model as a whole before the first value
is loaded; they are written under a temporary name first, so that no half file is left.
"""

import hashlib
import inspect
import json
import os
import re
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file
from timm.models import adapt_input_conv
from timm.utils import unwrap_model
from torch import Tensor, nn

from inline_attention._version import __version__

from ._base import Grid, StateDict, VisionModel, to_pair
from ._checkpoint import (
    Checkpoint,
    errors_name,
    open_checkpoint,
    read_checkpoint,
    read_metadata,
    select_weights,
)
from ._download import atomic_path, download
from .cswin import CSwin
from .deit import DeiT
from .published import PUBLISHED
from .pvt import PVT
from .registry import create_model, list_models
from .swin import Swin

__all__ = ["download", "load_model", "load_weights", "read_checkpoint", "read_metadata", "save_weights"]

# A name that only one family has, under official or own names.
_FAMILY_NAMES = {
    "DeiT": r"cls_token|blocks\.0\.",
    "PVT": r"block1\.0\.|stages\.0\.pos_embed",
    "Swin": r"layers\.0\.blocks\.0\.|stages\.1\.downsample\.reduction\.",
    "CSwin": r"stage1\.0\.|stages\.1\.downsample\.conv\.",
}
HEAD_NAMES = ("head.weight", "head.bias")
_MAX_LISTED = 8

Source = str | os.PathLike[str] | Mapping[str, Any]


def load_weights(
    model: nn.Module,
    source: Source,
    *,
    ema: bool | None = None,
    reset_head: bool = False,
) -> nn.Module:
    """Loads weights into a model of this library and returns it. An error leaves the model as it was.

    Position embeddings and bias tables are resized to the model's, and the first convolution is adapted to its
    number of input channels (timm's `adapt_input_conv`). Whatever else does not fit is an error.

    Args:
        source: a safetensors file, an official checkpoint, an http(s) or file URL of either, or a mapping from
            official or own names to tensors.
        ema: None takes averaged (EMA) weights where there are some, True demands them, False takes the others.
        reset_head: leave the head as the model has it, whatever the source has. Without it, another class count is
            an error.
    """
    checkpoint, origin = _open_source(source, ema=ema)
    load_checkpoint(model, checkpoint, origin=origin, reset_head=reset_head)
    return model


def load_model(source: str | os.PathLike[str]) -> nn.Module:
    """Builds the model that a file (or URL) of `save_weights` describes, and loads its weights."""
    path = local_path(source)
    checkpoint = open_checkpoint(path)
    with errors_name(path):
        model = build_as_saved(checkpoint)
    load_checkpoint(model, checkpoint, origin=str(path))
    return model


def build_as_saved(checkpoint: Checkpoint) -> nn.Module:
    """A new model of the configuration in the metadata."""
    config = saved_config(checkpoint)
    if config is None:
        raise ValueError("does not say how to build its model: build it with create_model, then call load_weights")
    # A file is not trusted: of all that timm can be asked for, it may name our models and arguments of theirs alone.
    arguments = {name for cls in (CSwin, DeiT, PVT, Swin) for name in inspect.signature(cls).parameters}
    name = checkpoint.info["architecture"]
    if name not in list_models() or not arguments.issuperset(config):
        raise ValueError(f"asks for a model that is not known here: {name} with {', '.join(sorted(config))}")
    return create_model(name, **config)


def load_checkpoint(model: nn.Module, checkpoint: Checkpoint, *, origin: str, reset_head: bool = False) -> None:
    """`load_weights` of an open checkpoint; errors call it by its origin."""
    target = unwrap_model(model)
    if not isinstance(target, VisionModel):
        raise ValueError(f"weights are loaded into a model of inline_attention, not into a {type(target).__name__}")
    own = target.state_dict()
    if any(tensor.is_meta for tensor in own.values()):
        raise ValueError("the model is on the meta device, which holds no values: build it on the CPU or a GPU")

    state_dict = checkpoint.state_dict
    family, source_family = find_family(own), find_family(state_dict)
    if source_family in (None, family):
        try:
            state_dict = target.adapt_state_dict(state_dict, img_size=source_size(checkpoint))
        except (ValueError, IndexError, RuntimeError) as error:  # also of shapes that nothing can be made of
            raise ValueError(f"{origin} does not fit the model: {error}") from error
        if reset_head:
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in HEAD_NAMES}
            state_dict.update({name: own[name] for name in HEAD_NAMES if name in own})
        with errors_name(origin):
            _check_class_count(own, state_dict)
        _adapt_input_channels(own, state_dict, name=first_conv_name(target))
    _check_fit(own, state_dict, origin=origin, family=family, source_family=source_family)
    target.load_state_dict(state_dict)


def save_weights(model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes the weights as safetensors, with the model's architecture and configuration in the metadata.

    `load_model` builds the model again from such a file; `read_metadata` shows what it says.
    """
    target = unwrap_model(model)
    entries = {"format": "pt", "library": f"inline_attention {__version__}"}
    if isinstance(target, VisionModel) and hasattr(target, "config"):  # built by create_model, which can do it again
        now = {"img_size": target.img_size, "num_classes": target.num_classes, "global_pool": target.global_pool}
        entries["architecture"] = architecture(target)
        entries["config"] = json.dumps({**target.config, **now})
    for key, value in (metadata or {}).items():
        if key in entries or not isinstance(value, str):
            raise ValueError(f"metadata {key!r}: {value!r}; expected a string, under none of the keys {list(entries)}")
        entries[key] = value

    tensors: StateDict = {}
    storages: set[int] = set()
    for name, tensor in target.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: there are no values to write")
        tensor = tensor.detach().cpu().contiguous()
        # safetensors takes no tensors that share memory: tied weights are written once for each name.
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    path = Path(path).expanduser()
    with atomic_path(path) as temporary:
        temporary.touch()
        permissions = temporary.stat().st_mode
        save_file(tensors, temporary, metadata=entries)
        temporary.chmod(permissions)  # safetensors leaves files that their owner alone may read
    return path


def _open_source(source: Source, *, ema: bool | None) -> tuple[Checkpoint, str]:
    """The checkpoint, and what errors shall call it."""
    if isinstance(source, Mapping):
        with errors_name("the mapping"):
            state_dict, is_ema = select_weights(source, ema=ema)
            if any(tensor.is_meta for tensor in state_dict.values()):
                raise ValueError("is on the meta device: there are no values to load")
        return Checkpoint(state_dict, is_ema, {}), "the mapping"
    path = local_path(source)
    return open_checkpoint(path, ema=ema), str(path)


def local_path(source: str | os.PathLike[str]) -> Path:
    """Where a path or URL is on this machine; what an http(s) URL names is downloaded."""
    text = os.fspath(source)
    url = urlsplit(text)
    if url.scheme in ("http", "https"):
        return download(text, filename=_cache_name(text))
    return Path(urllib.request.url2pathname(url.path) if url.scheme == "file" else text).expanduser()


def _cache_name(url: str) -> str:
    """The file's name in the cache; a digest of the address keeps apart the many files called model.safetensors."""
    for name, facts in PUBLISHED.items():
        if url == facts.url:
            return f"{name}.pth"
    file = PurePosixPath(urlsplit(url).path)
    return f"{file.stem or 'weights'}-{hashlib.sha256(url.encode()).hexdigest()[:16]}{file.suffix}"


def architecture(model: VisionModel) -> str:
    """The name that the model is registered under."""
    cfg: Any = model.pretrained_cfg  # timm's builder sets it
    return cfg["architecture"]


def find_family(names: Iterable[str]) -> str | None:
    """The family that weights with these names, official or own, belong to; None where that is not clear."""
    names = list(names)
    found = [family for family, pattern in _FAMILY_NAMES.items() if any(re.match(pattern, name) for name in names)]
    return found[0] if len(found) == 1 else None


def first_conv_name(model: nn.Module) -> str:
    """The weight whose shape follows the image's channels."""
    return next(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d))


def saved_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The arguments of create_model in a file of `save_weights`; None for any other file."""
    info = checkpoint.info
    if not str(info.get("library", "")).startswith("inline_attention") or "architecture" not in info:
        return None
    config = json.loads(info["config"])
    if not isinstance(config, dict):
        raise ValueError(f"holds a configuration that is no mapping: {info['config']}")
    return config


def source_size(checkpoint: Checkpoint) -> Grid | None:
    """The image size that weights were made at, where the file says so: our metadata or the official configuration."""
    saved, official = saved_config(checkpoint), checkpoint.info.get("config")
    size: Any = None
    if saved is not None:
        size = saved.get("img_size")
    elif isinstance(official, Mapping) and isinstance(official.get("DATA"), Mapping):
        size = official["DATA"].get("IMG_SIZE")
    return None if size is None else to_pair(size)


def _adapt_input_channels(own: StateDict, state_dict: StateDict, *, name: str) -> None:
    """timm can turn a convolution of 3 input channels into any other; whatever else differs is left for the check."""
    if name in state_dict:
        channels, weight = own[name].shape[1], state_dict[name]
        if weight.ndim == 4 and weight.shape[1] == 3 != channels:
            state_dict[name] = adapt_input_conv(channels, weight)


def _check_class_count(own: StateDict, state_dict: StateDict) -> None:
    shapes = (tensors[HEAD_NAMES[0]].shape if HEAD_NAMES[0] in tensors else () for tensors in (state_dict, own))
    theirs, ours = (next(iter(shape), 0) for shape in shapes)
    if theirs != ours:
        raise ValueError(
            f"has {theirs} classes and the model has {ours}: build the model with num_classes={theirs}, "
            "or pass reset_head=True to load everything but the head"
        )


def _check_fit(
    own: StateDict, state_dict: StateDict, *, origin: str, family: str | None, source_family: str | None
) -> None:
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    misfits = [
        f"{name} ({_kind(tensor)} instead of {_kind(own[name])})"
        for name, tensor in state_dict.items()
        if name in own and _kind(tensor) != _kind(own[name])
    ]
    problems = [
        f"{len(entries)} {what}: {', '.join(entries[:_MAX_LISTED])}{', …' if len(entries) > _MAX_LISTED else ''}"
        for what, entries in (("missing", missing), ("unexpected", unexpected), ("of another shape", misfits))
        if entries
    ]
    if problems:
        hint = f"it looks like the weights of a {source_family} model, and this is a {family}; "
        other_family = source_family is not None and source_family != family
        raise ValueError(f"{origin} does not fit the model: {hint if other_family else ''}{'; '.join(problems)}")


def _kind(tensor: Tensor) -> str:
    """What must be equal for a tensor to be loaded: its shape, and whether it holds fractions."""
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else ' integers'}"
