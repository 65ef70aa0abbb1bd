"""Grounding: identifiers that a model can only copy, never invent.

With `Grounding`, CVE ids, addresses, domains (any dotted name with a word behind a dot, so file names too), hashes,
e-mail addresses and URLs come about only if the prompt or the allow-list holds them, whatever the model and however the
text is cut into tokens. An identifier that has begun must be finished as an allowed one, so the text can't end, or
run out of budget, in the middle of it: "10.0.0.1" is not made on the way to an allowed "10.0.0.12" unless there is room
for the "2". Text that only resembles one (``CVE-``, ``10.0.``) may be broken off.

Each kind is an automaton over bytes (`identifiers`); they run side by side, from where the prompt ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cyberslm.errors import GenerationError
from cyberslm.generation.identifiers import KINDS, IdentifierAutomaton, find
from cyberslm.generation.walk import FORBIDDEN, Vocabulary, Walk

MAX_ALLOWED = 100_000
_MAX_WAYS = 32
_MAX_ENDINGS = 8
_KEPT_MASKS = 512

States = tuple[int, ...]
MayFinish = Callable[[int, bytes], bool]


class Identifier(NamedTuple):
    """One identifier of a text, in canonical spelling."""

    kind: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Grounding:
    """Which kinds of identifiers may only be copied. Raises `GenerationError` naming what can't be used."""

    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds that may only be copied from the prompt or the allow-list."""

    allow: tuple[str, ...] = ()
    """Identifiers that may be written although the prompt doesn't hold them."""

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise GenerationError(f"grounding knows no kind {unknown[0]!r}; kinds: {', '.join(KINDS)}")
        if not self.kinds:
            raise GenerationError(f"grounding needs at least one kind of: {', '.join(KINDS)}")
        if len(self.allow) > MAX_ALLOWED:
            raise GenerationError(f"the allow-list has {len(self.allow)} entries; at most {MAX_ALLOWED} are taken")
        for entry in self.allow:
            if not any(find(KINDS[kind], _bytes(entry)) for kind in self.kinds):
                raise GenerationError(
                    f"the allow-list's {entry!r:.80} holds no identifier of these kinds: {', '.join(self.kinds)}"
                )

    def identifiers(self, text: str) -> set[Identifier]:
        """Those of the kinds in question that a text holds."""
        data = _bytes(text)
        return {
            Identifier(kind, value.decode("utf-8", "replace"))
            for kind in self.kinds
            for value in find(KINDS[kind], data)
        }

    def invented(self, source: str, answer: str, *, tail: str | None = None) -> list[Identifier]:
        """Those that the answer holds, and neither the source nor the allow-list.

        ``tail`` is what the answer continues, so that one may begin there: by default the source, a prompt.
        """
        known = self.identifiers(source).union(*map(self.identifiers, self.allow))
        return sorted(self.identifiers(_last_word(source if tail is None else tail) + answer) - known)

    def walks(self, source: str, tail: str, vocabulary: Vocabulary) -> list[tuple[Walk, int]]:
        """An automaton for each kind, and its state where an answer continues ``tail``."""
        sources = [_bytes(source), *map(_bytes, self.allow)]
        walks = []
        for kind in map(KINDS.__getitem__, self.kinds):
            values: set[bytes] = set().union(*(find(kind, text) for text in sources))
            if kind.name == "url":
                values |= {twin for value in values if (twin := _twin(value))}
            walk = Walk(IdentifierAutomaton(kind, values), vocabulary)
            walks.append((walk, _after(walk, _bytes(_last_word(tail)))))
        return walks


class SideBySide:
    """Several automata over one text, and what their states allow of a vocabulary."""

    def __init__(self, walks: Sequence[tuple[Walk, int]], vocabulary: Vocabulary) -> None:
        self._walks, self._vocabulary = [walk for walk, _ in walks], vocabulary
        self.start = tuple(state for _, state in walks)
        self._masks: dict[States, tuple[np.ndarray, list[tuple[int, list[bytes]]]]] = {}
        self._ways: dict[States, list[bytes]] = {}

    def read(self, states: States, token: int) -> States:
        """The states behind a token."""
        data = self._vocabulary.table[token]
        return tuple(walk.read(state, data) for walk, state in zip(self._walks, states, strict=True))

    def final(self, states: States) -> bool:
        """Whether the text may end: no identifier is half made."""
        return all(walk.final(state) for walk, state in zip(self._walks, states, strict=True))

    def mask(self, states: States, room: int, may_finish: MayFinish | None = None) -> np.ndarray:
        """Ids that may follow, boolean, where ``room`` more tokens may be made, this one included.

        A token behind which the text can't end passes if one of the ways to finish it fits, and ``may_finish`` agrees.
        """
        found = self._masks.get(states)
        if found is None:
            if len(self._masks) >= _KEPT_MASKS:
                self._masks.clear()
            found = self._masks[states] = self._allowed(states)
        fine, opening = found
        fits = [
            token
            for token, ways in opening
            if any(len(way) < room and (may_finish is None or may_finish(token, way)) for way in ways)
        ]
        if not fits:
            return fine
        mask = fine.copy()
        mask[fits] = True
        return mask

    def _allowed(self, states: States) -> tuple[np.ndarray, list[tuple[int, list[bytes]]]]:
        """Ids behind which the text may end, and those that begin or go on with an identifier, with the shortest ways
        to finish it."""
        reaches = [walk.reach(state) for walk, state in zip(self._walks, states, strict=True)]
        fine = np.logical_and.reduce([reach.fine for reach in reaches])
        going = np.logical_and.reduce([reach.fine | reach.open for reach in reaches]) & ~fine
        opening = []
        for token in np.flatnonzero(going).tolist():
            ways = self._ways_to_end(tuple(int(reach.ends[token]) for reach in reaches))
            if ways:
                opening.append((token, ways))
        return fine, opening

    def _ways_to_end(self, states: States) -> list[bytes]:
        """The bytes, each one a token, that lead to where the text may end: some of the shortest ways."""
        if states not in self._ways:
            seen, level = {states}, [(states, b"")]
            ways: list[bytes] = []
            while level and len(ways) < _MAX_ENDINGS:
                level = self._next_level(level, seen)
                ways += [way for reached, way in level if self.final(reached)]
            self._ways[states] = ways
        return self._ways[states]

    def _next_level(self, level: Iterable[tuple[States, bytes]], seen: set[States]) -> list[tuple[States, bytes]]:
        after: list[tuple[States, bytes]] = []
        for states, way in level:
            for byte in sorted(self._leads(states) & self._vocabulary.single):
                reached = tuple(walk.step(state, byte) for walk, state in zip(self._walks, states, strict=True))
                if FORBIDDEN not in reached and reached not in seen and len(after) < _MAX_WAYS:
                    seen.add(reached)
                    after.append((reached, way + bytes([byte])))
        return after

    def _leads(self, states: States) -> set[int]:
        ways: set[int] = set()
        for walk, state in zip(self._walks, states, strict=True):
            if not walk.final(state):
                ways |= walk.automaton.leads(walk.state(state))  # type: ignore[attr-defined]
        return ways


class TextGuide:
    """A `Guide` that lets automata say what may follow. ``budget`` is the most tokens that will be made."""

    done = False

    def __init__(self, text: SideBySide, states: States, budget: int, stop_ids: Sequence[int]) -> None:
        self._text, self._states, self._room, self._stops = text, states, budget, list(stop_ids)

    def allowed(self, may_finish: MayFinish | None = None) -> Tensor:
        mask = torch.from_numpy(self._text.mask(self._states, self._room, may_finish).copy())
        mask[self._stops] = self.final
        return mask

    def accept(self, token: int) -> None:
        self._states = self._text.read(self._states, token)
        self._room -= 1

    @property
    def final(self) -> bool:
        """Whether the text may end here."""
        return self._text.final(self._states)

    def admits(self, tokens: Iterable[int]) -> bool:
        """Whether these could come next and the text end behind them."""
        states = self._states
        for token in tokens:
            states = self._text.read(states, token)
        return FORBIDDEN not in states and self._text.final(states)

    def fork(self) -> TextGuide:
        return TextGuide(self._text, self._states, self._room, self._stops)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _last_word(text: str) -> str:
    """What follows the last ASCII white space, where every automaton starts anew."""
    return re.split(r"[ \t\n\r\f\v]", text)[-1]


def _after(walk: Walk, data: bytes) -> int:
    """The state behind what was given, whatever it holds."""
    automaton: IdentifierAutomaton = walk.automaton  # type: ignore[assignment]
    state = automaton.start
    for byte in data:
        state = automaton.follow(state, byte)
    return walk.number(state)


def _twin(url: bytes) -> bytes | None:
    """The same address with its scheme defanged, or no longer so."""
    for plain, defanged in ((b"http", b"hxxp"), (b"hxxp", b"http")):
        if url[:4].lower() == plain:
            return defanged + url[4:]
    return None
