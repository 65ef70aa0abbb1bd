"""What one source gave and what it did not: every document is added or skipped, with a reason and a place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """What one source gave. ``text_bytes`` is UTF-8; ``first`` tells where each kind of skip was first met."""

    documents: int = 0
    validation_documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    mended_surrogates: int = 0
    cuts: int = 0
    """Places where a document longer than ``data.max_document_bytes`` was cut in two."""
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, text_bytes: int, *, held_out: bool) -> None:
        self.documents += 1
        self.validation_documents += held_out
        self.text_bytes += text_bytes

    def take_back(self, text_bytes: int, *, held_out: bool) -> None:
        """Undo ``add`` of a document that turned out to be of no use."""
        self.documents -= 1
        self.validation_documents -= held_out
        self.text_bytes -= text_bytes

    def skip(self, reason: str, where: str) -> None:
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)

    def merge(self, later: Counts) -> None:
        """Add what was counted elsewhere, such as in a worker process, for input that comes after this one's."""
        self.documents += later.documents
        self.validation_documents += later.validation_documents
        self.text_bytes += later.text_bytes
        self.tokens += later.tokens
        self.mended_surrogates += later.mended_surrogates
        self.cuts += later.cuts
        self.skipped += later.skipped
        self.first = later.first | self.first

    def summary(self) -> dict[str, object]:
        """Plain data for a manifest."""
        return {
            "documents": self.documents,
            "validation_documents": self.validation_documents,
            "bytes": self.text_bytes,
            "tokens": self.tokens,
            "mended_surrogates": self.mended_surrogates,
            "cuts": self.cuts,
            "skipped": dict(sorted(self.skipped.items())),
            "first_skipped": dict(sorted(self.first.items())),
        }
