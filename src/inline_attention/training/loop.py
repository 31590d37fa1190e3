"""The training loop: one process or many, CPU or GPU, from the first update or from a checkpoint.

The task provides data, model, losses and evaluation (`training.task`). Inside an epoch the host waits for the device
only to log and to save. Randomness never depends on the state of a generator: data order, augmentation, mixup and
stochastic depth are functions of (seed, epoch, step, sample). A resumed run therefore repeats what the interrupted run
would have done, with any number of workers and ranks.
"""

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from inline_attention.data.seeding import derive_seed
from inline_attention.layers.drop import SampledDepth
from inline_attention.printing import counted
from inline_attention.training import settings
from inline_attention.training.checkpoint import Checkpoints, Progress, newest_checkpoint, read_manifest, restore
from inline_attention.training.config import LoopConfig
from inline_attention.training.distributed import (
    Ranks,
    StopAgreement,
    gradient_sync,
    join_ranks,
    parallelize,
    share_statistics,
)
from inline_attention.training.ema import WeightAverage
from inline_attention.training.lock import FileLock
from inline_attention.training.meters import DeviceMeter
from inline_attention.training.optim import Optimizer
from inline_attention.training.report import SUMMARY, Reporter, memory_bytes
from inline_attention.training.run_folder import CHECKPOINTS, LOCK, Plan, check_plan, claim_folder, give_back
from inline_attention.training.schedule import Schedule
from inline_attention.training.signals import StopRequest, stop_on_signals
from inline_attention.training.task import Evaluation, TrainingBatch, check_same_task

MIN_SCALE = 1e-4  # of the fp16 scaler. It reaches this after thirty non-finite gradients


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its results, and the folder of its files."""

    folder: Path
    summary: dict[str, Any]
    signal: int = 0  # the signal that stopped the run after saving; 0: the run is complete
    is_first_rank: bool = True


class NonFiniteLoss(ValueError):
    """The loss or its gradient is NaN or infinite, and `run.on_nan` is "stop"."""


def train(plan: Plan) -> Outcome:
    """Carry out a plan: train, evaluate, and write the run folder. Under torchrun every rank calls this."""
    with stop_on_signals() as request, join_ranks(plan.config.device) as ranks:
        plan = ranks.broadcast(plan)  # the name of the default folder contains the time
        config = plan.loop_settings
        with (
            FileLock(plan.folder / LOCK) as lock,
            Reporter(plan.folder, config, headline=plan.task.headline, active=ranks.is_first) as reporter,
        ):
            ranks.decide(lambda: check_plan(plan, lock))
            if config.data.train_split == (split := config.data.val_split):
                reporter.note(f"data.train_split and data.val_split are both {split!r}: results are of training images")
            plan = settle(plan, ranks, reporter)
            with determinism(config.deterministic):
                trainer = Trainer(plan, ranks=ranks, reporter=reporter, request=request)
                files = trainer.task.start_files()
                is_new = ranks.decide(lambda: claim_folder(plan, ranks, lock, notify=reporter.note, files=files))
                try:
                    return trainer.fit()
                except Exception:
                    if is_new and ranks.is_first:
                        give_back(plan.folder)
                    raise
                finally:
                    # Workers block SIGTERM, so multiprocessing cannot stop them at exit; close them here.
                    trainer.data.train.close()


def settle(plan: Plan, ranks: Ranks, reporter: Reporter) -> Plan:
    """Return the plan with values for the settings in `from_data`."""
    config = plan.config
    if not config.from_data:
        return plan
    chosen = ranks.decide(lambda: plan.task(config).choose_from_data(ranks.world_size))
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    config = settings.update(config, settings.nested({**values, "from_data": []}))
    config.data.validate()
    listed = " ".join(f"{name}={'null' if value is None else value}" for name, value in values.items())
    reporter.note(f"chosen from the data: {listed}")
    reporter.config = config
    return dataclasses.replace(plan, config=config)


class Trainer:
    """One rank of a run: builds everything a plan names, resumes if there is a checkpoint, and trains with `fit`."""

    def __init__(self, plan: Plan, *, ranks: Ranks, reporter: Reporter, request: StopRequest) -> None:
        config = self.config = plan.loop_settings
        self.folder, self.ranks, self.reporter, self.request = plan.folder, ranks, reporter, request
        self.task = plan.task(plan.config)
        self.task.resumed_run = plan.source
        self.data = ranks.together(lambda: self.task.open_data(ranks))
        reporter.headline = self.task.headline
        batch_size = self.data.train.batch_size
        if batch_size != config.data.batch_size:
            reporter.note(f"data.batch_size={config.data.batch_size} lowered to {batch_size}: there are too few images")
            config = self.config = dataclasses.replace(
                config, data=dataclasses.replace(config.data, batch_size=batch_size)
            )
        self.steps_per_epoch = self.data.train.steps_per_epoch // config.optim.accumulate
        self.schedule = ranks.together(self.build_schedule)
        self.total_epochs = -(-self.schedule.total_steps // self.steps_per_epoch)  # the last one may be shorter

        ranks.decide(self.task.fetch_weights)
        self.model = ranks.together(self.task.build_model).to(ranks.device)
        if config.run.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.depth = SampledDepth(self.model, device=ranks.device)
        self.amp_dtype = choose_precision(config.run.precision, ranks.device)
        self.compile_mode = choose_compile_mode(config, ranks=ranks, fixed_shapes=self.task.fixed_shapes)
        self.forward = parallelize(
            self.model,
            strategy=config.run.strategy,
            ranks=ranks,
            mode=self.compile_mode,
            param_dtype=torch.bfloat16 if self.amp_dtype == torch.bfloat16 else None,
            unused_parameters=self.task.unused_parameters,
        )
        scaler = torch.amp.GradScaler(ranks.device.type) if self.amp_dtype == torch.float16 else None
        self.optimizer = ranks.together(lambda: Optimizer(self.model, config.optim, scaler=scaler))
        decay = config.ema.decay_per_step(config.global_batch(ranks.world_size))
        self.average = None if decay is None else WeightAverage(self.model, decay=decay, warmup=config.ema.warmup)

        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            keep=config.checkpoint.keep,
            ranks=ranks,
            about=self.task.describe(),
            notify=reporter.note,
        )
        self.progress = Progress(steps_per_epoch=self.steps_per_epoch)
        if plan.source is not None:
            self.resume(plan)
        self.agreement = StopAgreement(ranks)
        self.meter = DeviceMeter(ranks)

    def build_schedule(self) -> Schedule:
        config = self.config
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"optim.accumulate={config.optim.accumulate}: an epoch has only {self.data.train.steps_per_epoch} "
                f"batches of {config.data.batch_size} images; lower optim.accumulate or data.batch_size"
            )
        return config.build_schedule(steps_per_epoch=self.steps_per_epoch, world_size=self.ranks.world_size)

    # The run

    def fit(self) -> Outcome:
        progress = self.progress
        self.describe_run()
        self.reporter.start(total_updates=progress.updates + self.updates_left, done_updates=progress.updates)
        result = None
        while progress.epoch < self.total_epochs:
            if signal := self.train_epoch():
                stopped = f"stopped by signal {signal} after update {progress.updates}"
                if "checkpoint" in self.checkpoints.failing:
                    self.ranks.fail(
                        OSError(f"{stopped}, but its state could not be saved in {self.checkpoints.folder}")
                    )
                self.reporter.note(f"{stopped}; continue with --resume {self.folder}")
                return Outcome(self.folder, self.summary(result), signal, self.ranks.is_first)
            if self.is_due(self.config.log.eval_epochs):
                result = self.evaluate_epoch()
                if self.stops_early:
                    self.save()
                    best = f"the best is epoch {progress.best_epoch}"
                    self.reporter.note(
                        f"early stop: no better result in the last {progress.stale} evaluation(s); {best}"
                    )
                    progress.epoch, progress.step = progress.epoch + 1, 0
                    break
            progress.epoch, progress.step = progress.epoch + 1, 0
        if result is None:  # the run was complete before it was resumed
            result = self.evaluate()
            self.keep_best(result, weights="model")
        summary = self.summary(result)
        self.reporter.write_files(self.task.result_files(result))
        if self.checkpoints.failing:  # no summary: to job scripts, it means that the weights are there
            self.ranks.fail(
                OSError(f"the run is over, but its last state could not be saved in {self.checkpoints.folder}")
            )
        self.reporter.write_summary(summary)
        if SUMMARY in self.reporter.failing:
            raise OSError(f"the run is over, but {SUMMARY} could not be written to {self.folder}")
        return Outcome(self.folder, summary, is_first_rank=self.ranks.is_first)

    def train_epoch(self) -> int:
        """Train to the end of the epoch. Returns the signal that stopped the run before that, or 0."""
        progress, config = self.progress, self.config
        self.forward.train()
        batches = self.data.train.epoch(progress.epoch, start_step=progress.step * config.optim.accumulate)
        self.start_clock()
        while progress.step < self.steps_in_epoch:
            self.update(batches)
            progress.step, progress.updates = progress.step + 1, progress.updates + 1
            self.reporter.advance(progress.updates)
            if signal := self.agreement.stop_now(self.request.number):
                self.save()
                return signal
            ends_epoch = progress.step == self.steps_in_epoch
            if progress.updates % config.log.every_steps == 0 or ends_epoch:
                self.log()
            every = config.checkpoint.every_steps
            if every is not None and progress.updates % every == 0 and not ends_epoch:
                self.save()
        if self.is_due(config.checkpoint.every_epochs):
            self.save()
        return 0

    @property
    def steps_in_epoch(self) -> int:
        """Updates in this epoch. A schedule in steps may end inside the last epoch."""
        return min(self.steps_per_epoch, self.schedule.total_steps - self.progress.epoch * self.steps_per_epoch)

    @property
    def stops_early(self) -> bool:
        patience = self.config.schedule.early_stop
        return patience is not None and self.progress.stale >= patience and self.updates_left > 0

    @property
    def updates_left(self) -> int:
        return max(0, self.schedule.total_steps - self.progress.position)

    def update(self, batches: Iterator[TrainingBatch]) -> None:
        """One optimizer update from `accumulate` batches. Nothing here reads from the device."""
        progress, accumulate = self.progress, self.config.optim.accumulate
        total = torch.zeros((), device=self.ranks.device)
        parts: dict[str, Tensor] = {}
        for part in range(accumulate):
            batch = next(batches)
            step = progress.step * accumulate + part
            self.seed_step(step, batch)
            with gradient_sync(self.forward, enabled=part + 1 == accumulate):
                losses = self.task.losses(self.call_model, batch, epoch=progress.epoch, step=step)
                loss = sum(losses.values(), start=torch.zeros_like(total)) / accumulate
                self.optimizer.backward(loss)
            total += loss.detach()
            if len(losses) > 1:
                for name, value in losses.items():
                    parts[name] = parts.get(name, 0) + value.detach() / accumulate
        norm = self.optimizer.step(self.rate(progress.position))
        if self.average is not None:
            self.average.update(progress.updates)
        checked = norm
        if (scaler := self.optimizer.scaler) is not None:
            # It raises its scale until gradients overflow. Unless its scale is tiny, only a non-finite loss shows
            # divergence. `get_scale` would wait for the device.
            checked = torch.where(scaler.scale(torch.ones_like(total)) < MIN_SCALE, norm, total)
        self.meter.add(total, norm, bad=~checked.isfinite(), parts=parts)

    def rate(self, position: int) -> float:
        """The learning rate of the update at this position of the schedule."""
        return self.schedule.rate(position, plateaus=self.progress.plateaus)

    def call_model(self, *inputs: Any) -> Any:
        if self.config.run.channels_last:
            maps = [isinstance(value, Tensor) and value.ndim == 4 for value in inputs]
            inputs = tuple(
                value.contiguous(memory_format=torch.channels_last) if is_map else value
                for value, is_map in zip(inputs, maps, strict=True)
            )
        with torch.autocast(self.ranks.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            return self.forward(*inputs)

    def seed_step(self, step: int, batch: TrainingBatch) -> None:
        """Seed stochastic depth by (seed, epoch, step, sample), and other draws of the model (dropout) by rank too."""
        key = derive_seed("forward", self.config.seed, self.progress.epoch, step)
        self.depth.draw(batch.sample_ids, key=key)
        torch.manual_seed(derive_seed("rank", key, self.ranks.rank))

    # Between updates

    def is_due(self, every_epochs: int) -> bool:
        """Whether an action with this interval in epochs is due after this epoch. It is always due at the end."""
        done = self.progress.epoch + 1
        return done % every_epochs == 0 or done == self.total_epochs

    def evaluate(self) -> Evaluation:
        share_statistics(self.model, self.ranks)
        return self.task.evaluate(self.model, device=self.ranks.device, amp_dtype=self.amp_dtype)

    def evaluate_epoch(self) -> Evaluation:
        """Evaluate the weights and their average, and keep the best weights of all epochs."""
        progress, headline = self.progress, self.task.headline
        result = self.evaluate()
        progress.stale += 1
        record: dict[str, Any] = {"kind": "eval", "update": progress.updates, "epoch": progress.epoch + 1}
        record |= {f"val_{name}": value for name, value in result.figures.items()}
        self.keep_best(result, weights="model")
        if self.average is not None:
            with self.average.in_place():
                averaged = self.evaluate()
                self.keep_best(averaged, weights="ema")
            both = [name for name in (headline.key, "loss") if name in averaged.figures]
            record |= {f"ema_{name}": averaged.figures[name] for name in both}
        if progress.stale and progress.stale % self.config.schedule.patience == 0:
            progress.plateaus += 1
        self.reporter.record(record)
        return result

    def keep_best(self, result: Evaluation, *, weights: str) -> None:
        """Save the model's current weights (its own, or their average) if they are better than the saved ones."""
        progress, key = self.progress, self.task.headline.key
        figure = result.figures[key]
        if progress.best is None or math.isnan(progress.best) or figure > progress.best:
            progress.stale = 0
            about = {"weights": weights, "epoch": str(progress.epoch + 1), key: f"{figure:.4f}"}
            if self.checkpoints.save_best(self.model, about=about):
                progress.best, progress.best_epoch = figure, progress.epoch + 1

    def start_clock(self) -> None:
        self.clock = time.perf_counter()
        self.waited = self.data.train.waiting_seconds
        self.clock_updates = self.progress.updates

    def log(self) -> None:
        """Read the meter from the device and record it. Stop after a non-finite gradient if `run.on_nan` says so."""
        updates = self.progress.updates - self.clock_updates
        if updates == 0:
            return
        reading = self.meter.read()
        seconds = time.perf_counter() - self.clock
        images = updates * self.config.global_batch(self.ranks.world_size)
        self.progress.seconds += seconds
        self.progress.images += images
        self.progress.bad_steps += reading.bad_steps
        self.reporter.record(
            {
                "kind": "train",
                "update": self.progress.updates,
                "epoch": round(self.progress.position / self.steps_per_epoch, 4),
                "loss": reading.loss,
                **{f"loss_{name}": value for name, value in reading.parts.items()},
                "lr": self.rate(self.progress.position - 1),
                "grad_norm": reading.grad_norm,
                "images_per_second": images / seconds,
                "waiting": (self.data.train.waiting_seconds - self.waited) / seconds,
                "memory": memory_bytes(self.ranks.device),
                "bad_steps": self.progress.bad_steps,
            },
            eta_seconds=self.updates_left * seconds / updates,
            # At the end of an epoch, the line of the evaluation shows the same figures.
            show=self.progress.step < self.steps_in_epoch or not self.is_due(self.config.log.eval_epochs),
        )
        if reading.first_bad is not None and self.config.run.on_nan == "stop":
            self.stop_for_nan(self.clock_updates + reading.first_bad + 1)
        self.start_clock()

    def stop_for_nan(self, update: int) -> NoReturn:
        """update: counted from 1, as checkpoints are."""
        saved = self.checkpoints.saved_updates
        good, again = f"the last good checkpoint is that of update {saved}", "--resume"
        if saved is None:
            good, again = "there is no checkpoint yet", "start again"
        lower = "optim.clip_norm=1" if self.config.optim.clip_norm is None else "a longer schedule.warmup_epochs"
        self.ranks.fail(
            NonFiniteLoss(
                f"the gradient was not finite in update {update}: it was not applied, and the run stops; {good} in "
                f"{self.checkpoints.folder}. Try a lower optim.lr, {lower} or run.precision=fp32, then {again}; "
                "run.on_nan=skip leaves such updates out and continues"
            )
        )

    def save(self) -> None:
        self.log()  # raises after a non-finite gradient, so that such a state is not saved
        self.checkpoints.save(self.progress, model=self.model, optimizer=self.optimizer, average=self.average)
        self.start_clock()

    # Resuming, and messages about the run

    def resume(self, plan: Plan) -> None:
        """Continue from the checkpoint that the plan names, or from the newest; without any, from the beginning."""
        assert plan.source is not None
        own, source, note = self.checkpoints, plan.source / CHECKPOINTS, self.reporter.note
        is_own = source.resolve() == own.folder.resolve()
        if is_own:
            self.ranks.decide(own.clear_unfinished)
        checkpoint = plan.checkpoint or self.ranks.decide(lambda: newest_checkpoint(source, notify=note))
        if checkpoint is None:
            return
        self.ranks.decide(lambda: check_same_task(read_manifest(checkpoint)["about"], own.about, checkpoint))
        saved, fresh = restore(checkpoint, model=self.model, optimizer=self.optimizer, average=self.average)
        if saved.steps_per_epoch != self.steps_per_epoch:
            before = saved.steps_per_epoch
            in_steps = self.config.schedule.steps is not None
            saved = saved.with_epochs_of(self.steps_per_epoch, length_in_steps=in_steps)
            note(
                f"an epoch had {before} updates and now has {self.steps_per_epoch}: the run continues near where it "
                f"was (epoch {saved.epoch + 1}, update {saved.step} of the epoch), not exactly there"
            )
        if is_own:
            own.saved_updates = saved.updates
            self.ranks.decide(lambda: own.set_aside_after(checkpoint, updates=saved.updates))
        elif saved.position >= self.schedule.total_steps:
            length = "schedule.epochs" if self.config.schedule.steps is None else "schedule.steps"
            self.ranks.fail(
                ValueError(
                    f"{checkpoint} has {saved.position} of {self.schedule.total_steps} updates: nothing is left to "
                    f"train in {self.folder}; raise {length}"
                )
            )
        else:  # the best weights so far are in the other run's folder
            saved = dataclasses.replace(saved, best=None, best_epoch=None, stale=0)
        self.progress = saved
        if saved.step and not self.data.train.exact_resume:
            note("streamed data: the epoch starts again at its first image, but has only its remaining updates")
        if fresh:
            note(f"{len(fresh)} parameters start without moments: they were frozen before, or had another optimizer")
        note(f"continuing from {checkpoint}: epoch {saved.epoch + 1}, {saved.updates} updates done")
        if plan.changes:
            note(f"with other settings than before: {', '.join(plan.changes)}")

    def describe_run(self) -> None:
        config, ranks = self.config, self.ranks
        trained = sum(p.numel() for p in self.optimizer.parameters)
        epochs = round(self.schedule.total_steps / self.steps_per_epoch, 2)
        precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.amp_dtype]
        compiled = "" if self.compile_mode is None else f", compile mode {self.compile_mode}"
        classes = f"{len(self.data.class_names)} classes, " if self.data.class_names else ""
        self.reporter.note(
            f"{self.task.title}: {trained / 1e6:.2f}M trained parameters, {classes}"
            f"{counted(self.schedule.total_steps, 'update')} of {config.global_batch(ranks.world_size)} images "
            f"({counted(epochs, 'epoch')}), {ranks.world_size} × {ranks.device.type}, {precision}{compiled}"
        )
        self.reporter.note(f"run folder: {self.folder}")

    def summary(self, result: Evaluation | None) -> dict[str, Any]:
        progress, task = self.progress, self.task
        skipped = {image.path for loader in (self.data.train, self.data.val) for image in loader.skipped}
        return {
            **{f"val_{name}": None if result is None else result.figures[name] for name in task.summary_figures},
            f"best_{task.headline.key}": progress.best,
            "best_epoch": progress.best_epoch,
            "epochs": progress.epoch,
            "updates": progress.updates,
            "seconds": round(progress.seconds, 2),
            "images_per_second": round(progress.images / progress.seconds, 1) if progress.seconds else None,
            "skipped_images": len(set().union(*self.ranks.gather(skipped))),
            "bad_steps": progress.bad_steps,
            "model": task.title,
            "recipe": self.config.recipe,
        }


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The autocast type of `run.precision`; None: fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def choose_compile_mode(config: LoopConfig, *, ranks: Ranks, fixed_shapes: bool) -> str | None:
    """The mode of `optimize`: with CUDA graphs where an update can be replayed; None: not compiled.

    A replay overwrites the outputs of the previous one, gradients included. An update must therefore not use tensors of
    the update before it: gradients are not accumulated, and `DeviceMeter` keeps its sums in its own memory. PyTorch
    detects the end of an update by its backward pass. `cudagraph_mark_step_begin` is not needed, and would force every
    other compiled model in the process to mark its steps too.
    """
    if not config.run.compile:
        return None
    graphs = (
        ranks.device.type == "cuda"
        and ranks.world_size == 1
        and config.optim.accumulate == 1
        and fixed_shapes
        and not config.model.checkpointing  # Checkpointing implies tight memory; CUDA graphs would pin more.
    )
    return "reduce-overhead" if graphs else "default"


@contextmanager
def determinism(enabled: bool) -> Iterator[None]:
    """Only deterministic algorithms inside the block; an operation that has none raises."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
