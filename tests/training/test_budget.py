from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import ConfigError
from cyberslm.training.budget import FEW_STEPS, PROBE_STEPS, Budget
from cyberslm.training.config import NO_LIMIT, TrainConfig
from cyberslm.training.state import TrainState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    seconds: Iterable[float], *, warmup: int = 0, state: TrainState | None = None, pause: float = 0.0, **changes: object
) -> TrainState:
    """Step until the run is over; ``seconds`` says how long each step takes, and every tenth is followed by a pause."""
    config = TrainConfig(**{"max_time": "100s", "max_steps": NO_LIMIT, **changes})
    clock, taken = Clock(), iter(seconds)
    budget = Budget(config, warmup_steps=warmup, pauses=(10, 20), clock=clock)
    state = state or TrainState()
    while not state.is_over(config):
        clock.now += next(taken)
        state.step += 1
        budget.after_step(state)
        clock.now += pause * (state.step % 10 == 0)
        budget.after_pause(state)
    return state


def test_steady_steps_fill_the_time_exactly() -> None:
    state = run(repeat(0.5))
    assert (state.step, state.seconds, state.ended) == (200, 100.0, "max_time")
    assert state.decisions[0] == (PROBE_STEPS + 1, 200, (PROBE_STEPS + 1) * 0.5)
    assert {decision.total for decision in state.decisions} == {200}


def test_slow_first_step_is_not_measured() -> None:
    """A first step that compiles for 30 s would make the rest look ten times as long."""
    state = run(chain([30.0], repeat(0.25)))
    assert state.decisions[0].total == state.step == 281


def test_machine_that_slows_down_gets_a_shorter_plan_and_ends_in_time() -> None:
    state = run(chain(repeat(0.1, 400), repeat(0.4)))
    assert 99 < state.seconds < 100.001
    assert state.decisions[0].total > 900
    assert state.step < 600
    assert state.decisions[-1].total == state.step


def test_machine_that_speeds_up_uses_the_time_gained() -> None:
    state = run(chain(repeat(1.0, 30), repeat(0.1)))
    assert state.step > 600
    assert 99 < state.seconds < 100.001


def test_time_used_up_by_a_step_ends_the_run_with_it() -> None:
    state = run(chain(repeat(0.5, 60), repeat(45.0)))
    assert (state.ended, state.step, state.seconds) == ("max_time", 62, 120.0)
    assert state.decisions[-1] == (62, 62, 120.0)


def test_pauses_at_known_intervals_are_part_of_the_plan_and_mislead_nobody() -> None:
    """One pause in a short stretch made steps look ten times as long, and the run ended early."""
    state = run(repeat(0.1), pause=2.0)
    assert 290 <= state.step <= 340
    assert 98 <= state.seconds <= 103
    assert len(state.decisions) < 15


def test_pause_just_after_a_batch_ramp_does_not_end_the_run() -> None:
    state = run(repeat(0.1), pause=4.0, batch_ramp=((10, 1),), state=TrainState(step=9))
    assert state.seconds > 95


def test_warm_up_is_over_before_the_first_decision_unless_it_takes_an_eighth_of_the_time() -> None:
    assert run(repeat(0.1), warmup=40).decisions[0].after == 40
    assert run(repeat(1.0), warmup=40).decisions[0].after == 13


def test_steps_of_a_batch_ramp_are_not_taken_for_those_after_it() -> None:
    state = run(chain(repeat(0.1, 30), repeat(0.5)), batch_ramp=((10, 1), (20, 2)))
    assert [decision.after for decision in state.decisions][0] == 40
    assert {decision.total for decision in state.decisions} == {30 + 194} == {state.step}


def test_number_of_steps_stays_the_most() -> None:
    state = run(repeat(0.5), max_steps=50)
    assert (state.step, state.ended) == (50, None)
    assert {decision.total for decision in state.decisions} == {50}


def test_without_a_time_nothing_is_counted_or_decided() -> None:
    state = TrainState(step=3)
    config = TrainConfig()
    budget = Budget(config, warmup_steps=0, pauses=(1, 1), clock=Clock())
    assert budget.after_step(state) is None
    budget.after_pause(state)
    assert state == TrainState(step=3)
    assert state.total_steps(config) == 1000


def test_time_goes_on_counting_after_a_resume() -> None:
    state = run(repeat(0.5), state=TrainState(step=120, seconds=60.0))
    assert (state.step, state.seconds) == (200, 100.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=400), st.floats(0.05, 2.0))
def test_run_ends_in_time_but_for_one_step_with_few_decisions(taken: list[float], rest: float) -> None:
    state = run(chain(taken, repeat(rest)))
    assert state.seconds <= 100 + max(*taken, rest)
    assert len(state.decisions) <= 40
    assert state.decisions[-1].total == state.step
    gaps = [late.after - early.after for early, late in zip(state.decisions, state.decisions[1:], strict=False)]
    assert all(gap > 0 for gap in gaps)


def test_decisions_are_few_near_the_end() -> None:
    state = run(repeat(0.5))
    assert all(d.total - d.after >= FEW_STEPS / 2 for d in state.decisions)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("1d2h3m4s", 93784)]
)
def test_time_is_read(text: str, seconds: int) -> None:
    assert TrainConfig(max_time=text).max_seconds == seconds


@pytest.mark.parametrize("text", ["", "10", "0m", "m", "10 m", "1.5h", "30m1h", "-5m", "ten minutes"])
def test_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="max_time must be a time above 0 such as"):
        TrainConfig(max_time=text)
