"""What may be asked of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # most answers are asked nothing, and then need none of what makes guides
    from cyberslm.generation.constrain import Constraint
    from cyberslm.generation.grounding import Grounding


class Demand(NamedTuple):
    """What is asked of one answer; None asks nothing."""

    constraint: Constraint | None = None
    ground: Grounding | None = None

    def __bool__(self) -> bool:
        return self.constraint is not None or self.ground is not None


NOTHING = Demand()
