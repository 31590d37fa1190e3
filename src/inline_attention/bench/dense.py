"""Backbone and head at the sizes of dense prediction: InLine against softmax, time and memory, in one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.models import list_models
from inline_attention.ops import Backend
from inline_attention.tasks.detection import published as detectors
from inline_attention.tasks.detection.model import HEADS as DETECTION_HEADS
from inline_attention.tasks.detection.model import create_detector
from inline_attention.tasks.segmentation import published as segmenters
from inline_attention.tasks.segmentation.losses import pixel_loss
from inline_attention.tasks.segmentation.model import HEADS, Segmenter, create_segmenter

from .model import (
    EAGER,
    Candidate,
    Measured,
    in_precision,
    inference_step,
    learning_step,
    measure_all,
    set_backend,
    usable_modes,
)
from .record import fastest, table
from .timing import Call, Effort

MODES = (EAGER, "default")
INFER_MODES = (*MODES, "reduce-overhead")  # with CUDA graphs; of a detector, for backbone and pyramid alone
INFER_BATCH, TRAIN_BATCH = 1, 2  # two images a GPU are the published step, and the fewest that UperNet can learn from


@dataclass(frozen=True)
class DenseHead:
    """What is put on a backbone, and what is timed of it."""

    title: str
    size: tuple[int, int]  # (height, width) of the published cost
    build: Callable[[str], nn.Module]  # backbone's name → model
    loss: Callable[[nn.Module, Tensor], Tensor]  # () of a training step on images (B, 3, H, W)


def _segmentation_loss(model: nn.Module, images: Tensor) -> Tensor:
    assert isinstance(model, Segmenter)
    masks = torch.randint(model.num_classes, (len(images), *images.shape[2:]), device=images.device)
    logits = model(images)
    loss = pixel_loss(logits.main, masks)
    return loss if logits.auxiliary is None else loss + 0.4 * pixel_loss(logits.auxiliary, masks)


def _build_detector(backbone: str, *, head: str) -> nn.Module:
    """Random weights find nothing, and the mask heads would idle: here every region is an object of the first class."""
    model = create_detector(backbone, head, num_classes=detectors.COST_CLASSES)
    for stage in model.heads.in_order():
        nn.init.constant_(stage.box_predictor.cls_score.bias[1:2], 5.0)
    return model


def _detection_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Of seven objects an image, as COCO has on average: squares of 32 to 320 pixels side by side, filled."""
    height, width = images.shape[2:]
    sides = torch.linspace(32, 320, 7, device=images.device).clamp(max=min(height, width))
    corners = torch.linspace(0, width, 8, device=images.device)[:7].clamp(max=width - sides)
    boxes = torch.stack([corners, torch.zeros_like(sides), corners + sides, sides], dim=1)
    columns = torch.arange(width, device=images.device)
    rows = torch.arange(height, device=images.device)
    inside = (columns >= boxes[:, :1]) & (columns < boxes[:, 2:3])
    masks = (rows < boxes[:, 3:]).unsqueeze(2) & inside.unsqueeze(1)
    target = {"boxes": boxes, "labels": torch.arange(1, 8, device=images.device), "masks": masks.to(torch.uint8)}
    losses = model(images, None, [target] * len(images), torch.arange(len(images), device=images.device))
    return sum(losses.values(), start=images.new_zeros(()))


DENSE_HEADS: dict[str, DenseHead] = {
    name: DenseHead(
        title,
        segmenters.COST_SIZE,
        build=partial(create_segmenter, head=name, num_classes=segmenters.COST_CLASSES),
        loss=_segmentation_loss,
    )
    for name, (title, _, _) in HEADS.items()
} | {
    name: DenseHead(
        title,
        detectors.COST_SIZE,
        build=partial(_build_detector, head=name),
        loss=_detection_loss,
    )
    for name, (title, _) in DETECTION_HEADS.items()
}

# contender → (for people, first part of the backbone's name, backend or None)
CONTENDERS: dict[str, tuple[str, str, Backend | None]] = {
    "fused": ("InLine, fused", "inline", "triton"),
    "reference": ("InLine, reference", "inline", "reference"),
    "softmax": ("softmax", "softmax", None),
}


def default_contenders(device: torch.device) -> list[str]:
    return ["fused", "reference", "softmax"] if device.type == "cuda" else ["reference", "softmax"]


@dataclass(frozen=True)
class DenseSetting:
    """One comparison. `model` is HEAD-BACKBONE, such as upernet-swin_tiny."""

    model: str
    size: tuple[int, int]
    batch: int
    training: bool

    @classmethod
    def parse(cls, model: str, *, size: Sequence[int] | None, batch: int | None, training: bool) -> "DenseSetting":
        """Without size or batch, that of the published cost and training. ValueError for what there is not."""
        head, _, backbone = model.partition("-")
        if head not in DENSE_HEADS or any(f"{kind}_{backbone}" not in list_models() for kind in ("inline", "softmax")):
            raise ValueError(
                f"there is no dense model {model!r}; expected HEAD-BACKBONE such as fpn-pvt_tiny or upernet-swin_tiny, "
                f"with a head of {', '.join(DENSE_HEADS)}"
            )
        height, width = size or DENSE_HEADS[head].size
        if min(height, width) < 1:
            raise ValueError(f"--img-size is {height} {width}; expected a height and a width of 1 or more")
        if batch is None:
            batch = TRAIN_BATCH if training else INFER_BATCH
        if batch < 1:
            raise ValueError(f"--batch-size {batch}: expected 1 or more")
        if head == "upernet" and training and batch == 1:
            raise ValueError(
                f"--batch-size 1: {model} needs 2 images or more to train, for a batch norm over the mean of an image; "
                "give --batch-size 2, or --infer"
            )
        return cls(model, (height, width), batch, training)

    @property
    def head(self) -> DenseHead:
        return DENSE_HEADS[self.model.partition("-")[0]]

    @property
    def backbone(self) -> str:
        return self.model.partition("-")[2]

    @property
    def task(self) -> str:
        return "train" if self.training else "infer"


@dataclass(frozen=True, kw_only=True)
class DenseResult(Measured):
    model: str
    size: tuple[int, int]
    batch: int
    task: str


def build(setting: DenseSetting, contender: str) -> nn.Module:
    _, kind, backend = CONTENDERS[contender]
    model = setting.head.build(f"{kind}_{setting.backbone}")
    return model if backend is None else set_backend(model, backend)


def run_setting(
    setting: DenseSetting,
    *,
    contenders: Sequence[str],
    modes: Sequence[str] | None,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    log: Callable[[str], None] = lambda line: None,
) -> list[DenseResult]:
    """Every contender in every mode, built first, then timed in turn."""
    images = torch.randn(setting.batch, 3, *setting.size, device=device)
    autocast = in_precision(device, dtype)

    def step_of(model: nn.Module) -> Call:
        if setting.training:
            return learning_step(model, lambda model: setting.head.loss(model, images), autocast)
        return inference_step(model, images, autocast)

    candidates = {
        (contender, mode): Candidate(partial(build, setting, contender), mode, step_of, training=setting.training)
        for contender in contenders
        for mode in usable_modes(modes or (MODES if setting.training else INFER_MODES), device)
    }
    where = f"{setting.model} {setting.size[0]}×{setting.size[1]}, {setting.batch} {setting.task}"
    measured = measure_all(
        candidates, batch=setting.batch, device=device, effort=effort, log=lambda line: log(f"{where}: {line}")
    )
    about: dict[str, Any] = dict(model=setting.model, size=setting.size, batch=setting.batch, task=setting.task)
    return [DenseResult(**about, **vars(one)) for one in measured]


def _row(r: dict[str, Any]) -> tuple[str, tuple[int, int], int, str]:
    height, width = r["size"]
    return r["model"], (height, width), r["batch"], r["task"]


def dense_table(results: Sequence[dict[str, Any]]) -> str:
    """A row a contender, in its best mode, with its speed and memory over softmax's."""
    best = fastest(results, _row)
    softmax = {_row(r): r for r in best if r["contender"] == "softmax"}
    rows = []
    for r in best:
        cells = [r["model"], f"{r['size'][0]}×{r['size'][1]} × {r['batch']}", r["task"], CONTENDERS[r["contender"]][0]]
        if r["timing"] is None:
            rows.append([*cells, r["error"], *[""] * 5])
            continue
        peer, timing = softmax.get(_row(r), {}), r["timing"]
        rows.append([
            *cells,
            r["mode"],
            f"{timing['median'] * 1e3:.2f}",
            f"{(timing['high'] - timing['low']) / timing['median']:.1%}",
            _ratio(r["images_per_second"], peer.get("images_per_second")),
            "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}",
            _ratio(r["peak_bytes"], peer.get("peak_bytes")),
        ])  # fmt: skip
    header = [
        "model", "size × batch", "task", "contender", "best mode", "ms", "spread", "speed ÷ softmax", "GiB",
        "GiB ÷ softmax",
    ]  # fmt: skip
    return table(header, rows)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else ""


def draw_dense(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Two panels side by side: milliseconds an image and peak memory, a group of bars a model and task."""
    from matplotlib.figure import Figure

    best = [r for r in fastest(results, _row) if r["timing"] is not None]
    if not best:
        raise ValueError("nothing to draw: no measurement succeeded")
    groups = list(dict.fromkeys(_row(r) for r in best))
    shown = [contender for contender in CONTENDERS if any(r["contender"] == contender for r in best)]
    figure = Figure(figsize=(11, 1.4 + 0.35 * len(groups) * len(shown)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    measures: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("milliseconds an image", lambda r: 1e3 / r["images_per_second"]),
        ("peak memory, GiB", lambda r: (r["peak_bytes"] or 0) / 2**30),
    ]
    height = 0.8 / len(shown)
    for axes, (label, value) in zip(panels, measures, strict=True):
        for number, contender in enumerate(shown):
            of_group = {_row(r): value(r) for r in best if r["contender"] == contender}
            places = [i + (number - (len(shown) - 1) / 2) * height for i in range(len(groups))]
            bars = axes.barh(places, [of_group.get(g, 0) for g in groups], height, label=CONTENDERS[contender][0])
            axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        axes.set_xlabel(label)
        axes.margins(x=0.12)  # room for the figures beside the bars
        axes.grid(axis="x", alpha=0.3)
    names = [f"{model}\n{task}, {batch} × {size[0]}×{size[1]}" for model, size, batch, task in groups]
    panels[0].set_yticks(range(len(groups)), names)
    panels[0].invert_yaxis()  # the first on top
    panels[1].legend()
    figure.savefig(path, dpi=150)
