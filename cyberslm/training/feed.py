"""The rows of each step on the device of the model, without a wait of the host for the device.

A step's rows are copied at once, through pinned memory, before its first micro-batch. While the device still works on
them the host reads those of the next step: `Feed.read_ahead`. On the CPU nothing runs meanwhile, and it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cyberslm.data.loader import Batch, RowLoader
from cyberslm.training.distributed import Dist
from cyberslm.training.loss import count_targets


class StepRows(NamedTuple):
    """This rank's rows of a step, on the device."""

    batch: Batch
    num_tokens: int
    """Tokens of all ranks that are trained on."""
    number: int
    """What the summed loss of all ranks is divided by."""
    most_rows: int
    """Of the rank that has the most."""


class Feed:
    """The rows of ``loader``: which ones a rank has in a step is a function of its number and of rows passed over.

    ``count`` tells of what and how many a batch's loss is the sum.
    """

    def __init__(
        self, loader: RowLoader, device: torch.device, dist: Dist, *, count: Callable[[Batch], int] = count_targets
    ) -> None:
        self._loader, self._device, self._dist, self._count = loader, device, dist, count
        self._ahead: dict[tuple[int, int], Batch] = {}

    def rows(self, step: int, *, passed: int) -> StepRows:
        """Those of step number ``step``, counted from 1; every rank has to ask."""
        batch = self._ahead.pop((step, passed), None)
        if batch is None:
            batch = self._read(step, passed)
        tokens, counts, rows = self._dist.each(count_targets(batch), self._count(batch), batch.targets.shape[0])
        return StepRows(batch.to(self._device), int(sum(tokens)), int(sum(counts)), int(max(rows)))

    def read_ahead(self, step: int, *, passed: int) -> None:
        """Read what `rows` will most likely be asked for next."""
        self._ahead.clear()
        if self._device.type != "cpu":
            self._ahead[step, passed] = self._read(step, passed)

    def _read(self, step: int, passed: int) -> Batch:
        return self._loader.batch(step - 1, rank=self._dist.rank, world=self._dist.world, passed=passed)
