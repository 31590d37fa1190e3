"""The configuration of a classification run: recipes, overrides, and values that cannot work."""

from pathlib import Path

import pytest
import yaml

from inline_attention.models.published import PUBLISHED
from inline_attention.tasks.classification.config import RECIPES, TrainConfig, load_config
from inline_attention.training import settings
from inline_attention.training.config import read_yaml, recipe_names


@pytest.mark.parametrize(
    "name",
    ["0123", "12:30", "1_000", "0x10", "1e3", "2024-01-01", "yes", "null", "~", ".5", "1.10", "a: b", "{x}", "#1"],
)
def test_names_stay_as_they_are_written(name: str, tmp_path: Path) -> None:
    """YAML reads these as numbers, dates, booleans or structures: 0123 as 83, 12:30 as 750."""
    assert load_config("inline_deit_tiny", overrides=[f"data.path={name}"]).data.path == name
    # Through config.yaml and back, and unquoted in a recipe where YAML's syntax allows it.
    config = load_config("inline_deit_tiny", flags={"data": {"path": name}})
    assert settings.update(TrainConfig(), read_yaml(settings.to_yaml(config), "config.yaml")).data.path == name
    if not set(name) & set("{#") and ": " not in name:
        recipe = tmp_path / "mine.yaml"
        recipe.write_text(f"data: {{path: {name}}}\n")
        assert load_config(str(recipe)).data.path == name


def test_merge_keys_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: &rates {lr: 1e-4, clip_norm: null}\nschedule: {epochs: 30}\n")
    config = load_config(str(recipe))
    assert (config.optim.lr, config.optim.clip_norm) == (1e-4, None)
    recipe.write_text("optim:\n  <<: {lr: 1e-4, betas: [0.8, 0.9]}\n  weight_decay: 0.1\n")
    config = load_config(str(recipe))
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay) == (1e-4, (0.8, 0.9), 0.1)


def test_yaml_and_back() -> None:
    config = load_config("inline_cswin_base", overrides=["model.kwargs.head_drop=0.1", "optim.betas=[0.9, 0.98]"])
    for values in (yaml.safe_load(settings.to_yaml(config)), read_yaml(settings.to_yaml(config), "config.yaml")):
        assert settings.update(TrainConfig(), values) == config


def test_there_is_a_recipe_for_every_published_model() -> None:
    published = [name for name in PUBLISHED if name.startswith("inline_")]
    assert set(recipe_names(RECIPES)) == {*published, "finetune", "quickstart"}
    for name in published:
        assert load_config(name).model.name == name


def test_recipes_hold_only_what_differs_from_the_defaults() -> None:
    defaults = settings.to_mapping(TrainConfig())
    root = Path(settings.__file__).parents[1] / RECIPES
    for name in recipe_names(RECIPES):
        for section, values in yaml.safe_load((root / f"{name}.yaml").read_text()).items():
            for key, value in values.items() if isinstance(values, dict) else ():
                same = settings.update(TrainConfig(), {section: {key: value}})
                assert settings.to_mapping(same) != defaults or key == "name", f"{name}: {section}.{key} is the default"


def test_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown recipe 'inline_diet_tiny'; did you mean inline_deit_tiny.*quickstart"
    ):
        load_config("inline_diet_tiny")


def test_own_recipe_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("optim: {lr: 1e-4}\nschedule: {epochs: 30}\n")
    config = load_config(str(path), overrides=["schedule.epochs=40"])
    assert (config.recipe, config.optim.lr, config.schedule.epochs) == ("mine", 1e-4, 40)
    path.write_text("optim: {learning_rate: 1e-4}\n")
    with pytest.raises(ValueError, match=r"unknown setting optim.learning_rate"):
        load_config(str(path))
    path.write_text("- optim\n")
    with pytest.raises(ValueError, match=r"mine.yaml: expected `section"):
        load_config(str(path))
    for text in ("optim: {lr: [}\n", "[" * 5000):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"mine.yaml is not YAML"):
            load_config(str(path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.epochs=0", "schedule.epochs=0"),
        ("schedule.epochs=10", r"schedule.warmup_epochs=20 exceeds schedule.epochs=10"),
        ("optim.lr=-1", "optim.lr=-1.0: expected a positive rate"),
        ("optim.accumulate=0", "optim.accumulate=0"),
        ("optim.clip_norm=0", "or null for no clipping"),
        ("optim.layer_decay=1.5", "optim.layer_decay=1.5"),
        ("model.drop_path=1", r"model.drop_path=1.0: expected a rate in \[0, 1\)"),
        ("checkpoint.keep=0", "checkpoint.keep=0"),
        ("log.every_steps=0", "log.every_steps=0"),
        ("run.strategy=zero", "run.strategy=zero: expected one of ddp, fsdp"),
        ("data.batch_size=0", "data.batch_size is 0"),
        ("optim.lr=nan", "optim.lr=nan: expected a finite number"),
        ("optim.lr=inf", "optim.lr=inf: expected a finite number"),
        ("optim.rate_batch=0", "optim.rate_batch=0: expected 1 or more"),
        ("optim.weight_decay=-1", "optim.weight_decay=-1.0: expected 0 or more"),
        ("optim.betas=[0.9, 1]", r"optim.betas=\[0.9, 1.0\]: expected 2 numbers in \[0, 1\)"),
        ("optim.eps=0", "optim.eps=0.0: expected a positive number"),
        ("optim.label_smoothing=1", "optim.label_smoothing=1.0: expected a share"),
        ("optim.loss=mse", "optim.loss=mse: expected one of cross_entropy, bce"),
        ("optim.head_rate=0", "optim.head_rate=0.0: expected a positive factor"),
        ("schedule.early_stop=0", "schedule.early_stop=0: expected 1 or more, or null"),
        ("schedule.patience=0", "schedule.patience=0: expected 1 or more"),
        ("schedule.falling_share=2", r"schedule.falling_share=2.0: expected a share in \[0, 1\]"),
        ("ema.warmup=true", "ema.warmup=True: expected false without ema.decay"),
        ("data.val_share=0.9", "data.val_share is 0.9; expected a share above 0, at most 0.5"),
        ("schedule.warmup_epochs=-1", "schedule.warmup_epochs=-1.0: expected 0 or more"),
        ("schedule.warmup_steps=-1", "schedule.warmup_steps=-1: expected 0 or more"),
        ("schedule.cooldown_epochs=-1", "schedule.cooldown_epochs=-1: expected 0 or more"),
        ("schedule.min_lr=-1", "schedule.min_lr=-1.0: expected 0 or more"),
        ("schedule.drop_epochs=0", "schedule.drop_epochs=0.0: expected a positive number"),
        ("schedule.drop_factor=0", r"schedule.drop_factor=0.0: expected a factor in \(0, 1\]"),
        ("ema.decay=1", r"ema.decay=1.0: expected a factor in \[0, 1\), or null"),
        ("ema.batch=0", "ema.batch=0: expected 1 or more, or null"),
        ("model.kwargs.num_classes=5", "model.kwargs.num_classes=5: the data's classes are counted instead"),
        ("model.kwargs.img_size=64", "model.kwargs.img_size=64: set data.img_size instead"),
        ("seed=-1", r"seed=-1: expected a number from 0"),
        (f"seed={2**63}", r"expected a number from 0 to 2\^63 - 1"),
    ],
)
def test_values_that_cannot_work_are_refused_before_the_run_starts(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("inline_deit_tiny", overrides=[override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.name=lamb", r"run.strategy=fsdp shards adamw only, not optim.name=lamb: use ddp"),
        ("run.channels_last=true", r"run.channels_last=true: run.strategy=fsdp cannot shard this layout: use ddp"),
    ],
)
def test_what_cannot_be_sharded(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("inline_deit_tiny", overrides=[override, "run.strategy=fsdp"])
