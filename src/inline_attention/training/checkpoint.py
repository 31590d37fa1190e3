"""Checkpoints: written as a whole or not at all, and verified before they are used.

    checkpoints/
      step-00001200/            the checkpoint after update 1200
        model.safetensors       weights
        ema.safetensors         their moving average, if there is one
        state.pt                progress, gradient scaler and optimizer; loads with weights_only=True
        optimizer/              optimizer of a sharded run, one file per rank (torch.distributed.checkpoint)
        manifest.json           model and classes, and the size and SHA-256 of every file above
      last.safetensors          weights of the newest checkpoint (a hard link); ema.safetensors likewise
      best.safetensors          the best weights so far

Files are written to a hidden folder and synced, then the folder is renamed: a kill at any moment leaves the previous
checkpoint. Random generators are not saved because nothing depends on their state (see docs/training.md).
"""

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from inline_attention.training.distributed import Ranks, is_sharded
from inline_attention.training.ema import WeightAverage
from inline_attention.training.files import link, remove, sha256, sync_folder, unused, write_atomically, write_synced
from inline_attention.training.optim import Optimizer

WEIGHTS, AVERAGE, STATE = "model.safetensors", "ema.safetensors", "state.pt"
SHARDS, MANIFEST = "optimizer", "manifest.json"


@dataclass
class Progress:
    """How far a run has come. Every checkpoint contains it.

    `updates` counts every optimizer update since the run began. It only grows, and it names and orders checkpoints and
    metrics. The position in the schedule is separate: an epoch has fewer updates with a larger batch or more ranks.
    """

    updates: int = 0
    epoch: int = 0
    step: int = 0  # updates done in this epoch; steps_per_epoch: the epoch's evaluation is still to come
    steps_per_epoch: int = 0
    images: int = 0
    seconds: float = 0.0  # spent in training steps
    best: float | None = None  # highest value of the task's headline figure, in per cent
    best_epoch: int | None = None
    bad_steps: int = 0  # updates skipped for a non-finite gradient
    stale: int = 0  # evaluations since the best one
    plateaus: int = 0  # how often `schedule.patience` evaluations were stale; the plateau schedule drops at each

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> "Progress":
        """Version 0.1 saved no `updates`: its count was the position in the schedule."""
        progress = cls(**values)
        return progress if "updates" in values else dataclasses.replace(progress, updates=progress.position)

    @property
    def position(self) -> int:
        """Updates of the schedule that are done."""
        return self.epoch * self.steps_per_epoch + self.step

    def with_epochs_of(self, steps_per_epoch: int, *, length_in_steps: bool) -> "Progress":
        """The same progress, for epochs with another number of updates.

        A schedule in steps keeps its step. A schedule in epochs keeps its epoch and the finished fraction of it.
        """
        if length_in_steps:
            epoch, step = divmod(self.position, steps_per_epoch)
        else:
            epoch, step = self.epoch, self.step * steps_per_epoch // self.steps_per_epoch
        return dataclasses.replace(self, epoch=epoch, step=step, steps_per_epoch=steps_per_epoch)


@dataclass
class Checkpoints:
    """The checkpoint folder of a run. Its methods are called on every rank; rank 0 writes.

    `about` is the metadata of every file (architecture, classes, …), as `models.weights` stores it.
    A folder that cannot be written to (a full disk) does not stop the training. `notify` gets a line when saving begins
    to fail, and another when it works again.
    """

    folder: Path
    keep: int
    ranks: Ranks
    about: Mapping[str, str]
    notify: Callable[[str], None]
    saved_updates: int | None = None  # updates of the newest checkpoint
    failing: set[str] = field(default_factory=set)  # parts that could not be saved the last time

    def save(
        self, progress: Progress, *, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None = None
    ) -> None:
        if progress.updates == self.saved_updates:
            return
        name = f"step-{progress.updates:08d}"
        unfinished = self.folder / f".{name}.saving"
        weights = full_weights(model)
        # Integer buffers (the batch counter of batch norm) are not averaged: they come from the weights.
        averaged = None if average is None else weights | {key: _full(value) for key, value in average.average.items()}
        state: dict[str, Any] = {
            "progress": dataclasses.asdict(progress),
            "scaler": None if optimizer.scaler is None else optimizer.scaler.state_dict(),
        }
        sharded = is_sharded(model)

        def prepare() -> None:
            self._make_folder()
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()

        def write_shards() -> None:
            dcp.save(get_optimizer_state_dict(model, optimizer.inner), checkpoint_id=unfinished / SHARDS)

        def write_rest() -> None:
            write_synced(unfinished / WEIGHTS, self._weights_file(weights))
            if averaged is not None:
                write_synced(unfinished / AVERAGE, self._weights_file(averaged))
            if not sharded:
                # Not `cpu_offload`, which refuses a dtype among the settings of a parameter group (timm's adafactorbv).
                whole = get_optimizer_state_dict(model, optimizer.inner)
                state["optimizer"] = tree_map_only(Tensor, Tensor.cpu, whole)
            write_synced(unfinished / STATE, _pickled(state))
            write_synced(unfinished / MANIFEST, self._manifest(unfinished, state["progress"]))
            self._commit(unfinished, self.folder / name)

        # Ranks agree after each part: none may enter the collectives of the next one alone.
        failure = self._try(prepare, first_rank_only=True)
        if not failure and sharded:
            failure = self._try(write_shards)
        if not failure:
            failure = self._try(write_rest, first_rank_only=True)
        self._report("checkpoint", failure)
        if not failure:
            self.saved_updates = progress.updates
        elif self.ranks.is_first:
            remove(unfinished)

    def save_best(self, model: nn.Module, *, about: Mapping[str, str]) -> bool:
        """Write the model's current weights to best.safetensors, with `about` as further metadata. False: it failed."""
        weights = full_weights(model)

        def write() -> None:
            self._make_folder()
            content = safetensors.torch.save(weights, metadata={**self.about, **about})
            write_atomically(self.folder / "best.safetensors", content)
            sync_folder(self.folder)

        failure = self._try(write, first_rank_only=True)
        self._report("best weights", failure)
        return not failure

    def clear_unfinished(self) -> None:
        """Remove the unfinished files of a killed process. Only rank 0 calls this, with the run folder locked."""
        for left_over in (*self.folder.glob(".*.saving"), *self.folder.glob(".*.removing")):
            remove(left_over)

    def set_aside_after(self, checkpoint: Path, *, updates: int) -> None:
        """Rename the checkpoints that are newer than `checkpoint`, from which the run continues.

        updates: the update count of `checkpoint`, which may have been set aside itself. Only rank 0 calls this.
        """
        for other in list_checkpoints(self.folder):
            if _number(other) >= updates and other.name != checkpoint.name:
                other.rename(unused(other.with_name(f"aside-{other.name}")))

    def _make_folder(self) -> None:
        # No `parents=True`: a run folder that was deleted during the run must stay deleted.
        self.folder.mkdir(exist_ok=True)

    def _weights_file(self, weights: dict[str, Tensor]) -> bytes:
        return safetensors.torch.save(weights, metadata=dict(self.about))

    def _manifest(self, folder: Path, progress: Mapping[str, Any]) -> bytes:
        files = {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        return json.dumps({"about": dict(self.about), "progress": progress, "files": files}, indent=1).encode()

    def _commit(self, unfinished: Path, final: Path) -> None:
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(self.folder)
        link(final / WEIGHTS, self.folder / "last.safetensors")
        if (final / AVERAGE).exists():
            link(final / AVERAGE, self.folder / "ema.safetensors")
        sync_folder(self.folder)
        older = [other for other in list_checkpoints(self.folder) if _number(other) <= _number(final)]
        for old in older[: -self.keep]:
            with contextlib.suppress(OSError):
                # Renamed first: a kill in the middle of the removal would leave a checkpoint that lacks files.
                remove(old.rename(old.with_name(f".{old.name}.removing")))

    def _try(self, write: Callable[[], None], *, first_rank_only: bool = False) -> str:
        """Call `write`. Returns the first error message of any rank, or "", the same on every rank."""
        failure = ""
        if self.ranks.is_first or not first_rank_only:
            try:
                write()
            except (OSError, CheckpointException) as error:
                failure = str(error) or type(error).__name__
        return next(filter(None, self.ranks.gather(failure)), "")

    def _report(self, what: str, failure: str) -> None:
        if failure and what not in self.failing:
            self.notify(
                f"could not save the {what} in {self.folder} ({failure}). Training continues, earlier checkpoints "
                "stay, and saving is retried later; free some disk space"
            )
            self.failing.add(what)
        elif not failure and what in self.failing:
            self.notify(f"saving works again: the {what} is in {self.folder}")
            self.failing.remove(what)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdecimal()), key=_number)


def newest_checkpoint(folder: Path, *, notify: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint. `notify` gets a line about each damaged one that is skipped.

    None: the folder has no checkpoints. ValueError: all are damaged. Changes nothing in the folder.
    """
    candidates = list_checkpoints(folder)
    for candidate in reversed(candidates):
        damage = find_damage(candidate)
        if damage is None:
            return candidate
        notify(f"checkpoint {candidate.name} is damaged ({damage}): trying the one before it")
    if candidates:
        raise ValueError(f"no checkpoint in {folder} is intact; remove that folder to start the run from the beginning")
    return None


def restore(
    checkpoint: Path, *, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None = None
) -> tuple[Progress, list[str]]:
    """Load an intact checkpoint, which may have been saved with another strategy or number of ranks.

    Returns the progress, and the names of parameters without saved moments: they were frozen before, or had another
    optimizer.
    """
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    shards = checkpoint / SHARDS if (checkpoint / SHARDS).exists() else None
    fresh = _restore_optimizer(model, optimizer.inner, whole=state.get("optimizer"), shards=shards)
    if optimizer.scaler is not None and state["scaler"] is not None:
        optimizer.scaler.load_state_dict(state["scaler"])
    # After the optimizer: to create its state, torch makes a step of rate 0, which rounds weights in madgrad.
    weights: dict[str, Any] = safetensors.torch.load_file(checkpoint / WEIGHTS)
    set_model_state_dict(model, weights, options=_WHOLE_ON_EACH_RANK)
    if average is not None:
        source = checkpoint / AVERAGE
        # If averaging begins with this resume, the average starts from the weights.
        values = safetensors.torch.load_file(source if source.exists() else checkpoint / WEIGHTS)
        with torch.no_grad():
            for name, target in average.average.items():
                target.copy_(_sharded_like(values[name], target))
    return Progress.from_saved(state["progress"]), fresh


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: Mapping[str, Any] | None, shards: Path | None
) -> list[str]:
    """Load the moments of the parameters that are trained now. Returns the names of those without saved moments.

    The settings of the parameter groups come from the configuration, not from the checkpoint.
    """
    current: dict[str, Any] = get_optimizer_state_dict(model, optimizer)  # this rank's part
    states: dict[str, dict[str, Any]] = current["state"]
    if shards is not None:
        stored = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
        fresh = [name for name in states if f"state.{name}.step" not in stored]
        dcp.load({"state": {name: state for name, state in states.items() if name not in fresh}}, checkpoint_id=shards)
    else:
        assert whole is not None
        before: dict[str, dict[str, Any]] = whole["state"]
        fresh = [name for name in states if states[name].keys() != before.get(name, {}).keys()]
        for name in states.keys() - set(fresh):  # a parameter that is frozen now has no state
            states[name] = {key: _like(before[name][key], target) for key, target in states[name].items()}
        # Some optimizers count the updates of a group, not of each parameter.
        counts = {name: group["step"] for group in whole["param_groups"] if "step" in group for name in group["params"]}
        for group in current["param_groups"]:
            if "step" in group:
                group["step"] = counts.get(group["params"][0], 0)
    set_optimizer_state_dict(model, optimizer, current)
    for name in fresh:  # the next step creates their state, as in a new run: some optimizers do not start at zero
        del optimizer.state[model.get_parameter(name)]
    return fresh


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / MANIFEST).read_text())


def find_damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used; None: every file exists and has its checksum."""
    try:
        manifest = read_manifest(checkpoint)
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        about = manifest["about"]
        class_names, arguments = json.loads(about["class_names"]), json.loads(about["config"])
        is_complete = {WEIGHTS, STATE} <= files.keys() and isinstance(about["architecture"], str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is missing or unreadable"
    if not is_complete or not isinstance(class_names, list) or not isinstance(arguments, dict):
        return f"{MANIFEST} is incomplete"
    for name, (size, digest) in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if sha256(file) != digest:
            return f"{name}: checksum differs"
    return None


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The full state dictionary in CPU memory. Every rank calls this; with several ranks only rank 0 gets it."""
    weights: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
    return {name: value.contiguous() for name, value in weights.items()}


# With several ranks, full state on the CPU is gathered on rank 0 only.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WHOLE_ON_EACH_RANK = StateDictOptions(full_state_dict=True)


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()


def _sharded_like(value: Tensor, target: Tensor) -> Tensor:
    if isinstance(target, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return value


def _like(value: Any, target: Any) -> Any:
    """A saved optimizer value in place of `target`: tensors are copied into it, other values replace it."""
    return target.copy_(_sharded_like(value, target)) if isinstance(target, Tensor) else value


def _pickled(state: Mapping[str, Any]) -> bytes:
    # In memory first: torch.save to a file reports a full disk as a RuntimeError.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _number(checkpoint: Path) -> int:
    """The update that a checkpoint was saved after, from its name."""
    return int(checkpoint.name.removeprefix("step-"))
