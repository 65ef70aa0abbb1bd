"""`TrainState`: all that a run carries from step to step besides weights and moments.

What the loop decides by looking (a spike, a rollback, the end of patience, the number of steps that fit in the time) is
recorded here, so that a resumed run decides the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from cyberslm.errors import IntegrityError
from cyberslm.training.config import TrainConfig
from cyberslm.training.schedule import Decision

LATER = frozenset({"loss_scale", "steps_at_scale", "overflows"})
"""Fields that older files lack."""


@dataclass
class TrainState:
    """Where a run stands. The next step is ``step + 1``; the position in the data follows from it."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on so far."""
    bad_steps: int = 0
    """Steps skipped, in all ..."""
    bad_in_a_row: int = 0
    """... and just now."""
    best_loss: float | None = None
    """Lowest validation loss so far ..."""
    best_step: int | None = None
    """... and its step."""
    stale: int = 0
    """Validations since the last improvement by ``min_delta`` ..."""
    stale_loss: float | None = None
    """... and the loss that is to be improved on."""
    recent: list[float] = field(default_factory=list)
    """The last losses that a spike is measured against."""
    loss_scale: float | None = None
    """With fp16: what the loss of the next step is multiplied by; None before the first step ..."""
    steps_at_scale: int = 0
    """... and the steps without overflow since it last changed."""
    overflows: int = 0
    """Steps skipped because a gradient exceeded fp16; they are none of the bad steps."""
    spikes: int = 0
    rollbacks: int = 0
    passed_rows: int = 0
    """Rows that rollbacks passed over: the data of every later step begin so many rows further on."""
    seconds: float = 0.0
    """Time trained so far; counted with a time budget only."""
    decisions: list[Decision] = field(default_factory=list)
    """With a time budget: how many steps were to be made in it, as decided on the way."""
    ended: str | None = None
    """The setting that ended the run before ``max_steps``: max_time or patience."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, object]) -> TrainState:
        """What `to_json` gave, now or before there were the fields of `LATER`."""
        names = {field.name for field in fields(cls)}
        if not names - LATER <= set(value) <= names:
            raise IntegrityError(f"train state holds {sorted(value)}, which is not what this version writes")
        state = cls(**value)  # type: ignore[arg-type]
        state.decisions = [Decision(*decision) for decision in state.decisions]
        return state

    def plan(self, config: TrainConfig) -> list[Decision]:
        """The decisions about the number of steps: the configuration's own without a time budget."""
        return self.decisions if config.max_time is not None else [Decision(0, config.max_steps)]

    def total_steps(self, config: TrainConfig) -> int | None:
        """How many steps the run is to have; None while a time budget hasn't decided it."""
        plan = self.plan(config)
        return plan[-1].total if plan else None

    def is_over(self, config: TrainConfig) -> bool:
        return self.ended is not None or self.step >= config.max_steps
