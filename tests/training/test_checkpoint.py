"""Checkpoints on disk: complete or absent, verified, and a failure to write one does not end a run."""

import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import training_runs as _runs

from inline_attention.training.checkpoint import Checkpoints, Progress, find_damage, newest_checkpoint, restore
from inline_attention.training.config import OptimConfig
from inline_attention.training.distributed import Ranks
from inline_attention.training.ema import WeightAverage
from inline_attention.training.optim import Optimizer


class Subject:
    """A model that has been trained for a few steps, with all that is saved of it."""

    def __init__(self, *, steps: int = 3, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4))
        self.optimizer = Optimizer(self.model, OptimConfig(), scaler=torch.amp.GradScaler("cpu"))
        self.average = WeightAverage(self.model, decay=0.9)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.backward(self.model(torch.ones(2, 6)).square().sum())
        self.optimizer.step(rate=1e-2)
        self.average.update(0)

    def saved(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.inner.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *self.average.average.values(), *moments]


def checkpoints(folder: Path, *, keep: int = 2) -> tuple[Checkpoints, list[str]]:
    notes: list[str] = []
    about = {"architecture": "linear", "class_names": "[]", "config": "{}"}
    return Checkpoints(folder, keep=keep, ranks=Ranks(torch.device("cpu")), about=about, notify=notes.append), notes


def progress(step: int) -> Progress:
    return Progress(
        updates=200 + step,
        epoch=2,
        step=step,
        steps_per_epoch=100,
        images=64 * step,
        seconds=1.5,
        best=12.5,
        best_epoch=1,
    )


def test_everything_is_restored(tmp_path: Path) -> None:
    subject, other = Subject(), Subject(steps=1, seed=1)
    store, _ = checkpoints(tmp_path)
    store.save(progress(7), **subject.saved())
    assert restore(tmp_path / "step-00000207", **other.saved()) == (progress(7), [])
    assert other.optimizer.scaler.state_dict() == subject.optimizer.scaler.state_dict()
    for _ in range(2):  # and goes on alike
        assert all(torch.equal(a, b) for a, b in zip(subject.tensors(), other.tensors(), strict=True))
        subject.step()
        other.step()


def test_a_checkpoint_of_version_0_1_is_understood(tmp_path: Path) -> None:
    """It has no count of updates: the position in the schedule was the count."""
    subject, other = Subject(), Subject(steps=1, seed=1)
    store, _ = checkpoints(tmp_path)
    store.save(progress(7), **subject.saved())
    path = tmp_path / "step-00000207" / "state.pt"
    state = torch.load(path, weights_only=True)
    del state["progress"]["updates"]
    torch.save(state, path)
    assert restore(tmp_path / "step-00000207", **other.saved()) == (progress(7), [])


@pytest.mark.parametrize("in_steps", [False, True])
def test_progress_with_other_epochs(in_steps: bool) -> None:
    """The count of updates stays; a schedule in epochs keeps its epoch, one in steps its step."""
    moved = progress(50).with_epochs_of(40, length_in_steps=in_steps)
    assert (moved.updates, moved.steps_per_epoch) == (250, 40)
    assert (moved.epoch, moved.step) == ((6, 10) if in_steps else (2, 20))
    done = progress(100).with_epochs_of(40, length_in_steps=in_steps)  # at the end of epoch 2, before its evaluation
    assert done.position == (300 if in_steps else 120)


def test_unfrozen_parameters_start_fresh(tmp_path: Path) -> None:
    """What was trained before keeps its moments; what is frozen now loses them."""
    subject = Subject()
    subject.model[0].requires_grad_(False)
    subject.optimizer = Optimizer(subject.model, OptimConfig())
    subject.step()
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), **subject.saved())
    other = Subject(steps=0, seed=1)
    other.optimizer = Optimizer(other.model, OptimConfig())
    _, fresh = restore(tmp_path / "step-00000201", **other.saved())
    assert sorted(fresh) == ["0.bias", "0.weight"]
    state = other.optimizer.inner.state
    assert other.model[0].weight not in state
    assert state[other.model[2].weight]["step"] == 1
    moments = subject.optimizer.inner.state[subject.model[2].weight]["exp_avg"]
    assert torch.equal(state[other.model[2].weight]["exp_avg"], moments)
    other.step()
    store.save(progress(2), **other.saved())
    again = Subject(steps=0)
    again.model[0].requires_grad_(False)
    again.optimizer = Optimizer(again.model, OptimConfig(layer_decay=None))
    assert restore(tmp_path / "step-00000202", **again.saved())[1] == []
    assert again.optimizer.inner.state[again.model[2].weight]["step"] == 2


# lamb counts the updates of a group, adan too; adafactor keeps numbers that are no tensors, and adafactorbv a dtype;
# madgrad keeps the first weights.
@pytest.mark.parametrize(
    "name", ["sgd", "lamb", "lion", "muon", "adan", "adafactor", "adafactorbv", "madgrad", "nadamw"]
)
def test_every_optimizer_continues_where_it_was(name: str, tmp_path: Path) -> None:
    subject = Subject(steps=0)
    subject.optimizer = Optimizer(subject.model, OptimConfig(name=name))
    for _ in range(2):
        subject.step()
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), **subject.saved())
    other = Subject(steps=0, seed=1)
    other.optimizer = Optimizer(other.model, OptimConfig(name=name))
    assert restore(tmp_path / "step-00000201", **other.saved())[1] == []
    for _ in range(2):
        subject.step()
        other.step()
    for a, b in zip(subject.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["rmsprop", "madgrad"])
def test_another_optimizer_starts_as_in_a_new_run(name: str, tmp_path: Path) -> None:
    subject, other = Subject(), Subject(steps=0, seed=1)
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), **subject.saved())
    other.optimizer = Optimizer(other.model, OptimConfig(name=name))
    assert len(restore(tmp_path / "step-00000201", **other.saved())[1]) == 6
    subject.optimizer = Optimizer(subject.model, OptimConfig(name=name))
    for _ in range(2):
        subject.step()
        other.step()
    for a, b in zip(subject.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_average_has_every_tensor_of_the_model(tmp_path: Path) -> None:
    """Batch norm counts its batches in an integer, which is not averaged."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    optimizer, average = Optimizer(model, OptimConfig()), WeightAverage(model, decay=0.9)
    optimizer.backward(model(torch.randn(4, 6)).square().sum())
    optimizer.step(rate=1e-2)
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), model=model, optimizer=optimizer, average=average)
    saved = safetensors.torch.load_file(tmp_path / "ema.safetensors")
    torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).load_state_dict(saved)
    assert saved["1.num_batches_tracked"] == 1
    assert torch.equal(saved["0.weight"], average.average["0.weight"])


def test_only_older_checkpoints_are_removed(tmp_path: Path) -> None:
    """A checkpoint of a later update than the one just saved stays."""
    subject = Subject()
    store, _ = checkpoints(tmp_path, keep=1)
    store.save(progress(50), **subject.saved())
    store.save(progress(5), **subject.saved())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000205", "step-00000250"]


def test_going_back_twice_loses_nothing(tmp_path: Path) -> None:
    subject = Subject()
    store, _ = checkpoints(tmp_path, keep=5)
    for _ in range(2):
        store.saved_updates = None
        for step in (1, 2):
            if not (tmp_path / f"step-{200 + step:08d}").exists():
                store.save(progress(step), **subject.saved())
        store.set_aside_after(tmp_path / "step-00000201", updates=201)
    assert sorted(path.name for path in tmp_path.glob("aside-*")) == ["aside-step-00000202", "aside-step-00000202.2"]
    # From one that was set aside: the one of the same update belongs to another branch.
    store.saved_updates = None
    store.save(progress(2), **subject.saved())
    store.set_aside_after(tmp_path / "aside-step-00000202", updates=202)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000201"]
    assert len(list(tmp_path.glob("aside-*"))) == 3


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"files": [], "about": {}}', '{"files": {"state.pt": 3}, "about": {}}', "[" * 100_000, "null"],
)
def test_a_manifest_of_another_shape_is_damage(content: str, tmp_path: Path) -> None:
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), **Subject().saved())
    (tmp_path / "step-00000201" / "manifest.json").write_text(content)
    assert find_damage(tmp_path / "step-00000201") is not None


def test_settings_come_from_the_configuration_and_state_from_the_checkpoint(tmp_path: Path) -> None:
    subject = Subject()
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), **subject.saved())
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4))
    optimizer = Optimizer(model, OptimConfig(weight_decay=0.3, betas=(0.8, 0.95)))
    restore(tmp_path / "step-00000201", model=model, optimizer=optimizer)
    assert [group["weight_decay"] for group in optimizer.inner.param_groups] == [0.0, 0.3]
    assert optimizer.inner.param_groups[0]["betas"] == (0.8, 0.95)
    assert optimizer.inner.state[model[0].weight]["step"] == 3


def test_the_last_checkpoints_are_kept_and_last_points_to_the_newest(tmp_path: Path) -> None:
    subject = Subject()
    store, _ = checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        subject.step()
        store.save(progress(step), **subject.saved())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ema.safetensors", "last.safetensors", "step-00000202", "step-00000203",
    ]  # fmt: skip
    assert os.path.samefile(tmp_path / "last.safetensors", tmp_path / "step-00000203" / "model.safetensors")
    store.save_best(subject.model, about={"epoch": "3"})
    shutil.rmtree(tmp_path / "step-00000203")
    weights = safetensors.torch.load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in subject.model.state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flipped", "gone", "emptied"])
def test_damage_to_any_file_is_found(name: str, harm: str, tmp_path: Path) -> None:
    subject = Subject()
    store, notes = checkpoints(tmp_path)
    for step in (1, 2):
        store.save(progress(step), **subject.saved())
    file = tmp_path / "step-00000202" / name
    content = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    elif harm == "flipped":
        # Only the manifest's entries about files count.
        place = content.index(b'"sha256": "') + 20 if name == "manifest.json" else len(content) // 2
        content[place] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2 if harm == "cut" else 0])
    assert find_damage(file.parent) is not None
    assert newest_checkpoint(tmp_path, notify=notes.append) == tmp_path / "step-00000201"
    assert len(notes) == 1
    assert "step-00000202 is damaged" in notes[0]


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    store, notes = checkpoints(tmp_path)
    assert newest_checkpoint(tmp_path, notify=notes.append) is None
    half = tmp_path / ".step-00000201.saving"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".best.saving").write_bytes(b"half")
    assert newest_checkpoint(tmp_path, notify=notes.append) is None
    assert (
        len(list(tmp_path.iterdir())) == 2
    )  # looking for a checkpoint changes nothing: the folder may be another run's
    store.clear_unfinished()
    assert list(tmp_path.iterdir()) == []
    assert notes == []


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def remove_half(folder: Path, **_: object) -> None:
        if (folder / "manifest.json").exists():
            (folder / "manifest.json").unlink()
            raise Killed

    subject = Subject()
    store, _ = checkpoints(tmp_path, keep=1)
    store.save(progress(1), **subject.saved())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_half)
        with pytest.raises(Killed):
            store.save(progress(2), **subject.saved())
    assert [find_damage(path) for path in tmp_path.glob("step-*")] == [None]
    store, notes = checkpoints(tmp_path, keep=1)
    assert newest_checkpoint(tmp_path, notify=notes.append) == tmp_path / "step-00000202"
    assert notes == []
    store.clear_unfinished()
    assert not list(tmp_path.glob(".*"))


def test_the_same_step_is_not_written_twice(tmp_path: Path) -> None:
    subject = Subject()
    store, _ = checkpoints(tmp_path)
    store.save(progress(1), **subject.saved())
    before = (tmp_path / "step-00000201" / "state.pt").stat().st_ino
    store.save(progress(1), **subject.saved())
    assert (tmp_path / "step-00000201" / "state.pt").stat().st_ino == before


def test_a_deleted_run_folder_does_not_come_back(tmp_path: Path) -> None:
    subject = Subject()
    store, notes = checkpoints(tmp_path / "run" / "checkpoints")
    store.save(progress(1), **subject.saved())
    store.save_best(subject.model, about={})
    assert not (tmp_path / "run").exists()
    assert store.failing == {"checkpoint", "best weights"}
    assert len(notes) == 2


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where a folder should be")
    subject = Subject()
    store, notes = checkpoints(blocked)
    store.save(progress(1), **subject.saved())
    store.save(progress(2), **subject.saved())
    assert len(notes) == 1
    assert "could not save the checkpoint" in notes[0]
    assert "Training continues" in notes[0]
    blocked.unlink()
    store.save(progress(3), **subject.saved())
    assert notes[1:] == [f"saving works again: the checkpoint is in {blocked}"]
    assert find_damage(blocked / "step-00000203") is None


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's files")
def test_a_full_disk_does_not_stop_the_run(tmp_path: Path) -> None:
    """From the first checkpoint on large files cannot be written: the run completes, then reports the error."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    settings = ("checkpoint.every_steps=2", "checkpoint.keep=1", "log.every_steps=1", "schedule.epochs=3")
    process = _runs.start(_runs.arguments(output, *settings), log=log)
    while process.is_alive() and not list((output / "checkpoints").glob("step-*")):
        time.sleep(0.0005)
    # Python ignores SIGXFSZ, so that writing past the limit is an OSError like that of a full disk.
    resource.prlimit(process.pid or 0, resource.RLIMIT_FSIZE, (15_000, 15_000))
    process.join()
    text = log.read_text()
    assert process.exitcode == 2, text
    assert text.count("could not save the checkpoint") == 1
    assert "the run is over, but its last state could not be saved" in text
    kept = list((output / "checkpoints").glob("step-*"))
    assert len(kept) == 1
    assert find_damage(kept[0]) is None
    assert not (output / "summary.json").exists()  # the run is not complete without its weights
    assert not list((output / "checkpoints").glob(".*"))
    # With free space, the run continues from its last checkpoint.
    assert _runs.run(["train", f"--resume={output}"], log=log) == 0, log.read_text()
    assert json.loads((output / "summary.json").read_text())["epochs"] == 3
