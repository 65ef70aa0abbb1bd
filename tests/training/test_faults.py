from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.training.config import TrainConfig
from cyberslm.training.faults import WINDOW, Measured, improved, judge
from cyberslm.training.state import TrainState


def step(loss: float, norm: float = 1.0, num_tokens: int = 9) -> Measured:
    return Measured(loss, norm, num_tokens)


def settled(loss: float = 2.0) -> TrainState:
    return TrainState(recent=[loss] * WINDOW)


@pytest.mark.parametrize("bad", [step(math.nan), step(math.inf), step(2.0, math.nan), step(2.0, 1.0, 0)])
@pytest.mark.parametrize("on_spike", ["ignore", "skip", "rollback"])
def test_step_that_is_not_sound_is_skipped_counted_and_no_spike(bad: Measured, on_spike: str) -> None:
    state = settled()
    assert judge(bad, state, TrainConfig(on_spike=on_spike)) == ("skip", None)
    assert (state.bad_steps, state.bad_in_a_row, state.spikes) == (1, 1, 0)
    assert state.recent == settled().recent
    assert judge(step(2.0), state, TrainConfig()).verdict == "train"
    assert (state.bad_steps, state.bad_in_a_row) == (1, 0)


def test_huge_finite_loss_is_not_nan() -> None:
    state = TrainState()
    assert judge(step(1e30), state, TrainConfig()) == ("train", None)
    assert state.bad_steps == 0


@pytest.mark.parametrize(
    ("on_spike", "verdict", "skipped"), [("ignore", "train", 0), ("skip", "skip", 1), ("rollback", "rollback", 0)]
)
def test_spike_is_what_the_setting_says(on_spike: str, verdict: str, skipped: int) -> None:
    state, config = settled(), TrainConfig(spike_factor=3.0, on_spike=on_spike)
    assert judge(step(6.0), state, config) == ("train", None)
    assert judge(step(6.1), state, config) == (verdict, 2.0)
    assert (state.spikes, state.bad_steps) == (1, skipped)


def test_nothing_is_a_spike_before_the_window_is_full_or_without_a_factor() -> None:
    state = TrainState(recent=[2.0] * (WINDOW - 1))
    assert judge(step(1e6), state, TrainConfig()).usual is None
    assert judge(step(1e6), settled(), TrainConfig(spike_factor=0.0)).usual is None


def test_run_that_ignores_spikes_gets_used_to_a_new_level() -> None:
    state, config = settled(), TrainConfig()
    assert [judge(step(10.0), state, config).usual is None for _ in range(WINDOW)].index(True) == WINDOW // 2


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=100), st.integers(0, 100))
def test_verdicts_are_a_function_of_the_recorded_losses(losses: list[float], cut: int) -> None:
    """State that goes through JSON in the middle judges the rest alike."""
    config = TrainConfig(on_spike="skip")
    state, verdicts = TrainState(), []
    for number, loss in enumerate(losses):
        if number == cut:
            state = TrainState.from_json(state.to_json())
        verdicts.append(judge(step(loss), state, config))
    straight = TrainState()
    assert verdicts == [judge(step(loss), straight, config) for loss in losses]
    assert len(state.recent) <= WINDOW


def test_patience_counts_validations_without_an_improvement_by_the_delta() -> None:
    state, config = TrainState(), TrainConfig(patience=3, min_delta=0.1)
    seen = []
    for number, loss in enumerate([3.0, 2.0, 1.95, math.nan, 1.8, 1.75, 1.72, 1.71]):
        state.step = number
        seen.append((improved(loss, state, config), state.stale, state.ended))
    assert seen == [
        (True, 0, None),
        (True, 0, None),
        (True, 1, None),
        (False, 2, None),
        (True, 0, None),
        (True, 1, None),
        (True, 2, None),
        (True, 3, "patience"),
    ]
    assert (state.best_loss, state.best_step) == (1.71, 7)


def test_without_patience_a_run_never_ends_by_it() -> None:
    state = TrainState()
    for _ in range(99):
        improved(math.nan, state, TrainConfig())
    assert state.ended is None
