"""`Guide`: what a row may say next, token by token. The loop knows nothing of grammars; a grammar nothing of models.

Before each token the loop asks `allowed`, lets nothing else be made, whatever filters and settings say, and tells the
guide what was chosen by `accept`. Stop ids are allowed or not like all others; a stop id ends the row and is not
accepted. A guide that is `done` ends its row at once, with finish reason "stop". Where guide, banned ids and the row's
other settings leave no token at all, the row ends with finish reason "blocked".
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Guide(Protocol):
    """The state of one row's constraint."""

    def allowed(self) -> Tensor | None:
        """Ids that may come next, boolean ``(V,)`` on the CPU; ids behind its end may not. None = all."""
        ...

    def accept(self, token: int) -> None:
        """Go on by ``token``, which `allowed` allowed."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing may follow but a stop."""
        ...

    def fork(self) -> Guide:
        """A copy that goes its own way: of a sample, or of a beam."""
        ...
