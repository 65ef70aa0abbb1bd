"""`History`: the tokens of one row, and what filters ask of them, kept up to date instead of counted anew each step.

Only the row's own real tokens are here: no padding, nothing of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Tally:
    """Distinct ids in the order in which they first came, and how often each came."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._slots: dict[int, int] = {}
        self._ids, self._counts = torch.empty(64, dtype=torch.int64), torch.zeros(64)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = torch.cat((self._ids, torch.empty_like(self._ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        """int64 ``(N,)``."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        """fp32 ``(N,)``."""
        return self._counts[: len(self._slots)]


class History:
    """A row's prompt and the answer so far; what is never asked for is never made."""

    def __init__(self, prompt: Sequence[int], answer: Iterable[int] = ()) -> None:
        self.prompt, self.answer = list(prompt), list(answer)
        self._said: Tally | None = None
        self._all: Tally | None = None
        self._grams: dict[int, dict[tuple[int, ...], set[int]]] = {}

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    def add(self, token: int) -> None:
        """One more token of the answer."""
        self.answer.append(token)
        for tally in (self._said, self._all):
            if tally is not None:
                tally.add(token)
        for n, grams in self._grams.items():
            if len(self) >= n:
                *head, last = self._tail(n)
                grams.setdefault(tuple(head), set()).add(last)

    def said(self) -> Tally:
        """The answer's tokens."""
        if self._said is None:
            self._said = Tally(self.answer)
        return self._said

    def all(self) -> Tally:
        """The prompt's tokens and the answer's."""
        if self._all is None:
            self._all = Tally(self.tokens)
        return self._all

    def followers(self, n: int) -> set[int]:
        """Tokens that would make the last ``n`` tokens a sequence that prompt and answer hold already."""
        if n not in self._grams:
            tokens, grams = self.tokens, self._grams.setdefault(n, {})
            for end in range(n, len(tokens) + 1):
                grams.setdefault(tuple(tokens[end - n : end - 1]), set()).add(tokens[end - 1])
        return self._grams[n].get(tuple(self._tail(n - 1)), set()) if len(self) >= n - 1 else set()

    def _tail(self, count: int) -> list[int]:
        """The last ``count`` tokens."""
        behind = self.answer[max(0, len(self.answer) - count) :]
        missing = count - len(behind)
        return (self.prompt[len(self.prompt) - missing :] if missing else []) + behind
