"""How many steps fit into a run's time, decided while it goes and recorded as decisions.

The first decision follows a short measured stretch, each later one half of the steps or half of the time that the one
before had left; so there are few, and the last ones are about so little that the run ends on time at the end of its
schedule. Should the machine slow down after the last, the run ends when the next step would exceed the time. The first
step of a call warms up and is not measured, and steps of a batch ramp say nothing about those after it. Validations and
checkpoints count: they are time between steps.
"""

from __future__ import annotations

from collections.abc import Callable

from cyberslm.training.config import TrainConfig
from cyberslm.training.schedule import Decision
from cyberslm.training.state import TrainState

PROBE_STEPS = 10
FEW_STEPS = 8


class Budget:
    """The clock of one call of the training loop."""

    def __init__(self, config: TrainConfig, *, warmup_steps: int, clock: Callable[[], float]) -> None:
        self._config, self._clock, self._limit = config, clock, config.max_seconds
        self._ramp_steps = sum(steps for steps, _ in config.batch_ramp)
        self._settled = max(warmup_steps, self._ramp_steps + PROBE_STEPS if self._ramp_steps else 0)
        self._last, self._steps, self._measured = clock(), 0, 0.0

    def after_step(self, state: TrainState) -> Decision | None:
        """Count the time since the last call as trained. A decision that is due is added to the state and returned.

        Sets ``state.ended`` at the last step that the time allows. Does nothing without a time budget.
        """
        if self._limit is None:
            return None
        now = self._clock()
        state.seconds += now - self._last
        self._steps += 1
        if self._steps > 1:
            self._measured += now - self._last
        self._last = now
        if state.step == self._ramp_steps:
            self._steps, self._measured = 1, 0.0
        decision = self._decide(state, self._limit)
        if decision is not None:
            state.decisions.append(decision)
        if state.decisions and state.step >= state.decisions[-1].total:
            state.ended = "max_time" if state.step < self._config.max_steps else None
        return decision

    def _decide(self, state: TrainState, limit: float) -> Decision | None:
        if state.decisions and state.step >= state.decisions[-1].total:
            return None
        if state.seconds >= limit:
            return Decision(state.step, state.step, state.seconds)
        if self._steps < 2:
            return None
        per_step = self._measured / (self._steps - 1)
        fitting = int((limit - state.seconds) / per_step) if per_step else self._config.max_steps
        if fitting and not self._is_due(state, limit):
            return None
        return Decision(state.step, min(self._config.max_steps, state.step + fitting), state.seconds)

    def _is_due(self, state: TrainState, limit: float) -> bool:
        if not state.decisions:
            measured = self._steps > PROBE_STEPS and state.step >= self._settled
            return measured or state.seconds > limit / 8
        last = state.decisions[-1]
        left = last.total - last.after
        late = state.step - last.after >= left / 2 or state.seconds - last.seconds >= (limit - last.seconds) / 2
        return left >= FEW_STEPS and late
