"""Learning rates: the published curves, from the published numbers alone."""

import math

import pytest
import timm.scheduler
import torch

from inline_attention.training.classification import Classification
from inline_attention.training.config import load_config
from inline_attention.training.schedule import Schedule

IMAGENET = 1_281_167
RANKS = 8
# batch per GPU, epochs, warm-up epochs, cool-down epochs; rates per 512 images: base, warm-up, minimum
PUBLISHED = {
    "inline_deit_tiny": (512, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_deit_small": (128, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_deit_base": (64, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_pvt_tiny": (128, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_pvt_small": (128, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_pvt_medium": (128, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_pvt_large": (64, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_swin_tiny": (128, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_swin_small": (128, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_swin_base": (64, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_cswin_tiny": (128, 300, 20, 10, 5e-4, 1e-6, 1e-5),
    "inline_cswin_small": (128, 300, 20, 10, 5e-4, 1e-6, 1e-5),
    "inline_cswin_base": (64, 300, 20, 10, 5e-4, 1e-6, 1e-5),
    "inline_swin_base_384": (32, 30, 5, 0, 2e-5, 2e-8, 2e-7),
    "inline_cswin_base_384": (32, 20, 0, 10, 5e-6, None, 5e-7),
}
# weight decay, clip, EMA decay per update on eight GPUs, drop path, input size
TRAINING = {
    "inline_deit_tiny": (0.05, 5.0, None, 0.1, 224),
    "inline_deit_small": (0.05, 5.0, None, 0.1, 288),
    "inline_deit_base": (0.05, 5.0, None, 0.1, 448),
    "inline_pvt_tiny": (0.05, None, None, 0.1, 224),
    "inline_pvt_small": (0.05, None, None, 0.1, 224),
    "inline_pvt_medium": (0.05, 1.0, None, 0.3, 224),
    "inline_pvt_large": (0.05, 1.0, None, 0.3, 224),
    "inline_swin_tiny": (0.05, 5.0, None, 0.2, 224),
    "inline_swin_small": (0.05, 5.0, None, 0.3, 224),
    "inline_swin_base": (0.05, 5.0, None, 0.5, 224),
    "inline_cswin_tiny": (0.05, None, 0.9996 ** (1024 / 4096), 0.2, 224),
    "inline_cswin_small": (0.05, None, 0.9996 ** (1024 / 4096), 0.4, 224),
    "inline_cswin_base": (0.1, None, 0.9996 ** (512 / 4096), 0.5, 224),
    "inline_swin_base_384": (1e-8, 5.0, None, 0.5, 384),
    "inline_cswin_base_384": (1e-8, None, 0.9996 ** (256 / 4096), 0.7, 384),
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_rates(recipe: str) -> None:
    batch, epochs, warmup, cooldown, base, warmup_rate, minimum = PUBLISHED[recipe]
    scale = batch * RANKS / 512
    steps = IMAGENET // (batch * RANKS)
    schedule = load_config(recipe).build_schedule(steps_per_epoch=steps, world_size=RANKS)

    def cosine(epoch: float) -> float:
        return (minimum + (base - minimum) * 0.5 * (1 + math.cos(math.pi * epoch / epochs))) * scale

    table = {
        0: base * scale if warmup_rate is None else warmup_rate * scale,
        warmup * steps: cosine(warmup),
        epochs * steps // 2: cosine(epochs * steps // 2 / steps),
        epochs * steps - 1: cosine((epochs * steps - 1) / steps),
    }
    if warmup:
        # The last step of the warm-up is one step short of the peak.
        table[warmup * steps - 1] = scale * (base - (base - warmup_rate) / (warmup * steps))
    if cooldown:
        table[epochs * steps] = table[(epochs + cooldown) * steps - 1] = minimum * scale
    for step, rate in table.items():
        assert schedule.rate(step) == pytest.approx(rate, rel=1e-12), step
    assert schedule.total_steps == (epochs + cooldown) * steps


@pytest.mark.parametrize("recipe", TRAINING)
def test_published_training_settings(recipe: str) -> None:
    config = load_config(recipe)
    decay, clip, average, drop_path, size = TRAINING[recipe]
    assert config.optim.weight_decay == decay
    assert config.optim.clip_norm == clip
    assert config.ema.decay_per_step(config.global_batch(RANKS)) == average
    assert config.model.drop_path == drop_path
    assert Classification(config).config.data.img_size == size
    assert (config.optim.betas, config.optim.eps, config.optim.label_smoothing) == ((0.9, 0.999), 1e-8, 0.1)
    data = config.data
    assert data.auto_augment == "rand-m9-mstd0.5-inc1"
    assert (data.color_jitter, data.random_erase, data.mixup, data.cutmix, data.mixup_switch) == (
        0.4,
        0.25,
        0.8,
        1.0,
        0.5,
    )
    assert data.interpolation == "bicubic"
    assert data.eval_transform == ("resize" if recipe == "inline_swin_base_384" else "published")


@pytest.mark.parametrize("warmup", [0, 7])
def test_cosine_is_timms(warmup: int) -> None:
    schedule = Schedule("cosine", 0.3, 0.01, 0.02, warmup, 50, 5, drop_every=1, drop_factor=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=50, lr_min=0.02, warmup_t=warmup, warmup_lr_init=0.01, t_in_epochs=False
    )
    for step in range(55):
        theirs.step_update(step)
        assert schedule.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_step_schedule_is_timms_above_the_minimum() -> None:
    schedule = Schedule("step", 0.3, 0.01, 0.001, 5, 60, 0, drop_every=15, drop_factor=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = timm.scheduler.StepLRScheduler(
        optimizer, decay_t=15, decay_rate=0.1, warmup_t=5, warmup_lr_init=0.01, warmup_prefix=False, t_in_epochs=False
    )
    for step in range(60):
        theirs.step_update(step)
        assert schedule.rate(step) == pytest.approx(max(optimizer.param_groups[0]["lr"], 0.001), rel=1e-12)


def test_linear_schedule_goes_from_peak_to_minimum() -> None:
    schedule = Schedule("linear", 1.0, 0.0, 0.1, 10, 100, 20, drop_every=1, drop_factor=0.1)
    assert [schedule.rate(s) for s in (0, 5, 10, 55, 100, 119)] == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_poly_schedule_is_timms() -> None:
    schedule = Schedule("poly", 0.3, 0.01, 0.02, 7, 50, 5, drop_every=1, drop_factor=0.1, power=0.9)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = timm.scheduler.PolyLRScheduler(
        optimizer, t_initial=50, power=0.9, lr_min=0.02, warmup_t=7, warmup_lr_init=0.01, t_in_epochs=False
    )
    for step in range(55):
        theirs.step_update(step)
        assert schedule.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


@pytest.mark.parametrize(
    ("length", "warmup", "drops", "steps"),
    [
        ("schedule.epochs=12", "schedule.warmup_steps=500", "[8, 11]", (12000, 500, 8000, 11000)),
        ("schedule.epochs=12", "schedule.warmup_epochs=0.25", "[8, 11]", (12000, 250, 8000, 11000)),
        ("schedule.steps=9000", "schedule.warmup_steps=500", "[6000, 8000]", (9000, 500, 6000, 8000)),
    ],
)
def test_lengths_in_steps_or_epochs(length: str, warmup: str, drops: str, steps: tuple[int, int, int, int]) -> None:
    settings = [length, warmup, "schedule.kind=step", f"schedule.drop_at={drops}", "schedule.min_lr=0"]
    config = load_config("inline_deit_tiny", overrides=[*settings, "optim.rate_batch=512", "optim.lr=1"])
    schedule = config.build_schedule(steps_per_epoch=1000, world_size=1)
    total, warm, first, second = steps
    assert schedule.total_steps == total
    assert schedule.rate(warm - 1) < schedule.rate(warm) == schedule.rate(first - 1) == 1
    assert schedule.rate(first) == schedule.rate(second - 1) == pytest.approx(0.1)
    assert schedule.rate(second) == schedule.rate(total - 1) == pytest.approx(0.01)


def test_lengths_that_cannot_be() -> None:
    short = load_config("inline_deit_tiny", overrides=["schedule.steps=300", "schedule.warmup_steps=500"])
    with pytest.raises(ValueError, match="a warm-up of 500 updates in a run of 300"):
        short.build_schedule(steps_per_epoch=10, world_size=1)
    with pytest.raises(ValueError, match=r"schedule.drop_at=\[11.0, 8.0\]: expected ascending"):
        load_config("inline_deit_tiny", overrides=["schedule.drop_at=[11, 8]"])
    with pytest.raises(ValueError, match=r"schedule.steps=0: expected 1 or more"):
        load_config("inline_deit_tiny", overrides=["schedule.steps=0"])


def test_rates_grow_with_ranks_batch_and_accumulation() -> None:
    peaks = [
        load_config("inline_deit_tiny", overrides=overrides).build_schedule(steps_per_epoch=100, world_size=ranks).peak
        for ranks, overrides in [(1, []), (4, []), (1, ["optim.accumulate=4"]), (2, ["data.batch_size=1024"])]
    ]
    assert peaks == pytest.approx([5e-4, 2e-3, 2e-3, 2e-3])


def test_warm_up_may_fill_the_whole_run() -> None:
    for kind in ("cosine", "linear", "step"):
        schedule = Schedule(kind, 1.0, 0.0, 0.1, 10, 10, 0, drop_every=1, drop_factor=0.1)
        assert [schedule.rate(s) for s in (0, 9)] == pytest.approx([0.0, 0.9])


@pytest.mark.parametrize("batch", [1, 12, 64, 4096])
def test_fine_tuning_has_one_rate_at_every_batch(batch: int) -> None:
    config = load_config("finetune", overrides=[f"data.batch_size={batch}", "optim.lr=3e-4"])
    schedule = config.build_schedule(steps_per_epoch=10, world_size=4)
    assert schedule.peak == 3e-4
    assert schedule.rate(0) == config.schedule.warmup_lr
