"""What redaction did, without the values: counts that merge, digests for the leak audit, and JSON lines of finds.

A report has the same content whatever order or number of workers it was gathered by. Memory grows with the number of
different values (about 100 bytes each), not with the text; finds are streamed to the caller and not kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cyberslm.data.redact.config import CLASS_OF
from cyberslm.data.redact.redactor import Redacted


@dataclass
class RedactionReport:
    """Counts by kind; ``digests`` are of all the values that were found. ``standins`` were pseudonyms already."""

    documents: int = 0
    changed: int = 0
    found: Counter[str] = field(default_factory=Counter)
    standins: Counter[str] = field(default_factory=Counter)
    digests: set[str] = field(default_factory=set)

    def add(self, redacted: Redacted) -> None:
        """Count one document."""
        self.documents += 1
        self.changed += bool(redacted.findings)
        self.found.update(finding.kind for finding in redacted.findings)
        self.standins.update(redacted.standins)
        self.digests.update(finding.digest for finding in redacted.findings)

    def merge(self, other: RedactionReport) -> None:
        """Take in the counts of another worker or file."""
        self.documents += other.documents
        self.changed += other.changed
        self.found.update(other.found)
        self.standins.update(other.standins)
        self.digests |= other.digests

    def plain(self) -> dict[str, object]:
        """All of it as JSON holds it; `of_plain` gives it back."""
        return vars(self) | {"digests": sorted(self.digests)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> RedactionReport:
        tallies = {name: Counter(plain[name]) for name in ("found", "standins")}
        return cls(**plain | tallies | {"digests": set(plain["digests"])})

    def summary(self) -> dict[str, object]:
        """Plain data for a manifest."""
        classes: Counter[str] = Counter()
        for kind, number in self.found.items():
            classes[CLASS_OF[kind]] += number
        return {
            "documents": self.documents,
            "changed": self.changed,
            "classes": dict(sorted(classes.items())),
            "kinds": dict(sorted(self.found.items())),
            "standins_before": dict(sorted(self.standins.items())),
            "values": len(self.digests),
        }

    def digest_lines(self) -> Iterator[str]:
        """The digests, sorted, one a line."""
        yield from (digest + "\n" for digest in sorted(self.digests))


def finding_lines(redacted: Redacted, source: str, *, line: int = 1, record: bool = False) -> Iterator[str]:
    """A JSON line for each find of a document that begins at ``line`` of ``source``.

    The lines of a ``record``'s text are not lines of the file; they are told apart, as ``text_line``.
    """
    for finding in redacted.findings:
        place: dict[str, object] = {"file": source, "line": line + finding.line - 1}
        if record:
            place |= {"line": line, "text_line": finding.line}
        what = {"class": finding.cls, "kind": finding.kind, "digest": finding.digest}
        yield json.dumps(place | what, ensure_ascii=True) + "\n"
