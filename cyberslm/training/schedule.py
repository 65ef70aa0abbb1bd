"""Learning-rate curves as pure functions of the step and of what was decided about how many steps there are.

Steps count from 1. Warm-up rises to the peak at step ``warmup_steps``, so the first update already has a rate above 0
(``peak / warmup_steps``); the last step has the floor ``min_lr_ratio * peak``. A curve is one function from the
progress after warm-up (0 at the peak, 1 at the last step) to the share of the way from floor to peak, and one line of
the table.

A run of ``max_steps`` has one decision: its total, known from the start. Under a time budget the total is decided while
the run goes (`budget`); each decision spreads what is left of the curve evenly over the steps that are left, so the
curve has no jump, and before the first one the rate stays at the peak. Decisions are recorded, hence rates are a
function of the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cyberslm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How the learning rate moves over a run."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Curve after warm-up: cosine or linear to the floor, wsd (hold, then fall), or constant."""

    warmup_steps: int = 100
    """Steps of linear warm-up."""

    min_lr_ratio: float = 0.1
    """Rate of the last step as a share of the peak; not used by constant."""

    decay_fraction: float = 0.2
    """Share of the steps after warm-up in which wsd falls; used by wsd only."""

    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How wsd falls: linear, or 1 - sqrt(progress), which falls early and ends gently; used by wsd only."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be at least 0, not {self.warmup_steps}")
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, not {getattr(self, name)}")


class Decision(NamedTuple):
    """After step ``after`` and ``seconds`` of training, the run is to have ``total`` steps."""

    after: int
    total: int
    seconds: float = 0.0


def _wsd(progress: float, config: SchedulerConfig) -> float:
    """Hold, then fall; the shape sqrt is from Haegele et al. 2024 (https://arxiv.org/abs/2405.18392, section 4)."""
    if progress <= 1 - config.decay_fraction:
        return 1.0
    left = (1 - progress) / config.decay_fraction
    return left if config.decay_shape == "linear" else 1 - math.sqrt(1 - left)


CURVES: dict[str, Callable[[float, SchedulerConfig], float]] = {
    "cosine": lambda progress, _: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress, _: 1 - progress,
    "wsd": _wsd,
    "constant": lambda _progress, _config: 1.0,
}


def share_of_peak(step: int, config: SchedulerConfig, decisions: Sequence[Decision]) -> float:
    """The rate of optimizer step ``step``, counted from 1, as a share of the peak rate."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.name == "constant":
        return 1.0
    curve = CURVES[config.name](progress(step, config.warmup_steps, decisions), config)
    return 1 - (1 - config.min_lr_ratio) * (1 - curve)


def progress(step: int, warmup_steps: int, decisions: Sequence[Decision]) -> float:
    """How much of the curve is behind at ``step``: 0 up to the end of warm-up and the first decision, 1 at the end."""
    done, since, total = 0.0, warmup_steps, 0
    for decision in decisions:
        after = max(decision.after, warmup_steps)
        if after >= step:
            break
        if total:
            done += (1 - done) * _part(after - since, total - since)
        since, total = after, decision.total
    return done + (1 - done) * _part(step - since, total - since) if total else 0.0


def holds(step: int, config: SchedulerConfig, decisions: Sequence[Decision]) -> bool:
    """Whether no rate up to ``step`` depended on the number of steps: warm-up, or still at the peak."""
    return config.name == "constant" or step <= config.warmup_steps or share_of_peak(step, config, decisions) == 1.0


def _part(steps: int, of: int) -> float:
    return min(1.0, steps / of) if of > 0 else 1.0
