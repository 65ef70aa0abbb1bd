"""Steps that look at one text alone: Unicode mending and length.

Mending undoes only text that was decoded with the wrong encoding. Everything else that ftfy can do (straight quotes,
HTML entities, terminal escapes, ligatures, width) stays off, as those characters may be what a document is about.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from cyberslm.data.clean.config import LengthConfig, UnicodeConfig
from cyberslm.data.clean.entry import Entry, Note, Outcome
from cyberslm.errors import ConfigError

# A mended or normalised text may look wrongly decoded again; going on until nothing changes makes the step idempotent.
_MAX_ROUNDS = 8


@dataclass(frozen=True)
class UnicodeStep:
    """Raises ConfigError when made for mending without the ``data`` extra."""

    config: UnicodeConfig

    def __post_init__(self) -> None:
        if self.config.mend:
            _mended("")

    def apply(self, entry: Entry) -> Outcome:
        text, kinds = entry.text, dict[str, None]()
        for _ in range(_MAX_ROUNDS):
            before = text
            for kind, text_after in self._changes(text):
                kinds |= {kind: None} if text_after != text else {}
                text = text_after
            if text == before:
                break
        return Outcome(text, notes=tuple(map(Note, kinds)))

    def _changes(self, text: str) -> Iterator[tuple[str, str]]:
        if self.config.mend:
            text = _mended(text)
            yield "wrongly decoded", text
        if self.config.normalize != "none":
            yield f"not {self.config.normalize}", unicodedata.normalize(self.config.normalize, text)


@dataclass(frozen=True)
class LengthStep:
    config: LengthConfig

    def apply(self, entry: Entry) -> Outcome:
        size = len(entry.text.strip())
        if size < self.config.min_characters:
            return Outcome(entry.text, "too short")
        if self.config.max_characters is not None and size > self.config.max_characters:
            return Outcome(entry.text, "too long")
        return Outcome(entry.text)


def _mended(text: str) -> str:
    try:
        import ftfy
    except ImportError as error:
        raise ConfigError("unicode.mend needs ftfy; install it with: pip install 'cyberslm[data]'") from error
    if text.isascii():
        return text
    return str(ftfy.fix_encoding(text))
