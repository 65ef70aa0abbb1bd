"""Evaluation texts that have got into the training text, found by long common runs.

A run is 13 words or 50 letters and digits (Brown et al. 2020, appendix C, used 13 words), without case, punctuation and
white space, so that none of them hides a copy. Runs are 64-bit hashes in one sorted array of 12 bytes
a run; an evaluation text shorter than a run is looked for as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cyberslm.data.clean import words
from cyberslm.data.clean.config import ContaminationConfig
from cyberslm.data.clean.entry import Entry, Note, Outcome
from cyberslm.errors import DataError

_ALPHANUMERIC = re.compile(r"[^\W_]")
_UNITS = {"words": words.PLAIN_WORD, "characters": _ALPHANUMERIC}
_SEPARATOR = "\n"
_MAX_ROUNDS = 32


class _Runs(NamedTuple):
    """Sorted hashes of runs of one length, and the evaluation text that each is first met in."""

    hashes: words.Hashes
    texts: npt.NDArray[np.int32]


@dataclass(frozen=True)
class EvaluationIndex:
    """The runs of evaluation texts by length, and their names; ``too_short`` texts are not looked for."""

    runs: dict[int, _Runs]
    names: tuple[str, ...]
    too_short: tuple[str, ...]


def index_evaluation(entries: Iterable[Entry], config: ContaminationConfig, *, key: str) -> EvaluationIndex:
    """Raises DataError that names ``key`` when no evaluation text is long enough to be looked for."""
    collected: dict[int, tuple[array[int], array[int]]] = {}
    names: list[str] = []
    too_short: list[str] = []
    numbering = _Numbering(config.unit)
    for entry in entries:
        numbers = numbering.numbers(entry.text)
        length = min(config.run_length, numbers.size)
        if length < config.shortest:
            too_short.append(entry.place())
            continue
        hashes, texts = collected.setdefault(length, (array("Q"), array("i")))
        found = np.unique(words.windows(numbers, length))
        hashes.frombytes(found.tobytes())
        texts.extend([len(names)] * found.size)
        names.append(entry.place())
    if not names:
        raise DataError(
            f"{key}: none of the {len(too_short)} evaluation texts has {config.shortest} "
            f"{config.unit}; lower min_length or name other files"
        )
    return EvaluationIndex(
        {length: _sorted(*pair) for length, pair in collected.items()}, tuple(names), tuple(too_short)
    )


def _sorted(hashes: array[int], texts: array[int]) -> _Runs:
    values, owners = np.frombuffer(hashes, np.uint64), np.frombuffer(texts, np.int32)
    order = np.lexsort((owners, values))
    first = np.ones(order.size, bool)
    first[1:] = values[order[1:]] != values[order[:-1]]
    return _Runs(values[order][first], owners[order][first])


class _Numbering:
    """Text -> one number a unit."""

    def __init__(self, unit: str) -> None:
        self.pattern = _UNITS[unit]
        self._numbers = words.Numbers(words.plain_number)

    def numbers(self, text: str) -> words.Hashes:
        return words.numbers_of(text.casefold(), self.pattern, self._numbers, np.uint64)

    def __reduce__(self) -> tuple[type[_Numbering], tuple[str]]:
        unit = next(name for name, pattern in _UNITS.items() if pattern is self.pattern)
        return _Numbering, (unit,)


class _Found(NamedTuple):
    covered: npt.NDArray[np.bool_]
    """For each unit of the text, whether it lies in a run that an evaluation text has."""
    text: int

    @property
    def share(self) -> float:
        return float(self.covered.mean())


class ContaminationStep:
    """Drops, cuts or reports; pure and picklable."""

    def __init__(self, config: ContaminationConfig, index: EvaluationIndex) -> None:
        self.config = config
        self.index = index
        self._numbering = _Numbering(config.unit)

    def apply(self, entry: Entry) -> Outcome:
        found = self._find(entry.text)
        if found is None or found.share <= self.config.max_share:
            return Outcome(entry.text)
        spans = self._spans(entry.text, found.covered)
        line = entry.text.count("\n", 0, spans[0][0]) + 1
        detail = f"{found.share:.0%} of it is in {self.index.names[found.text]}"
        notes = (Note("evaluation text", line, len(spans), detail),)
        if self.config.action == "report":
            return Outcome(entry.text, notes=notes)
        if self.config.action == "drop":
            return Outcome(entry.text, "evaluation text", notes)
        text = self._without(entry.text, spans)
        return Outcome(text, None if text.strip() else "nothing but evaluation text", notes)

    def _without(self, text: str, spans: list[tuple[int, int]]) -> str:
        """Cuts until nothing is found, as what a cut brings together may be a run again; in the end, all of it."""
        for _ in range(_MAX_ROUNDS):
            ends = [0, *(end for _, end in spans)]
            starts = [*(start for start, _ in spans), len(text)]
            parts = (text[end:start].strip(" \t") for end, start in zip(ends, starts, strict=True))
            text = _SEPARATOR.join(part for part in parts if part)
            found = self._find(text)
            if found is None or found.share <= self.config.max_share:
                return text
            spans = self._spans(text, found.covered)
        return ""

    def _find(self, text: str) -> _Found | None:
        numbers = self._numbering.numbers(text)
        covered, first = np.zeros(numbers.size + 1, np.int64), None
        for length, runs in self.index.runs.items():
            hashes = words.windows(numbers, length)
            if not hashes.size:
                continue
            at = np.minimum(np.searchsorted(runs.hashes, hashes), runs.hashes.size - 1)
            hits = np.flatnonzero(runs.hashes[at] == hashes)
            if hits.size:
                covered[hits] += 1
                np.subtract.at(covered, hits + length, 1)
                candidate = int(hits[0]), int(runs.texts[at[hits[0]]])
                first = candidate if first is None else min(first, candidate)
        return None if first is None else _Found(covered[:-1].cumsum() > 0, first[1])

    def _spans(self, text: str, covered: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Start and end in ``text`` of each covered stretch."""
        padded = np.concatenate(([False], covered, [False]))
        borders = np.flatnonzero(padded[1:] != padded[:-1])
        places = list(_places(self._numbering.pattern, text))
        return [(places[start][0], places[end - 1][1]) for start, end in borders.reshape(-1, 2).tolist()]


def _places(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """Start and end in ``text`` of each unit of the text without case, where a character may become two."""
    folded = text.casefold()
    units = (match.span() for match in pattern.finditer(folded))
    if len(folded) == len(text):
        return units
    origins = [at for at, character in enumerate(text) for _ in character.casefold()]
    return ((origins[start], origins[end - 1] + 1) for start, end in units)
