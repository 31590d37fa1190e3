"""Intervals by hand, and those of samples whose truth is known."""

import numpy as np
import pytest

from study.intervals import bootstrap, effect_of, paired


def test_paired_differences_by_hand() -> None:
    """The residual's gain on linear attention in the recorded study: differences of 4.52, 4.08 and 4.02."""
    effect = paired({0: 43.76, 1: 42.18, 2: 42.10}, {0: 39.24, 1: 38.10, 2: 38.08, 3: 1.0})
    assert effect is not None
    assert effect.seeds == 3  # that both have
    assert effect.mean == pytest.approx(4.2067, abs=1e-4)
    assert effect.margin == pytest.approx(4.303 * 0.2730 / 3**0.5, abs=1e-3)
    assert str(effect) == "+4.21 ± 0.68"


def test_pairing_removes_what_seeds_share() -> None:
    a, b = {0: 40.0, 1: 50.0, 2: 45.0}, {0: 39.0, 1: 49.1, 2: 43.9}
    effect = paired(a, b)
    assert effect is not None
    assert effect.low is not None
    assert effect.low > 0.7


def test_one_seed_has_no_interval() -> None:
    effect = effect_of({0: 1.0})
    assert (effect.margin, effect.low, effect.high, str(effect)) == (None, None, None, "+1.00")
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_t_intervals_cover_the_truth() -> None:
    generator = np.random.default_rng(0)
    samples = [effect_of(dict(enumerate(generator.normal(1.0, 2.0, 3)))) for _ in range(400)]
    covered = sum(s.low < 1.0 < s.high for s in samples if s.low is not None and s.high is not None)
    assert 365 <= covered <= 395


def test_bootstrap_of_a_mean() -> None:
    """Of 400 values with deviation 1, the mean has a standard error of 0.05."""
    values = np.random.default_rng(0).normal(size=(400, 2))
    low, high = bootstrap(values)
    assert low.shape == high.shape == (2,)
    np.testing.assert_allclose((high - low) / 2, 1.96 * values.std(0) / 20, rtol=0.12)
    assert (low < values.mean(0)).all()
    assert (values.mean(0) < high).all()
