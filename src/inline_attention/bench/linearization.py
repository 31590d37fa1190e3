"""The report on a linearised model: its accuracy after each stage, and its speed and memory beside the teacher's."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.data import open_eval_data
from inline_attention.layers.mode import evaluation_mode
from inline_attention.linearize.calibration import observed
from inline_attention.linearize.convert import linearization_of, linearized_modules
from inline_attention.linearize.modules import Call, LinearizedAttention
from inline_attention.models.base import input_shape, resize_input
from inline_attention.models.weights import load_model
from inline_attention.ops.projections import unstack
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

from .model import Candidate, compare, default_modes, in_precision, inference_step
from .record import describe_run
from .timing import Effort, Timing, allocated_bytes, describe_error, measure

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
class AttentionSpeed:
    """Seconds of one call of attentions that are alike, alone and not compiled, with the inputs that they get."""

    layers: list[str]
    kind: str  # the class of the softmax attention
    keys: int  # of one call
    batch: int  # images
    softmax: float | None = None
    linear: float | None = None
    is_slower: bool = False  # the linear form takes longer, by more than the samples vary
    error: str | None = None

    @classmethod
    def of(cls, call: "_Call", kind: str, batch: int, outcome: dict[str, Timing | str]) -> "AttentionSpeed":
        softmax, linear = outcome["softmax"], outcome["linear"]
        if isinstance(softmax, str) or isinstance(linear, str):
            error = next(one for one in (softmax, linear) if isinstance(one, str))
            return cls(call.layers, kind, call.keys, batch, error=error)
        is_slower = linear.low > softmax.high  # their quartiles
        return cls(call.layers, kind, call.keys, batch, softmax.median, linear.median, is_slower)


@dataclass(frozen=True)
class LinearizationReport:
    """The report of a run. `as_text` prints it; `write_report` writes it to files."""

    title: str
    facts: dict[str, str]  # about the machine
    layers: str  # what was done, layer by layer
    quality: list[Quality]
    speed: list[Speed]
    attention: list[AttentionSpeed]
    curves: dict[str, list[dict[str, Any]]]  # the records of each stage

    def as_text(self) -> str:
        parts = [f"# {self.title}, linearised", self.quality_table(), self.speed_table()]
        if self.attention:
            parts += [self.attention_table(), *self.slower_layers()]
        return "\n\n".join(parts)

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

    def attention_table(self) -> str:
        """The softmax of the teacher against the linear form of the student, attention by attention."""
        rows = []
        for one in self.attention:
            cells = [_shortened(one.layers), one.kind, f"{one.keys:,}", str(one.batch)]
            if one.softmax is None or one.linear is None:
                rows.append([*cells, one.error or "–", "", ""])
                continue
            times = [f"{seconds * 1e3:.3f}" for seconds in (one.softmax, one.linear)]
            rows.append([*cells, *times, f"{one.softmax / one.linear:.2f}"])
        header = ("attentions alone", "module", "keys", "images", "softmax, ms", "linear, ms", "softmax ÷")
        return table(header, rows)

    def slower_layers(self) -> Iterator[str]:
        """A sentence for each batch size."""
        for batch in dict.fromkeys(one.batch for one in self.attention):
            slower = [one for one in self.attention if one.batch == batch and one.is_slower]
            images = "1 image" if batch == 1 else f"{batch} images"
            if slower:
                names = "; ".join(_shortened(one.layers) for one in slower)
                yield f"With {images}, the linear form is slower than softmax here in: {names}."
            elif any(one.batch == batch and one.error is None for one in self.attention):
                yield f"With {images}, the linear form is slower than softmax in none of the layers that were timed."
        if any(one.is_slower for one in self.attention):
            yield "Layers that are slower may as well stay softmax (--keep-softmax), at this input size."

    def pairs(self) -> Iterator[tuple[Speed, Speed]]:
        """Teacher and student at each size."""
        return zip(self.speed[::2], self.speed[1::2], strict=True)


def _shortened(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


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
        attention=time_attentions(teacher, student, data.size, device=device, dtype=dtype or torch.float32, log=log),
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
    """Inference of teacher and student, in turn: of one image, then of batches at up to four input sizes."""
    scales, most = SCALES.get(device.type, SCALES["cpu"])
    mode, autocast = default_modes(device)[0], in_precision(device, dtype)
    results: list[Speed] = []
    for scale, batch in ((1, 1), *((scale, max(1, most // scale**2)) for scale in scales)):
        side = (scale * size[0], scale * size[1])
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


@dataclass
class _Call:
    """The inputs of an attention in a run of the whole model. Attentions that are alike share them."""

    layers: list[str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: int = 0


def time_attentions(
    teacher: nn.Module,
    student: nn.Module,
    size: tuple[int, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], None] = lambda line: None,
) -> list[AttentionSpeed]:
    """Each linear attention of the student against the teacher's softmax, for one image and for a batch, in turn.

    Both are whole modules and get the inputs of the student's: its windows, masks, biases and reduced keys count.
    """
    autocast, results = in_precision(device, dtype), []
    for batch in (1, SCALES.get(device.type, SCALES["cpu"])[1]):
        images = torch.randn(batch, input_shape(teacher)[0], *size, device=device)
        log(f"timing: the attentions alone × {batch}")
        try:
            calls = _calls_of_attentions(student, teacher, images, autocast)
        except Exception as failure:  # such as out of memory: keep the rest of the report
            log(f"not timed: {describe_error(failure)}")
            continue
        for call in calls:
            name = call.layers[0]
            modules = {"softmax": teacher.get_submodule(name), "linear": student.get_submodule(name)}
            steps = {form: partial(_call_module, module, call, autocast) for form, module in modules.items()}
            with evaluation_mode(teacher), evaluation_mode(student):
                outcome = measure(steps, device=device, effort=Effort.choose(quick=True))
            results.append(AttentionSpeed.of(call, type(modules["softmax"]).__name__, batch, outcome))
    return results


def _call_module(module: nn.Module, call: _Call, autocast: Callable[[], Any]) -> None:
    with torch.no_grad(), autocast():
        module(*call.args, **call.kwargs)


def _calls_of_attentions(
    student: nn.Module, teacher: nn.Module, images: Tensor, autocast: Callable[[], Any]
) -> list[_Call]:
    """The calls of the student's linear attentions in a run on these images, one for all that are alike."""
    calls: dict[str, _Call] = {}
    of_layer: dict[str, _Call] = {}

    def remember(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = [_shape_of(value) for value in (*args, *kwargs.values())]
        key = f"{module.heads(module)} {teacher.get_submodule(name)!r} {signature} {list(kwargs)}"  # type: ignore[operator]
        of_layer[name] = calls.setdefault(key, _Call([], args, kwargs))
        if name not in of_layer[name].layers:
            of_layer[name].layers.append(name)

    def count_keys(name: str, module: LinearizedAttention, call: Call) -> Tensor:
        of_layer[name].keys = unstack(call.projections)[1].shape[1]
        return module.linear_form(call, module.gain)

    with ExitStack() as stack:
        for name, module in linearized_modules(student).items():
            handle = module.register_forward_pre_hook(partial(remember, name), with_kwargs=True)
            stack.callback(handle.remove)
        observers = {name: partial(count_keys, name) for name in linearized_modules(student)}
        stack.enter_context(observed(student, observers))
        stack.enter_context(evaluation_mode(student))
        with torch.no_grad(), autocast():
            student(images)
    return list(calls.values())


def _shape_of(value: Any) -> Any:
    """What makes calls alike: the shapes of tensors, and other values as they are."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


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
