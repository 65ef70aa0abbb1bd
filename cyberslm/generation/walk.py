"""From an automaton over bytes to a mask over a vocabulary.

A token may come next when the automaton can read all its bytes. `Walk` reads those of every token at once: the states
met so far are numbered, their transitions stand in a table that is filled where it is asked, and a step over all tokens
is one look-up in it. What a state allows is kept, so that a text that returns to it pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

FORBIDDEN = 0
_UNKNOWN = -1
_KEPT_STATES = 512


class Automaton(Protocol):
    """``step`` gives None for a byte that may not follow; states are hashable."""

    @property
    def start(self) -> Any: ...
    def step(self, state: Any, byte: int) -> Any | None: ...
    def final(self, state: Any) -> bool: ...


class Vocabulary:
    """The bytes of every id: a column per place in a token, longest tokens first."""

    def __init__(self, token_bytes: Callable[[int], bytes], size: int) -> None:
        self.table = [token_bytes(token) for token in range(size)]
        lengths = np.array([len(data) for data in self.table])
        self.order = np.argsort(-lengths, kind="stable")
        self.counts = [int((lengths > place).sum()) for place in range(int(lengths.max(initial=0)))]
        self.columns = [
            np.array([self.table[token][place] for token in self.order[:count]], dtype=np.int64)
            for place, count in enumerate(self.counts)
        ]
        self.empty = lengths == 0
        self.single = frozenset(data[0] for data in self.table if len(data) == 1)


class Reach(NamedTuple):
    """What a state allows: ``fine`` tokens after which the text may end, ``open`` ones after which it may not."""

    fine: np.ndarray
    open: np.ndarray
    ends: np.ndarray


class Walk:
    """An automaton's numbered states and what each allows of a vocabulary."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton, self._vocabulary = automaton, vocabulary
        self._states: list[Any] = [None]
        self._numbers: dict[Any, int] = {}
        self._next = np.full((64, 256), _UNKNOWN, dtype=np.int32)
        self._next[FORBIDDEN] = FORBIDDEN
        self._final = np.zeros(64, dtype=bool)
        self._reach: dict[int, Reach] = {}
        self.start = self.number(automaton.start)

    def number(self, state: Any) -> int:
        """The number of a state, new or old."""
        found = self._numbers.get(state)
        if found is not None:
            return found
        number = self._numbers[state] = len(self._states)
        self._states.append(state)
        if number == len(self._next):
            self._next = np.concatenate([self._next, np.full_like(self._next, _UNKNOWN)])
            self._final = np.concatenate([self._final, np.zeros_like(self._final)])
        self._final[number] = self.automaton.final(state)
        return number

    def state(self, number: int) -> Any:
        return self._states[number]

    def final(self, number: int) -> bool:
        """Whether the text may end here."""
        return bool(self._final[number])

    def step(self, number: int, byte: int) -> int:
        """The state after a byte; FORBIDDEN when it may not follow."""
        after = int(self._next[number, byte])
        if after == _UNKNOWN:
            state = self.automaton.step(self._states[number], byte)
            after = FORBIDDEN if state is None else self.number(state)
            self._next[number, byte] = after
        return after

    def read(self, number: int, data: bytes) -> int:
        """The state after several bytes."""
        for byte in data:
            number = self.step(number, byte)
        return number

    def reach(self, number: int) -> Reach:
        """What may follow a state, as boolean arrays over ids, and the state that each id leads to."""
        found = self._reach.get(number)
        if found is None:
            if len(self._reach) >= _KEPT_STATES:
                self._reach.clear()
            found = self._reach[number] = self._walk(number)
        return found

    def _walk(self, number: int) -> Reach:
        words = self._vocabulary
        now = np.full(len(words.order), number, dtype=np.int32)
        for count, column in zip(words.counts, words.columns, strict=True):
            after = self._next[now[:count], column]
            if (after == _UNKNOWN).any():
                self._fill(now[:count], column, after)
                after = self._next[now[:count], column]
            now[:count] = after
        ends = np.empty_like(now)
        ends[words.order] = now
        ends[words.empty] = FORBIDDEN
        fine = self._final[ends]
        return Reach(fine, (ends != FORBIDDEN) & ~fine, ends)

    def _fill(self, now: np.ndarray, column: np.ndarray, after: np.ndarray) -> None:
        unknown = after == _UNKNOWN
        for key in np.unique(now[unknown].astype(np.int64) * 256 + column[unknown]).tolist():
            self.step(key // 256, key % 256)


class Forbidden:
    """An automaton that reads everything but a given sequence of bytes, whose first byte occurs in it only once."""

    start = 0

    def __init__(self, sequence: bytes) -> None:
        self._sequence = sequence

    def step(self, state: int, byte: int) -> int | None:
        if byte == self._sequence[state]:
            return state + 1 if state + 1 < len(self._sequence) else None
        return int(byte == self._sequence[0])

    def final(self, state: int) -> bool:  # noqa: ARG002 (the text may end anywhere)
        return True


def token_table(token_bytes: Callable[[int], bytes], size: int, control_ids: Sequence[int]) -> list[bytes]:
    """The bytes of every id below ``size``; control ids have none."""
    controls = frozenset(control_ids)
    return [b"" if token in controls else token_bytes(token) for token in range(size)]
