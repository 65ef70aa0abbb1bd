"""How fast a run will be, from a few real steps of its own loop on its own rows, with a model that is thrown away.

A step is some micro-batches and one update. Steps of one micro-batch are timed, and in them the update by itself, so
that a run's step follows without making a whole one. The first step warms up and doesn't count; the shortest of the
others does, as what disturbs a machine for a moment doesn't last for hours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from cyberslm.data.loader import Batch, RowLoader
from cyberslm.model.model import CyberSLM
from cyberslm.training.loss import Score
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import Record
from cyberslm.training.trainer import Plan, train

STEPS = 4


class Speed(NamedTuple):
    """Seconds of a forward and backward pass over ``rows`` rows and of an update; tokens trained on in the pass."""

    rows: int
    pass_seconds: float
    update_seconds: float
    tokens: float

    def step_seconds(self, rows: float) -> float:
        """Seconds of an optimizer step of ``rows`` rows."""
        return self.pass_seconds * rows / self.rows + self.update_seconds

    def tokens_per_second(self, rows: float) -> float:
        return self.tokens * rows / self.rows / self.step_seconds(rows)


def measure_speed(
    plan: Plan, model: CyberSLM, optimizer: torch.optim.Optimizer, loader: RowLoader, *, rows: int, seconds: float
) -> Speed:
    """Train ``model`` on ``rows`` rows a step, at most `STEPS` steps and no new one after ``seconds``.

    ``model`` and ``optimizer`` are of no use afterwards. The global random state stays as it was.
    """
    hooks = _Clock(until=time.perf_counter() + seconds)
    optimizer.register_step_pre_hook(lambda *_: hooks.update_begins())
    optimizer.register_step_post_hook(lambda *_: hooks.update_ends())
    config = replace(
        plan.config,
        max_steps=STEPS,
        max_time=None,
        batch_ramp=(),
        micro_batch_size=rows,
        global_batch_size=rows,
        max_bad_steps=STEPS + 1,
        spike_factor=0.0,
        on_spike="ignore",
    )
    few = replace(plan, config=config, until=STEPS, validate_every=STEPS + 1, save_every=STEPS + 1)
    train(few, model, optimizer, _FirstRows(loader, rows), TrainState(), hooks)  # type: ignore[arg-type]
    passes, updates, tokens = zip(*(hooks.steps[1:] or hooks.steps), strict=True)
    return Speed(rows, min(passes), min(updates), sum(tokens) / len(tokens))


@dataclass
class _FirstRows:
    """The first rows of each of the loader's steps."""

    loader: RowLoader
    rows: int

    def batch(self, step: int, *, rank: int, world: int, passed: int) -> Batch:
        return self.loader.batch(step, rank=rank, world=world, passed=passed).rows(0, self.rows)


@dataclass
class _Clock:
    """Hooks that keep the time of each step's pass and update, and stop at ``until``."""

    until: float
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    began: float = 0.0
    update: float = 0.0

    def update_begins(self) -> None:
        self.began = time.perf_counter()

    def update_ends(self) -> None:
        self.update = time.perf_counter() - self.began

    def record(self, record: Record) -> None:
        whole = float(str(record["seconds"]))
        self.steps.append((whole - self.update, self.update, int(str(record["step_tokens"]))))

    def validate(self, _state: TrainState) -> Score | None:
        return None

    def save(self, _state: TrainState, _score: Score | None) -> None:
        return None

    def should_save(self) -> bool:
        return False

    def go_back(self, step: int) -> TrainState:
        raise AssertionError(f"a probe looks for no spikes and went back to {step}")

    def should_stop(self) -> bool:
        return time.perf_counter() >= self.until
