"""Reads the files that torch.save writes, and executes nothing that they name.

A torch.save file is a pickle plus raw storages. A pickle is a program for a small stack machine, and what
makes it dangerous is that the machine looks up any object by name and calls it. The machine below can do
neither: `pickletools` decodes the instructions, a name is a string compared with fixed tables, and what those
tables hold builds plain containers and descriptions of tensors (`TensorRecord`). No module is imported, no
attribute is read or set, no method of a loaded object is called. Tensors are made afterwards, from numbers
that were checked against the file's size, and only those the caller asks for: an optimizer's state, two thirds
of a training checkpoint, is never read.

`torch.load(weights_only=True)` is not enough for the official checkpoints: it refuses the yacs configuration
that they contain, and with a stub class allowed in its place it refuses to set the items of a dict subclass.
"""

import io
import math
import mmap
import os
import pickletools
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

ZIP_SIGNATURE = b"PK\x03\x04"
# The first two objects of the format that torch.save wrote before PyTorch 1.6.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001


class RefusedFile(ValueError):
    """The file is not damaged, but holds what this reader will not build. The message says what."""


class Config(dict[str, Any]):
    """Stands in for yacs.config.CfgNode: its items, without the attributes that yacs keeps beside them."""


class StorageRecord(NamedTuple):
    """A storage as the pickle describes it: which one, and how many elements of which type."""

    key: str
    dtype: torch.dtype
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class TensorRecord(NamedTuple):
    """A tensor as the pickle describes it: a strided view that is known to lie inside its storage."""

    storage: StorageRecord
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Name(NamedTuple):
    """An object that the pickle named: the name, never the object."""

    full_name: str


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _rebuild_tensor(
    storage: StorageRecord,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    backward_hooks: object = None,
    metadata: object = None,
) -> TensorRecord:
    """The gradient flag and the hooks are left aside: weights have no use for either."""
    if type(storage) is not StorageRecord or type(size) is not tuple or type(stride) is not tuple:
        raise ValueError("a tensor without storage, size or stride")
    if len(size) > 64 or len(size) != len(stride) or not all(map(_is_count, (offset, *size, *stride))):
        raise ValueError("a tensor of impossible size, stride or offset")
    if metadata:
        raise RefusedFile("a tensor stored in conjugated or negated form")
    numel = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # An expanded tensor (stride 0), larger than its storage, could ask for any amount of memory when copied.
    if numel and max(last + 1, numel) > storage.num_elements:
        raise ValueError(
            f"a tensor of size {size}, stride {stride} and offset {offset} "
            f"reaches beyond its storage of {storage.num_elements} elements"
        )
    return TensorRecord(storage, offset, size, stride)


def _rebuild_parameter(data: TensorRecord, requires_grad: bool, backward_hooks: object) -> TensorRecord:
    if type(data) is not TensorRecord:
        raise ValueError("a parameter without a tensor")
    return data


def _check_key(key: object) -> object:
    """Scalars only: the hash of any other object could recurse through everything that the file holds."""
    if key is not None and type(key) not in (str, int, float, bool, bytes):
        raise RefusedFile(f"a dict key or set member of type {type(key).__name__}")
    return key


def _config() -> Config:
    return Config()


def _size(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if type(sizes) is not tuple:
        raise ValueError("a torch.Size that is no tuple")
    return sizes


def _set(items: Iterable[object] = ()) -> set[object]:
    return {_check_key(item) for item in items}


def _ordered_dict(items: Iterable[tuple[object, object]] = ()) -> OrderedDict[object, object]:
    return OrderedDict((_check_key(key), value) for key, value in items)


_STORAGE_DTYPES: dict[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_DTYPES = {str(dtype): dtype for dtype in _STORAGE_DTYPES.values()}
# What REDUCE may call. Pickles up to protocol 2 use Python 2's name for the builtins.
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered_dict,
    "__builtin__.set": _set,
    "builtins.set": _set,
}
# What NEWOBJ may create.
_CLASSES: dict[str, Callable[..., object]] = {"yacs.config.CfgNode": _config}

# Instructions that push the value pickletools has decoded. Protocol 0 has others; torch.save cannot use it.
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
_STRINGS = {"BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_LITERALS = _INTEGERS | _STRINGS | {"BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLE_LENGTHS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The pickle machine, unable to find or call anything outside of the tables above."""

    def __init__(self, make_storage: Callable[[tuple[object, ...]], StorageRecord]) -> None:
        self._make_storage = make_storage
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each MARK
        self._memo: dict[int, object] = {}

    def run(self, file: io.BytesIO | mmap.mmap) -> object:
        """Reads one pickle, up to and including its STOP."""
        for opcode, argument, _ in pickletools.genops(file):  # type: ignore[arg-type]  # mmap is as good as IO[bytes]
            name = opcode.name
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self._stack.append(_EMPTY[name]())
            elif name in _TUPLE_LENGTHS:
                self._stack.append(tuple(self._pop(_TUPLE_LENGTHS[name])))
            else:
                self._step(name, argument)
        (result,) = self._stack
        return result

    def _step(self, name: str, argument: Any) -> None:
        match name:
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[argument])
            case "MARK":
                self._outer.append(self._stack)
                self._stack = []
            case "TUPLE":
                items = tuple(self._pop_to_mark())
                self._stack.append(items)
            case "APPEND":
                self._append(self._pop(1))
            case "APPENDS":
                self._append(self._pop_to_mark())
            case "ADDITEMS":
                self._add(self._pop_to_mark())
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "GLOBAL":
                self._stack.append(_look_up(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                self._stack.append(_look_up(*self._pop(2)))
            case "REDUCE":
                self._stack.append(_call(_FUNCTIONS, *self._pop(2)))
            case "NEWOBJ":
                self._stack.append(_call(_CLASSES, *self._pop(2)))
            case "BUILD":
                # Attributes of a state dict (_metadata) or of a configuration: nothing that is needed.
                target, _ = self._pop(2)
                if type(target) not in (OrderedDict, Config):
                    raise RefusedFile(f"attributes for an object of type {type(target).__name__}")
                self._stack.append(target)
            case "BINPERSID":
                self._stack.append(self._storage(*self._pop(1)))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise RefusedFile(f"the pickle instruction {name}, which torch.save does not write for weights")

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise ValueError("an instruction without its operands")
        del self._stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError(f"list items for an object of type {type(target).__name__}")
        target.extend(items)

    def _add(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not set:
            raise ValueError(f"set members for an object of type {type(target).__name__}")
        target.update(_set(items))

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict, Config):
            raise ValueError(f"dict items for an object of type {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_check_key(key)] = value

    def _storage(self, identifier: object) -> StorageRecord:
        """("storage", type, key, device, number of elements); the legacy format adds a view, now None."""
        if type(identifier) is not tuple or identifier[:1] != ("storage",):
            is_module = type(identifier) is tuple and identifier[:1] == ("module",)
            raise RefusedFile("a whole pickled module" if is_module else "a reference to something unknown")
        return self._make_storage(identifier[1:])


def _look_up(module: object, attribute: object) -> object:
    if type(module) is not str or type(attribute) is not str:
        raise ValueError("a name that is no string")
    full_name = f"{module}.{attribute}"
    if full_name in _DTYPES:
        return _DTYPES[full_name]
    if full_name in _FUNCTIONS or full_name in _CLASSES or full_name in _STORAGE_DTYPES:
        return _Name(full_name)
    raise RefusedFile(f"the name {full_name[:200]!r}")


def _call(table: dict[str, Callable[..., object]], name: object, arguments: object) -> object:
    if type(name) is not _Name or name.full_name not in table:
        shown = name.full_name if type(name) is _Name else f"an object of type {type(name).__name__}"
        raise RefusedFile(f"a call of {shown}")
    if type(arguments) is not tuple:
        raise ValueError("a call without arguments")
    return table[name.full_name](*arguments)


def _no_storage(description: tuple[object, ...]) -> StorageRecord:
    raise ValueError("a storage where none can be")


def _storage_record(description: tuple[Any, ...]) -> StorageRecord:
    storage_type, key, _, num_elements, *view = description
    if type(storage_type) is not _Name or storage_type.full_name not in _STORAGE_DTYPES:
        raise ValueError("a storage of unknown type")
    if type(key) is not str or not _is_count(num_elements):
        raise ValueError("a storage without key or number of elements")
    if any(part is not None for part in view):
        raise RefusedFile("a view of a storage, as PyTorch before 0.4 wrote it")
    return StorageRecord(key, _STORAGE_DTYPES[storage_type.full_name], num_elements)


def _check_byte_order(*, is_little: bool) -> None:
    if is_little != (sys.byteorder == "little"):
        raise RefusedFile("numbers in another byte order than this machine's")


class TorchFile:
    """An open torch.save file, zip or legacy; `content` is what was saved, a `TensorRecord` for each tensor.

    Raises ValueError for a damaged file and RefusedFile, a ValueError, for one that holds more than weights; the
    messages are predicates ("is damaged: …") for the caller to put the file's name before.
    In an open file every record is known to lie inside the file; `tensor` reads it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115  # `close` closes it
        self._length = os.fstat(self._file.fileno()).st_size
        self._places: dict[str, tuple[int, int]] = {}  # position and length of each storage in the file
        self._storages: dict[StorageRecord, Tensor] = {}
        try:
            is_zip = self._file.read(len(ZIP_SIGNATURE)) == ZIP_SIGNATURE
            self._file.seek(0)
            self.content: Any = self._open_zip() if is_zip else self._open_legacy()
            if sum(length for _, length in self._places.values()) > self._length:
                raise ValueError("storages overlap")
        except BaseException as error:
            self.close()
            if isinstance(error, RefusedFile):
                raise RefusedFile(
                    f"is refused, and nothing in it was executed: it contains {error} "
                    "(tensors, plain containers and a yacs configuration are all that is read)"
                ) from None
            if isinstance(error, ValueError | struct.error | zipfile.BadZipFile | NotImplementedError):
                raise ValueError(f"is damaged or truncated: {error}") from error
            if isinstance(error, LookupError | TypeError):  # a missing operand, a wrong number of arguments
                raise ValueError("is damaged: its pickle makes no sense") from error
            raise

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def tensor(self, record: TensorRecord) -> Tensor:
        """Reads one tensor. Tensors of one storage share it, as they did when they were saved."""
        storage = record.storage
        if storage not in self._storages:
            buffer = bytearray(storage.num_bytes)
            self._file.seek(self._places[storage.key][0])
            if self._file.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]  # BinaryIO lacks readinto
                raise ValueError("was truncated while it was read")
            # torch.frombuffer refuses an empty buffer.
            flat = torch.frombuffer(buffer, dtype=storage.dtype) if buffer else torch.empty(0, dtype=storage.dtype)
            self._storages[storage] = flat
        return self._storages[storage].as_strided(record.size, record.stride, record.offset)

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise ValueError(f"it ends {num_bytes - len(data)} bytes early")
        return data

    def _open_zip(self) -> object:
        """<name>/data.pkl is the pickle and <name>/data/<key> are the storages, none of them compressed."""
        with zipfile.ZipFile(self._file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if len(entries) < len(archive.infolist()):
                raise RefusedFile("two zip entries of one name")
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise RefusedFile("no data.pkl (it is a zip archive, but none that torch.save wrote)")
        prefix = pickles[0].removesuffix("data.pkl")
        if prefix + "constants.pkl" in entries:
            raise RefusedFile("TorchScript, which is a program (save the model's state dict instead)")

        def locate(name: str) -> tuple[int, int]:
            """Position and length of an entry's data."""
            if (entry := entries.get(prefix + name)) is None:
                raise ValueError(f"the entry {name} is missing")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise RefusedFile("compressed zip entries, which torch.save does not write")
            if entry.header_offset < 0:
                raise ValueError(f"the entry {name} begins before the file")
            # The padding that aligns the data is in the local header alone, not in the archive's directory.
            self._file.seek(entry.header_offset)
            signature, name_length, extra_length = struct.unpack("<4s22xHH", self._read(30))
            if signature != ZIP_SIGNATURE:
                raise ValueError(f"the entry {name} has no header")
            position = entry.header_offset + 30 + name_length + extra_length
            if position + entry.file_size > self._length:
                raise ValueError(f"the entry {name} reaches beyond the end of the file")
            return position, entry.file_size

        def read(name: str) -> bytes:
            position, length = locate(name)
            self._file.seek(position)
            return self._read(length)

        def make_storage(description: tuple[object, ...]) -> StorageRecord:
            storage = _storage_record(description)
            position, length = locate(f"data/{storage.key}")
            if length != storage.num_bytes:
                raise ValueError(f"storage {storage.key!r} has {length} bytes instead of {storage.num_bytes}")
            self._places[storage.key] = position, length
            return storage

        if prefix + "byteorder" in entries:
            _check_byte_order(is_little=read("byteorder") == b"little")
        return _Machine(make_storage).run(io.BytesIO(read("data.pkl")))

    def _open_legacy(self) -> object:
        """Five pickles (magic number, version, system, the object, storage keys), then the storages."""
        # Not the file itself: asked for more bytes than there are, it would allocate them all before it looks.
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return self._walk_legacy(view)

    def _walk_legacy(self, view: mmap.mmap) -> object:
        if _Machine(_no_storage).run(view) != LEGACY_MAGIC:
            raise RefusedFile("a plain pickle, not one that torch.save wrote")
        if _Machine(_no_storage).run(view) != LEGACY_VERSION:
            raise RefusedFile("an unknown version of torch.save's format")
        system = _Machine(_no_storage).run(view)
        _check_byte_order(is_little=not isinstance(system, dict) or bool(system.get("little_endian", True)))
        storages: dict[str, StorageRecord] = {}

        def make_storage(description: tuple[object, ...]) -> StorageRecord:
            storage = _storage_record(description)
            if storages.setdefault(storage.key, storage) != storage:
                raise ValueError(f"storage {storage.key!r} is described in two ways")
            return storage

        content = _Machine(make_storage).run(view)
        keys = _Machine(_no_storage).run(view)
        if type(keys) is not list or _set(keys) != set(storages):
            raise ValueError("the list of storages does not fit the pickle")
        for key in keys:
            storage = storages[key]
            (length,) = struct.unpack("<q", view.read(8))
            if length != storage.num_elements:
                raise ValueError(f"storage {key!r} has {length} elements instead of {storage.num_elements}")
            self._places[key] = view.tell(), storage.num_bytes
            view.seek(storage.num_bytes, os.SEEK_CUR)  # ValueError beyond the end
        return content
