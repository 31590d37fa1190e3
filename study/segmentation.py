"""Four backbones of the group `backbones`, fine-tuned under segmentation heads on CamVid, three seeds each.

Each run is an ordinary `inline segment train` of the recipe `camvid_fpn` or `camvid_upernet`. The runs are made like
those of the grid: several at a time, until the time is up, and continued in the next call.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inline_attention.environment import describe_environment
from inline_attention.printing import table, write_json
from inline_attention.training.report import SUMMARY
from study import grid
from study.grid import BACKBONES, MAIN_EPOCHS, SEEDS
from study.intervals import Effect, paired
from study.measures import weights_file
from study.runner import GridRunner, is_finished

DATASET, RESULTS = "camvid", "segmentation.json"
RECIPES = {model: "camvid_fpn" if "pvt" in model else "camvid_upernet" for model in BACKBONES}
PAIRS = (("inline_pvt_tiny", "softmax_pvt_tiny"), ("inline_swin_tiny", "softmax_swin_tiny"))


@dataclass(frozen=True)
class Run(grid.Run):
    """The fine-tuning of one backbone. `row` is its model; the recipe has the number of updates."""

    backbones: Path = Path("runs/study")  # the --output of `train`

    @property
    def name(self) -> str:
        return f"{self.row}-s{self.seed}"

    @property
    def model(self) -> str:
        return f"{DATASET}-{self.row}"

    @property
    def weights(self) -> Path:
        """Of the backbone, which has one seed."""
        return weights_file(self.backbones / grid.Run("tiny_imagenet", self.row, MAIN_EPOCHS, 0, 4).name)

    def arguments(self, path: str, out: Path, *, extra: Sequence[str] = (), recipe: str | Path = "") -> list[str]:
        where = ["--data", path, "--seed", str(self.seed), "--output", str(out / self.name), "--resume", "auto"]
        settings = [f"model.name={self.row}", f"model.weights={self.weights}", *extra]
        return ["segment", "train", RECIPES[self.row], *where, *settings]


class Runner(GridRunner):
    def _check_data(self) -> None:
        if not Path(self.paths[DATASET]).is_dir():
            raise ValueError(f"--data {self.paths[DATASET]}: there is no such folder")

    @staticmethod
    def _describe(summary: Mapping[str, Any]) -> str:
        return f"mIoU {summary['val_miou']:.2f}%"


def build_runs(backbones: Path, models: Sequence[str] | None = None) -> list[Run]:
    """All models of a seed before the next seed."""
    if unknown := sorted(set(models or ()) - set(RECIPES)):
        raise ValueError(f"there is no backbone {', '.join(unknown)}; expected some of {', '.join(RECIPES)}")
    return [
        Run(DATASET, model, 0, seed, 0, backbones)
        for seed in SEEDS
        for model in RECIPES
        if not models or model in models
    ]


def check_backbones(runs: Sequence[Run]) -> None:
    """ValueError if the weights of a backbone are missing."""
    if missing := sorted({str(run.weights) for run in runs if not run.weights.exists()}):
        raise ValueError(
            f"{', '.join(missing)}: no such file; `python -m study train --groups backbones` trains the backbones"
        )


def write_results(out: Path) -> str:
    """Write segmentation.json. Returns its tables as Markdown: mIoU of each model, and differences paired by seed."""
    found = {model: _summaries(out, model) for model in RECIPES}
    miou = {model: {seed: s["val_miou"] for seed, s in by_seed.items()} for model, by_seed in found.items()}
    effects = {f"{a} − {b}": paired(miou[a], miou[b]) for a, b in PAIRS}
    rows = [
        {"model": model, "recipe": RECIPES[model], "seeds": list(by_seed),
         **{key: [s[f"val_{key}"] for s in by_seed.values()] for key in ("miou", "macc")},
         "seconds": [s["seconds"] for s in by_seed.values()]}
        for model, by_seed in found.items()
        if by_seed
    ]  # fmt: skip
    differences = {name: effect._asdict() for name, effect in effects.items() if effect is not None}
    write_json(out / RESULTS, {"environment": describe_environment(), "rows": rows, "differences": differences})
    lines = [
        [str(row["model"]), str(row["recipe"]), str(len(row["seeds"])), _spread(row["miou"]), _spread(row["macc"])]
        for row in rows
    ]
    text = table(["backbone", "recipe", "seeds", "mIoU (%)", "mAcc (%)"], lines)
    compared = [[name, *_cells(effect)] for name, effect in effects.items() if effect is not None]
    return f"{text}\n\n{table(['mIoU', 'points, 95 % interval', 'seeds'], compared)}" if compared else text


def _summaries(out: Path, model: str) -> dict[int, dict[str, Any]]:
    """Of the finished runs, by seed."""
    folders = {run.seed: out / run.name for run in build_runs(Path(), [model])}
    return {seed: json.loads((folder / SUMMARY).read_text()) for seed, folder in folders.items() if is_finished(folder)}


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _cells(effect: Effect) -> list[str]:
    return [str(effect), str(effect.seeds)]
