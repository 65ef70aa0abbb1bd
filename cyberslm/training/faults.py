"""What to do with a step, from its loss and gradient: train on it, skip it, or go back.

A spike is a loss far above the median of the last `WINDOW`; a median doesn't move for a few outliers. Nothing is a
spike before the window is full. Losses that a run trained on enter the window, so that one which ignores spikes gets
used to a new level, and one that skips them stops after ``max_bad_steps``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from cyberslm.errors import TrainingError
from cyberslm.training.config import TrainConfig
from cyberslm.training.loss_scale import FLOOR
from cyberslm.training.state import TrainState

WINDOW = 32
Verdict = Literal["train", "skip", "rollback"]


class Judgement(NamedTuple):
    """``usual`` is the median that a spike stands out from; None if the loss is no spike."""

    verdict: Verdict
    usual: float | None


class Measured(NamedTuple):
    """Loss per token, gradient norm and number of trained tokens of one step, before its update."""

    loss: float
    norm: float
    num_tokens: int
    loss_scale: float = 1.0

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm) and self.num_tokens > 0

    @property
    def overflowed(self) -> bool:
        """Whether the gradient alone isn't finite and a smaller loss scale may mend it."""
        return self.loss_scale > FLOOR and math.isfinite(self.loss) and not math.isfinite(self.norm)


def judge(measured: Measured, state: TrainState, config: TrainConfig) -> Judgement:
    """Judge the step after ``state.step``; spikes and steps skipped are counted in ``state``.

    An overflow is skipped and counted apart: it is part of looking for the loss scale, and ends no run.
    """
    if measured.overflowed:
        state.overflows += 1
        return Judgement("skip", None)
    usual = _spike_over(measured.loss, state.recent, config.spike_factor) if measured.is_sound else None
    state.spikes += usual is not None
    if usual is not None and config.on_spike == "rollback":
        return Judgement("rollback", usual)
    if measured.is_sound and (usual is None or config.on_spike == "ignore"):
        state.bad_in_a_row = 0
        state.recent = [*state.recent, measured.loss][-WINDOW:]
        return Judgement("train", usual)
    state.bad_in_a_row += 1
    state.bad_steps += 1
    return Judgement("skip", usual)


def stop_if_hopeless(measured: Measured, state: TrainState, config: TrainConfig) -> None:
    """`TrainingError` after too many skipped steps in a row."""
    if state.bad_in_a_row < config.max_bad_steps:
        return
    row = f"step {state.step}: the last of {state.bad_in_a_row} bad steps in a row (train.max_bad_steps)"
    if measured.num_tokens == 0:
        raise TrainingError(f"{row} had no token to learn from: raise train.global_batch_size or model.max_seq_len")
    if measured.is_sound:
        raise TrainingError(
            f"{row} had a loss of {measured.loss:.4g}, above train.spike_factor {config.spike_factor:g} times the"
            f" median of {median(state.recent):.4g}: lower optimizer.lr, raise train.spike_factor or use"
            " on_spike: rollback"
        )
    raise TrainingError(
        f"step {state.step}: loss or gradient was not finite {state.bad_in_a_row} steps in a row (train.max_bad_steps);"
        " nothing of it was saved. Lower optimizer.lr, lengthen scheduler.warmup_steps or use another precision"
    )


def improved(loss: float, state: TrainState, config: TrainConfig) -> bool:
    """Record a validation loss; whether it is the best so far. A loss that isn't finite improves nothing.

    Sets ``state.ended`` when patience is at its end.
    """
    best = math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss)
    if best:
        state.best_loss, state.best_step = loss, state.step
    if math.isfinite(loss) and (state.stale_loss is None or loss < state.stale_loss - config.min_delta):
        state.stale, state.stale_loss = 0, loss
    else:
        state.stale += 1
    if config.patience and state.stale >= config.patience:
        state.ended = "patience"
    return best


def _spike_over(loss: float, recent: Sequence[float], factor: float) -> float | None:
    if not factor or len(recent) < WINDOW:
        return None
    usual = median(recent)
    return usual if loss > factor * usual else None
