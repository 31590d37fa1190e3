"""Tiny real runs in their own processes. A fork server imports torch once, so that starting a process is fast."""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import pty
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from PIL import Image

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["inline_attention.tasks.classification", "sklearn.datasets", "torch._dynamo"])

# Everything random is on: augmentation, mixup and cutmix, stochastic depth; and an average of the weights.
TINY = (
    "model.kwargs={embed_dim: 16, depth: 3, num_heads: 2, patch_size: 4}",
    "model.drop_path=0.4",
    "data.img_size=8",
    "data.in_chans=1",
    "data.batch_size=16",
    "data.workers=0",
    "data.in_memory=true",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0.5",
    "optim.lr=3e-2",
    "ema.decay=0.9",
    "ema.batch=null",
    "log.tensorboard=false",
)


@functools.cache
def images() -> str:
    """A folder of real images: the first digits of the embedded set, 160 for training and 41 for validation."""
    import sklearn.datasets

    root = tempfile.mkdtemp(prefix="digits-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    digits = sklearn.datasets.load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:201], digits.target[:201], strict=True)):
        folder = Path(root, "train" if number < 160 else "val", str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).save(folder / f"{number}.png")
    return root


def arguments(output: Path, *more: str) -> list[str]:
    """A command line of `inline`, 10 updates an epoch; later settings win over those of TINY."""
    flags = [item for item in more if item.startswith("--")]
    return [
        "train", "inline_deit_tiny", *TINY, *(item for item in more if not item.startswith("--")),
        f"--data={images()}", "--device=cpu", "--deterministic", f"--output={output}", *flags,
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


def call(function: Callable[..., Any], *arguments: object) -> Any:
    """What a function of a test module returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=processes) as pool:
        return pool.submit(function, *arguments).result()


def start_ranks(argv: Sequence[str], world_size: int, *, log: Path | None = None) -> list[BaseProcess]:
    """The command on several ranks of one machine, as torchrun starts it."""
    return _start_on_ranks(_run, world_size, list(argv), log)


def run_ranks(argv: Sequence[str], world_size: int, *, log: Path | None = None) -> list[int | None]:
    return _join(start_ranks(argv, world_size, log=log))


def run_on_ranks(function: Callable[..., object], world_size: int, *arguments: object) -> list[int | None]:
    """A function of a test module on several ranks; their exit statuses."""
    return _join(_start_on_ranks(function, world_size, *arguments))


def _start_on_ranks(function: Callable[..., object], world_size: int, *arguments: object) -> list[BaseProcess]:
    port = free_port()
    ranks = [
        processes.Process(target=_run_rank, args=(function, rank, world_size, port, arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def _join(ranks: Sequence[BaseProcess]) -> list[int | None]:
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def run_on_terminal(argv: Sequence[str], *, columns: int) -> tuple[int | None, str]:
    """(exit status, what the terminal was sent)"""
    ours, theirs = pty.openpty()
    process = processes.Process(target=_run_on_terminal, args=(list(argv), os.ttyname(theirs), columns))
    process.start()
    shown = b""
    while process.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.01)[0]:
            shown += os.read(ours, 1 << 16)
    process.join()
    os.close(theirs)
    os.close(ours)
    return process.exitcode, shown.decode()


def _run_on_terminal(argv: list[str], terminal: str, columns: int) -> None:
    os.environ |= {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    sys.stdout = open(terminal, "w")  # noqa: SIM115  (until the process ends)
    _run(argv, None)


def run_until_killed(argv: list[str], log: Path, output: Path) -> None:
    """A rank under torchrun's agent. Rank 1 is killed, once, as soon as there is a checkpoint."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":

        def kill_this_process() -> None:
            while not list((output / "checkpoints").glob("step-*")):
                time.sleep(0.001)
            (output / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill_this_process, daemon=True).start()
    status = inline(argv, log=log)
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def without_pictures() -> Iterator[None]:
    """As if matplotlib were not installed: drawing figures takes longer than these runs."""
    plots = ("inline_attention.training.plots", "inline_attention.tasks.classification.plots")
    before = {name: sys.modules.get(name) for name in plots}
    sys.modules |= dict.fromkeys(plots)  # type: ignore[arg-type]  # an import of None fails
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _run(argv: list[str], log: Path | None) -> None:
    os.setsid()  # a process group of its own, which a test may signal as a whole
    with without_pictures():
        sys.exit(inline(argv, log=log))


def _run_rank(
    function: Callable[..., object], rank: int, world_size: int, port: int, arguments: tuple[object, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    function(*arguments)


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
