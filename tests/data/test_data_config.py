import math
from dataclasses import asdict

import pytest
import yaml

from inline_attention.data import DataConfig, open_data, open_eval_data
from inline_attention.data.config import AUGMENTING, INTERPOLATIONS


def test_yaml_knows_every_value() -> None:
    config = DataConfig(img_size=[8, 16], mean=[0.5], std=[0.5], in_chans=1)
    assert DataConfig(**yaml.safe_load(yaml.safe_dump(asdict(config)))) == config
    assert config.size == (8, 16)


def test_published_defaults() -> None:
    config = DataConfig()
    assert config.auto_augment == "rand-m9-mstd0.5-inc1"
    assert (config.color_jitter, config.random_erase, config.hflip) == (0.4, 0.25, 0.5)
    assert (config.mixup, config.cutmix, config.mixup_switch, config.mixup_prob) == (0.8, 1.0, 0.5, 1.0)
    assert (config.interpolation, config.eval_transform) == ("bicubic", "published")
    assert config.statistics == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_greyscale_statistics() -> None:
    mean, std = DataConfig(in_chans=1).statistics
    assert mean == pytest.approx([0.449])
    assert std == pytest.approx([0.226])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"img_size": [8, 8, 8]},
            r"data\.img_size is \[8, 8, 8\]; expected a positive side, .*, or null",
        ),
        ({"img_size": 0}, r"data\.img_size is 0"),
        ({"in_chans": 4}, r"data\.in_chans is 4; expected 1 \(greyscale\) or 3"),
        ({"mean": [0.5]}, r"data\.mean is \[0\.5\]; expected 3 value"),
        ({"std": [0.5, 0.0, 0.5]}, r"data\.std is .* expected positive"),
        ({"interpolation": "cubic"}, r"data\.interpolation is 'cubic'; expected one of nearest"),
        ({"batch_size": 0}, r"data\.batch_size is 0"),
        ({"batch_size": 5}, r"a batch has 5 image\(s\), and mixup mixes pairs"),
        ({"workers": -1}, r"data\.workers is -1"),
        ({"scale": [1.0, 0.5]}, r"data\.scale is \[1\.0, 0\.5\]; expected \[low, high\]"),
        ({"hflip": 1.5}, r"data\.hflip is 1\.5; expected a probability"),
        ({"mixup": -1.0}, r"data\.mixup is -1\.0; expected 0 or more"),
        ({"eval_transform": "crop"}, r"data\.eval_transform is 'crop'; expected one of published, timm, resize"),
        ({"crop_pct": 0.0}, r"data\.crop_pct is 0\.0"),
        ({"max_broken": -0.1}, r"data\.max_broken is -0\.1"),
        ({"mixup": math.inf}, r"data\.mixup is inf; expected 0 or more, and finite"),
        ({"scale": [1.0, math.inf]}, r"data\.scale is \[1\.0, inf\]; expected \[low, high\]"),
        ({"mean": [math.nan] * 3}, r"data\.mean is \[nan, nan, nan\]; expected 3 value\(s\), finite"),
        (
            {"interpolation": "lanczos"},
            r"data\.interpolation is 'lanczos'; expected .* with data\.auto_augment",
        ),
    ],
)
def test_values_that_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(DataConfig(**{"img_size": 8, **options}))


def test_any_number_of_broken_images() -> None:
    assert DataConfig(max_broken=math.inf).max_broken_count(10) == 10
    assert DataConfig(max_broken=1e300).max_broken_count(10) == 10
    assert [DataConfig(max_broken=m).max_broken_count(150) for m in (0, 0.01, 0.5, 1, 7.9)] == [0, 2, 75, 1, 7]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_every_interpolation(interpolation: str) -> None:
    """Pillow rotates with three of them only, so that the others exclude RandAugment."""
    options = {} if interpolation in AUGMENTING else {"auto_augment": None}
    assert len(open_eval_data(DataConfig(img_size=8, workers=0, interpolation=interpolation)).class_names) == 10
    data = open_data(DataConfig(img_size=8, workers=0, interpolation=interpolation, max_broken=0, **options))
    assert next(data.train.epoch(0)).images.isfinite().all()
    assert next(iter(data.val)).images.isfinite().all()


def test_workers_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert DataConfig().resolved_workers(world_size=1) == 8
    assert DataConfig().resolved_workers(world_size=4) == 3
    assert DataConfig().resolved_workers(world_size=64) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # two machines with four ranks each
    assert DataConfig().resolved_workers(world_size=8) == 3
    assert DataConfig(workers=0).resolved_workers(world_size=1) == 0
