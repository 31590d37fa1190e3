"""Finds the weights in a file, whatever wrote it: safetensors, torch.save of today or of before PyTorch 1.6."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from timm.models import clean_state_dict
from torch import Tensor

from ._base import StateDict
from ._unpickle import ZIP_SIGNATURE, RefusedFile, TensorRecord, TorchFile

PathLike = str | os.PathLike[str]

# Where checkpoints keep their weights, in order of preference.
_EMA_KEYS = ("state_dict_ema", "model_ema")
_RAW_KEYS = ("model", "state_dict")
_INFO_KEYS = ("config", "epoch", "max_accuracy")


@dataclass
class Checkpoint:
    """Weights, whether they are averaged (EMA) ones, and what the file says about them.

    `info` is the metadata of a safetensors file, or of a training checkpoint its configuration, epoch and accuracy.
    """

    state_dict: StateDict
    is_ema: bool
    info: dict[str, Any]


def read_checkpoint(path: PathLike, *, ema: bool | None = None) -> StateDict:
    """The weights in a file, on the CPU, under the names that the file gives them.

    The kind of file is told by its content. "module." and "_orig_mod.", which wrappers put before names, are removed.

    Args:
        ema: None takes averaged (EMA) weights where there are some, True demands them, False takes the others.
    """
    return open_checkpoint(path, ema=ema).state_dict


def open_checkpoint(path: PathLike, *, ema: bool | None = None) -> Checkpoint:
    """`read_checkpoint`, with what else the file says."""
    path = Path(path).expanduser()
    with errors_name(path):
        if _is_safetensors(path):
            with _open_safetensors(path) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no iterator
                info = file.metadata() or {}
            return Checkpoint(*select_weights(tensors, ema=ema), info)
        with TorchFile(path) as file:
            records, is_ema = select_weights(file.content, ema=ema)
            state_dict = {name: file.tensor(record) for name, record in records.items()}
            info = {key: file.content[key] for key in _INFO_KEYS if key in file.content}
            return Checkpoint(state_dict, is_ema, info)


def check_checkpoint(path: PathLike) -> None:
    """Raises what `read_checkpoint` would, but reads no more than the index of the file."""
    path = Path(path).expanduser()
    with errors_name(path):
        if _is_safetensors(path):
            with _open_safetensors(path) as file:
                if not file.keys():
                    raise ValueError("holds no tensors")
        else:
            with TorchFile(path) as file:
                select_weights(file.content, ema=None)


def read_metadata(path: PathLike) -> dict[str, str]:
    """The metadata of a safetensors file; empty where it has none."""
    path = Path(path).expanduser()
    with errors_name(path):
        if not _is_safetensors(path):
            raise ValueError("is a torch.save file; only safetensors files have metadata")
        with _open_safetensors(path) as file:
            return file.metadata() or {}


def select_weights(content: Any, *, ema: bool | None) -> tuple[dict[str, Any], bool]:
    """The mapping from names to tensors (or records of them) inside what a file holds, and whether it is EMA's."""
    if not isinstance(content, Mapping):
        raise ValueError(f"holds an object of type {type(content).__name__}, not a mapping from names to tensors")
    averaged = next((content[key] for key in _EMA_KEYS if isinstance(content.get(key), Mapping)), None)
    raw = next((content[key] for key in _RAW_KEYS if isinstance(content.get(key), Mapping)), None)
    if ema and averaged is None:
        raise ValueError(f"holds no EMA weights ({' or '.join(_EMA_KEYS)}), and ema=True asks for them")
    if ema is False and raw is None and averaged is not None:
        raise ValueError("holds EMA weights alone, and ema=False asks for others")
    is_ema = averaged is not None and ema is not False
    chosen = averaged if is_ema else content if raw is None else raw
    assert chosen is not None

    others = [name for name, value in chosen.items() if not isinstance(value, Tensor | TensorRecord)]
    if len(others) == len(chosen):
        raise ValueError(f"holds no tensors{_listed(others)}")
    if others:
        raise ValueError(f"holds more than tensors where weights should be{_listed(others)}")
    # A compiled model may be inside DistributedDataParallel or around it: the prefixes come in both orders.
    return clean_state_dict(clean_state_dict(dict(chosen))), is_ema


def _listed(keys: list[Any]) -> str:
    shown = ", ".join(str(key)[:40] for key in keys[:8])
    return f" (entries: {shown}{', …' if len(keys) > 8 else ''})" if keys else ""


@contextmanager
def errors_name(subject: object) -> Iterator[None]:
    """Turns the predicate that a ValueError holds ("is empty") into a sentence about the subject."""
    try:
        yield
    except ValueError as error:
        raise (RefusedFile if isinstance(error, RefusedFile) else ValueError)(f"{subject} {error}") from error


def _is_safetensors(path: Path) -> bool:
    """True for safetensors, False for torch.save; ValueError says what any other file is."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        raise ValueError("is a folder, not a file of weights")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise ValueError("is empty")
    # A safetensors file is the length of a JSON header, that header, the data.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        return True
    if head.startswith((ZIP_SIGNATURE, b"\x80")):  # a zip archive, a pickle
        return False
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise ValueError("is not weights: a web page was saved instead")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError("is not weights but a Git LFS pointer to them: run `git lfs pull`")
    if head[257:262] == b"ustar":
        raise ValueError("is a tar archive, the format of PyTorch before 0.1.10: load it with PyTorch and save it anew")
    raise ValueError("is neither a safetensors file nor one that torch.save wrote")


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"is damaged or truncated: {error}") from error
