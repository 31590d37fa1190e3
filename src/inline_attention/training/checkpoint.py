"""Checkpoints that are there whole or not at all.

    checkpoints/
      step-00001200/            one checkpoint; its name appears with the rename that commits it
        model.safetensors       weights
        ema.safetensors         their moving average, where used
        state.pt                position, gradient scaler and optimiser; loads with weights_only=True
        optimizer/              of a sharded run, instead of in state.pt: one file a rank (torch.distributed.checkpoint)
        manifest.json           what the checkpoint is of, and size and SHA-256 of every file above
      last.safetensors          the newest checkpoint's weights (a hard link), ema.safetensors likewise
      best.safetensors          the best weights so far

Files are written into a hidden folder and synced before the rename: a kill at any moment leaves the checkpoint before
it. Random generators are not saved, since nothing random depends on their state (see docs/training.md).
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
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

from inline_attention.training.distributed import Ranks, is_sharded
from inline_attention.training.ema import WeightAverage
from inline_attention.training.optim import Optimizer

WEIGHTS, AVERAGE, STATE, SHARDS, MANIFEST = (
    "model.safetensors",
    "ema.safetensors",
    "state.pt",
    "optimizer",
    "manifest.json",
)


@dataclass
class Progress:
    """Where a run stands; saved with it."""

    epoch: int = 0
    step: int = 0  # updates done in this epoch; steps_per_epoch: the epoch's evaluation is still to come
    steps_per_epoch: int = 0
    images: int = 0
    seconds: float = 0.0  # spent in training steps
    best: float | None = None  # of the figure that the task is judged by, in per cent
    best_epoch: int | None = None
    bad_steps: int = 0  # updates left out for a non-finite gradient

    @property
    def updates(self) -> int:
        return self.epoch * self.steps_per_epoch + self.step


@dataclass
class Checkpoints:
    """The checkpoint folder of a run. Its methods are called on every rank; rank 0 writes.

    `about` goes into every file: what the weights are of (architecture, classes, …), as `models.weights` stores it.
    A folder that cannot be written to (a full disk) is told to `notify` once and does not stop the training.
    """

    folder: Path
    keep: int
    ranks: Ranks
    about: Mapping[str, str]
    notify: Callable[[str], None]
    saved_updates: int | None = None  # of the newest checkpoint
    failing: set[str] = field(default_factory=set)  # what could not be saved last time it was tried

    def save(
        self, progress: Progress, *, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None = None
    ) -> None:
        if progress.updates == self.saved_updates:
            return
        name = f"step-{progress.updates:08d}"
        unfinished = self.folder / f".{name}.saving"
        weights = full_weights(model)
        averaged = None if average is None else {key: _full(value) for key, value in average.average.items()}
        state: dict[str, Any] = {
            "progress": dataclasses.asdict(progress),
            "scaler": None if optimizer.scaler is None else optimizer.scaler.state_dict(),
        }
        sharded = is_sharded(model)
        if not sharded:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer.adamw, options=_WHOLE)

        def write() -> None:
            if self.ranks.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
            if sharded:
                self.ranks.barrier()
                dcp.save(get_optimizer_state_dict(model, optimizer.adamw), checkpoint_id=unfinished / SHARDS)
            if self.ranks.is_first:
                write_synced(unfinished / WEIGHTS, self._weights_file(weights))
                if averaged is not None:
                    write_synced(unfinished / AVERAGE, self._weights_file(averaged))
                write_synced(unfinished / STATE, _pickled(state))
                write_synced(unfinished / MANIFEST, self._manifest(unfinished, state["progress"]))
                self._commit(unfinished, self.folder / name)

        if self._try("checkpoint", write, unfinished):
            self.saved_updates = progress.updates

    def save_best(self, model: nn.Module, *, about: Mapping[str, str]) -> None:
        """The weights that the model holds now, as best.safetensors; `about` goes into the file too."""
        weights = full_weights(model)
        unfinished = self.folder / ".best.saving"

        def write() -> None:
            if self.ranks.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_synced(unfinished, safetensors.torch.save(weights, metadata={**self.about, **about}))
                unfinished.replace(self.folder / "best.safetensors")
                _sync_folder(self.folder)

        self._try("best weights", write, unfinished)

    def newest(self) -> Path | None:
        """The newest checkpoint that is intact; one that is not is named, and the one before it is used.

        None: there is none at all. All damaged: ValueError. On rank 0 alone.
        """
        for left_over in (*self.folder.glob(".*.saving"), *self.folder.glob(".*.removing")):
            _remove(left_over)
        candidates = sorted(self.folder.glob("step-*"), reverse=True)
        for candidate in candidates:
            damage = find_damage(candidate)
            if damage is None:
                return candidate
            self.notify(f"checkpoint {candidate.name} is damaged ({damage}): trying the one before it")
        if candidates:
            raise ValueError(
                f"no checkpoint in {self.folder} is intact; remove that folder to start the run from the beginning"
            )
        return None

    def set_aside_after(self, checkpoint: Path) -> None:
        """A run that goes back to an older checkpoint leaves the newer ones under names that are not resumed from."""
        for newer in self.folder.glob("step-*"):
            if newer.name > checkpoint.name:
                _remove(newer.with_name(f"aside-{newer.name}"))
                newer.rename(newer.with_name(f"aside-{newer.name}"))

    def _weights_file(self, weights: dict[str, Tensor]) -> bytes:
        return safetensors.torch.save(weights, metadata=dict(self.about))

    def _manifest(self, folder: Path, progress: Mapping[str, Any]) -> bytes:
        files = {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _digest(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        return json.dumps({"about": dict(self.about), "progress": progress, "files": files}, indent=1).encode()

    def _commit(self, unfinished: Path, final: Path) -> None:
        _sync_folder(unfinished)
        _remove(final)  # a damaged one, passed over when the run resumed
        unfinished.rename(final)
        _sync_folder(self.folder)
        _link(final / WEIGHTS, self.folder / "last.safetensors")
        if (final / AVERAGE).exists():
            _link(final / AVERAGE, self.folder / "ema.safetensors")
        _sync_folder(self.folder)
        for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
            with contextlib.suppress(OSError):
                # Under another name first: a kill amid the files would leave a checkpoint that lacks some.
                _remove(old.rename(old.with_name(f".{old.name}.removing")))

    def _try(self, what: str, write: Callable[[], None], unfinished: Path) -> bool:
        """Whether `write` went well, on every rank the same; a failure is told once, and so is its end."""
        failure = ""
        try:
            write()
        except (OSError, CheckpointException) as error:
            failure = str(error)
            _remove(unfinished)
        failure = self.ranks.broadcast(failure)
        if failure and what not in self.failing:
            self.notify(
                f"could not save the {what} in {self.folder} ({failure}). Training goes on, what was saved before "
                "stays, and saving is tried again; free some space"
            )
            self.failing.add(what)
        elif not failure and what in self.failing:
            self.notify(f"saving works again: the {what} is in {self.folder}")
            self.failing.remove(what)
        return not failure


def restore(
    checkpoint: Path, *, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None = None
) -> Progress:
    """Load an intact checkpoint into what was built like the run that saved it, on any number of ranks."""
    weights: dict[str, Any] = safetensors.torch.load_file(checkpoint / WEIGHTS)
    set_model_state_dict(model, weights, options=_WHOLE_ON_EACH_RANK)
    if average is not None:
        source = checkpoint / AVERAGE
        # A run that turns averaging on when it resumes starts the average from the weights.
        values = safetensors.torch.load_file(source if source.exists() else checkpoint / WEIGHTS)
        with torch.no_grad():
            for name, target in average.average.items():
                target.copy_(_sharded_like(values[name], target))
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    # The configuration, not the checkpoint, says what the groups' settings are.
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.adamw.param_groups]
    if (checkpoint / SHARDS).exists():
        shards = get_optimizer_state_dict(model, optimizer.adamw)
        dcp.load(shards, checkpoint_id=checkpoint / SHARDS)
        set_optimizer_state_dict(model, optimizer.adamw, shards)
    else:
        set_optimizer_state_dict(model, optimizer.adamw, state["optimizer"], options=_WHOLE_ON_EACH_RANK)
    for group, values in zip(optimizer.adamw.param_groups, settings, strict=True):
        group.update(values)
    if optimizer.scaler is not None and state["scaler"] is not None:
        optimizer.scaler.load_state_dict(state["scaler"])
    return Progress(**state["progress"])


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / MANIFEST).read_text())


def find_damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used; None: every file is there and has its checksum."""
    try:
        listed = read_manifest(checkpoint)["files"].items()
        files = {name: {key: entry[key] for key in ("bytes", "sha256")} for name, entry in listed}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not JSON, or JSON of another shape
        return f"{MANIFEST} is missing or unreadable"
    for name, expected in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if _digest(file) != expected["sha256"]:
            return f"{name}: checksum differs"
    return None


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dictionary in CPU memory (of a sharded model on rank 0 alone; called on every rank)."""
    weights: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
    return {name: value.contiguous() for name, value in weights.items()}


# With more than one rank, "whole, on the CPU" is gathered on rank 0 alone.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WHOLE_ON_EACH_RANK = StateDictOptions(full_state_dict=True)


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _sharded_like(value: Tensor, target: Tensor) -> Tensor:
    if isinstance(target, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return value


def _pickled(state: Mapping[str, Any]) -> bytes:
    # In memory first: torch's own file writer reports a full disk as a RuntimeError.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def write_synced(path: Path, data: bytes) -> None:
    """On the disk when this returns, not only on its way there."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """As far as it can be removed: what is in the way later is an error there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(source: Path, target: Path) -> None:
    """Let `target` name the same file as `source`, atomically; a copy where the file system has no hard links."""
    unfinished = target.with_name(f".{target.name}.saving")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)
    except OSError:
        shutil.copyfile(source, unfinished)
    unfinished.replace(target)
