"""`PrefixCache`: keys and values of prompts that were fed, for prompts that begin alike.

A system prompt, a list of labels or a long report is read once; what follows it is all that the next request feeds. A
prompt finds the entry with which it shares most tokens and takes a copy of as many, so entries never change; those used
longest ago make room for new ones. It belongs to one model, the first it serves, whose weights stay as they are.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, cat

from cyberslm.decoding.feed import Cache, LanguageModel, prefill
from cyberslm.errors import GenerationError

LEAST = 16
"""Shared tokens below which feeding a prompt anew is as fast."""


class PrefixCache:
    """Up to ``max_bytes`` of keys and values. Raises `GenerationError` for less than one byte."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise GenerationError(f"a prefix cache needs max_bytes of at least 1, not {max_bytes}")
        self.max_bytes = max_bytes
        self.tokens_saved = 0
        """Tokens that did not have to be fed."""
        self._held: OrderedDict[tuple[int, ...], Cache] = OrderedDict()
        self._model: weakref.ref[LanguageModel] | None = None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(cache.num_bytes for cache in self._held.values())

    def serve(self, model: LanguageModel) -> None:
        """Belong to ``model``. Raises `GenerationError` for one whose keys can't be shared, or another than before."""
        if model.keys_follow_length:
            raise GenerationError(
                "prefixes can't be shared with rope scaling of type dynamic, which turns keys by the length of the"
                " whole text: leave out the prefix cache"
            )
        if self._model is not None and self._model() is not model:
            raise GenerationError("the prefix cache holds another model's keys: give each model its own")
        self._model = weakref.ref(model)

    def find(self, prompt: Sequence[int], capacity: int) -> Cache | None:
        """A cache of one row that holds the beginning of ``prompt``, never all of it: its last token is to be fed."""
        best, key = 0, None
        for ids in self._held:
            shared = min(_shared(ids, prompt), len(prompt) - 1)
            if shared > best:
                best, key = shared, ids
        if key is None or best < LEAST:
            return None
        self._held.move_to_end(key)
        self.tokens_saved += best
        return self._held[key].copy_row(0, best, capacity)

    def keep(self, prompt: Sequence[int], cache: Cache, row: int) -> None:
        """Remember the row of ``cache`` that ``prompt`` was fed to; what it begins with is then remembered too."""
        ids = tuple(prompt)
        if len(ids) < LEAST or any(_shared(held, ids) == len(ids) for held in self._held):
            return
        new = cache.copy_row(row, len(ids), len(ids))
        if new.num_bytes > self.max_bytes:
            return
        for held in [held for held in self._held if _shared(held, ids) == len(held)]:
            del self._held[held]
        self._held[ids] = new
        while self.num_bytes > self.max_bytes:
            self._held.popitem(last=False)


def prefill_new(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    capacities: Sequence[int],
    *,
    chunk: int,
    prefixes: PrefixCache | None,
) -> tuple[Tensor, Cache]:
    """Logits ``(B, V)`` after each prompt and a new cache that holds them; only what ``prefixes`` lack is fed."""
    found = [None if prefixes is None else prefixes.find(*each) for each in zip(prompts, capacities, strict=True)]
    anew = [row for row, cache in enumerate(found) if cache is None]
    parts, order = [], list(anew)
    if anew:
        whole = model.new_cache(len(anew), [capacities[row] for row in anew])
        parts.append((prefill(model, [prompts[row] for row in anew], whole, chunk=chunk), whole))
    for row, cache in enumerate(found):
        if cache is not None:
            parts.append((prefill(model, [prompts[row][cache.lengths[0] :]], cache, chunk=chunk), cache))
            order.append(row)
    logits_BV, cache = cat([logits for logits, _ in parts]), parts[0][1]
    for _, other in parts[1:]:
        cache.append(other)
    if order != sorted(order):
        places = [order.index(row) for row in range(len(order))]
        cache.keep(places)
        logits_BV = logits_BV[places]
    if prefixes is not None:
        for row, prompt in enumerate(prompts):
            prefixes.keep(prompt, cache, row)
    return logits_BV, cache


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    if tuple(one[: len(other)]) == tuple(other[: len(one)]):
        return min(len(one), len(other))
    return next(count for count, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
