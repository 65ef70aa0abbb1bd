"""The loss scale of fp16, whose smallest number is 6e-8: gradients below it would be lost.

The loss is multiplied by a power of two before the backward pass and gradients are divided by it after, both exactly
(Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). Where a gradient overflows, the step is skipped and the
scale halved; after many steps without, it doubles. The rule is that of `torch.amp.GradScaler`, to which the tests hold
it. Here it works on the host and on `TrainState`: the loop reads the norm of all gradients before an update anyway,
with several processes that of all of them, so nothing else waits for the device or is exchanged, and two numbers
in the checkpoint are the whole state.
"""

from __future__ import annotations

from dataclasses import dataclass

from cyberslm.training.state import TrainState

FLOOR = 1.0
"""At this scale a gradient that isn't finite is no overflow that a smaller scale could mend: the step is a bad one."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Where the scale of a run begins, and after how many steps without overflow it doubles."""

    start: float = 2.0**16
    grows_after: int = 2000

    def of(self, state: TrainState) -> float:
        """The scale of the next step."""
        return self.start if state.loss_scale is None else state.loss_scale

    def move(self, state: TrainState, *, overflowed: bool) -> None:
        """Take in how a step went."""
        scale, steps = self.of(state), state.steps_at_scale + 1
        if overflowed:
            scale, steps = max(FLOOR, scale / 2), 0
        elif steps == self.grows_after:
            scale, steps = scale * 2, 0
        state.loss_scale, state.steps_at_scale = scale, steps
