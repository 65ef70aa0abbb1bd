"""Is it text at all? Shares that junk has in excess and that prose, logs, hexdumps, rules and tables do not.

The rules for web corpora (Gopher, Rae et al. 2021; C4, Raffel et al. 2020) count stop words and full stops and throw
away what a security team works with. These measures know no language, except that a keyboard played at random is
recognised by its consonants, in words of lower-case Latin letters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cyberslm.data.clean.config import QualityConfig
from cyberslm.data.clean.entry import Entry, Outcome
from cyberslm.data.clean.words import UNSPACED

JUDGED = 1 << 20

_WALL = 40
_LONG = 300
_WALL_SAMPLE = 4096
_WALL_CHANGES = 0.25
_BASE64 = re.compile(r"[A-Za-z0-9+/=_-]+")
_CHANGE = re.compile(r"[a-z](?=[A-Z0-9])|[A-Z](?=[0-9]|[a-z][A-Z0-9])|[0-9](?=[A-Za-z])")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_UNDECODABLE = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\x80-\x84\x86-\x9f\ufffd]")
_ALPHANUMERIC = re.compile(r"[^\W_]+")
_RUN = re.compile(r"(\S)\1{39,}")
_LOWER_WORD = re.compile(r"(?<!\S)(?!([a-z])\1{3})[a-z]{5,}(?=[\s,;:!?]|\.\s|\Z)")
_CONSONANTS = re.compile("[bcdfghjklmnpqrstvwxz]{4}")
_MIN_WORDS, _MIN_LINES, _MIN_KEYBOARD, _MIN_RUN = 100, 20, 20, 200
_GRAM = 5


class Measure(NamedTuple):
    """A reason to leave a document out, the setting that limits it and the value that the limit is held against."""

    reason: str
    setting: str
    value: Callable[[Sample], float]
    is_minimum: bool = False


class Sample:
    """The judged part of a text, with what several measures need."""

    def __init__(self, text: str) -> None:
        self.text = text[:JUDGED]
        self.words = self.text.split()
        self.solid = sum(map(len, self.words))


def _alphanumeric(sample: Sample) -> float:
    return sum(map(len, _ALPHANUMERIC.findall(sample.text))) / sample.solid if sample.solid else 1.0


def _undecodable(sample: Sample) -> float:
    return len(_UNDECODABLE.findall(sample.text)) / max(1, len(sample.text))


def _wall(sample: Sample) -> float:
    walls = (len(word) for word in sample.words if len(word) >= _WALL and _is_wall(word))
    return sum(walls) / max(1, sample.solid)


def _is_wall(word: str) -> bool:
    """Whether case and digits change as often as in base64, or there is no end to it; hashes in hexadecimal pass."""
    head = word[:_WALL_SAMPLE]
    if _UNSPACED.search(head):
        return False
    if len(word) >= _LONG:
        return True
    return _BASE64.fullmatch(head) is not None and _changes_case(head) >= _WALL_CHANGES


def _changes_case(word: str) -> float:
    has_both = word != word.lower() and word != word.upper()
    return len(_CHANGE.findall(word)) / len(word) if has_both else 0.0


def _mean_word(sample: Sample) -> float:
    words = [word for word in sample.words if not _UNSPACED.search(word)]
    return sum(map(len, words)) / max(1, len(words))


def _run(sample: Sample) -> float:
    if sample.solid < _MIN_RUN:
        return 0.0
    return max((len(run[0]) for run in _RUN.finditer(sample.text)), default=0) / sample.solid


def _repeated_lines(sample: Sample) -> float:
    lines = [line for line in map(str.strip, sample.text.split("\n")) if line]
    if len(lines) < _MIN_LINES:
        return 0.0
    return 1 - sum(map(len, set(lines))) / sum(map(len, lines))


def _repeated_words(sample: Sample) -> float:
    if len(sample.words) < _MIN_WORDS:
        return 0.0
    grams = zip(*(sample.words[at:] for at in range(_GRAM)), strict=False)
    return 1 - len(set(grams)) / (len(sample.words) - _GRAM + 1)


def _keyboard(sample: Sample) -> float:
    words = {match[0] for match in _LOWER_WORD.finditer(sample.text)}
    if len(words) < _MIN_KEYBOARD:
        return 0.0
    return sum(_CONSONANTS.search(word) is not None for word in words) / len(words)


MEASURES = (
    Measure("not decodable", "max_undecodable", _undecodable),
    Measure("few letters and digits", "min_alphanumeric", _alphanumeric, is_minimum=True),
    Measure("one character repeated", "max_run", _run),
    Measure("wall of random characters", "max_wall", _wall),
    Measure("words too long", "max_mean_word", _mean_word),
    Measure("repeated lines", "max_repeated_lines", _repeated_lines),
    Measure("repeated words", "max_repeated_words", _repeated_words),
    Measure("keyboard noise", "max_keyboard", _keyboard),
)


@dataclass(frozen=True)
class QualityStep:
    config: QualityConfig

    def apply(self, entry: Entry) -> Outcome:
        sample = Sample(entry.text)
        for measure in MEASURES:
            limit, value = getattr(self.config, measure.setting), measure.value(sample)
            if value < limit if measure.is_minimum else value > limit:
                return Outcome(entry.text, measure.reason)
        return Outcome(entry.text)
