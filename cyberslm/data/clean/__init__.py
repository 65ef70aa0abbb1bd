"""Cleaning: named steps over the entries of a corpus, each a pure map with counts (``pipeline``, ``config``).

In doubt a step keeps a document: text of this domain is odd, and what looks strange may be the evidence.
"""

from __future__ import annotations

from cyberslm.data.clean.config import StepConfig
from cyberslm.data.clean.counts import StepCounts, table
from cyberslm.data.clean.duplicates import DuplicateReport, is_held_out
from cyberslm.data.clean.entry import Entry, Group
from cyberslm.data.clean.pipeline import Cleaned, Pipeline

__all__ = [
    "Cleaned",
    "DuplicateReport",
    "Entry",
    "Group",
    "Pipeline",
    "StepConfig",
    "StepCounts",
    "is_held_out",
    "table",
]
