"""What the loop needs of a network, and how prompts of any lengths are fed to it: in chunks, right-padded, together.

The cache stores no padding. The network is put into evaluation mode for the pass and back into the mode in which it was
found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

PREFILL_CHUNK = 512
"""Most columns of one pass over prompts."""


class LanguageModel(Protocol):
    """A network with a cache that it doesn't own."""

    training: bool

    @property
    def max_seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def keys_follow_length(self) -> bool:
        """Whether a token's key depends on the length of the whole text."""
        ...

    def new_cache(self, batch_size: int, capacity: Sequence[int]) -> Cache: ...
    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, cache: Any = None) -> Tensor: ...
    def head(self, features: Tensor) -> Tensor: ...
    def next_logits(self, tokens: Tensor, cache: Any, counts: Sequence[int] | None = None) -> Tensor:
        """Logits ``(N, V)`` after each of the tokens ``(N,)``, of which ``counts[b]`` (default: one) belong to row b of
        ``cache``, which takes them up."""
        ...

    def train(self, mode: bool = True) -> Any: ...  # noqa: FBT001, FBT002 (torch's signature)


class Cache(Protocol):
    """Keys and values of rows of any lengths, as `cyberslm.model.cache.KVCache` holds them."""

    lengths: list[int]
    capacities: list[int]

    @property
    def num_bytes(self) -> int: ...

    def keep(self, rows: Sequence[int]) -> None: ...
    def append(self, other: Any) -> None: ...
    def copy_row(self, row: int, length: int, capacity: int) -> Cache: ...
    def truncate(self, lengths: Sequence[int]) -> None: ...


def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]], cache: Cache, *, chunk: int) -> Tensor:
    """Feed all prompts into an empty cache, or one into a cache of one row; logits ``(B, V)`` after each one's last
    token."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    ids = ids.to(model.device)
    ends = torch.tensor(lengths, device=model.device)
    ragged = min(lengths) < longest
    mask = torch.arange(longest, device=model.device) < ends.unsqueeze(1) if ragged else None
    last: Tensor | None = None
    for start in range(0, longest, chunk):
        stop = min(start + chunk, longest)
        features = model.features(ids[:, start:stop], None if mask is None else mask[:, :stop], cache=cache)
        here = features[torch.arange(len(prompts)), (ends - 1 - start).clamp(0, stop - start - 1)]
        within = ((ends > start) & (ends <= stop)).unsqueeze(1)
        last = here if last is None else torch.where(within, here, last)
    return model.head(last)  # type: ignore[arg-type]


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """The network in evaluation mode."""
    was = model.training
    if was:
        model.train(False)
    try:
        yield
    finally:
        if was:
            model.train(True)
