"""Mutated and hostile weight files through the package's loaders."""

import json
import os
import pickle
import random
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from small import create_small, shrunk

import inline_attention
from inline_attention.models.weights import load_model, read_checkpoint, read_metadata, save_weights

from .part import MIB, Part

MODELS = ("inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny")
TRAPS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.getaddrinfo",
)

Mutation = Callable[["Weights", random.Random], bytes]


class Weights(Part):
    name = "weights"
    what = "mutated and hostile weight files, through every loader"
    promise = (
        "nothing executed, no process, no connection, no file written; a ValueError that names the file, or a model"
    )
    count, per_chunk = 20_000, 500
    patience = 30.0
    spare_memory = 512 * MIB

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.models = {name: create_small(name) for name in MODELS}
        self.canary = folder / "executed"
        self.good = {name: list(_good_files(model, folder)) for name, model in self.models.items()}

    def run(self, case: int) -> Mapping[str, int]:
        draw = self.draw(case)
        kind = draw.choices(list(KINDS), weights=[weight for _, weight in KINDS.values()])[0]
        content = KINDS[kind][0](self, draw)
        # Loaders tell files apart by their content; the name must not matter.
        path = self.folder / draw.choice(["mutant.safetensors", "mutant.pth", "mutant.pth.tar", "mutant"])
        path.write_bytes(content)
        model = self.models[draw.choice(MODELS)]
        outcomes = [
            self._attempt(path, read_checkpoint, path),
            self._attempt(path, read_metadata, path),
            self._attempt(path, inline_attention.load_weights, model, path),
            self._attempt(path, load_model, path),
        ]
        return {kind: 1, "loaders called": len(outcomes), "refused with a message": outcomes.count("refused")}

    def _attempt(self, path: Path, loader: Callable[..., Any], *arguments: Any) -> str:
        message = None
        try:
            with watched():
                loader(*arguments)
        except ValueError as error:
            message = str(error)
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(f"{loader.__name__} raised {type(error).__name__}") from error
        assert not self.canary.exists(), f"{loader.__name__} executed what is in the file"
        assert message is None or path.name in message, (
            f"{loader.__name__}: the error does not name the file: {message}"
        )
        return "read" if message is None else "refused"


_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in TRAPS:
        raise AssertionError(f"a loader did {event}{arguments!r:.200}")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        raise AssertionError(f"a loader opened {arguments[0]!r} for writing")


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[None]:
    """Raises an AssertionError if the block starts a process, opens a connection or opens a file for writing."""
    global _watching
    _watching = True
    try:
        yield
    finally:
        _watching = False


def _good_files(model: Any, folder: Path) -> Iterator[bytes]:
    """The model's weights in every kind of file that the loaders read."""
    path = folder / "good"
    yield save_weights(model, path, metadata={"class_names": json.dumps(["a", "b", "c", "d", "e"])}).read_bytes()
    state = model.state_dict()
    for content in (state, {"model": state, "epoch": 3}, {"state_dict_ema": state, "state_dict": state, "arch": "x"}):
        for is_zip in (True, False):
            torch.save(content, path, _use_new_zipfile_serialization=is_zip)
            yield path.read_bytes()


# Each mutation makes one file.


def damaged(part: Weights, draw: random.Random) -> bytes:
    """Bytes changed, cut, doubled, or spliced with those of another file. Most changes are near the beginning
    or the end, where formats keep their indices."""
    files = part.good[draw.choice(MODELS)]
    content = bytearray(draw.choice(files))
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        at = _place(draw, len(content))
        match draw.randrange(6):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                content[at] ^= 1 << draw.randrange(8)
            case 2:
                del content[at : at + draw.choice([1, 4, 100])]
            case 3:
                content[at:at] = draw.randbytes(draw.choice([1, 4, 100]))
            case 4:
                size = draw.choice([2, 4, 8])
                number = draw.choice([0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])
                content[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, draw.choice(["little", "big"]))
            case 5:
                other = draw.choice(files)
                start = _place(draw, len(other))
                content[at : at + 64] = other[start : start + 64]
        if not content:
            break
    return bytes(content)


def truncated(part: Weights, draw: random.Random) -> bytes:
    content = draw.choice(part.good[draw.choice(MODELS)])
    return content[: _place(draw, len(content))]


def safetensors_header(part: Weights, draw: random.Random) -> bytes:
    """A well-formed safetensors file whose header says something else: shapes, types, offsets, names, metadata."""
    content = part.good[draw.choice(MODELS)][0]
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for _ in range(draw.choice([0, 1, 3])):
        _change(header, draw)
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and draw.random() < 0.7:
        config = json.loads(json.dumps(shrunk(draw.choice(MODELS))))
        _change(config, draw)
        metadata["config"] = json.dumps(config)
        if draw.random() < 0.3:
            metadata["architecture"] = draw.choice(
                ["resnet18", "hf-hub:a/b", "../x", "", "vit_tiny_patch16_224", *MODELS]
            )
        if draw.random() < 0.3:
            key = draw.choice(["config", "class_names", "preprocessing", "architecture", "library"])
            metadata[key] = draw.choice(
                ["", "{", "null", "[]", "[" * 5000, "NaN", "1e999", '{"a": 1}', "\u0000", "\ud83d\ude00"]
            )
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def pickle_stream(part: Weights, draw: random.Random) -> bytes:
    """A valid torch.save archive with a damaged pickle inside. Checksums do not catch this."""
    content = draw.choice([file for file in part.good[draw.choice(MODELS)] if file.startswith(b"PK")])
    with zipfile.ZipFile(BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    stream = bytearray(entries[name])
    for _ in range(draw.choice([1, 1, 2, 16])):
        at = draw.randrange(len(stream))
        if draw.random() < 0.5:
            stream[at] = draw.randrange(256)
        else:
            stream[at:at] = draw.choice(
                [b"R", b"o", b"b", b"\x81", b"\x93", b"cos\nsystem\n", b"(", b"t", b"0", b"2", b"Q", b"."]
            )
    entries[name] = bytes(stream)
    return _as_zip(entries)


def hostile(part: Weights, draw: random.Random) -> bytes:
    """A pickle that would create the canary, in one of the containers that torch.load reads."""
    shell = f"touch {part.canary}"
    code = f"open({str(part.canary)!r}, 'w').close()"
    call: Any = draw.choice(
        [_Call(os.system, shell), _Call(eval, code), _Call(exec, code), _Call(open, str(part.canary), "w")]
    )
    state = part.models[draw.choice(MODELS)].state_dict()
    content = draw.choice(
        [
            call,
            {"model": call},
            {"model": state, "epoch": call},
            {"state_dict": {**state, "x": call}},
            [call],
            {call: 1},
        ]
    )
    buffer = BytesIO()
    match draw.randrange(4):
        case 0:
            torch.save(content, buffer)
        case 1:
            torch.save(content, buffer, _use_new_zipfile_serialization=False)
        case 2:
            pickle.dump(call, buffer, protocol=draw.randrange(6))
        case 3:
            return _as_zip({"archive/data.pkl": pickle.dumps(call), "archive/version": b"3\n"})
    return buffer.getvalue()


def nonsense(part: Weights, draw: random.Random) -> bytes:
    """Files without weights: noise, other formats, and valid first bytes followed by noise."""
    noise = draw.randbytes(draw.choice([0, 1, 7, 8, 9, 64, 3000]))
    opening = draw.choice(
        [b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95", struct.pack("<Q", 2**40) + b"{", struct.pack("<Q", 9) + b"{",
         b"<html>", b"version https://git-lfs", b"\x1f\x8b", b"\x89PNG\r\n", b"[" * 50_000]
    )  # fmt: skip
    return opening + noise


KINDS: dict[str, tuple[Mutation, int]] = {
    "bytes changed": (damaged, 30),
    "cut short": (truncated, 10),
    "safetensors headers changed": (safetensors_header, 25),
    "pickles changed inside whole archives": (pickle_stream, 20),
    "pickles that call something": (hostile, 10),
    "no weights at all": (nonsense, 5),
}
EXTREMES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**62, 10**30, 0.5, float("nan"), "", "x", "/etc/passwd", "http://127.0.0.1:9/x", [],
    [[]], {}, [0, 0], [1, 10**9], [2**62, 2**62, 0],
)  # fmt: skip
ARGUMENTS = (
    "img_size", "num_classes", "embed_dim", "depth", "depths", "num_heads", "patch_size", "in_chans", "attention",
    "checkpoint_path", "weights", "pretrained", "pretrained_cfg", "features_only", "drop_path_rate",
)  # fmt: skip


class _Call:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def _place(draw: random.Random, length: int) -> int:
    edge = min(length, 2000)
    return draw.choice([draw.randrange(length), draw.randrange(edge), length - 1 - draw.randrange(edge)])


def _change(tree: Any, draw: random.Random) -> None:
    """Changes, renames or removes one entry of a JSON object."""
    while True:
        key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if isinstance(tree[key], dict | list) and tree[key] and draw.random() < 0.8:
            tree = tree[key]
            continue
        break
    if not isinstance(tree, dict) or draw.random() < 0.6:
        tree[key] = draw.choice(EXTREMES)
    elif draw.random() < 0.5:
        tree[draw.choice([*ARGUMENTS, "", "a.b", "x" * 1000])] = draw.choice(EXTREMES)
    else:
        del tree[key]


def _as_zip(entries: Mapping[str, bytes]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()
