"""`TrainConfig`: how long a run trains, on how many rows a step, and what it does when something goes wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cyberslm.errors import ConfigError

NO_LIMIT = 1 << 40
"""The largest ``max_steps``: only a time budget ends such a run."""
_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How many steps, and how many rows in each."""

    max_steps: int = 1000
    """Optimizer steps of the whole run; with max_time, the most that it may have, and no limit unless given."""

    max_time: str | None = None
    """Time to train, such as 90s, 10m or 1h30m, over all starts of the run: its schedule is made to end then."""

    micro_batch_size: int = 8
    """Rows in one forward and backward pass; lower it when memory is short: it changes rounding and dropout's draws."""

    seq_len: int | None = None
    """Tokens of a row; null = model.max_seq_len. Shorter rows leave the model's context and positions as they are."""

    activation_checkpointing: bool = False
    """Keep only each block's input for the backward pass and compute the rest again: less memory, a third slower."""

    global_batch_size: int = 8
    """Rows in one optimizer step, over all processes; above micro_batch_size, gradients are accumulated."""

    batch_ramp: tuple[tuple[int, int], ...] = ()
    """Stages before global_batch_size as [steps, rows]: [[100, 2], [200, 4]] = 100 steps of 2 rows, then 200 of 4."""

    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0 = off."""

    z_loss: float = 0.0
    """Weight of the squared log normaliser of the softmax, added to what is trained but not to the reported loss."""

    ema_decay: float = 0.0
    """Decay rate of a running mean of the weights, which is then validated and published in their place. 0 = off."""

    max_bad_steps: int = 5
    """Stop after this many skipped steps in a row: loss or gradient not finite, no token to learn from, or a spike."""

    spike_factor: float = 2.0
    """A loss above this many times the median of the last 32 is a spike, which is counted and shown. 0 = off."""

    on_spike: Literal["ignore", "skip", "rollback"] = "ignore"
    """Train on it, skip it, or go back to the last checkpoint at checkpoint.interval and pass over all rows since."""

    max_rollbacks: int = 3
    """Stop at the spike after this many rollbacks."""

    patience: int = 0
    """End after this many validations in a row without improvement. 0 = off."""

    min_delta: float = 0.0
    """How much lower a validation loss must be to count as an improvement for patience."""

    def __post_init__(self) -> None:
        limits = {
            "max_steps": (1, NO_LIMIT),
            "micro_batch_size": (1, 1 << 20),
            "global_batch_size": (1, 1 << 20),
            "max_bad_steps": (1, 1 << 20),
            "max_rollbacks": (1, 1 << 20),
            "patience": (0, 1 << 20),
        } | ({} if self.seq_len is None else {"seq_len": (1, 1 << 24)})
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from {least} to {most:,}, not {getattr(self, name)}")
        for name in ("grad_clip", "z_loss", "min_delta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0 and finite, not {getattr(self, name)}")
        for problem in (*self._ramp_problems(), *self._fault_problems()):
            raise ConfigError(problem)

    @property
    def max_seconds(self) -> float | None:
        """``max_time`` in seconds; None without one."""
        return None if self.max_time is None else _seconds(self.max_time)

    def _ramp_problems(self) -> Iterator[str]:
        for steps, rows in self.batch_ramp:
            if not 1 <= steps <= NO_LIMIT or not 1 <= rows <= 1 << 20:
                yield f"batch_ramp: a stage is [steps, rows], both at least 1, not [{steps}, {rows}]"

    def _fault_problems(self) -> Iterator[str]:
        if self.max_time is not None and not _seconds(self.max_time):
            yield f"max_time must be a time above 0 such as 90s, 10m, 2h or 1h30m, not {self.max_time!r}"
        if not 0 <= self.ema_decay < 1:
            yield f"ema_decay must be at least 0 and below 1, not {self.ema_decay}"
        if self.spike_factor and not 1 < self.spike_factor < math.inf:
            yield f"spike_factor must be above 1 and finite, or 0 to look for no spikes, not {self.spike_factor}"
        if not self.spike_factor and self.on_spike != "ignore":
            yield f"on_spike is {self.on_spike} and spike_factor is 0, so no spike is ever found: raise spike_factor"


def _seconds(text: str) -> float:
    """0 for a text that is no time."""
    found = _TIME.fullmatch(text)
    return float(
        sum(int(n or 0) * unit for n, unit in zip(found.groups(), _UNITS.values(), strict=True)) if found else 0
    )
