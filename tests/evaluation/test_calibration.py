"""Calibration against labels drawn from known probabilities, and reports against counting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cyberslm.errors import DataError
from cyberslm.evaluation.calibration import (
    THRESHOLDS,
    Calibration,
    cross_validated,
    fit,
    report,
    wilson,
)


def drawn(number: int, truth: Calibration, *, labels: int = 3, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Scores and labels that follow ``truth``'s probabilities."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(number, labels, generator=generator, dtype=torch.float64)
    found = torch.multinomial(truth.probabilities(scores), 1, generator=generator).squeeze(1)
    return scores, found.tolist()


def test_fit_finds_temperature_and_bias_that_made_the_labels() -> None:
    truth = Calibration(2.5, (0.8, -0.3, -0.5))
    found = fit(*drawn(20_000, truth))
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.bias == pytest.approx(truth.bias, abs=0.08)


def test_fit_is_the_same_each_time_and_leaves_the_random_state() -> None:
    scores, labels = drawn(200, Calibration(2.0, (0.0, 1.0, -1.0)))
    state = torch.get_rng_state()
    assert fit(scores, labels) == fit(scores, labels)
    cross_validated(scores, labels)
    assert torch.equal(state, torch.get_rng_state())


def test_fit_is_finite_where_labels_can_be_told_apart_perfectly() -> None:
    scores = torch.eye(3, dtype=torch.float64).repeat(20, 1) * 9
    found = fit(scores, [0, 1, 2] * 20)
    assert 0.01 < found.temperature < 100
    assert float(found.probabilities(scores).max(-1).values.min()) > 0.9


def test_calibrated_probabilities_are_worth_what_they_say_on_other_records() -> None:
    truth = Calibration(3.0, (1.0, 0.0, -1.0))
    scores, labels = drawn(3000, truth)
    fitted = fit(*drawn(1000, truth, seed=1))
    raw, better = (report(one.probabilities(scores), labels) for one in (Calibration(), fitted))
    assert raw.calibration_error > 0.1
    assert better.calibration_error < 0.04
    assert better.accuracy > raw.accuracy
    honest = report(cross_validated(scores, labels), labels)
    assert honest.calibration_error < 0.04


def test_cross_validation_does_not_see_the_record_itself() -> None:
    """With scores that say nothing, a fit that saw its own record would look better than the commonest label."""
    scores = torch.zeros(60, 3, dtype=torch.float64)
    labels = [0, 1, 2] * 20
    assert report(cross_validated(scores, labels), labels).accuracy <= 1 / 3 + 0.05


def test_too_few_labelled_records_are_refused() -> None:
    with pytest.raises(DataError, match="19 labelled records; calibration needs at least 20"):
        cross_validated(torch.zeros(19, 2), [0] * 19)


def test_report_counts() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.45, 0.55], [0.35, 0.65]], dtype=torch.float64)
    found = report(probabilities, [0, 1, 1, 1])
    assert (found.examples, found.accuracy, found.commonest) == (4, 0.75, 0.75)
    assert found.calibration_error == pytest.approx((0.1 + 0.8 + 0.45 + 0.35) / 4)
    curve = {kept.threshold: (kept.share, kept.accuracy) for kept in found.abstention}
    assert tuple(curve) == THRESHOLDS
    assert curve[0.0] == (1.0, 0.75)
    assert curve[0.7] == (0.5, 0.5)
    assert curve[0.85] == (0.25, 1.0)
    assert curve[0.95] == (0.0, None)


@given(total=st.integers(1, 300), data=st.data())
def test_wilson_interval_holds_the_share_and_stays_between_0_and_1(total: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, total))
    low, high = wilson(hits, total)
    assert 0 <= low <= hits / total + 1e-12
    assert hits / total - 1e-12 <= high <= 1


def test_wilson_interval_is_the_published_one() -> None:
    """Newcombe 1998, table I: 81 of 263."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
