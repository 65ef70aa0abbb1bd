"""Drafts: guesses of the next tokens that one forward pass checks together.

The loop feeds a row's last token and its draft at once and then chooses each token exactly as without a draft, from
the same logits and the same draws: as long as the choice is what was guessed, the next position's logits are already
there. So a draft decides how many forward passes an answer takes and nothing else: greedy ids are those of decoding
token by token, and with a seed the sampled ones are too (for a guess that is certain, accepting a token when the draw
from the model's own distribution falls on it is the exact rule of speculative sampling: Leviathan et al. 2023,
arXiv:2211.17192). `PromptLookup` guesses what followed the same few tokens before, in the prompt or the answer
(prompt lookup decoding, A. Saxena 2023); `DraftModel` asks a smaller model.

How much is guessed follows what came of earlier guesses (`Pace`), so that text which is not like its prompt costs next
to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cyberslm.decoding.feed import PREFILL_CHUNK
from cyberslm.decoding.history import History
from cyberslm.errors import GenerationError

LENGTHS = (3, 7, 15)
"""Tokens of a draft: a pass over 4, 8 or 16 costs the compiled step no more than one over a few less ..."""

WIDEST = 24
"""... and tokens of all rows in a pass that checks drafts: so many cost little more than one of each row."""

LONGEST, SHORTEST = 5, 3
"""Tokens that have to repeat for a guess; the longest repetition is asked first."""


class Drafter(Protocol):
    """Guesses for one row. ``follow`` is told every token of the row once, in order, before the next guess."""

    def follow(self, tokens: Sequence[int]) -> None: ...
    def guess(self, most: int) -> list[int]: ...


class Guesses:
    """One row's drafter at its pace."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._pace, self._followed = drafter, Pace(), 0

    def next(self, history: History, most: int) -> list[int]:
        """At most ``most`` tokens that may follow the row."""
        most = min(most, self._pace.allowance()) if most > 0 else 0
        if most <= 0:
            return []
        self._drafter.follow(history.since(self._followed))
        self._followed = len(history)
        return self._drafter.guess(most)

    def record(self, guessed: int, right: int) -> None:
        """``right`` of ``guessed`` tokens were chosen."""
        self._pace.record(guessed, right)


@dataclass
class Pace:
    """How long the next draft should be: the next of `LENGTHS` when all of the last was right, else the first.

    After ``misses`` drafts in a row of which nothing was right, ``2 ** (misses + 1)`` tokens (at most 64) go undrafted.
    """

    size: int = 0
    misses: int = 0
    waiting: int = 0

    def allowance(self) -> int:
        """Tokens to guess now; 0 while waiting."""
        if self.waiting:
            self.waiting -= 1
            return 0
        return LENGTHS[self.size]

    def record(self, guessed: int, right: int) -> None:
        """``right`` of ``guessed`` tokens were chosen."""
        if right:
            self.misses = 0
            self.size = min(self.size + 1, len(LENGTHS) - 1) if right == guessed else 0
        else:
            self.misses += 1
            self.waiting = min(64, 2 << self.misses)
            self.size = 0


class PromptLookup:
    """What followed the last `LONGEST` (else fewer, down to `SHORTEST`) tokens when they stood in the row before.

    One dictionary entry a token and length: following costs a few microseconds, whatever the row's length.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(SHORTEST, LONGEST + 1)]
        self._indexed = 0

    def follow(self, tokens: Sequence[int]) -> None:
        self._ids += tokens

    def guess(self, most: int) -> list[int]:
        ids, held = self._ids, len(self._ids)
        for end in range(max(self._indexed, SHORTEST), held):  # endings with a token behind them
            for size, ends in enumerate(self._ends, SHORTEST):
                if end >= size:
                    ends[tuple(ids[end - size : end])] = end
        self._indexed = max(self._indexed, held)
        for size in range(LONGEST, SHORTEST - 1, -1):
            found = self._ends[size - SHORTEST].get(tuple(ids[held - size :])) if held > size else None
            if found is not None:
                return _continued(ids, found, most)
        return []


def _continued(ids: list[int], start: int, most: int) -> list[int]:
    """``most`` tokens from ``start``; what runs over the end goes on with the guess itself, as a loop of text does."""
    guess = ids[start : start + most]
    period = len(ids) - start
    while len(guess) < most:
        guess.append(guess[len(guess) - period])
    return guess


class DraftModel:
    """The greedy continuation of a smaller model with the same ids, from a cache of its own.

    ``model`` is a `cyberslm.decoding.loop.LanguageModel` whose context must hold the row.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        self._model, self._capacity = model, capacity
        self._cache = model.new_cache(1, [min(capacity, model.max_seq_len)])
        self._ids: list[int] = []
        self._fed: list[int] = []

    def follow(self, tokens: Sequence[int]) -> None:
        self._ids += tokens

    @torch.no_grad()
    def guess(self, most: int) -> list[int]:
        room = min(self._capacity, self._model.max_seq_len) - len(self._ids)
        if room <= 0:
            return []
        same = next((i for i, (a, b) in enumerate(zip(self._fed, self._ids, strict=False)) if a != b), None)
        kept = min(len(self._fed) if same is None else same, len(self._ids) - 1)
        if kept < len(self._fed):
            self._cache.truncate([kept])
            del self._fed[kept:]
        guess: list[int] = []
        new = self._ids[kept:]
        for start in range(0, len(new) - 1, PREFILL_CHUNK):
            part = new[start : min(start + PREFILL_CHUNK, len(new) - 1)]
            self._model.features(torch.tensor([part], device=self._model.device), cache=self._cache)
        self._fed += new[:-1]
        token = new[-1]
        while len(guess) < min(most, room):
            logits_1V = self._model.next_logits(torch.tensor([token], device=self._model.device), self._cache)
            self._fed.append(token)
            token = int(logits_1V.argmax())
            guess.append(token)
        return guess


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How drafts are made: by ``lookup`` in the row's own text, or by a ``model`` with the same ids.

    Raises `GenerationError` for both and for neither.
    """

    lookup: bool = False
    model: Any = None

    def __post_init__(self) -> None:
        if self.lookup == (self.model is not None):
            raise GenerationError("drafts come from lookup or from a draft model: give one of them")

    def guesses(self, capacity: int) -> Guesses:
        """Those of a row of at most ``capacity`` tokens."""
        return Guesses(PromptLookup() if self.lookup else DraftModel(self.model, capacity))
