"""Weights in and out of models: official checkpoints, safetensors, downloads.

Files are read without executing anything in them and checked against the model as a whole before the first value
is loaded; they are written under a temporary name first, so that no half file is left.
"""

import hashlib
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

from ._checkpoint import StateDict, errors_name, read_checkpoint, read_metadata, select_weights
from ._download import atomic_path, download

__all__ = ["PUBLISHED_URLS", "download", "load_weights", "read_checkpoint", "read_metadata", "save_weights"]

# Where the paper's authors put the weights of each model. The links end in "/": they give no file name.
PUBLISHED_URLS: dict[str, str] = {
    name: f"https://cloud.tsinghua.edu.cn/f/{file_id}/?dl=1"
    for name, file_id in {
        "inline_deit_tiny": "1d6b8191ad6d4114b291",
        "inline_deit_small": "2f3898b07e9247f3beb3",
        "inline_deit_base": "10bdd726d4b0435eb34e",
        "inline_pvt_tiny": "90ac52b1555b401eb5e6",
        "inline_pvt_small": "1ab953b2479d433080a3",
        "inline_pvt_medium": "a72aec31e6084bc0a280",
        "inline_pvt_large": "efd91318ba964f01b288",
        "inline_swin_tiny": "32810869fcc34410966b",
        "inline_swin_small": "e9657fd247c04c7cb1a1",
        "inline_swin_base": "bf23564bb64c420aafe1",
        "inline_cswin_tiny": "49fa2ecc543647c4b970",
        "inline_cswin_small": "59f4e65f776f4052b93c",
        "inline_cswin_base": "91e17121df284ae38521",
    }.items()
}

# A name that only one family has, under official or own names.
_FAMILY_NAMES = {
    "DeiT": r"cls_token|blocks\.0\.norm1\.weight",
    "PVT": r"patch_embed1\.proj\.weight|stages\.0\.pos_embed",
    "Swin": r"layers\.0\.blocks\.0\.norm1\.weight",
    "CSwin": r"stage1\.0\.norm1\.weight",
}
_MAX_LISTED = 8


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
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
    target = unwrap_model(model)
    if not hasattr(target, "adapt_state_dict"):
        raise ValueError(f"load_weights expects a model of inline_attention, not {type(target).__name__}")
    own = target.state_dict()
    if any(tensor.is_meta for tensor in own.values()):
        raise ValueError("the model is on the meta device, which holds no values: build it on the CPU or a GPU")
    state_dict, origin = _read_source(source, ema=ema)

    family, source_family = _family(own), _family(state_dict)
    if source_family in (None, family):
        state_dict = target.adapt_state_dict(state_dict)
        head = [f"{target.pretrained_cfg['classifier']}.{part}" for part in ("weight", "bias")]
        if reset_head:
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in head}
            state_dict.update({name: own[name] for name in head if name in own})
        with errors_name(origin):
            _check_class_count(own, state_dict, classifier=head[0])
        _adapt_input_channels(own, state_dict, name=f"{target.pretrained_cfg['first_conv']}.weight")
    _check_fit(own, state_dict, origin=origin, family=family, source_family=source_family)
    target.load_state_dict(state_dict)
    return model


def save_weights(model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes the weights as safetensors, with the model's architecture and configuration in the metadata.

    `create_model(metadata["architecture"], **json.loads(metadata["config"]))` of what `read_metadata` returns builds
    the model that the file fits.
    """
    target = unwrap_model(model)
    entries = {
        "format": "pt",
        "library": f"inline_attention {__version__}",
        "architecture": target.pretrained_cfg["architecture"],
        "config": json.dumps(target.config),
    }
    for key, value in (metadata or {}).items():
        if key in entries or not isinstance(value, str):
            raise ValueError(
                f"metadata {key!r}: {value!r}; expected a string, and none of the keys {', '.join(entries)}"
            )
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
        save_file(tensors, temporary, metadata=entries)
    return path


def _read_source(source: str | os.PathLike[str] | Mapping[str, Any], *, ema: bool | None) -> tuple[StateDict, str]:
    """The weights, and what to call their origin in an error."""
    if isinstance(source, Mapping):
        with errors_name("the mapping"):
            state_dict, _ = select_weights(source, ema=ema)
            if any(tensor.is_meta for tensor in state_dict.values()):
                raise ValueError("is on the meta device: there are no values to load")
        return state_dict, "the mapping"
    path = os.fspath(source)
    url = urlsplit(path)
    if url.scheme in ("http", "https"):
        path = os.fspath(download(path, filename=_cache_name(path)))
    elif url.scheme == "file":
        path = urllib.request.url2pathname(url.path)
    return read_checkpoint(path, ema=ema), path


def _cache_name(url: str) -> str:
    """The file's name in the cache; a digest of the address keeps apart the many files called model.safetensors."""
    for name, published in PUBLISHED_URLS.items():
        if url == published:
            return f"{name}.pth"
    file = PurePosixPath(urlsplit(url).path)
    return f"{file.stem or 'weights'}-{hashlib.sha256(url.encode()).hexdigest()[:16]}{file.suffix}"


def _family(names: Iterable[str]) -> str | None:
    names = list(names)
    found = [family for family, pattern in _FAMILY_NAMES.items() if any(re.match(pattern, name) for name in names)]
    return found[0] if len(found) == 1 else None


def _adapt_input_channels(own: StateDict, state_dict: StateDict, *, name: str) -> None:
    """timm can turn a convolution of 3 input channels into any other; whatever else differs is left for the check."""
    if name in own and name in state_dict:
        channels, weight = own[name].shape[1], state_dict[name]
        if weight.ndim == 4 and weight.shape[1] == 3 != channels:
            state_dict[name] = adapt_input_conv(channels, weight)


def _check_class_count(own: StateDict, state_dict: StateDict, *, classifier: str) -> None:
    theirs, ours = (len(tensors[classifier]) if classifier in tensors else 0 for tensors in (state_dict, own))
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
