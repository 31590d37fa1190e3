"""Folders of finished runs with given numbers, as `python -m study report` reads them."""

import functools
import json
from pathlib import Path
from typing import Any

from inline_attention.training import settings
from study.grid import Run
from study.measures import CONFUSED_AT

LINEAR, SOFTMAX = [40.0, 40.4, 40.2], [43.5, 43.6, 43.4]


@functools.cache
def config_text(run: Run, changes: tuple[str, ...]) -> str:
    """Of config.yaml. YAML is slow, and the tests write the same runs again and again."""
    return settings.to_yaml(run.config(extra=changes))


def write_runs(
    out: Path,
    accuracies: dict[str, list[float]],
    *,
    epochs: int = 60,
    analyses: dict[str, dict[str, Any]] | None = None,
    changes: tuple[str, ...] = (),
) -> None:
    for row, values in accuracies.items():
        for seed, value in enumerate(values):
            run = Run("tiny_imagenet", row, epochs, seed, 4)
            folder = out / run.name
            folder.mkdir(parents=True)
            summary = {"val_top1": value, "best_top1": value + 0.1, "seconds": 10.0}
            record = {"kind": "eval", "epoch": epochs, "update": 1, "val_top1": value, "val_images": 5000}
            start = {"inline-attention": "1 (abc)", "device": "cpu", "cpu": "a cpu"}
            (folder / "summary.json").write_text(json.dumps(summary))
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            (folder / "environment.json").write_text(json.dumps([start]))
            (folder / "config.yaml").write_text(config_text(run, changes))
            if analyses and row in analyses:
                (folder / "analysis.json").write_text(json.dumps(analyses[row]))


def analysis(
    *,
    strict: float = 1e-6,
    loose: float = 1e-5,
    layers: tuple[float, ...] = (1.0, 1.0),
    local: float,
    random: float,
    without_residual: float = 30.0,
    whole: float = 50.0,
) -> dict[str, Any]:
    """Of a model with a local residual; `local` and `random` are the shares of top-1 that masks of 49 tokens cost."""

    def outcome(what: str, taps: str, top1: float) -> dict[str, Any]:
        shown = {"what": what, "tokens": 0 if what == "none" else 49, "local_terms": taps}
        lost = {"lost": 0.5 - top1, "lost_interval": [0.4 - top1, 0.6 - top1]}
        return {**shown, **lost, "top1": top1, "agreement": 0.5 + top1}

    outcomes = [outcome("none", "none", 0.5), outcome("local", "kept", 0.5 - local), outcome("local", "zeroed", 0.1)]
    outcomes += [outcome("random", "kept", 0.5 - random), outcome("random", "zeroed", 0.4)]
    return {
        "images": 200,
        "confused": [
            {"share_of_pairs": share, "interval": [share / 2, 2 * share], "by_layer": [share], "tau": tau, "rho": rho}
            for (tau, rho), share in zip(CONFUSED_AT, (strict, strict, strict, loose), strict=True)
        ],
        "ablation": [
            {"title": title, "top1": whole - lost, "lost": lost, "lost_interval": [lost - 1, lost + 1]}
            for title, lost in (("the whole model", 0.0), ("without the residual", without_residual))
        ],
        "locality": {
            "by_layer": [0.1 * x for x in layers],
            "chance": [0.1] * len(layers),
            "mean_over_chance": 1.0,
            "mean_over_uniform": 1.1,
            "interval": [[0.09 * x for x in layers], [0.11 * x for x in layers]],
        },
        "rank": {"mean_effective": 3.0, "images": 10, "by_layer": [3.0]},
        "masking": {"images": 200, "outcomes": outcomes},
    }
