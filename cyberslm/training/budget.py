"""How many steps fit into a run's time, decided while it goes and recorded as decisions.

The first decision follows a short measured stretch, each later one half of the steps or half of the time that the one
before had left; so there are few, and the last ones are about so little that the run ends on time at the end of its
schedule. Should the machine slow down after the last, the run ends with the step that uses up the time.

A step costs the mean of the measured ones plus its part of the pauses: those for validations and checkpoints come at
known intervals, so that one of them in a short stretch misleads nobody. The first step of a call warms up and is not
measured, and steps of a batch ramp say nothing about those after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cyberslm.training.config import TrainConfig
from cyberslm.training.schedule import Decision
from cyberslm.training.state import TrainState

PROBE_STEPS = 10
FEW_STEPS = 8


class Budget:
    """The clock of one call of the training loop; ``pauses`` are the intervals of validations and checkpoints.

    Without a time budget it does nothing.
    """

    def __init__(
        self, config: TrainConfig, *, warmup_steps: int, pauses: tuple[int, int], clock: Callable[[], float]
    ) -> None:
        self._config, self._clock, self._limit, self._pauses = config, clock, config.max_seconds, pauses
        self._ramp_steps = sum(steps for steps, _ in config.batch_ramp)
        self._settled = max(warmup_steps, self._ramp_steps + PROBE_STEPS if self._ramp_steps else 0)
        self._last, self._is_first = clock(), True
        self._steps, self._step_seconds, self._num_pauses, self._pause_seconds = 0, 0.0, 0, 0.0

    def after_step(self, state: TrainState) -> Decision | None:
        """Count a step's time as trained; a decision that is due is added to the state and returned.

        Sets ``state.ended`` at the last step that the time allows.
        """
        if self._limit is None:
            return None
        seconds = self._lap(state)
        if not self._is_first:
            self._steps, self._step_seconds = self._steps + 1, self._step_seconds + seconds
        self._is_first = False
        if state.step == self._ramp_steps:
            self._steps, self._step_seconds = 0, 0.0
        decision = self._decide(state, self._limit)
        if decision is not None:
            state.decisions.append(decision)
        if state.decisions and state.step >= state.decisions[-1].total:
            state.ended = "max_time" if state.step < self._config.max_steps else None
        return decision

    def after_pause(self, state: TrainState) -> None:
        """Count the time between two steps as trained."""
        if self._limit is None:
            return
        seconds = self._lap(state)
        if any(state.step % every == 0 for every in self._pauses):
            self._num_pauses, self._pause_seconds = self._num_pauses + 1, self._pause_seconds + seconds

    def _lap(self, state: TrainState) -> float:
        now = self._clock()
        seconds, self._last = now - self._last, now
        state.seconds += seconds
        return seconds

    def _decide(self, state: TrainState, limit: float) -> Decision | None:
        if state.decisions and state.step >= state.decisions[-1].total:
            return None
        if state.seconds >= limit:
            return Decision(state.step, state.step, state.seconds)
        if not self._steps or not self._is_due(state, limit):
            return None
        cost = self._cost_of_a_step()
        fitting = int((limit - state.seconds) / cost) if cost else self._config.max_steps
        return Decision(state.step, min(self._config.max_steps, state.step + max(1, fitting)), state.seconds)

    def _cost_of_a_step(self) -> float:
        one, other = self._pauses
        pauses_per_step = 1 / one + 1 / other - 1 / math.lcm(one, other)
        pause = self._pause_seconds / self._num_pauses if self._num_pauses else 0.0
        return self._step_seconds / self._steps + pause * pauses_per_step

    def _is_due(self, state: TrainState, limit: float) -> bool:
        if not state.decisions:
            measured = self._steps >= PROBE_STEPS and state.step >= self._settled
            return measured or state.seconds > limit / 8
        last = state.decisions[-1]
        left = last.total - last.after
        late = state.step - last.after >= left / 2 or state.seconds - last.seconds >= (limit - last.seconds) / 2
        return left >= FEW_STEPS and late
