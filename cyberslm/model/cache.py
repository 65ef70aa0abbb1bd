"""`KVCache`: keys and values of the tokens seen so far, preallocated, with a length per row.

Slot ``p`` of a row holds the key and value of that row's token at position ``p``: padding is never stored, so rows of
different lengths sit side by side without gaps, and a query at position ``p`` sees exactly the slots ``0 .. p``.
The caller owns the cache; the model writes through `LayerCache` views and calls `advance` once per forward pass.
Lengths live on the host, so nothing waits for a device to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm.errors import InputError
from cyberslm.model.config import CyberSLMConfig


class LayerCache(NamedTuple):
    """One layer's view for one forward pass: where its new keys go and how many slots the queries look at."""

    keys: Tensor
    """(B, K, capacity, E)"""
    values: Tensor
    start: int | None
    """First slot of the new tokens when all rows agree, so that writing is one copy."""
    rows: Tensor | None
    """Otherwise the row, ..."""
    slots: Tensor | None
    """... the slot ..."""
    columns: Tensor | None
    """... and the column among the new tokens, of every real new token."""
    visible: int
    """Slots that hold anything after the write."""

    def write(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return all visible ones, ``(B, K, visible, E)``, without a copy."""
        for store, new in ((self.keys, k_BKTE), (self.values, v_BKTE)):
            if self.start is not None:
                store[:, :, self.start : self.start + new.shape[2]] = new
            else:
                store[self.rows, :, self.slots] = new[self.rows, :, self.columns].to(store.dtype)
        held = self.keys[:, :, : self.visible], self.values[:, :, : self.visible]
        return held[0].to(k_BKTE.dtype), held[1].to(v_BKTE.dtype)


class KVCache:
    """Room for ``capacity`` tokens in each of ``batch_size`` rows."""

    def __init__(
        self,
        config: CyberSLMConfig,
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1 or not 1 <= capacity <= config.max_seq_len:
            raise InputError(
                f"a cache needs batch_size >= 1 and capacity from 1 to max_seq_len {config.max_seq_len},"
                f" not {batch_size} and {capacity}"
            )
        if not dtype.is_floating_point:
            raise InputError(f"a cache holds floating point numbers, not {dtype}")
        shape = (config.num_layers, batch_size, config.kv_heads, capacity, config.head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch_size
        """Tokens held, per row."""
        self.columns = 0
        """Columns of input seen, padding included: what an attention mask has to cover besides the new ones."""

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def fits(self, config: CyberSLMConfig) -> bool:
        """Whether the cache has the layers, heads and width of this network."""
        layers, _, heads, _, width = self.keys.shape
        return (layers, heads, width) == (config.num_layers, config.kv_heads, config.head_size)

    def advance(self, new: Sequence[int], num_columns: int) -> None:
        """Count ``new[b]`` more tokens in row b, out of ``num_columns`` columns of input."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.columns += num_columns

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; repeating one copies it."""
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise InputError(f"rows to keep must be from 0 to {self.batch_size - 1} and at least one, not {list(rows)}")
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget each row's tokens from position ``lengths[row]`` on."""
        if len(lengths) != self.batch_size or any(
            not 0 <= n <= old for n, old in zip(lengths, self.lengths, strict=True)
        ):
            raise InputError(f"rows hold {self.lengths} tokens and can't be cut to {list(lengths)}")
        self.lengths = list(lengths)
        self.columns = max(self.lengths)
