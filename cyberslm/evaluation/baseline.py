"""What is normal: the scores of lines known to be normal, and what another line's score means beside them.

A line is as strange as the share of normal lines that score at least as high. If it is itself as normal as those (their
order tells nothing), that share, counting itself, is at most ``rate`` with a chance of at most ``rate``: so the
threshold below flags normal lines at a stated rate whatever the scores are (conformal prediction, Vovk et al. 2005).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cyberslm.errors import ConfigError, DataError


class Baseline:
    """Sorted scores of normal lines. Raises `DataError` without any."""

    def __init__(self, scores: Iterable[float]) -> None:
        self._scores = np.sort(np.fromiter(scores, dtype=np.float64))
        if not self._scores.size:
            raise DataError("the baseline has no line to compare with")

    @property
    def size(self) -> int:
        return int(self._scores.size)

    def percentile(self, score: float) -> float:
        """Per cent of the normal lines that score lower."""
        return 100.0 * int(np.searchsorted(self._scores, score, "left")) / self.size

    def threshold(self, rate: float) -> float:
        """The score that a normal line exceeds with a chance of at most ``rate``.

        Raises `ConfigError` for a rate that is out of range or that so few normal lines can't tell.
        """
        if not 0.0 < rate < 1.0:
            raise ConfigError(f"fpr is {rate}; it must be above 0 and below 1, such as 0.01")
        above = int(rate * (self.size + 1) + 1e-9) - 1
        if above < 0:
            needed = int(np.ceil(1 / rate - 1e-9)) - 1
            raise ConfigError(
                f"fpr {rate} needs a baseline of at least {needed:,} lines, and there are {self.size:,}: raise it"
            )
        return float(self._scores[self.size - 1 - above])
