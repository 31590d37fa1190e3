"""Tiny real runs in processes of their own. A fork server imports torch once, so that a process costs little."""

import contextlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import safetensors.torch
import torch

TRAINED = "inline_attention.training.loop"
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([TRAINED, "sklearn.datasets", "timm.data", "torch._dynamo"])

# Everything random is on: augmentation, mixup and cutmix, stochastic depth; and an average of the weights.
TINY = (
    "model.kwargs={embed_dim: 16, depth: 3, num_heads: 2, patch_size: 4}",
    "model.drop_path=0.4",
    "data.img_size=8",
    "data.in_chans=1",
    "data.batch_size=128",
    "data.workers=0",
    "data.in_memory=true",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0.5",
    "optim.lr=4e-3",
    "ema.decay=0.9",
    "ema.batch=null",
    "log.tensorboard=false",
)


def arguments(output: Path, *more: str) -> list[str]:
    """A command line of `inline`: later settings win over those of TINY."""
    flags = [item for item in more if item.startswith("--")]
    return [
        "train", "inline_deit_tiny", *TINY, *(item for item in more if not item.startswith("--")),
        "--data=digits", "--device=cpu", "--deterministic", f"--output={output}", *flags,
    ]  # fmt: skip


def inline(argv: Sequence[str], *, log: Path | None = None) -> int:
    from inline_attention.cli import main

    torch.set_num_threads(1)
    if log is None:
        return main(argv)
    with open(log, "a", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return main(argv)


def start(argv: Sequence[str], *, log: Path | None = None) -> BaseProcess:
    process = processes.Process(target=_run, args=(list(argv), log))
    process.start()
    return process


def run(argv: Sequence[str], *, log: Path | None = None) -> int:
    process = start(argv, log=log)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_ranks(argv: Sequence[str], world_size: int, *, log: Path | None = None) -> list[int]:
    """What torchrun does for the processes of one machine."""
    port = free_port()
    ranks = [
        processes.Process(target=_run_rank, args=(list(argv), log, rank, world_size, port))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode or 0 for process in ranks]


def _run(argv: list[str], log: Path | None) -> None:
    sys.exit(inline(argv, log=log))


def _run_rank(argv: list[str], log: Path | None, rank: int, world_size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    _run(argv, log)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def weights(output: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(output / "checkpoints" / f"{name}.safetensors")


def metrics(output: Path, kind: str = "train") -> list[dict]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("last", "ema", "best"):
        first, second = weights(one, name), weights(other, name)
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), f"{name}: {key} differs"
