"""Learning rates as functions of the step, compared with timm's schedulers."""

import pytest
import timm.scheduler
import torch

from inline_attention.tasks.classification.config import load_config
from inline_attention.training.schedule import Schedule


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


def test_wsd_warms_up_stays_and_falls() -> None:
    schedule = Schedule("wsd", 1.0, 0.0, 0.1, 10, 100, 5, drop_every=1, drop_factor=0.1, falling_steps=20)
    rates = [schedule.rate(step) for step in (0, 5, 10, 79, 80, 90, 99, 100, 104)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.55, 0.145, 0.1, 0.1])
    config = load_config("inline_deit_tiny", overrides=["schedule.kind=wsd", "schedule.falling_share=0.25"])
    assert config.build_schedule(steps_per_epoch=10, world_size=1).falling_steps == 750


def test_plateau_drops_to_the_minimum() -> None:
    schedule = Schedule("plateau", 1.0, 0.0, 0.05, 10, 100, 0, drop_every=1, drop_factor=0.5)
    assert schedule.rate(5, plateaus=3) == 0.5  # the warm-up
    assert [schedule.rate(50, plateaus=plateaus) for plateaus in (0, 1, 2, 9)] == [1.0, 0.5, 0.25, 0.05]


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


def test_lengths_that_cannot_work() -> None:
    short = load_config("inline_deit_tiny", overrides=["schedule.steps=300", "schedule.warmup_steps=500"])
    with pytest.raises(ValueError, match="the warm-up has 500 updates and the run 300"):
        short.build_schedule(steps_per_epoch=10, world_size=1)
    with pytest.raises(ValueError, match=r"schedule.drop_at=\[11.0, 8.0\]: expected ascending"):
        load_config("inline_deit_tiny", overrides=["schedule.drop_at=[11, 8]"])
    with pytest.raises(ValueError, match=r"schedule.steps=0: expected 1 or more"):
        load_config("inline_deit_tiny", overrides=["schedule.steps=0"])


def test_a_minimum_above_the_peak() -> None:
    config = load_config("inline_deit_tiny", overrides=["optim.lr=1e-6"])
    with pytest.raises(ValueError, match=r"schedule.min_lr=5e-06 exceeds optim.lr=1e-06, so the rate would rise"):
        config.build_schedule(steps_per_epoch=10, world_size=1)


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
