"""What is normal, counted by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyberslm.errors import ConfigError, DataError
from cyberslm.evaluation.baseline import Baseline

SCORES = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=200)


@given(scores=SCORES, score=st.integers(-1, 21), rate=st.floats(0.001, 0.999))
def test_percentile_and_threshold_are_those_of_counting(scores: list[float], score: int, rate: float) -> None:
    baseline = Baseline(scores)
    below = sum(other < score for other in scores)
    assert baseline.percentile(score) == pytest.approx(100 * below / len(scores))
    as_high = 1 + sum(other >= score for other in scores)
    if rate * (len(scores) + 1) < 1 - 1e-9:
        with pytest.raises(ConfigError, match="needs a baseline of at least"):
            baseline.threshold(rate)
    else:
        assert (score > baseline.threshold(rate)) == (as_high / (len(scores) + 1) <= rate + 1e-12)


def test_normal_scores_exceed_the_threshold_at_the_stated_rate() -> None:
    rng = random.Random(4)
    flagged = 0
    for _ in range(4000):
        scores = [rng.gauss(0, 1) for _ in range(99)]
        flagged += rng.gauss(0, 1) > Baseline(scores).threshold(0.05)
    assert 0.04 < flagged / 4000 < 0.06


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_rates_out_of_range_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="fpr is"):
        Baseline([1.0]).threshold(rate)


def test_an_empty_baseline_is_refused() -> None:
    with pytest.raises(DataError, match="no line"):
        Baseline([])
