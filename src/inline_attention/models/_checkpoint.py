"""Reads weights files: safetensors, and both formats of torch.save. Nothing in a file is executed."""

import io
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from timm.models import clean_state_dict
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, safe_globals

from .base import StateDict

PathLike = str | os.PathLike[str]

# Where checkpoints keep their weights, in order of preference.
_EMA_KEYS = ("state_dict_ema", "model_ema")
_RAW_KEYS = ("model", "state_dict")
_INFO_KEYS = ("config", "args", "epoch", "max_accuracy")


class WeightsError(ValueError):
    """A weights file that cannot be used. The message is one line that names the file and the reason."""


@dataclass
class Checkpoint:
    """Weights, whether they are averaged (EMA), and the other content of the file.

    `info` is the metadata of a safetensors file. For a training checkpoint it holds the configuration, epoch and
    accuracy.
    """

    state_dict: StateDict
    is_ema: bool
    info: dict[str, Any]


def read_checkpoint(path: PathLike, *, ema: bool | None = None) -> StateDict:
    """Returns the weights in a file, on the CPU, under the names that the file gives them.

    The content decides how a file is read, not its name. Prefixes of wrappers ("module.", "_orig_mod.") are removed.
    If the format allows it, tensors are memory-mapped, so that only the tensors in use take memory.

    Args:
        ema: None takes averaged (EMA) weights if there are any, True requires them, False takes the others.
    """
    return open_checkpoint(path, ema=ema).state_dict


def open_checkpoint(path: PathLike, *, ema: bool | None = None) -> Checkpoint:
    """`read_checkpoint`, with the other content of the file."""
    path = Path(path).expanduser()
    with errors_name(path):
        if _is_safetensors(path):
            with _open_safetensors(path) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no iterator
                info = file.metadata() or {}
            return Checkpoint(*select_weights(tensors, ema=ema), info)
        content = _load_torch_file(path)
        state_dict, is_ema = select_weights(content, ema=ema)
        for name, tensor in state_dict.items():
            # A view may repeat elements of its storage. A copy would take more memory than the file.
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise WeightsError(f"is damaged: the tensor {name} is larger than its data")
        return Checkpoint(state_dict, is_ema, {key: content[key] for key in _INFO_KEYS if key in content})


def read_metadata(path: PathLike) -> dict[str, str]:
    """Returns the metadata of a safetensors file; empty if it has none."""
    path = Path(path).expanduser()
    with errors_name(path):
        if not _is_safetensors(path):
            raise WeightsError("is a torch.save file; only safetensors files have metadata")
        with _open_safetensors(path) as file:
            return file.metadata() or {}


def select_weights(content: Any, *, ema: bool | None) -> tuple[StateDict, bool]:
    """Find the mapping from names to tensors in the content of a file, and whether it is an average (EMA)."""
    if not isinstance(content, Mapping):
        raise WeightsError(f"holds an object of type {type(content).__name__}, not a mapping from names to tensors")
    averaged = next((content[key] for key in _EMA_KEYS if isinstance(content.get(key), Mapping)), None)
    raw = next((content[key] for key in _RAW_KEYS if isinstance(content.get(key), Mapping)), None)
    if ema and averaged is None:
        raise WeightsError(f"holds no EMA weights ({' or '.join(_EMA_KEYS)}), and ema=True asks for them")
    if ema is False and raw is None and averaged is not None:
        raise WeightsError("holds only EMA weights, and ema=False asks for others")
    is_ema = averaged is not None and ema is not False
    chosen = averaged if is_ema else content if raw is None else raw
    assert chosen is not None

    others = [name for name, value in chosen.items() if not isinstance(value, Tensor)]
    if len(others) == len(chosen):
        raise WeightsError(f"holds no tensors{_listed(others)}")
    if others:
        raise WeightsError(f"holds more than tensors where weights should be{_listed(others)}")
    if unnamed := [name for name in chosen if not isinstance(name, str)]:
        raise WeightsError(f"holds tensors whose names are not strings{_listed(unnamed)}")
    # A compiled model may be inside DistributedDataParallel or around it, so prefixes come in both orders.
    return clean_state_dict(clean_state_dict(dict(chosen))), is_ema


def _listed(keys: list[Any]) -> str:
    shown = ", ".join(one_line(key)[:40] for key in keys[:8])
    return f" (entries: {shown}{', …' if len(keys) > 8 else ''})" if keys else ""


def one_line(text: object) -> str:
    """Text from a file for a message, without line breaks and control characters."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(str(text).split()))


@contextmanager
def errors_name(subject: object) -> Iterator[None]:
    """Turns the predicate of a ValueError ("is empty") into a WeightsError about the subject."""
    try:
        yield
    except ValueError as error:
        raise WeightsError(f"{subject} {one_line(error)}") from error


def _is_safetensors(path: Path) -> bool:
    """True for safetensors, False for torch.save. Any other file is an error that names its type."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():  # perhaps that of a run
        inside = [*sorted(path.glob("*.safetensors")), *sorted(path.glob("checkpoints/*.safetensors"))]
        hint = f"; give one in it, such as {inside[0]}" if inside else ""
        raise WeightsError(f"is a folder, not a file of weights{hint}")
    if not path.is_file():
        raise WeightsError("is not a regular file")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise WeightsError("is empty")
    # A safetensors file has the length of a JSON header, the header, and the data.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        return True
    if head.startswith((_ZIP_SIGNATURE, b"\x80")):  # a zip archive, a pickle
        return False
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise WeightsError("is not weights: a web page was saved instead")
    if head.startswith(b"version https://git-lfs"):
        raise WeightsError("is a Git LFS pointer, not the weights themselves: run `git lfs pull`")
    if head[257:262] == b"ustar":
        raise WeightsError("is a tar archive, the format before PyTorch 0.1.10: load it with PyTorch and save it anew")
    raise WeightsError("is neither a safetensors file nor one that torch.save wrote")


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, RuntimeError, OverflowError) as error:
        raise WeightsError(f"is damaged or truncated: {error}") from error


# Files of torch.save. `_check_pickle` checks their instructions, then `torch.load(weights_only=True)` reads them.

_ZIP_SIGNATURE = b"PK\x03\x04"
# Configurations of training scripts: objects of yacs in the official code, of argparse in timm's script. An OrderedDict
# replaces them, so that neither package is imported and none of their attributes is set.
_STAND_INS = ("yacs.config.CfgNode", "argparse.Namespace")
_MAPPINGS = ("collections.OrderedDict", *_STAND_INS)
_FUNCTIONS = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.Size",
    "builtins.set",
    "__builtin__.set",
)
_OTHER_NAMES = re.compile(
    r"torch\.([A-Z][A-Za-z0-9]*Storage|storage\.UntypedStorage|(u?int|float|complex|bfloat|bool)[a-z0-9_]*)"
)
_MAX_TUPLE_DEPTH = 100


def _load_torch_file(path: Path) -> Any:
    try:
        with warnings.catch_warnings(), safe_globals([(OrderedDict, name) for name in _STAND_INS]):
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            with path.open("rb") as file:
                is_zip = file.read(len(_ZIP_SIGNATURE)) == _ZIP_SIGNATURE
            if is_zip:
                _check_zip(path)
                if path.suffix == ".safetensors":  # newer releases of torch decide by the name
                    return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
                # Mapped storages are always inside the file, and only tensors in use are read.
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            # Not the open file: torch would allocate as many bytes as a damaged file claims before it notices.
            content = io.BytesIO(path.read_bytes())
            _check_legacy(content)
            content.seek(0)
            return torch.load(content, map_location="cpu", weights_only=True)
    except (WeightsError, PermissionError):
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2] or str(error)
        raise WeightsError(f"{_REFUSED}: {reason.strip().splitlines()[0][:200]}") from error
    except Exception as error:  # a damaged file can make torch, zipfile and pickletools raise nearly anything
        raise WeightsError(f"is damaged or truncated: {str(error)[:200] or type(error).__name__}") from error


_REFUSED = "is refused, and nothing in it was executed"


def _refuse(reason: str) -> WeightsError:
    return WeightsError(
        f"{_REFUSED}: it contains {reason} (only tensors, plain containers and the configurations of "
        f"{' and '.join(name.partition('.')[0] for name in _STAND_INS)} are read)"
    )


def _check_zip(path: Path) -> None:
    """The archive is <name>/data.pkl and the storages <name>/data/<key>, all stored uncompressed."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        if len(names) < len(entries):
            raise _refuse("two zip entries of one name")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _refuse("no data.pkl: it is a zip archive, but torch.save did not write it")
        if pickles[0].replace("data.pkl", "constants.pkl") in names:
            raise _refuse("TorchScript, which is a program (save the model's state dict instead)")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _refuse("compressed zip entries, which torch.save does not write")
        _check_pickle(io.BytesIO(archive.read(pickles[0])))


def _check_legacy(file: io.BytesIO) -> None:
    """The format before PyTorch 1.6: magic number, version, system, the object, storage keys; then the storages."""
    if MAGIC_NUMBER not in [argument for _, argument, _ in pickletools.genops(file)]:
        raise _refuse("a plain pickle, which torch.save did not write")
    for _ in range(4):
        _check_pickle(file)


class _Item(NamedTuple):
    """The facts about an object of a pickle that the check tracks."""

    name: str = ""  # name of a class or function
    is_mapping: bool = False
    depth: int = 0  # depth of nested tuples


_MARK = _Item("(")


def _check_pickle(file: io.BytesIO) -> None:
    """Refuse a pickle with more than weights, before torch.load runs it.

    torch's own list of allowed names is longer. It has bytearray and the storage classes, which allocate any size that
    a file asks for. Before 2.10, torch also let a pickle set items of objects that are not mappings. Deeply nested
    tuples overflow the stack when they are hashed.
    """
    stack: list[_Item] = []
    memo: dict[int, _Item] = {}
    texts: list[str] = []  # the last two strings
    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        if name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            continue
        if name == "MARK":
            stack.append(_MARK)
            continue
        before = opcode.stack_before
        items: list[_Item] = []
        if pickletools.stackslice in before:
            while (item := stack.pop()) is not _MARK:
                items.append(item)
            before = before[: before.index(pickletools.markobject)]
        operands = [stack.pop() for _ in before][::-1]
        target = operands[0] if operands else _Item()
        result = _Item()
        if name == "GLOBAL":
            result = _Item(argument.replace(" ", ".", 1))
            if result.name not in (*_MAPPINGS, *_FUNCTIONS) and not _OTHER_NAMES.fullmatch(result.name):
                raise _refuse(f"the name {one_line(result.name)[:200]}")
        elif name == "STACK_GLOBAL":  # protocol 4, which torch.save does not use by default
            raise _refuse(f"the name {one_line('.'.join(texts[-2:]))[:200]} in pickle protocol 4")
        elif isinstance(argument, str):
            texts = [*texts[-1:], argument]
        elif name in ("REDUCE", "NEWOBJ"):
            if target.name not in (_FUNCTIONS if name == "REDUCE" else _MAPPINGS):
                raise _refuse(f"a call of {target.name or 'an object'}")
            result = _Item(is_mapping=target.name in _MAPPINGS)
        elif name in ("BUILD", "SETITEM", "SETITEMS"):
            if not target.is_mapping:
                raise _refuse(f"the pickle instruction {name} for an object that is not a mapping")
            result = target
        elif name == "EMPTY_DICT":
            result = _Item(is_mapping=True)
        elif name.startswith("TUPLE"):
            result = _Item(depth=1 + max((item.depth for item in (*operands, *items)), default=0))
            if result.depth > _MAX_TUPLE_DEPTH:
                raise _refuse(f"more than {_MAX_TUPLE_DEPTH} tuples inside each other")
        stack.extend(result for _ in opcode.stack_after)
