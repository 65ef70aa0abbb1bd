"""Ending in time: near the end of the budget, only tokens after which the answer can still be finished.

A known ending is carried along: a list of tokens that would finish the answer from here. It is found by greedy search
that prefers what closes (quotes, brackets, line ends, words of the constraint), and proved by the matcher, so it may be
longer than the best one but never wrong. While there is plenty of room nothing is narrowed. When the room left nears
the ending's length, a token passes only if an ending that fits is known behind it; the ending's own first token always
passes. So an answer with a known ending is whole within its budget, unless one single token far from the end asks for
more than the margin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np

Admits = Callable[[Sequence[int]], bool]

MARGINS = range(24, 65)
"""Tokens of room beyond the ending under which choices are narrowed; half the shortest answer within these."""

GROWTH = 8
"""The most by which one token is taken to lengthen the ending, between two looks at it."""

_TRIED = 192
_TRIED_TOGETHER = 24
_SEARCHED = 24
_LONGEST = 1024
_DEEPEST = 48
_WIDEST = 200
_PAUSE = 3
_FREE = b"qZ7"
_FEW = 8
_ENDS = b"]})>\"\n'`/.;,:| "
_ORDER = _ENDS + b"a0A1e-_{[" + bytes(byte for byte in range(0x21, 0x7F) if byte not in _ENDS + b"a0A1e-_{[")
_DEPTH = bytes(byte for byte in _ORDER if byte not in b" \n") + b" \n"


class Words:
    """A vocabulary as a way to spell bytes. Of several ids with the same bytes the first is taken."""

    def __init__(self, table: Sequence[bytes], eos_id: int) -> None:
        self.eos_id = eos_id
        self._ids: dict[bytes, int] = {}
        for token, data in enumerate(table):
            if data:
                self._ids.setdefault(data, token)
        self._longest = max(map(len, self._ids), default=0)
        self.free = self._known(_FREE) if all(bytes([byte]) in self._ids for byte in _FREE) else None
        self.order, self.ends, self.outward = self._known(_ORDER), set(self._known(_ENDS).tolist()), self._known(_DEPTH)
        self.visible = self._known(b"\n " + bytes(range(0x21, 0x7F))).tolist()

    def spell(self, data: bytes) -> list[int] | None:
        """Tokens of some bytes, the longest first that fits at each place; None where none does."""
        tokens, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    break
            else:
                return None
            tokens.append(token)
            at += size
        return tokens

    def spell_singly(self, data: bytes) -> list[int]:
        """A token for each byte that has one."""
        return self._known(data).tolist()

    def _known(self, data: bytes) -> np.ndarray:
        return np.array([token for byte in data if (token := self._ids.get(bytes([byte]))) is not None], dtype=np.int64)


class Closing:
    """The known ending of one answer, which a `GrammarGuide` consults."""

    def __init__(
        self, words: Words, matcher: Any, budget: int, admits: Admits | None, literals: Sequence[str] = ()
    ) -> None:
        self.words, self._admits = words, admits
        self._literals = [tokens for literal in literals if (tokens := words.spell(literal.encode()))]
        self._limit = _LONGEST
        self.shortest = self._ending(matcher, wide=True)
        self._limit = min(budget, _LONGEST)
        self._ending_now = self.shortest
        self._margin = min(max(len(self.shortest or ()) // 2, MARGINS[0]), MARGINS[-1])
        self._known: dict[int, list[int]] = {}
        self._wait = 0

    def fork(self, admits: Admits | None) -> Closing:
        twin = copy(self)
        twin._admits = admits
        return twin

    def accept(self, token: int) -> None:
        self._wait -= 1
        ending = self._ending_now
        if ending and ending[0] == token:
            self._ending_now = ending[1:]
        elif self._wait <= 0:
            self._ending_now = self._known.get(token)
        self._known = {}

    def narrow(self, mask: np.ndarray, matcher: Any, room: int) -> np.ndarray:
        """Of the ids in ``mask``, those behind which a known ending fits in ``room``; all where there is plenty."""
        if self.shortest is None or self._wait > 0:
            return mask
        ending = self._ending_now
        if ending is None or matcher.validate_tokens([*ending, self.words.eos_id]) <= len(ending):
            ending = self._ending_now = self._ending(matcher)
        if ending is None or len(ending) > room:
            self._wait = _PAUSE
            return mask
        spare = room - len(ending) - self._margin
        if spare > 0:
            self._wait = spare // (GROWTH + 1) + 1
            return mask
        self._known = dict(self._passing(mask, matcher, ending, room - 1))
        narrowed = np.zeros_like(mask)
        narrowed[list(self._known)] = True
        return narrowed

    def _passing(self, mask: np.ndarray, matcher: Any, ending: list[int], room: int) -> Iterator[tuple[int, list[int]]]:
        """Ids that may come next, each with an ending behind it of at most ``room`` tokens."""
        tokens = np.flatnonzero(mask)
        alone = len(tokens) <= _SEARCHED
        for token in tokens[: _TRIED_TOGETHER if self._admits else _TRIED].tolist():
            if token == self.words.eos_id:
                continue
            rest = self._kept(matcher, token, ending)
            if rest is None and alone:
                rest = self._after(matcher, token)
            if rest is not None and len(rest) <= room and self._admitted([token, *rest]):
                yield token, rest
        if ending:
            yield ending[0], ending[1:]

    def _kept(self, matcher: Any, token: int, ending: list[int]) -> list[int] | None:
        """What of the known ending still ends the answer behind a token."""
        for skipped in range(min(3, len(ending) + 1)):
            rest = ending[skipped:]
            if matcher.validate_tokens([token, *rest, self.words.eos_id]) == len(rest) + 2:
                return rest
        return None

    def _after(self, matcher: Any, token: int) -> list[int] | None:
        after = matcher.deep_copy()
        return self._ending(after) if after.consume_token(token) else None

    def _admitted(self, tokens: list[int]) -> bool:
        return self._admits is None or self._admits(tokens)

    def _ending(self, matcher: Any, *, wide: bool = False) -> list[int] | None:
        """Tokens that finish the answer from here: the greedy way, else, if ``wide``, by search."""
        path = self._greedy(matcher.deep_copy())
        if path is None and wide:
            path = self._spread(matcher)
        return path if path is not None and self._admitted(path) else None

    def _greedy(self, matcher: Any) -> list[int] | None:
        path: list[int] = []
        while len(path) <= self._limit and not matcher.is_error():
            if matcher.is_accepting():
                return path
            tokens = self.words.spell(matcher.compute_ff_bytes()) or self._pick(matcher)
            valid = matcher.validate_tokens(tokens)
            if not valid or not matcher.consume_tokens(tokens[:valid]):
                return None
            path += tokens[:valid]
        return None

    def _pick(self, matcher: Any) -> list[int]:
        """In free text what ends it, in a word too; elsewhere what closes, then what goes least deep."""
        mask = _unpacked(matcher.compute_bitmask())
        may = self.words.order[mask[self.words.order]].tolist()
        if self._is_free(mask):
            ends = [[token] for token in may if token in self.words.ends] + self._literals
            ending = next((tokens for tokens in ends if self._ends_text(matcher, tokens)), None)
            return ending or [token for token in may if token not in self.words.ends][:1]
        if 0 < len(may) <= _FEW:
            may = self.words.outward[mask[self.words.outward]].tolist()
        return may[:1] or [token for token in np.flatnonzero(mask).tolist() if token != self.words.eos_id][:1]

    def _ends_text(self, matcher: Any, tokens: list[int]) -> bool:
        after = matcher.deep_copy()
        return (
            matcher.validate_tokens(tokens) == len(tokens)
            and after.consume_tokens(tokens)
            and (after.is_accepting() or not self._is_free(_unpacked(after.compute_bitmask())))
        )

    def _is_free(self, mask: np.ndarray) -> bool:
        return self.words.free is not None and bool(mask[self.words.free].all())

    def _spread(self, matcher: Any) -> list[int] | None:
        """Breadth-first over states that allow different tokens: finds what greed passes by."""
        seen: set[bytes] = {matcher.compute_bitmask()}
        level: list[tuple[Any, list[int]]] = [(matcher, [])]
        for _ in range(_DEEPEST):
            after: list[tuple[Any, list[int]]] = []
            for at, path in level:
                for token in self.words.visible:
                    if at.validate_tokens([token]) != 1:
                        continue
                    here = at.deep_copy()
                    here.consume_token(token)
                    if here.is_accepting():
                        return [*path, token]
                    signature = here.compute_bitmask()
                    if signature not in seen and len(seen) < _WIDEST:
                        seen.add(signature)
                        after.append((here, [*path, token]))
            level = after
        return None


def _unpacked(bits: bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").astype(bool)
