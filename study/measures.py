"""Measurements on trained models: the paper's analyses, and speed on an idle device."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inline_attention.analysis import (
    ConfusionResult,
    MaskingResult,
    measure_confusion,
    measure_locality,
    measure_masking,
    measure_rank,
)
from inline_attention.analysis.report import to_plain
from inline_attention.bench.contenders import classification_loss
from inline_attention.bench.model import EAGER, Candidate, compare, inference_step, training_step
from inline_attention.bench.timing import Effort, Timing
from inline_attention.data import EvalLoader
from inline_attention.environment import describe_environment
from inline_attention.models import create_model
from inline_attention.training.files import write_atomically
from study.ablation import ablate, open_model
from study.grid import DATASETS, Run
from study.intervals import bootstrap
from study.results import ANALYSIS, SPEED, is_early, run_folders
from study.runner import is_finished

IMAGES = 1000  # evenly spaced in the validation split
BATCH = 20
MASKED_SIDES = (3, 5, 7)
# (τ, ρ), from strict to loose. The paper does not give its thresholds, so no single pair decides.
CONFUSED_AT = ((0.03, 0.3), (0.1, 0.3), (0.1, 1.0), (0.3, 1.0))
SPEED_BATCH = {"cuda": 256}  # by device; 16 elsewhere


def weights_file(folder: Path) -> Path:
    """The weights of the last epoch, which the accuracies in tables belong to."""
    return folder / "checkpoints" / "last.safetensors"


def analyse_runs(
    out: Path,
    *,
    paths: dict[str, str],
    device: torch.device,
    images: int = IMAGES,
    shipped: Mapping[Run, Path] | None = None,
    log: Callable[[str], None],
) -> None:
    """Write analysis.json for each finished run that has weights. Parts that it has already are kept.

    An interrupted analysis of another number of images, or of an early definition, begins again.

    shipped: runs without a folder, whose weights are in the package.
    """
    files = {run: weights_file(folder) for run, folder in run_folders(out) if is_finished(folder)}
    for run, weights in {**(shipped or {}), **files}.items():
        path = out / run.name / ANALYSIS
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        due = [part for part in PARTS if part not in found]
        if not due or not weights.exists():
            continue
        if run.dataset not in paths:
            raise ValueError(f"{run.name} needs its images to be analysed: give --data {run.dataset}=FOLDER")
        path.parent.mkdir(exist_ok=True)
        model, loader = open_model(
            None, str(weights), path=paths[run.dataset], device=device, images=images, batch_size=BATCH
        )
        if found.get("images") != images or is_early(found):
            found, due = {}, list(PARTS)
        found |= dict(images=images, commit=describe_environment()["inline-attention"], machine=machine_name(device))
        for part in due:
            log(f"analysing {run.name}: {part}")
            found[part] = to_plain(PARTS[part](model, loader))
            write_atomically(path, json.dumps(found).encode())


def _measure_confusion(model: nn.Module, loader: EvalLoader) -> list[dict[str, Any]]:
    result = measure_confusion(model, _images(loader))
    return [_confused(result, tau, rho) for tau, rho in CONFUSED_AT]


def _measure_locality(model: nn.Module, loader: EvalLoader) -> dict[str, Any]:
    result = measure_locality(model, _images(loader))
    return dict(result.summary(), by_layer=result.share, chance=result.chance, interval=bootstrap(result.by_image))


def _measure_ablation(model: nn.Module, loader: EvalLoader) -> list[dict[str, Any]]:
    return [row._asdict() for row in ablate(model, loader)]


def _measure_rank(model: nn.Module, loader: EvalLoader) -> dict[str, Any]:
    result = measure_rank(model, _images(loader))
    # Mean over heads, windows and layers, for each image
    by_image = np.mean([np.nanmean(layer.reshape(result.images, -1), axis=1) for layer in result.effective], axis=0)
    return dict(result.summary(), by_layer=result.means(result.effective), interval=bootstrap(by_image))


def _measure_masking(model: nn.Module, loader: EvalLoader) -> dict[str, Any]:
    sides = [s for s in MASKED_SIDES if s < _side(model, loader)] or [3]  # a window must not cover the whole map
    result = measure_masking(model, ((b.images, b.targets) for b in loader), sides=sides)
    return dict(outcomes=_masked(result), images=result.images)


# The paper's analyses and the ablation, with intervals over the images. Those that take the most time come last.
PARTS: dict[str, Callable[[nn.Module, EvalLoader], Any]] = {
    "locality": _measure_locality,
    "ablation": _measure_ablation,
    "rank": _measure_rank,
    "confused": _measure_confusion,
    "masking": _measure_masking,
}


def _confused(result: ConfusionResult, tau: float, rho: float) -> dict[str, Any]:
    by_layer = result.share_by_layer(tau, rho)
    images, pairs = len(result.by_image), result.pairs.sum()
    share = float(by_layer @ result.pairs / pairs)
    of_images = result.by_image[:, result.taus.index(tau), result.rhos.index(rho)] / (pairs / images)
    return dict(
        tau=tau, rho=rho, share_of_pairs=share, interval=bootstrap(of_images), by_layer=by_layer, images=images
    )  # fmt: skip


def _masked(result: MaskingResult) -> list[dict[str, Any]]:
    """Outcomes as plain values. `lost`: the loss of top-1 by the mask, with its interval, paired by image."""
    outcomes, plain = [], result.outcomes[0].correct
    for o in result.outcomes:
        values = dict(o.condition._asdict(), top1=o.top1, agreement=o.agreement, logit_change=o.logit_change)
        if plain is not None and o.correct is not None:
            lost = plain.astype(float) - o.correct
            values |= dict(lost=lost.mean(), lost_interval=bootstrap(lost))
        outcomes.append(values)
    return outcomes


def uniform_over_chance(locality: Mapping[str, Any]) -> float:
    """Attention of uniform weights 1/N to the neighbourhood, over chance (9/N). Borders make it less than 1."""
    return locality["mean_over_chance"] / locality["mean_over_uniform"]


def masking_drops(found: Mapping[str, Any], *, taps: str = "kept") -> dict[str, dict[int, float]]:
    """Loss of top-1 in points by the number of masked tokens, local and random.

    Args:
        taps: of the local residual on masked tokens: "kept" (only attention is masked) or "zeroed".
    """
    whole = next(outcome["top1"] for outcome in found["outcomes"] if outcome["what"] == "none")
    drops: dict[str, dict[int, float]] = {"local": {}, "random": {}}
    for outcome in found["outcomes"]:
        if outcome["what"] in drops and outcome["local_terms"] in ("none", taps):
            drops[outcome["what"]][outcome["tokens"]] = 100 * (whole - outcome["top1"])
    return drops


def _images(loader: EvalLoader) -> Iterator[Tensor]:
    return (batch.images for batch in loader)


def _side(model: nn.Module, loader: EvalLoader) -> int:
    """The tokens along the shorter side of the first map."""
    return min(loader.input_shape[1:]) // getattr(model, "patch_size", 4)  # Swin's patches are 4 pixels


def build_model(run: Run) -> nn.Module:
    """The model of a run, untrained."""
    config = run.config()
    options = dict(img_size=config.data.img_size, in_chans=config.data.in_chans, **config.model.kwargs)
    return create_model(config.model.name, num_classes=DATASETS[run.dataset].num_classes, **options)


def time_runs(out: Path, runs: list[Run], *, device: torch.device, effort: Effort, log: Callable[[str], None]) -> None:
    """Add models to speed.json. All of its models must be timed on the same machine."""
    path = out / SPEED
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    machine = machine_name(device)
    due = [run for run in runs if speed_name(run.dataset, run.patch, run.row) not in known.get("rows", {})]
    if not due:
        return
    if known and known["machine"] != machine:
        log(f"{len(due)} models are not timed: the others were on another machine, {known['machine']}")
        return
    found = measure_speed(due, device=device, effort=effort, log=log)
    found["rows"] = {**known.get("rows", {}), **found["rows"]}
    found["commits"] = sorted({*known.get("commits", ()), found["environment"]["inline-attention"]})
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())


def machine_name(device: torch.device) -> str:
    return describe_environment()["gpu 0" if device.type == "cuda" else "cpu"]


def measure_speed(
    runs: list[Run], *, device: torch.device, effort: Effort, log: Callable[[str], None]
) -> dict[str, Any]:
    """Images a second of each model, training and inference, all timed in turn: {"machine", "rows": {name: …}}

    On a GPU, models are compiled with CUDA graphs, as in the training loop. Models are built from the settings of the
    runs. A name is that of the run without epochs and seed.
    """
    batch = SPEED_BATCH.get(device.type, 16)
    mode = "reduce-overhead" if device.type == "cuda" else EAGER
    wide = device.type == "cuda" and torch.cuda.is_bf16_supported()
    autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16, enabled=wide)
    rows: dict[str, dict[str, Any]] = {}
    sizes = sorted({(run.dataset, run.patch) for run in runs})
    for dataset, patch in sizes:
        chosen = {run.row: run for run in runs if (run.dataset, run.patch) == (dataset, patch)}
        data = next(iter(chosen.values())).config().data
        images = torch.randn(batch, data.in_chans, *data.size, device=device)
        loss_of = classification_loss(images)
        for training in (False, True):
            log(f"timing {'training' if training else 'inference'}, {dataset}, patch {patch}")
            candidates = {}
            for row, run in chosen.items():
                step = partial(training_step, loss_of=loss_of, autocast=autocast)
                infer = partial(inference_step, images=images, autocast=autocast)
                candidates[row] = Candidate(partial(build_model, run), mode, step if training else infer, training)
            for row, found in compare(candidates, device=device, effort=effort).items():
                key = "train" if training else "infer"
                entry = rows.setdefault(speed_name(dataset, patch, row), {"batch": batch})
                entry[key] = batch / found.timing.median if isinstance(found.timing, Timing) else None
                entry[f"{key}_peak_bytes"] = found.peak_bytes
    return {
        "machine": machine_name(device),
        "mode": mode,
        "precision": "bf16" if wide else "fp32",
        "environment": describe_environment(),
        "rows": to_plain(rows),
    }


def speed_name(dataset: str, patch: int, row: str) -> str:
    return f"{dataset}-p{patch}-{row}"
