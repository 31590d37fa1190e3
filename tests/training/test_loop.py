"""The loop in this process: its updates, its files, and the plans it refuses."""

import contextlib
import errno
import functools
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors
import torch
import training_runs as _runs
from PIL import Image
from torch.overrides import TorchFunctionMode

from inline_attention.data import Data
from inline_attention.models.weights import load_model
from inline_attention.tasks.classification.task import Classification
from inline_attention.training import checkpoint
from inline_attention.training.distributed import Ranks
from inline_attention.training.files import write_atomically
from inline_attention.training.lock import FileLock
from inline_attention.training.loop import NonFiniteLoss, Outcome, Trainer, choose_compile_mode, train
from inline_attention.training.report import Reporter
from inline_attention.training.run_folder import claim_folder
from inline_attention.training.run_folder import plan_run as plan_any_run
from inline_attention.training.signals import StopRequest
from inline_attention.training.task import Evaluation, Task

plan_run = functools.partial(plan_any_run, task=Classification)
CALM = ("data.augment=false", "data.mixup=0", "data.cutmix=0", "data.batch_size=32", "log.every_steps=1")


def run(
    output: Path,
    *overrides: str,
    resume: str | None = None,
    data: str | None = None,
    pictures: bool = False,
    device: str = "cpu",
    deterministic: bool = True,
    task: type[Task] = Classification,
) -> Outcome:
    flags = {
        "data": {"path": _runs.images() if data is None else data},
        "device": device,
        "deterministic": deterministic,
    }
    overrides = (*_runs.TINY, *CALM, *overrides)
    plan = plan_run("inline_deit_tiny", overrides=overrides, flags=flags, output=str(output), resume=resume, task=task)
    with _runs.without_pictures() if not pictures else contextlib.nullcontext():
        return train(plan)


def stop_by_signal(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    while not trainer.request.number:  # another thread receives it, which a busy machine runs later
        time.sleep(0.001)


class Fixed(Classification):
    """Evaluations that improve once and never again."""

    figures: ClassVar[list[float]] = [10.0, 30.0, 20.0, 30.0, 25.0, 40.0, 30.0, 30.0]

    def evaluate(self, model: torch.nn.Module, **options: Any) -> Evaluation:
        return Evaluation({"top1": self.figures[int(self.epoch)], "top5": 100.0, "loss": 1.0})

    def losses(self, forward: Any, batch: Any, *, epoch: int, step: int) -> dict[str, torch.Tensor]:
        self.epoch = epoch
        return super().losses(forward, batch, epoch=epoch, step=step)


def run_fixed(output: Path, *overrides: str, resume: str | None = None) -> Outcome:
    """Eight epochs of one update."""
    fixed = ("data.batch_size=160", "ema.decay=null", "schedule.warmup_epochs=0", "schedule.epochs=8")
    settings = (*_runs.TINY, *CALM, *fixed, *overrides)
    flags = {"data": {"path": _runs.images()}, "device": "cpu"}
    name = None if resume else "inline_deit_tiny"
    with _runs.without_pictures():
        return train(plan_any_run(name, overrides=settings, flags=flags, output=str(output), resume=resume, task=Fixed))


@pytest.mark.slow
def test_channels_last_trains_alike_and_resumes(tmp_path: Path) -> None:
    options = ("data.in_chans=3", "schedule.epochs=2", "model.drop_path=0")
    plain = run(tmp_path / "plain", *options)
    other = run(tmp_path / "other", *options, "run.channels_last=true")
    found = losses(other.folder)
    assert found == pytest.approx(losses(plain.folder), rel=1e-3)
    middle = other.folder / "checkpoints" / "step-00000005"
    run(other.folder, *options, "run.channels_last=true", resume=str(middle))
    assert losses(other.folder) == found


def test_early_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_fixed(tmp_path / "run", "schedule.early_stop=2", "checkpoint.every_epochs=100").summary
    assert (summary["epochs"], summary["best_top1"], summary["best_epoch"], summary["val_top1"]) == (4, 30.0, 2, 30.0)
    assert "early stop: no better result in the last 2 evaluation(s); the best is epoch 2" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()  # the last state is saved
    patient = run_fixed(tmp_path / "patient", "schedule.early_stop=4").summary
    assert (patient["epochs"], patient["best_epoch"]) == (8, 6)


def test_the_best_are_weights_that_could_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full when the best weights are written, and has space again after the next epoch."""
    attempts = []

    def full_at_the_second(path: Path, content: bytes) -> None:
        attempts.append(path)
        if len(attempts) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, content)

    monkeypatch.setattr(checkpoint, "write_atomically", full_at_the_second)
    summary = run_fixed(tmp_path / "run", "schedule.epochs=3").summary
    assert "saving works again: the best weights" in capsys.readouterr().out
    with safetensors.safe_open(tmp_path / "run" / "checkpoints" / "best.safetensors", framework="pt") as file:
        assert file.metadata()["epoch"] == "3"
    assert (summary["best_epoch"], summary["best_top1"]) == (3, 20.0)


def test_a_figure_that_is_nan_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixed, "figures", [float("nan"), 10.0, float("nan")])
    summary = run_fixed(tmp_path / "run", "schedule.epochs=3").summary
    assert (summary["best_epoch"], summary["best_top1"]) == (2, 10.0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val_top1"] is None


def test_plateau(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stale evaluations (epochs 3 and 4, 7 and 8) halve the rate, and an improvement does not raise it again."""
    options = ("schedule.kind=plateau", "schedule.patience=2", "schedule.drop_factor=0.5", "schedule.min_lr=0")
    run_fixed(tmp_path / "run", *options)
    before = _runs.metrics(tmp_path / "run")
    rates = [record["lr"] / before[0]["lr"] for record in before if record["epoch"] % 1 == 0]
    assert rates == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    monkeypatch.setattr(Fixed, "epoch", 6, raising=False)  # a resumed run begins with the evaluation of epoch 7
    run_fixed(tmp_path / "run", *options, resume=str(tmp_path / "run" / "checkpoints" / "step-00000007"))
    assert [record["lr"] for record in _runs.metrics(tmp_path / "run")] == [record["lr"] for record in before]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in _runs.metrics(output)]


@pytest.fixture
def folder_of_images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", classes=3)


def write_images(root: Path, *, classes: int) -> Path:
    """Class folders of 8 × 8 noise: 8 images a class for training, 5 for validation."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 5)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(noise.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
    return root


def test_run_folder(tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", "schedule.epochs=2", "log.tensorboard=true", "log.every_steps=2", pictures=True)
    folder = tmp_path / "run"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    checkpoint_files = ("model.safetensors", "ema.safetensors", "state.pt", "manifest.json")
    checkpoints = {f"checkpoints/step-{step:08d}/{name}" for step in (5, 10) for name in checkpoint_files}
    events = {name for name in found if name.startswith("tensorboard/")}
    assert len(events) == 1
    assert found - events == checkpoints | {
        "config.yaml", "environment.json", "metrics.jsonl", "summary.json", "curves.png", "confusion.png",
        "checkpoints/last.safetensors", "checkpoints/best.safetensors", "checkpoints/ema.safetensors", ".lock",
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == outcome.summary
    assert {"val_top1", "val_top5", "epochs", "seconds", "images_per_second", "skipped_images"} <= summary.keys()
    assert (summary["epochs"], summary["updates"], summary["skipped_images"]) == (2, 10, 0)
    evaluations = _runs.metrics(folder, "eval")
    assert [record["epoch"] for record in evaluations] == [1, 2]
    assert evaluations[-1]["val_images"] == 41
    assert summary["val_top1"] == evaluations[-1]["val_top1"]
    assert summary["best_top1"] == max(max(r["val_top1"], r["ema_top1"]) for r in evaluations)
    assert [record["update"] for record in _runs.metrics(folder)] == [2, 4, 5, 6, 8, 10]
    assert json.loads((folder / "environment.json").read_text())[0]["torch"] in torch.__version__
    with safetensors.safe_open(folder / "checkpoints" / "best.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["architecture"] == "inline_deit_tiny"
    assert json.loads(metadata["class_names"]) == [str(digit) for digit in range(10)]
    assert json.loads(metadata["config"])["embed_dim"] == 16
    assert metadata["weights"] in ("model", "ema")
    rebuilt = load_model(folder / "checkpoints" / "last.safetensors")
    assert all(torch.equal(value, rebuilt.state_dict()[name]) for name, value in _runs.weights(folder).items())


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    fixed = ("model.drop_path=0", "schedule.epochs=1")
    run(tmp_path / "one", *fixed, "data.batch_size=32")
    run(tmp_path / "four", *fixed, "data.batch_size=8", "optim.accumulate=4")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    for name, value in _runs.weights(tmp_path / "one").items():
        assert torch.allclose(_runs.weights(tmp_path / "four")[name], value, atol=1e-4), name


def test_a_run_of_steps_ends_inside_an_epoch(tmp_path: Path) -> None:
    """7 updates of an epoch of 5: the second epoch is cut short, evaluated, saved, and can be resumed."""
    steps = ("schedule.steps=7", "schedule.warmup_steps=2", "schedule.kind=poly")
    outcome = run(tmp_path / "run", *steps)
    assert (outcome.summary["updates"], outcome.summary["epochs"]) == (7, 2)
    assert [record["update"] for record in _runs.metrics(tmp_path / "run")] == list(range(1, 8))
    assert [record["update"] for record in _runs.metrics(tmp_path / "run", "eval")] == [5, 7]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000007")
    outcome = run(tmp_path / "again", *steps, resume="auto")
    assert outcome.summary["updates"] == 7
    _runs.assert_same_weights(tmp_path / "run", tmp_path / "again")
    # Its last checkpoint is inside the second epoch. A longer run continues from there.
    outcome = run(tmp_path / "run", *steps, "schedule.steps=12", resume="auto")
    assert (outcome.summary["updates"], outcome.summary["epochs"]) == (12, 3)
    assert [record["update"] for record in _runs.metrics(tmp_path / "run")] == list(range(1, 13))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("run.precision=fp16",), marks=pytest.mark.slow),
        ("run.precision=bf16", "optim.accumulate=2", "data.batch_size=16"),
        ("model.checkpointing=true", "model.freeze=1", "optim.layer_decay=0.7", "schedule.kind=step"),
        pytest.param(("model.kwargs.drop_rate=0.1",), marks=pytest.mark.slow),
    ],
    ids=["fp16", "bf16 accumulated", "checkpointed, frozen", "dropout"],
)
def test_options_continue_exactly(options: tuple[str, ...], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, *options, "schedule.epochs=2")
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000010")
    run(cut, *options, "schedule.epochs=2", resume="auto")
    _runs.assert_same_weights(whole, cut)
    assert losses(whole) == losses(cut)
    states = [
        torch.load(root / "checkpoints" / "step-00000010" / "state.pt", weights_only=True) for root in (whole, cut)
    ]
    assert states[0]["scaler"] == states[1]["scaler"]
    if "run.precision=fp16" in options:
        assert states[0]["scaler"]["_growth_tracker"] == 10


@pytest.mark.slow
def test_compiled_model_trains_alike(tmp_path: Path) -> None:
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for compiled in ("false", "true"):
        run(tmp_path / compiled, f"run.compile={compiled}", "schedule.epochs=2")
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), rel=1e-4)
    assert _runs.weights(tmp_path / "true").keys() == _runs.weights(tmp_path / "false").keys()
    # One for training and one for evaluation: nothing that changes from update to update is part of them.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 2


@pytest.mark.gpu
def test_cuda_graphs_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stochastic depth, clipping, an average of the weights, and evaluations between the epochs."""
    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph))[1])
    for compiled in ("false", "true"):
        assert not replayed
        options = (f"run.compile={compiled}", "run.precision=fp32", "schedule.epochs=3")
        run(tmp_path / compiled, *options, device="cuda", deterministic=False)
    assert len(replayed) >= 2 * 12  # forward and backward of 15 updates, less those that warm up and record
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), rel=1e-3)
    for key in ("val_loss", "ema_loss"):
        figures = [[r[key] for r in _runs.metrics(tmp_path / compiled, "eval")] for compiled in ("true", "false")]
        assert figures[0] == pytest.approx(figures[1], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "device", "world_size", "fixed_shapes", "expected"),
    [
        ((), "cuda", 1, True, "reduce-overhead"),
        (("run.compile=false",), "cuda", 1, True, None),
        ((), "cpu", 1, True, "default"),
        ((), "cuda", 2, True, "default"),
        ((), "cuda", 1, False, "default"),
        (("optim.accumulate=2",), "cuda", 1, True, "default"),
        (("model.checkpointing=true",), "cuda", 1, True, "default"),
    ],
)
def test_cuda_graphs_where_an_update_needs_nothing_of_the_last(
    overrides: tuple[str, ...], device: str, world_size: int, fixed_shapes: bool, expected: str | None
) -> None:
    config = plan_run("inline_deit_tiny", overrides=("run.compile=true", *overrides), flags={}).config
    ranks = Ranks(torch.device(device), world_size=world_size)
    assert choose_compile_mode(config, ranks=ranks, fixed_shapes=fixed_shapes) == expected


def test_a_diverging_run_stops_with_step_checkpoint_and_hint(tmp_path: Path) -> None:
    wild = ("optim.lr=1e30", "schedule.warmup_epochs=0", "optim.clip_norm=null", "schedule.epochs=1")
    message = r"not finite in update 2: .* there is no checkpoint yet .* Try a lower optim.lr, optim.clip_norm=1"
    with pytest.raises(NonFiniteLoss, match=message):
        run(tmp_path / "stop", *wild, "log.every_steps=4")
    with pytest.raises(NonFiniteLoss, match=r"update 2: .* last good checkpoint is that of update 1 in .*checkpoints"):
        run(tmp_path / "saved", *wild, "checkpoint.every_steps=1")
    assert [p.name for p in sorted((tmp_path / "saved" / "checkpoints").glob("step*"))] == ["step-00000001"]
    outcome = run(tmp_path / "skip", *wild, "run.on_nan=skip")
    assert outcome.summary["bad_steps"] == 4  # all but the first
    assert all(value.isfinite().all() for value in _runs.weights(tmp_path / "skip").values())
    # NaN is no JSON.
    assert "NaN" not in (tmp_path / "skip" / "metrics.jsonl").read_text()


def test_a_run_that_failed_before_it_saved_starts_again(tmp_path: Path) -> None:
    wild = ("optim.lr=1e30", "schedule.warmup_epochs=0", "optim.clip_norm=null", "schedule.epochs=1")
    with pytest.raises(NonFiniteLoss, match=r"run.precision=fp32, then start again"):
        run(tmp_path / "run", *wild)
    outcome = run(tmp_path / "run", "schedule.epochs=1")
    assert outcome.summary["updates"] == 5
    assert len(json.loads((tmp_path / "run" / "environment.json").read_text())) == 2
    assert [record["update"] for record in _runs.metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    # One that has saved something is kept.
    with pytest.raises(NonFiniteLoss, match=r"run.precision=fp32, then --resume"):
        run(tmp_path / "saved", *wild, "checkpoint.every_steps=1")
    with pytest.raises(ValueError, match="already holds a run"):
        run(tmp_path / "saved", "schedule.epochs=1")


class NoGradient(Classification):
    """A finite loss whose gradient is NaN."""

    def losses(self, forward: Any, batch: Any, *, epoch: int, step: int) -> dict[str, torch.Tensor]:
        (loss,) = super().losses(forward, batch, epoch=epoch, step=step).values()
        return {"class": loss + (loss - loss).sqrt()}


def test_an_fp16_run_without_finite_gradients_stops(tmp_path: Path) -> None:
    """The scaler takes them for overflows, and lowers its scale for ever."""
    settings = ("run.precision=fp16", "log.every_steps=100", "log.eval_epochs=100", "schedule.epochs=8")
    with pytest.raises(NonFiniteLoss, match="not finite in update 30:"):
        run(tmp_path, *settings, task=NoGradient)


class KeptData(Classification):
    """Keeps a reference to the data, as an exception or a compiler does that keeps a frame of the run."""

    kept: ClassVar[list[Data]] = []

    def open_data(self, ranks: Ranks) -> Data:
        self.kept.append(super().open_data(ranks))
        return self.kept[-1]


@pytest.mark.parametrize("rate", ["1e-3", "1e30"], ids=["to its end", "failing"])
def test_no_worker_outlives_the_run(tmp_path: Path, rate: str) -> None:
    """Workers block SIGTERM, with which Python ends children at exit: it would wait for them forever."""
    flags = {"data": {"path": _runs.images()}, "device": "cpu"}
    more = ("data.workers=1", "data.in_memory=false", "schedule.epochs=1", f"optim.lr={rate}", "optim.clip_norm=null")
    overrides = (*_runs.TINY, *CALM, *more)
    plan = plan_run("inline_deit_tiny", task=KeptData, overrides=overrides, flags=flags, output=str(tmp_path))
    failure = pytest.raises(NonFiniteLoss) if rate == "1e30" else contextlib.nullcontext()
    with _runs.without_pictures(), failure:
        train(plan)
    assert multiprocessing.active_children() == []


class NoHostReads(TorchFunctionMode):
    """Fails where a tensor's value is read on the host, which on a GPU would wait for it."""

    READS = frozenset(
        getattr(torch.Tensor, name)
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.READS, f"{func.__name__} reads from the device"
        return func(*args, **(kwargs or {}))


def test_an_update_reads_nothing_from_the_device(tmp_path: Path) -> None:
    flags = {"data": {"path": _runs.images()}, "device": "cpu"}
    plan = plan_run("inline_deit_tiny", overrides=_runs.TINY, flags=flags, output=str(tmp_path))
    with Reporter(tmp_path, plan.config, headline=plan.task.headline, active=False) as reporter:
        trainer = Trainer(plan, ranks=Ranks(torch.device("cpu")), reporter=reporter, request=StopRequest())
        batches = iter(_first(trainer.data.train.epoch(0), 2))
        trainer.update(batches)  # creates the optimiser's state
        with NoHostReads():
            trainer.update(batches)
        with pytest.raises(AssertionError, match="tolist reads from the device"), NoHostReads():
            trainer.meter.read()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_an_update_never_waits_for_the_gpu(tmp_path: Path, compiled: str) -> None:
    flags = {"data": {"path": _runs.images()}, "device": "cuda"}
    overrides = (*_runs.TINY, f"run.compile={compiled}")
    plan = plan_run("inline_deit_tiny", overrides=overrides, flags=flags, output=str(tmp_path))
    with Reporter(tmp_path, plan.config, headline=plan.task.headline, active=False) as reporter:
        trainer = Trainer(plan, ranks=Ranks(torch.device("cuda", 0)), reporter=reporter, request=StopRequest())
        batches = iter(_first(trainer.data.train.epoch(0), 5))
        for _ in range(3):  # creates the optimiser's state; compiles, and records CUDA graphs
            trainer.update(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.update(batches)
            trainer.update(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _first(items: Iterator[Any], count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


def test_own_images_and_classes(folder_of_images: Path, tmp_path: Path) -> None:
    small = ("data.batch_size=8", "schedule.epochs=1", "data.in_memory=false")
    outcome = run(tmp_path / "run", *small, data=str(folder_of_images))
    assert outcome.summary["updates"] == 3
    assert _runs.metrics(tmp_path / "run", "eval")[0]["val_images"] == 15
    assert _runs.weights(tmp_path / "run")["head.weight"].shape[0] == 3

    with pytest.raises(ValueError, match="has one class, 'class0': a classifier needs two or more"):
        run(tmp_path / "one", *small, data=str(write_images(tmp_path / "single", classes=1)))
    other = write_images(tmp_path / "two", classes=2)
    with pytest.raises(ValueError, match=r"step-00000003 has 3 classes, the data 2: .*model.reset_head=true"):
        run(tmp_path / "run", *small, data=str(other), resume="auto")
    renamed = tmp_path / "renamed"
    shutil.copytree(folder_of_images, renamed)
    for split in ("train", "val"):
        (renamed / split / "class1").rename(renamed / split / "class1b")
    with pytest.raises(ValueError, match="has other classes than the data: 'class1' instead of 'class1b'"):
        run(tmp_path / "run", *small, data=str(renamed), resume="auto")
    with pytest.raises(ValueError, match="is of inline_deit_tiny, this run trains inline_deit_small"):
        run(tmp_path / "run", *small, "model.name=inline_deit_small", data=str(folder_of_images), resume="auto")
    with pytest.raises(ValueError, match="was trained with depth=3, this run has depth=2"):
        run(tmp_path / "run", *small, "model.kwargs.depth=2", data=str(folder_of_images), resume="auto")
    with pytest.raises(ValueError, match=r"optim.accumulate=4: an epoch has only 3 batches of 8 images"):
        run(tmp_path / "new", *small, "optim.accumulate=4", data=str(folder_of_images))


def test_a_folder_with_fewer_images_than_a_batch(
    folder_of_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the lower batch had been asked for: the same rates, the same weights, and a line that says so."""
    run(tmp_path / "lowered", "data.batch_size=64", data=str(folder_of_images))
    assert "data.batch_size=64 lowered to 24" in capsys.readouterr().out
    run(tmp_path / "asked", "data.batch_size=24", data=str(folder_of_images))
    assert "lowered" not in capsys.readouterr().out
    _runs.assert_same_weights(tmp_path / "lowered", tmp_path / "asked")
    rates = [[record["lr"] for record in _runs.metrics(tmp_path / name)] for name in ("lowered", "asked")]
    assert rates[0] == rates[1]


def test_results_of_training_images_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", "data.val_split=train", "schedule.epochs=1")
    assert "data.train_split and data.val_split are both 'train'" in capsys.readouterr().out


def test_unreadable_images_are_counted_once(folder_of_images: Path, tmp_path: Path) -> None:
    for name in ("train/class0/broken.png", "train/class1/empty.png", "val/class2/broken.png"):
        (folder_of_images / name).write_bytes(b"" if "empty" in name else b"no image")
    settings = ("data.batch_size=8", "schedule.epochs=3", "data.in_memory=false", "data.max_broken=5")
    outcome = run(tmp_path / "run", *settings, data=str(folder_of_images))
    assert outcome.summary["skipped_images"] == 3
    assert _runs.metrics(tmp_path / "run", "eval")[0]["val_images"] == 15
    with pytest.raises(ValueError, match=r"more than the limit of 1.*data.max_broken"):
        run(tmp_path / "strict", *settings, "data.max_broken=1", data=str(folder_of_images))


def test_starting_from_weights(folder_of_images: Path, tmp_path: Path) -> None:
    """A run on ten classes gives its weights to one on three."""
    run(tmp_path / "ten", "schedule.epochs=1", "data.batch_size=64")
    weights = tmp_path / "ten" / "checkpoints" / "last.safetensors"
    still = (
        "data.batch_size=8",
        "schedule.epochs=1",
        "schedule.warmup_epochs=0",
        "optim.lr=1e-12",
        "schedule.min_lr=0",
    )
    run(tmp_path / "three", *still, f"model.weights={weights}", "model.reset_head=true", data=str(folder_of_images))
    before, after = _runs.weights(tmp_path / "ten"), _runs.weights(tmp_path / "three")
    for name, value in before.items():
        assert name.startswith("head") or torch.allclose(after[name], value, atol=1e-6), name
    assert after["head.weight"].shape == (3, 16)
    with pytest.raises(ValueError, match="classes"):
        run(tmp_path / "four", *still, f"model.weights={weights}", data=str(folder_of_images))
    with pytest.raises(ValueError, match="inline_swin_base_384: no weights of that model were published; give a file"):
        run(tmp_path / "four", *still, "model.weights=inline_swin_base_384", data=str(folder_of_images))
    with pytest.raises(OSError, match="nowhere"):
        run(tmp_path / "four", *still, "model.weights=nowhere.safetensors", data=str(folder_of_images))


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    one, three = (("data.batch_size=64", f"schedule.epochs={epochs}") for epochs in (1, 3))
    run(tmp_path / "run", *one)
    with pytest.raises(ValueError, match="run already holds a run: continue it with --resume auto"):
        run(tmp_path / "run", *one)
    # A finished run that is resumed is evaluated again and changes nothing.
    before = _runs.weights(tmp_path / "run")
    outcome = run(tmp_path / "run", *one, resume="auto")
    assert outcome.summary["epochs"] == 1
    assert all(torch.equal(value, before[name]) for name, value in _runs.weights(tmp_path / "run").items())
    # More epochs: it goes on.
    outcome = run(tmp_path / "run", *three, resume="auto")
    assert outcome.summary["epochs"] == 3
    # From an older checkpoint into a folder of its own; and back in time in its own folder.
    older, newer = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    outcome = run(tmp_path / "branch", *three, resume=str(older))
    assert outcome.summary["updates"] == 6
    assert (tmp_path / "branch" / "checkpoints" / "best.safetensors").exists()
    with pytest.raises(ValueError, match=r"has 6 of 6 updates: nothing is left to train in .*; raise schedule.epochs"):
        run(tmp_path / "empty", *three, resume=str(newer))
    assert not (tmp_path / "empty").exists()
    run(tmp_path / "run", *three, resume=str(older))
    assert (tmp_path / "run" / "checkpoints" / f"aside-{newer.name}").exists()
    assert newer.exists()


def test_a_larger_batch_after_a_pause_keeps_what_was_done(tmp_path: Path) -> None:
    """An epoch has 10 updates, then 2. Checkpoints and records are ordered by updates, not by place in the schedule."""
    folder = tmp_path / "run"
    run(folder, "schedule.epochs=2", "data.batch_size=16")
    outcome = run(folder, "schedule.epochs=4", "data.batch_size=64", resume="auto")
    assert (outcome.summary["updates"], outcome.summary["epochs"]) == (24, 4)
    assert [path.name for path in sorted((folder / "checkpoints").glob("step-*"))] == ["step-00000022", "step-00000024"]
    assert [record["update"] for record in _runs.metrics(folder)] == list(range(1, 25))
    assert [record["epoch"] for record in _runs.metrics(folder, "eval")] == [1, 2, 3, 4]
    # Resumed again, it goes on from there.
    outcome = run(folder, "schedule.epochs=5", "data.batch_size=64", resume="auto")
    assert (outcome.summary["updates"], outcome.summary["epochs"]) == (26, 5)


def test_a_run_that_is_shortened_has_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in its second epoch, before any evaluation, then ended there."""
    update = Trainer.update

    def stop_after_six(trainer: Trainer, batches: Any) -> None:
        update(trainer, batches)
        if trainer.progress.updates == 6:
            stop_by_signal(trainer)

    monkeypatch.setattr(Trainer, "update", stop_after_six)
    assert run(tmp_path / "run", "schedule.epochs=8", "log.eval_epochs=4").signal
    summary = run(tmp_path / "run", "schedule.epochs=1", "log.eval_epochs=4", resume="auto").summary
    assert (summary["updates"], summary["best_epoch"], summary["best_top1"]) == (7, 2, summary["val_top1"])
    assert (tmp_path / "run" / "checkpoints" / "best.safetensors").exists()


def test_a_schedule_in_steps_keeps_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 of 12 updates are done; with a smaller batch the other 6 follow, however short that is in epochs."""
    steps = ("schedule.warmup_steps=2", "schedule.cooldown_epochs=1")
    run(tmp_path / "run", *steps, "schedule.steps=6", "schedule.cooldown_epochs=0", "data.batch_size=32")
    outcome = run(tmp_path / "run", *steps, "schedule.steps=12", "data.batch_size=16", resume="auto")
    assert outcome.summary["updates"] == 12 + 10  # and a cool-down of an epoch
    assert [record["update"] for record in _runs.metrics(tmp_path / "run")] == list(range(1, 23))
    assert "\nupdate 22/22 " in capsys.readouterr().out


def test_unfreezing_when_a_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", "schedule.epochs=1", "model.freeze=1", "optim.layer_decay=0.8")
    before = _runs.weights(tmp_path / "run")["patch_embed.proj.weight"]
    run(tmp_path / "run", "schedule.epochs=2", "model.freeze=0", "optim.layer_decay=0.8", resume="auto")
    assert "parameters start without moments: they were frozen before" in capsys.readouterr().out
    assert not torch.equal(_runs.weights(tmp_path / "run")["patch_embed.proj.weight"], before)
    run(tmp_path / "run", "schedule.epochs=3", "model.freeze=2", resume="auto")
    assert "were frozen before" not in capsys.readouterr().out


def test_a_run_that_continues_and_is_stopped_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Job scripts look for summary.json to see whether a run is complete."""
    run(tmp_path / "run", "schedule.epochs=1")
    assert (tmp_path / "run" / "summary.json").exists()
    monkeypatch.setattr(Trainer, "update", lambda trainer, batches: stop_by_signal(trainer))
    outcome = run(tmp_path / "run", "schedule.epochs=2", resume="auto")
    assert outcome.signal == signal.SIGTERM
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_branch_reads_the_other_run_and_changes_nothing_there(tmp_path: Path) -> None:
    run(tmp_path / "run", "schedule.epochs=1")
    saving = tmp_path / "run" / "checkpoints" / ".step-00000007.saving"  # the run goes on elsewhere, and is saving
    saving.mkdir()
    (saving / "model.safetensors").write_bytes(b"half")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    run(tmp_path / "branch", "schedule.epochs=2", resume=str(tmp_path / "run"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize("content", [b"", b"[{", b"{}", b"\xff\xfe", b"[" * 100_000], ids=len)
def test_a_damaged_environment_file_does_not_stop_a_resume(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "environment.json"
    path.write_bytes(content)
    overrides = (*_runs.TINY, "data.path=digits")
    plan = plan_run("inline_deit_tiny", overrides=overrides, output=str(tmp_path), resume="auto")
    with FileLock(tmp_path / ".lock") as lock:
        claim_folder(plan, Ranks(torch.device("cpu")), lock, notify=print)
    assert len(json.loads(path.read_text())) == 1
    assert (tmp_path / "environment.json.damaged").read_bytes() == content
    assert f"{path} is damaged" in capsys.readouterr().out


def test_a_run_of_another_version_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config.yaml may have settings that are gone. Names on the command line are still checked."""
    run(tmp_path / "run", "schedule.epochs=1", "data.batch_size=64")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("data:\n", "data:\n  exif_rotation: false\n") + "colour: blue\n")
    plan = plan_run(output=str(tmp_path / "run"), resume="auto")
    assert plan.changes == ("data.exif_rotation no longer exists", "colour no longer exists")
    assert train(plan).summary["epochs"] == 1
    assert "with other settings than before: data.exif_rotation no longer exists" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"unknown setting data.exif_rotation"):
        plan_run(overrides=["data.exif_rotation=true"], output=str(tmp_path / "run"), resume="auto")


def test_a_damaged_configuration_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"model: {name: \xff\xfe")
    with pytest.raises(ValueError, match=r"config.yaml is not YAML"):
        plan_run(resume=str(tmp_path))


@pytest.mark.parametrize("end", ["complete", "stopped"])
def test_a_run_folder_deleted_meanwhile_is_an_error(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Trainer.update

    def delete_folder(trainer: Trainer, batches: Any) -> None:
        shutil.rmtree(trainer.folder, ignore_errors=True)
        update(trainer, batches)
        if end == "stopped":
            stop_by_signal(trainer)

    monkeypatch.setattr(Trainer, "update", delete_folder)
    message = "the run is over, but its last state could not be saved" if end == "complete" else "stopped by signal 15"
    with pytest.raises(OSError, match=message):
        run(tmp_path / "run", "schedule.epochs=1")
    assert not (tmp_path / "run").exists()


def test_checkpoints_without_a_configuration_are_a_run_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds a run"):
        run(tmp_path / "run", "schedule.epochs=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": "auto"}, "--resume auto continues the run in --output: give --output DIR too"),
        ({"resume": "nowhere"}, "--resume nowhere does not exist: expected auto, a run folder"),
        ({"recipe": "inline_diet"}, "unknown recipe 'inline_diet'"),
    ],
)
def test_plans_that_cannot_work(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_run(**arguments)  # type: ignore[arg-type]


def test_resume_keeps_the_settings_of_the_run(tmp_path: Path) -> None:
    run(tmp_path / "run", "schedule.epochs=1", "data.batch_size=64", "optim.lr=1e-3")
    plan = plan_run(overrides=["optim.clip_norm=2"], output=str(tmp_path / "run"), resume="auto")
    assert plan.config.optim.lr == 1e-3
    assert plan.changes == ("optim.clip_norm=2.0 (was 5.0)",)
    with pytest.raises(ValueError, match="holds a run of recipe inline_deit_tiny, not inline_pvt_tiny"):
        plan_run("inline_pvt_tiny", output=str(tmp_path / "run"), resume="auto")
    damaged = tmp_path / "run" / "checkpoints" / "step-00000002"
    (damaged / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step-00000002 is damaged .ema.safetensors is missing"):
        plan_run(resume=str(damaged))
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact"):
        run(tmp_path / "run", "schedule.epochs=1", "data.batch_size=64", resume="auto")


@pytest.mark.parametrize("name", ["file/run", "run"])
def test_a_run_folder_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run" / ".lock").mkdir(parents=True)  # cannot be opened, even by root
    with pytest.raises(ValueError, match=r"the run folder .*run cannot be written \(.+\); give another --output"):
        run(tmp_path / name)


def test_no_data_no_device_and_no_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data: give --data FOLDER"):
        run(tmp_path / "run", data="")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device cuda is not available here; available: .*cpu"):
            train(plan_run(flags={"device": "cuda"}, output=str(tmp_path / "run")))
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ImportError, match=r"log.wandb=mine needs the package wandb: pip install wandb"):
            run(tmp_path / "run", "log.wandb=mine")
    if importlib.util.find_spec("opt_einsum") is None:
        with pytest.raises(ImportError, match=r"optim.name=kronw needs the package opt_einsum: pip install opt_einsum"):
            run(tmp_path / "run", "optim.name=kronw")
    assert not (tmp_path / "run").exists()
