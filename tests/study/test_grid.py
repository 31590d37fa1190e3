"""The grid itself: equal parameters, commands that are valid, names that can be read back."""

import re
from pathlib import Path

import pytest

from inline_attention.data.batch_augment import BatchAugment
from inline_attention.tasks.classification.config import TrainConfig
from study.grid import (
    BACKBONES,
    BASELINES,
    DEEP,
    DEFAULT_GROUPS,
    GROUPS,
    MAIN,
    MAIN_EPOCHS,
    PILOT_EPOCHS,
    ROWS,
    VARIANT_EPOCHS,
    WINDOWS,
    Run,
    build_runs,
    parse_name,
)
from study.measures import build_model
from study.report import count_parameters


def parameters(row: str) -> int:
    return count_parameters(Run("tiny_imagenet", row, 30, 0, 4))


@pytest.mark.parametrize("row", [row for row in ROWS if row not in WINDOWS | DEEP | BACKBONES])
def test_deit_rows_have_equal_parameters(row: str) -> None:
    assert parameters(row) == pytest.approx(parameters("softmax"), rel=0.01)


@pytest.mark.parametrize("row", WINDOWS)
def test_swin_rows_have_equal_parameters(row: str) -> None:
    assert parameters(row) == pytest.approx(parameters("swin_window2"), rel=0.01)


@pytest.mark.parametrize("row", DEEP)
def test_deep_rows_have_equal_parameters(row: str) -> None:
    assert parameters(row) == pytest.approx(parameters("softmax_deep"), rel=0.01)
    assert parameters(row) > 1.9 * parameters("softmax")


def test_three_models_fit_15_megabytes_in_half_precision() -> None:
    assert sum(2 * parameters(row) for row in ("softmax", "linear", "inline")) < 14.8e6


def test_every_run_is_a_valid_command_and_has_its_own_name() -> None:
    runs = build_runs(GROUPS)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        config = run.config()
        assert config.schedule.epochs == run.epochs
        assert config.data.augment_on_device
        assert config.run.compile == (run.dataset != "digits")
        assert parse_name(run.name) == run


def test_the_page_counts_the_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "study.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|$", text, flags=re.MULTILINE)
    assert {name: int(runs) for name, runs in shown} == {name: len(build_runs([name])) for name in DEFAULT_GROUPS}


def test_the_main_rows_have_three_seeds() -> None:
    runs = build_runs(["main"], main_epochs=40)
    assert {(run.row, run.seed) for run in runs} == {(row, seed) for row in MAIN for seed in range(3)}
    assert {run.epochs for run in runs} == {40}


def test_shared_maps_cross_attention_map_and_residual() -> None:
    runs = build_runs(["shared_maps"])
    cells = {}
    for run in runs:
        model = run.config().model.kwargs
        cell = (model["attention"], model.get("feature_map", "relu"), model["local_residual"])
        cells.setdefault(cell, []).append(run.seed)
    assert cells == {
        (attention, name, residual): [0, 1, 2]
        for attention in ("linear", "inline")
        for name in ("relu", "relu_affine")
        for residual in (False, True)
    }
    assert {run.epochs for run in runs} == {MAIN_EPOCHS}
    assert len(set(build_runs(["shared_maps"])) - set(build_runs(["main"]))) == 18


def test_gains_are_learned_from_one_and_from_more() -> None:
    kwargs = {run.row: run.config().model.kwargs for run in build_runs(["gain"])}
    assert {row: options["gain"] for row, options in kwargs.items()} == {
        "inline_gain": True,
        "inline_larger_start": 8.0,
    }


def test_the_leaderboard_has_each_attention_with_and_without_residual() -> None:
    runs = build_runs(["family"])
    kinds = {run.row.removesuffix("_residual").removesuffix("_plain") for run in runs}
    main, older = {"softmax", "linear", "inline"}, BASELINES.keys()
    assert kinds == {*main, *older, "mala", "rala", "polaformer", "tangent"}
    for kind in kinds - {"inline"} - (older - {"focused"}):
        rows = {run.row: {r.seed for r in runs if r.row == run.row} for run in runs if run.row.startswith(kind)}
        assert rows == {kind: {0, 1, 2}, f"{kind}_residual": {0, 1, 2}}
    for row in {run.row for run in runs}:
        model = build_model(Run("tiny_imagenet", row, 1, 0, 4))
        has_local = row.endswith("_residual") or row == "inline"
        assert all((block.attn.local is not None) == has_local for block in model.blocks), row


def test_smaller_data_has_as_many_updates() -> None:
    runs = build_runs(["data_size"])
    shares = {run.row: run.config().data.train_share for run in runs}
    assert set(shares.values()) == {0.25, 0.5}
    assert {run.epochs * shares[run.row] for run in runs} == {MAIN_EPOCHS}


def test_published_rows_have_the_published_augmentation() -> None:
    runs, published = build_runs(["published"]), TrainConfig()
    assert {(run.epochs, run.seed) for run in runs} == {(300, 0), (300, 1)}
    for run in runs:
        config = run.config()
        assert (config.data.auto_augment, config.data.random_erase, config.optim.clip_norm) == (
            published.data.auto_augment, published.data.random_erase, 5.0,
        )  # fmt: skip
        BatchAugment(config.data, num_samples=1, seed=0)  # whole batches can be augmented like this


def test_variants_and_main_rows_have_lengths_of_the_pilot() -> None:
    """Variants can then be compared with main rows of their length, and the pilot's runs are the first seed's."""
    assert {MAIN_EPOCHS, VARIANT_EPOCHS} <= set(PILOT_EPOCHS)


def test_a_run_of_two_groups_is_made_once() -> None:
    runs = build_runs(["pilot", "main"])
    assert len(runs) == len(set(runs)) == 15 + 15 - 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(groups=["mian"]), "there is no mian in the grid"),
        (dict(rows=["soft"]), "there is no soft in the grid"),
        (
            dict(groups=["rates"], rows=["hydra", "softmax"]),
            "there is no hydra, softmax in rates; expected some of linear_",
        ),
    ],
)
def test_unknown_names_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_runs(**arguments)
