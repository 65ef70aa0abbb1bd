"""Learning-rate curves as pure functions of the step.

Steps count from 1. Warm-up rises to the peak at step ``warmup_steps``, so the first update already has a rate above 0
(``peak / warmup_steps``); the last step has the floor ``min_lr_ratio * peak``. A curve is one function from the
progress after warm-up (0 at the peak, 1 at the last step) to the share of the way from floor to peak, and one line of
the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be at least 0, not {self.warmup_steps}")
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, not {getattr(self, name)}")


CURVES: dict[str, Callable[[float, SchedulerConfig], float]] = {
    "cosine": lambda progress, _: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress, _: 1 - progress,
    "wsd": lambda progress, config: min(1.0, (1 - progress) / config.decay_fraction) if config.decay_fraction else 1.0,
    "constant": lambda _progress, _config: 1.0,
}


def learning_rate(step: int, *, peak: float, total: int, config: SchedulerConfig) -> float:
    """The rate of optimizer step ``step`` in ``1..total``."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    floor = peak * config.min_lr_ratio
    return floor + (peak - floor) * CURVES[config.name](progress, config)
