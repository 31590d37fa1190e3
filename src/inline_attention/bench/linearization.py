"""The report on a linearised model: its accuracy after each stage, and its speed and memory beside the teacher's."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention.data import open_eval_data
from inline_attention.linearize.calibration import count_keys
from inline_attention.linearize.convert import linearization_of, linearized_modules
from inline_attention.models.base import input_shape, resize_input
from inline_attention.models.weights import load_model
from inline_attention.printing import table
from inline_attention.tasks.classification.classifier import model_name
from inline_attention.tasks.classification.knn import knn_accuracy
from inline_attention.tasks.linearization.comparison import compare_outputs
from inline_attention.tasks.linearization.stages import DISTILL, MATCH, LinearizationPlan
from inline_attention.tasks.linearization.task import data_for, load_teacher, make_student
from inline_attention.training.distributed import Ranks, rank_device
from inline_attention.training.files import write_atomically
from inline_attention.training.loop import choose_precision
from inline_attention.training.report import read_records

from .break_even import break_even, measured, time_sizes
from .model import Candidate, compare, default_modes, in_precision, inference_step
from .record import describe_run
from .timing import Effort, Timing, allocated_bytes

TEACHER, CARRIED_OVER, STUDENT = "teacher", "carried over", "student"
TITLES = {MATCH: "matched", DISTILL: "distilled"}
# Multiples of the teacher's input size, and images in a batch at the first of them. Larger ones get fewer images.
SCALES = {"cuda": ((1, 2, 4, 8), 128), "cpu": ((1, 2, 3, 4), 4)}
SLOWEST = 10.0  # seconds of a call; larger sizes are then left out
NEIGHBOURS = 20  # that vote, as in DINO's evaluation
KNOWN_IMAGES = 10_000  # training images that are searched for the neighbours of a validation image


@dataclass(frozen=True)
class Quality:
    """One model on the validation images, in per cent. None: without labels, or without a head."""

    model: str
    top1: float | None
    knn_top1: float | None  # of features
    agreement: float | None  # with the teacher's most probable class
    cosine: float  # to the teacher's logits or features
    images: int


@dataclass(frozen=True)
class Speed:
    """Inference of the teacher or the student at one input size."""

    model: str
    img_size: tuple[int, int]
    batch: int
    images_per_second: float | None = None
    peak_bytes: int | None = None  # of weights and activations
    error: str | None = None


@dataclass(frozen=True)
class BreakEven:
    """Linear attentions of one head size, and the number of tokens from which they are faster than softmax here."""

    heads: int
    head_dim: int
    tokens: int | None  # None: softmax is faster at all sizes that were tried
    tried: int  # the most tokens that were tried
    below: list[str]  # layers that have fewer tokens at the teacher's input size

    def __str__(self) -> str:
        faster = f"is faster from {self.tokens:,} tokens on"
        if self.tokens is None:
            faster = f"is not faster with up to {self.tried:,} tokens"
        text = f"With {self.heads} heads of {self.head_dim} channels, a linear attention alone {faster} here."
        if self.below:
            text += f" Fewer tokens at this input size: {', '.join(self.below)}. These layers may as well stay softmax."
        return text


@dataclass(frozen=True)
class LinearizationReport:
    """The report of a run. `as_text` prints it; `write_report` writes it to files."""

    title: str
    facts: dict[str, str]  # about the machine
    layers: str  # what was done, layer by layer
    quality: list[Quality]
    speed: list[Speed]
    break_even: list[BreakEven]
    curves: dict[str, list[dict[str, Any]]]  # the records of each stage

    def as_text(self) -> str:
        parts = [f"# {self.title}, linearised", self.quality_table(), self.speed_table()]
        return "\n\n".join([*parts, *map(str, self.break_even)])

    def as_markdown(self) -> str:
        facts = "\n".join(f"- {name}: {value}" for name, value in self.facts.items())
        return f"{self.as_text()}\n\n```\n{self.layers}\n```\n\n{facts}\n"

    def quality_table(self) -> str:
        """A column for each measure that was made."""
        measures = {
            "top1": "top-1 %",
            "knn_top1": "k-NN top-1 %",
            "agreement": "teacher's class %",
            "cosine": "cosine %",
        }
        made = [name for name in measures if self.quality[0].__dict__[name] is not None]
        rows = [(q.model, *(f"{q.__dict__[name]:.2f}" for name in made)) for q in self.quality]
        return table([f"{self.quality[0].images} images", *(measures[name] for name in made)], rows)

    def speed_table(self) -> str:
        rows = []
        for teacher, student in self.pairs():
            size = "×".join(map(str, teacher.img_size))
            speeds = [_number(one.images_per_second) if one.error is None else one.error for one in (teacher, student)]
            memory = [_number(None if one.peak_bytes is None else one.peak_bytes / 2**20) for one in (teacher, student)]
            rows.append((f"{size} × {teacher.batch}", *speeds, _ratio(teacher, student), *memory))
        return table(("size × batch", "teacher, img/s", "student", "student ÷", "teacher, MiB", "student"), rows)

    def pairs(self) -> Iterator[tuple[Speed, Speed]]:
        """Teacher and student at each size."""
        return zip(self.speed[::2], self.speed[1::2], strict=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(teacher: Speed, student: Speed) -> str:
    if not teacher.images_per_second or not student.images_per_second:
        return "–"
    return f"{student.images_per_second / teacher.images_per_second:.2f}"


def make_report(plan: LinearizationPlan, *, log: Callable[[str], None] = lambda line: None) -> LinearizationReport:
    """Evaluate the teacher and the student after each stage of a finished run, then time teacher and student."""
    config, device = plan.config, rank_device(plan.config.device)
    dtype = choose_precision(config.run.precision, device)
    classifier = load_teacher(config)
    data, teacher = data_for(classifier, config), classifier.model.to(device)
    names = classifier.class_names if config.data.labels else None
    loader = open_eval_data(data, class_names=names, seed=config.seed)
    known = None
    if config.data.labels and not teacher.num_classes:
        known = open_eval_data(data, max_images=KNOWN_IMAGES, split=data.train_split, seed=config.seed)
    models = {TEACHER: teacher, CARRIED_OVER: make_student(classifier, config.model, seed=config.seed)[0]}
    models |= {TITLES[stage]: load_model(plan.weights(stage)) for stage, _ in plan.stages}
    quality = []
    for title, model in models.items():
        log(f"evaluating: {title}")
        model = model.to(device)
        near = compare_outputs(model, teacher, loader, device=device, amp_dtype=dtype, labelled=config.data.labels)
        neighbours = None
        if known is not None:
            k = min(NEIGHBOURS, known.num_images)
            neighbours, _ = knn_accuracy(model, known, loader, k=k, ranks=Ranks(device), amp_dtype=dtype)
        quality.append(Quality(title, near.top1, neighbours, near.agreement, near.cosine, near.images))
    student = load_model(plan.student).to(device)
    return LinearizationReport(
        title=model_name(teacher),
        facts=describe_run(device, dtype or torch.float32),
        layers=str(linearization_of(student).report),
        quality=quality,
        speed=time_both(teacher, student, data.size, device=device, dtype=dtype or torch.float32, log=log),
        break_even=compare_tokens(student, data.size, device=device, dtype=dtype or torch.float32, log=log),
        curves={TITLES[stage]: read_records(plan.folder / stage) for stage, _ in plan.stages},
    )


def time_both(
    teacher: nn.Module,
    student: nn.Module,
    size: tuple[int, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], None] = lambda line: None,
) -> list[Speed]:
    """Inference of teacher and student at up to four input sizes, in turn."""
    scales, most = SCALES.get(device.type, SCALES["cpu"])
    mode, autocast = default_modes(device)[0], in_precision(device, dtype)
    results: list[Speed] = []
    for scale in scales:
        side, batch = (scale * size[0], scale * size[1]), max(1, most // scale**2)
        images = torch.randn(batch, input_shape(teacher)[0], *side, device=device)
        log(f"timing: {side[0]}×{side[1]} × {batch}")
        candidates = {
            name: Candidate(
                partial(resized, model, side),
                mode,
                partial(inference_step, images=images, autocast=autocast),
                training=False,
            )
            for name, model in ((TEACHER, teacher), (STUDENT, student))
        }
        outcome = compare(candidates, device=device, effort=Effort.choose(quick=True))
        slowest = 0.0
        for name, (timing, peak, _) in outcome.items():
            if not isinstance(timing, Timing):
                results.append(Speed(name, side, batch, error=timing))
                continue
            if device.type == "cpu":
                peak = inference_bytes(candidates[name])
            results.append(Speed(name, side, batch, batch / timing.median, peak))
            slowest = max(slowest, timing.median)
        if slowest > SLOWEST:
            log(f"larger images are left out: a call took {slowest:.0f} s")
            break
    return results


def compare_tokens(
    student: nn.Module,
    size: tuple[int, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], None] = lambda line: None,
) -> list[BreakEven]:
    """The break-even of each head size of the student, and the layers below it."""
    keys = count_keys(student, (input_shape(student)[0], *size))
    anchors = linearization_of(student).form.anchors
    of_size: dict[tuple[int, int], list[str]] = {}
    for name, module in linearized_modules(student).items():
        of_size.setdefault(module.heads(module), []).append(name)
    found = []
    for (heads, head_dim), names in of_size.items():
        log(f"timing: attention with {heads} heads of {head_dim} channels")
        effort = Effort.choose(quick=True)
        timed = measured(time_sizes(heads, head_dim, device=device, dtype=dtype, effort=effort, anchors=anchors))
        if not timed:
            log("no size could be timed")
            continue
        tokens, tried = break_even(timed), max(one.tokens for one in timed)
        below = [name for name in names if keys[name] < (tried if tokens is None else tokens)]
        found.append(BreakEven(heads, head_dim, tokens, tried, below))
    return found


def inference_bytes(candidate: Candidate) -> int:
    """The weights of a model on a CPU, and what a call allocates."""
    model = candidate.build()
    return sum(tensor.nbytes for tensor in model.state_dict().values()) + allocated_bytes(candidate.step_of(model))


def resized(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A copy of the model for images of another size."""
    model = deepcopy(model)
    resize_input(model, size)
    return model


def write_report(report: LinearizationReport, folder: Path) -> list[Path]:
    """Write report.json, report.md and, with matplotlib, report.png."""
    record = json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False)
    write_atomically(folder / "report.json", record.encode())
    write_atomically(folder / "report.md", report.as_markdown().encode())
    written = [folder / "report.json", folder / "report.md"]
    try:
        from .linearization_picture import draw_report
    except ImportError:  # matplotlib is optional
        return written
    draw_report(report, folder / "report.png")
    return [*written, folder / "report.png"]
