"""The grid of `python -m study train`: models, data, lengths and seeds.

All DeiT rows have the same width, depth and number of parameters. If an attention has parameters of its own (the
kernel generator of the local residual, the positions of focused attention), its MLPs are smaller by as many.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from inline_attention.models.deit import STUDY
from inline_attention.tasks.classification.config import TrainConfig, load_config

RECIPE = Path(__file__).with_name("study.yaml")
RECIPE_NAME = "study/study.yaml"  # in printed commands, which run from the checkout
DEIT = {name: STUDY[name] for name in ("embed_dim", "depth", "num_heads")}
SWIN = {"embed_dim": 64, "depths": [2, 2, 2], "num_heads": [2, 4, 8]}
PLAIN, WITH_RESIDUAL = 4.5, 3.5  # MLP ratios that give the DeiT rows the same number of parameters
SWIN_PLAIN, SWIN_WITH_RESIDUAL = 4.35, 3.5  # the same for the Swin rows


@dataclass(frozen=True)
class Row:
    """One row of a table: a model and its arguments."""

    title: str
    kwargs: Mapping[str, Any]  # of create_model
    model: str = "inline_deit_tiny"
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of its training that differ from the recipe

    @property
    def is_deit(self) -> bool:
        return "deit" in self.model


@dataclass(frozen=True)
class Dataset:
    """How a data set is used. The command line says where its images are."""

    title: str
    settings: Mapping[str, Any]
    num_classes: int
    patches: tuple[int, ...]
    deit: Mapping[str, Any] = field(default_factory=lambda: DEIT)
    path: str | None = None  # None: the command line must give it
    is_evidence: bool = True  # False: only for trying the study out; it gives no verdicts

    def tokens(self, patch: int) -> int:
        """The number of tokens of a DeiT, with its class token."""
        return (self.settings["data.img_size"] // patch) ** 2 + 1


DATASETS = {
    "tiny_imagenet": Dataset("Tiny ImageNet, 100 classes, 64 px", {"data.img_size": 64}, 100, patches=(4,)),
    # It has a third of the images. Half the batch gives enough updates.
    "imagenette": Dataset(
        "Imagenette, 10 classes, 128 px", {"data.img_size": 128, "data.batch_size": 128}, 10, patches=(4, 8, 16)
    ),
    # Tries the whole study in a minute or two, on the embedded digits.
    "digits": Dataset(
        "digits, 10 classes, 8 px",
        {"data.img_size": 8, "data.in_chans": 1, "data.batch_size": 64, "data.hflip": 0.0, "data.workers": 0,
         "log.every_steps": 21, "optim.lr": 1.6e-2, "run.compile": False},
        10,
        patches=(2,),
        deit={"embed_dim": 32, "depth": 2, "num_heads": 2},
        path="digits",
        is_evidence=False,
    ),
}  # fmt: skip


def _deit(title: str, *, mlp_ratio: float = PLAIN, **kwargs: Any) -> Row:
    return Row(title, {**kwargs, "mlp_ratio": mlp_ratio})


def _swin(title: str, **kwargs: Any) -> Row:
    ratio = SWIN_WITH_RESIDUAL if kwargs["local_residual"] else SWIN_PLAIN
    return Row(title, {**SWIN, **kwargs, "attention": "inline", "mlp_ratio": ratio}, model="inline_swin_tiny")


MAIN = {
    "softmax": _deit("softmax", attention="softmax"),
    "linear": _deit("linear (ReLU)", attention="linear", local_residual=False),
    "inline_plain": _deit("InLine without residual", attention="inline", local_residual=False),
    "linear_residual": _deit(
        "linear (ReLU) with residual", attention="linear", local_residual=True, mlp_ratio=WITH_RESIDUAL
    ),
    "inline": _deit("InLine (with residual)", attention="inline", local_residual=True, mlp_ratio=WITH_RESIDUAL),
}
PHI = {
    "identity": "identity", "relu": "ReLU", "leaky_relu": "LeakyReLU", "exp": "exp", "relu_affine": "ReLU(A·x + b)",
}  # fmt: skip
# The feature maps of the main rows
_OWN_MAPS = {("softmax", "identity"): "softmax", ("linear", "relu"): "linear", ("inline", "identity"): "inline_plain"}


def feature_map_row(attention: str, name: str) -> str:
    """The row of softmax, linear or InLine attention with this feature map and without residual"""
    return _OWN_MAPS.get((attention, name), f"{attention}_{name}")


FEATURE_MAPS = {
    row: _deit(
        f"{'InLine' if attention == 'inline' else attention} without residual, φ = {title}",
        attention=attention, feature_map=name, local_residual=False,
        # The learned map has d² + d parameters a head, shared by q and k.
        mlp_ratio=PLAIN - 0.1 if name == "relu_affine" else PLAIN,
    )
    for attention in ("linear", "inline")
    for name, title in PHI.items()
    if (row := feature_map_row(attention, name)) not in MAIN
}  # fmt: skip
FEATURE_MAPS["softmax_relu"] = _deit("softmax after ReLU on q and k", attention="mapped_softmax", feature_map="relu")
# Feature maps that train well in both attentions.
SHARED_MAPS = ("relu", "relu_affine")


def shared_map_row(attention: str, name: str, *, residual: bool) -> str:
    """The row of linear or InLine attention with this feature map and with residual."""
    if not residual:
        return feature_map_row(attention, name)
    return "linear_residual" if (attention, name) == ("linear", "relu") else f"{attention}_{name}_residual"


WITH_SHARED_MAP = {
    row: _deit(
        f"{'InLine' if attention == 'inline' else attention} with residual, φ = {PHI[name]}",
        attention=attention, feature_map=name, local_residual=True,
        mlp_ratio=WITH_RESIDUAL - 0.1 if name == "relu_affine" else WITH_RESIDUAL,
    )
    for attention in ("linear", "inline")
    for name in SHARED_MAPS
    if (row := shared_map_row(attention, name, residual=True)) not in MAIN
}  # fmt: skip
WINDOW_SIZES = (2, 4, 8, 16)
WINDOWS = {
    f"swin_window{window}{'_residual' if residual else ''}": _swin(
        f"InLine-Swin, window {'whole map' if window == 16 else window}{' + residual' if residual else ''}",
        window_size=window, local_residual=residual,
    )
    for window in WINDOW_SIZES
    for residual in (False, True)
}  # fmt: skip
WINDOW_ENDS = tuple(f"swin_window{size(WINDOW_SIZES)}_residual" for size in (min, max))
BASELINES = {
    "hydra": _deit("Hydra", attention="hydra"),
    "efficient": _deit("Efficient", attention="efficient"),
    "angular": _deit("Angular", attention="angular"),
    "enhanced": _deit("Enhanced", attention="enhanced", mlp_ratio=4.4),
    "focused": _deit("Focused", attention="focused", mlp_ratio=3.7),
}
# The newer members of the family and the strongest baseline, with MLP ratios (without, with residual).
_NEWER = {
    "mala": ("MALA", PLAIN, WITH_RESIDUAL), "rala": ("RALA", 4.0, 2.95), "polaformer": ("PolaFormer", 4.0, 2.95),
    "tangent": ("tangent", PLAIN, WITH_RESIDUAL), "focused": ("Focused", 3.7, 2.65),
}  # fmt: skip
FAMILY = {
    f"{attention}{'_residual' if residual else ''}": _deit(
        f"{title}{' with residual' if residual else ''}",
        attention=attention, local_residual=residual, mlp_ratio=ratios[residual],
    )
    for attention, (title, *ratios) in _NEWER.items()
    for residual in (False, True)
    if residual or attention != "focused"
}  # fmt: skip
FAMILY["softmax_residual"] = _deit("softmax with residual", attention="local_softmax", mlp_ratio=WITH_RESIDUAL)
DEEP = {
    f"{name}_deep": Row(f"{MAIN[name].title}, twice as deep", {**MAIN[name].kwargs, "depth": 2 * DEIT["depth"]})
    for name in ("softmax", "linear", "inline")
}
RATES = {
    f"{name}_{factor}_rate": replace(
        MAIN[name], title=f"{MAIN[name].title}, {factor} the rate", settings={"optim.lr": rate}
    )
    for name in ("linear", "linear_residual", "inline")
    for factor, rate in (("half", 1e-3), ("twice", 4e-3))  # of the recipe's 2e-3
}
# A learned gain per head, started as in the published models and larger. At the start, rows of InLine attention are
# about eight times nearer to uniform than those of linear attention.
LARGER_START = 8.0
GAINS = {
    "inline_gain": replace(MAIN["inline"], title="InLine with residual, learned gain",
                           kwargs={**MAIN["inline"].kwargs, "gain": True}),
    "inline_larger_start": replace(MAIN["inline"], title="InLine with residual, learned gain from 8",
                                   kwargs={**MAIN["inline"].kwargs, "gain": LARGER_START}),
}  # fmt: skip
# The published augmentation and clipping. RandAugment and erasing work on whole batches, on the GPU like the rest.
PUBLISHED_SETTINGS = {
    "data.auto_augment": "rand-m9-mstd0.5-inc1", "data.random_erase": 0.25, "optim.clip_norm": 5.0,
}  # fmt: skip
PUBLISHED = {
    f"{name}_published": replace(
        row, title=f"{row.title}, published augmentation", settings={**row.settings, **PUBLISHED_SETTINGS}
    )
    for name, row in {**MAIN, **WITH_SHARED_MAP}.items()
    if name in ("softmax", "linear_residual", "inline", "inline_relu_residual")
}
DATA_SHARES = {"quarter": 0.25, "half": 0.5}  # of the training images; all of them: the main rows
SMALLER_DATA = {
    f"{name}_{part}_data": replace(
        MAIN[name], title=f"{MAIN[name].title}, {100 * share:g} % of the images", settings={"data.train_share": share}
    )
    for part, share in DATA_SHARES.items()
    for name in ("softmax", "linear", "linear_residual", "inline")
}
# Backbones with maps at several strides, which are trained here and then fine-tuned under segmentation heads.
BACKBONES = {
    model: Row(f"{title}-T", {}, model=model)
    for model, title in (
        ("inline_pvt_tiny", "InLine-PVT"), ("softmax_pvt_tiny", "PVT"),
        ("inline_swin_tiny", "InLine-Swin"), ("softmax_swin_tiny", "Swin"),
    )
}  # fmt: skip
_SETS = (
    MAIN, FEATURE_MAPS, WITH_SHARED_MAP, BASELINES, FAMILY, WINDOWS, DEEP, RATES, GAINS, PUBLISHED, SMALLER_DATA,
    BACKBONES,
)  # fmt: skip
ROWS = {name: row for rows in _SETS for name, row in rows.items()}
assert len(ROWS) == sum(map(len, _SETS))


@dataclass(frozen=True)
class Run:
    """One training run. Its folder has the same name."""

    dataset: str
    row: str
    epochs: int
    seed: int
    patch: int

    @property
    def name(self) -> str:
        return f"{self.dataset}-p{self.patch}-e{self.epochs}-{self.row}-s{self.seed}"

    @property
    def tokens(self) -> int:
        return DATASETS[self.dataset].tokens(self.patch)

    @property
    def model(self) -> str:
        """A name that all runs of the same model have: seeds, lengths and rates do not change what is compiled."""
        ours = ROWS[self.row]
        first = next(name for name, row in ROWS.items() if (row.model, row.kwargs) == (ours.model, ours.kwargs))
        return f"{self.dataset}-p{self.patch}-{first}"

    def overrides(self) -> list[str]:
        """Settings that differ from the recipe, as key=value"""
        row, dataset = ROWS[self.row], DATASETS[self.dataset]
        kwargs = {**dataset.deit, "patch_size": self.patch, **row.kwargs} if row.is_deit else dict(row.kwargs)
        values = {
            "model.name": row.model,
            "model.kwargs": kwargs,
            "schedule.epochs": self.epochs,
            "schedule.warmup_epochs": max(1, self.epochs / 20),
            **dataset.settings,
            **row.settings,
        }
        return [f"{key}={as_yaml(value)}" for key, value in values.items()]

    def arguments(
        self, path: str, out: Path, *, extra: Sequence[str] = (), recipe: str | Path = RECIPE_NAME
    ) -> list[str]:
        """Arguments of `inline` that start or continue the run."""
        where = ["--data", path, "--seed", str(self.seed), "--output", str(out / self.name), "--resume", "auto"]
        return ["train", str(recipe), *where, *self.overrides(), *extra]

    def config(self, *, extra: Iterable[str] = ()) -> TrainConfig:
        return load_config(str(RECIPE), overrides=[*self.overrides(), *extra], flags={"seed": self.seed})


_NAME = re.compile(r"(?P<dataset>\w+)-p(?P<patch>\d+)-e(?P<epochs>\d+)-(?P<row>\w+)-s(?P<seed>\d+)")


def parse_name(name: str) -> Run | None:
    """The run of that name. None: the grid has no such run."""
    match = _NAME.fullmatch(name)
    if match is None or match["dataset"] not in DATASETS or match["row"] not in ROWS:
        return None
    numbers = {key: int(match[key]) for key in ("patch", "epochs", "seed")}
    return Run(dataset=match["dataset"], row=match["row"], **numbers)


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["inline", *arguments])


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).removesuffix("\n...\n").strip()


PILOT_EPOCHS = (10, 20, 40)  # short runs first: they show how long the others will take
MAIN_EPOCHS = 40  # one of the pilot's lengths, so that its runs are the first seed
VARIANT_EPOCHS = 20  # one of the pilot's lengths, so that the main rows exist at it
TOKENS_EPOCHS = 30
LONG_EPOCHS = 120
PUBLISHED_EPOCHS = 300
CHECK_EPOCHS = 8
SEEDS = (0, 1, 2)
# {linear, InLine} × {ReLU, ReLU(A·x + b)} × {without, with residual}
SHARED_MAP_ROWS = tuple(
    shared_map_row(attention, name, residual=residual)
    for residual in (False, True)
    for name in SHARED_MAPS
    for attention in ("linear", "inline")
)
# One recipe for all: the leaderboard.
FAMILY_ROWS = (*MAIN, *BASELINES, *FAMILY)


def epochs_of(row: str, epochs: int) -> int:
    """The epochs of a row with as many updates as all images have in `epochs`: fewer images are seen more often."""
    return round(epochs / ROWS[row].settings.get("data.train_share", 1))


@dataclass(frozen=True)
class Group:
    """Runs that answer one question."""

    question: str
    rows: tuple[str, ...]
    epochs: tuple[int, ...]  # 0: the length of the main rows, which the command line can change
    seeds: tuple[int, ...] = (0,)
    dataset: str = "tiny_imagenet"

    def runs(self, *, main_epochs: int = MAIN_EPOCHS) -> list[Run]:
        return [
            Run(self.dataset, row, epochs_of(row, epochs or main_epochs), seed, patch)
            for epochs in self.epochs
            for seed in self.seeds
            for patch in DATASETS[self.dataset].patches
            for row in self.rows
        ]


# In the order of training. The runs that decide verdicts come first.
GROUPS = {
    "pilot": Group("how long runs take, and the first seed", tuple(MAIN), PILOT_EPOCHS),
    "main": Group("the five main models, three seeds", tuple(MAIN), (0,), SEEDS),
    "shared_maps": Group("injectivity at equal φ", SHARED_MAP_ROWS, (0,), SEEDS),
    "gain": Group("does a learned gain or a larger start close the gap?", tuple(GAINS), (0,), SEEDS),
    "long": Group("the five main models for longer", tuple(MAIN), (LONG_EPOCHS,), SEEDS),
    "data_size": Group("do the gaps depend on the number of images?", tuple(SMALLER_DATA), (0,), SEEDS),
    "augmentation": Group(
        "does augmentation change the gap?", ("linear_residual_published", "inline_published"), (LONG_EPOCHS,), SEEDS
    ),
    "family": Group("every attention under one recipe: the leaderboard", FAMILY_ROWS, (0,), SEEDS),
    "feature_maps": Group(
        "other feature maps", ("softmax", "linear", "inline_plain", *FEATURE_MAPS), (VARIANT_EPOCHS,), SEEDS
    ),
    "window_ends": Group("the smallest window and the whole map, three seeds", WINDOW_ENDS, (VARIANT_EPOCHS,), SEEDS),
    "published": Group("published augmentation and clipping", tuple(PUBLISHED), (PUBLISHED_EPOCHS,), SEEDS[:2]),
    "backbones": Group("backbones for segmentation", tuple(BACKBONES), (0,)),
    "tokens": Group("the number of tokens", tuple(MAIN), (TOKENS_EPOCHS,), dataset="imagenette"),
    "baselines": Group("older linear attentions", tuple(BASELINES), (VARIANT_EPOCHS,)),
    "windows": Group("the size of the windows", tuple(WINDOWS), (VARIANT_EPOCHS,)),
    "deep": Group("twice the depth", tuple(DEEP), (VARIANT_EPOCHS,)),
    "rates": Group("other learning rates", tuple(RATES), (VARIANT_EPOCHS,)),
    "check": Group("the whole chain on digits", tuple(MAIN), (CHECK_EPOCHS,), SEEDS[:2], dataset="digits"),
}
DEFAULT_GROUPS = tuple(name for name in GROUPS if name != "check")


def build_runs(
    groups: Sequence[str] = DEFAULT_GROUPS, *, main_epochs: int = MAIN_EPOCHS, rows: Sequence[str] | None = None
) -> list[Run]:
    """The runs of these groups in the order of training, each once. `rows` selects some of their rows."""
    for name, known in ((set(groups), tuple(GROUPS)), (set(rows or ()), tuple(ROWS))):
        if unknown := sorted(name - set(known)):
            raise ValueError(f"there is no {', '.join(unknown)} in the grid; expected some of {', '.join(known)}")
    made = [run for group in groups for run in GROUPS[group].runs(main_epochs=main_epochs)]
    chosen = [run for run in dict.fromkeys(made) if rows is None or run.row in rows]
    if rows and not chosen:
        has = ", ".join(dict.fromkeys(run.row for run in made))
        raise ValueError(f"there is no {', '.join(rows)} in {', '.join(groups)}; expected some of {has}")
    return chosen
