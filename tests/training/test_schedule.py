from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import ConfigError
from cyberslm.training.schedule import CURVES, Decision, SchedulerConfig, holds, progress, share_of_peak


def rates(total: int, **asked: object) -> list[float]:
    config = SchedulerConfig(**asked)
    return [share_of_peak(step, config, [Decision(0, total)]) for step in range(1, total + 1)]


@pytest.mark.parametrize("name", sorted(CURVES))
def test_first_update_has_a_rate_and_warm_up_ends_at_the_peak(name: str) -> None:
    """G35 (verl#3674): warm-up began at rate 0, so that the first update did nothing."""
    curve = rates(10, name=name, warmup_steps=4, min_lr_ratio=0.1)
    assert curve[:4] == [0.25, 0.5, 0.75, 1.0]
    assert curve[-1] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert all(a >= b for a, b in zip(curve[3:], curve[4:], strict=False))


@pytest.mark.parametrize("name", sorted(CURVES))
def test_without_warm_up_the_first_step_is_not_zero(name: str) -> None:
    assert rates(10, name=name, warmup_steps=0)[0] > 0.9


def test_wsd_holds_then_falls_in_its_share() -> None:
    curve = rates(110, name="wsd", warmup_steps=10, min_lr_ratio=0.0, decay_fraction=0.2)
    assert curve[9:90] == pytest.approx([1.0] * 81)
    assert curve[99] == pytest.approx(0.5)
    assert curve[-1] == 0.0


def test_wsd_without_decay_stays_at_the_peak() -> None:
    assert rates(20, name="wsd", warmup_steps=5, decay_fraction=0.0)[-1] == 1.0


def test_cosine_is_halfway_in_the_middle() -> None:
    assert rates(100, name="cosine", warmup_steps=0, min_lr_ratio=0.0)[49] == pytest.approx(0.5)


@pytest.mark.parametrize(("field", "value"), [("warmup_steps", -1), ("min_lr_ratio", 1.5), ("decay_fraction", -0.1)])
def test_impossible_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**{field: value})


def test_wsd_may_fall_as_one_minus_the_root() -> None:
    """Haegele et al. 2024: 1 - sqrt(progress) in the decay; a quarter of the way in it has fallen by half."""
    asked = {"name": "wsd", "warmup_steps": 10, "min_lr_ratio": 0.0, "decay_fraction": 0.2}
    line, root = (rates(110, **asked, decay_shape=shape) for shape in ("linear", "sqrt"))
    assert root[:90] == line[:90]
    assert root[94] == pytest.approx(0.5)
    assert line[94] == pytest.approx(0.75)
    assert root[-1] == line[-1] == 0.0
    assert all(a >= b for a, b in zip(root[9:], root[10:], strict=False))


@pytest.mark.parametrize("name", sorted(CURVES))
def test_before_the_first_decision_the_rate_stays_at_the_peak(name: str) -> None:
    config = SchedulerConfig(name=name, warmup_steps=2)
    assert [share_of_peak(step, config, []) for step in (1, 2, 3, 99)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", sorted(CURVES))
@given(
    warmup=st.integers(0, 20),
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=60)
def test_later_decisions_bend_the_curve_without_a_jump(name: str, warmup: int, steps: list[tuple[int, int]]) -> None:
    """What is left of the curve is spread over the steps that are left: it only falls, and ends at the floor."""
    decisions, after = [], 0
    for gap, left in steps:
        after += gap
        if decisions and after >= decisions[-1].total:
            break
        decisions.append(Decision(after, after + left))
    total = decisions[-1].total
    config = SchedulerConfig(name=name, warmup_steps=warmup, min_lr_ratio=0.1)
    curve = [share_of_peak(step, config, decisions) for step in range(1, total + 1)]
    assert curve[:warmup] == [step / warmup for step in range(1, min(warmup, total) + 1)]
    falling = curve[warmup:]
    assert all(a >= b - 1e-12 for a, b in zip(falling, falling[1:], strict=False))
    if total > warmup and name != "constant":
        assert curve[-1] == pytest.approx(0.1)
    for count in range(1, len(decisions)):
        before = decisions[count].after
        assert [share_of_peak(s, config, decisions[:count]) for s in range(1, before + 1)] == curve[:before]


def test_decision_before_the_end_of_warm_up_counts_from_there() -> None:
    config = SchedulerConfig(name="linear", warmup_steps=10, min_lr_ratio=0.0)
    assert [progress(step, 10, [Decision(4, 20)]) for step in (5, 10, 15, 20)] == [0.0, 0.0, 0.5, 1.0]
    assert share_of_peak(15, config, [Decision(4, 20)]) == 0.5


def test_rates_hold_while_they_do_not_depend_on_the_number_of_steps() -> None:
    def last_held(name: str) -> int:
        config = SchedulerConfig(name=name, warmup_steps=10, decay_fraction=0.2)
        return max(step for step in range(1, 111) if holds(step, config, [Decision(0, 110)]))

    assert {name: last_held(name) for name in CURVES} == {"cosine": 10, "linear": 10, "wsd": 90, "constant": 110}
