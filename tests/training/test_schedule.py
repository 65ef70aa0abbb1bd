from __future__ import annotations

import pytest

from cyberslm.errors import ConfigError
from cyberslm.training.schedule import CURVES, SchedulerConfig, learning_rate


def rates(total: int, **settings: object) -> list[float]:
    config = SchedulerConfig(**settings)
    return [learning_rate(step, peak=1.0, total=total, config=config) for step in range(1, total + 1)]


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
