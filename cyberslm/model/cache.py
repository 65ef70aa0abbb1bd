"""`KVCache`: keys and values of the tokens seen so far, in preallocated room, with a length per row.

Slot ``p`` of a row holds the key and value of that row's token at position ``p``: padding is never stored, so rows of
different lengths sit side by side without gaps, and a query at position ``p`` sees exactly the slots ``0 .. p``.
Slots past a row's length are zeros: what was cut off can't reach anyone.

Room begins small and doubles up to ``capacity``, so a short chat doesn't pay for the whole context. It takes
`cyberslm.model.sizes.cache_bytes_per_token` for every slot of every row. The caller owns the cache; the model writes to
its layers and calls `advance` once a forward pass, without recording gradients. Lengths live on the host, so nothing
waits for a device to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from cyberslm.errors import InputError
from cyberslm.model.config import CyberSLMConfig

FIRST_ROOM = 256
"""Slots a row, ..."""
SPARED = 320
"""... but a capacity of up to so many is allocated at once, as growing by a little would cost more than it saves."""


class Slots(NamedTuple):
    """Where the new tokens of one forward pass go, the same in every layer."""

    visible: int
    """Slots that hold anything after the write."""
    start: int | None = None
    """First slot of the new tokens when all rows agree, so that writing is one copy."""
    rows: Tensor | None = None
    """Otherwise the row, ..."""
    slots: Tensor | None = None
    """... the slot ..."""
    columns: Tensor | None = None
    """... and the column among the new tokens, of every real new token."""


class LayerCache:
    """One layer's keys ``(B, K, room, key_dim)`` and values ``(B, K, room, head_dim)``."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def write(self, k_BKTE: Tensor, v_BKTE: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return all visible ones, ``(B, K, visible, E)``, without a copy."""
        for store, new in ((self.keys, k_BKTE), (self.values, v_BKTE)):
            if slots.start is not None:
                store[:, :, slots.start : slots.start + new.shape[2]] = new
            else:
                store[slots.rows, :, slots.slots] = new[slots.rows, :, slots.columns].to(store.dtype)
        held = self.keys[:, :, : slots.visible], self.values[:, :, : slots.visible]
        return held[0].to(k_BKTE.dtype), held[1].to(v_BKTE.dtype)


class KVCache:
    """Keys and values of up to ``capacity`` tokens in each of ``batch_size`` rows; a number for all rows or one each.

    Raises `InputError` for sizes out of range; nothing larger than `SPARED` slots a row is allocated at once.
    """

    def __init__(
        self,
        config: CyberSLMConfig,
        *,
        batch_size: int,
        capacity: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        capacities = [capacity] * batch_size if isinstance(capacity, int) else list(capacity)
        fit = all(isinstance(n, int) and 1 <= n <= config.max_seq_len for n in capacities)
        if batch_size < 1 or len(capacities) != batch_size or not fit:
            raise InputError(
                f"a cache needs batch_size >= 1 and for each row a capacity from 1 to max_seq_len {config.max_seq_len},"
                f" not {batch_size} and {capacity}"
            )
        if not dtype.is_floating_point:
            raise InputError(f"a cache holds floating point numbers, not {dtype}")
        room = max(capacities) if max(capacities) <= SPARED else FIRST_ROOM
        widths = config.key_size, config.head_size
        self.layers = [
            LayerCache(*(torch.zeros(batch_size, config.kv_heads, room, w, dtype=dtype, device=device) for w in widths))
            for _ in range(config.num_layers)
        ]
        self.capacities = capacities
        """Tokens that each row may hold, and by which dynamic rope scaling turns it."""
        self.lengths = [0] * batch_size
        """Tokens held, per row."""
        self.columns = 0
        """Columns of input seen, padding included: what an attention mask has to cover besides the new ones."""
        self.is_view = False

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    def fits(self, config: CyberSLMConfig) -> bool:
        """Whether the cache has the layers, heads and widths of this network."""
        layer = self.layers[0]
        shape = len(self.layers), layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]
        return shape == (config.num_layers, config.kv_heads, config.key_size, config.head_size)

    def view(self, layer: int) -> KVCache:
        """One layer as a cache of its own, for a layer that is run by hand: shared storage, lengths counted apart.

        Rows are kept, reordered and cut on the whole cache, before its views are taken.
        """
        view = self._copy([self.layers[layer]])
        view.is_view = True
        return view

    def fork(self) -> KVCache:
        """A copy that goes its own way."""
        return self._copy([LayerCache(layer.keys.clone(), layer.values.clone()) for layer in self.layers])

    def copy_row(self, row: int, length: int, capacity: int) -> Self:
        """A cache of its own with the first ``length`` tokens of a row, and room for ``capacity``."""
        self._whole()
        if not 0 <= row < self.batch_size or not 0 <= length <= min(capacity, self.lengths[row]):
            raise InputError(f"row {row} of {self.lengths} can't give {length} tokens to a row of {capacity}")
        room = max(1, min(capacity, max(length, FIRST_ROOM)))
        parts = [[t[row : row + 1, :, :length] for t in (layer.keys, layer.values)] for layer in self.layers]
        other = self._copy([LayerCache(*(_enlarged(t, room) for t in pair)) for pair in parts])
        other.lengths, other.capacities, other.columns = [length], [capacity], length
        return other

    def admit(self, new: Sequence[int]) -> int:
        """The longest row after ``new[b]`` more tokens in row b; `InputError` with the numbers if one doesn't fit."""
        totals = [length + count for length, count in zip(self.lengths, new, strict=True)]
        for row, (total, capacity) in enumerate(zip(totals, self.capacities, strict=True)):
            if total > capacity:
                raise InputError(
                    f"row {row} would hold {total} tokens ({self.lengths[row]} and {new[row]} new) and the cache has"
                    f" room for {capacity}: make it larger (up to max_seq_len)"
                )
        return max(totals)

    def reserve(self, slots: int) -> None:
        """Have room for ``slots`` tokens a row, by doubling up to the largest capacity."""
        for layer in self.layers:
            room = layer.keys.shape[2]
            if slots > room:
                room = max(slots, min(2 * room, max(self.capacities)))
                layer.keys, layer.values = _enlarged(layer.keys, room), _enlarged(layer.values, room)

    def advance(self, new: Sequence[int], num_columns: int) -> None:
        """Count ``new[b]`` more tokens in row b, out of ``num_columns`` columns of input."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.columns += num_columns

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; repeating one copies it."""
        self._whole()
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise InputError(f"rows to keep must be from 0 to {self.batch_size - 1} and at least one, not {list(rows)}")
        index = torch.tensor(rows, device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]
        self.capacities = [self.capacities[row] for row in rows]

    def append(self, other: KVCache) -> None:
        """Let the rows of ``other``, a cache of the same network and dtype, follow these; ``other`` stays as it is.

        Later masks cover the longest row: padding that was fed before is forgotten.
        """
        self._whole()
        if self._form() != other._form():
            raise InputError(
                f"caches with layers of {self._form()[0]} and {other._form()[0]} don't belong to one network"
            )
        for mine, its in zip(self.layers, other.layers, strict=True):
            mine.keys, mine.values = _joined(mine.keys, its.keys), _joined(mine.values, its.values)
        self.lengths, self.capacities = self.lengths + other.lengths, self.capacities + other.capacities
        self.columns = max(self.lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget each row's tokens from position ``lengths[row]`` on.

        If anything is cut, later masks cover the longest row: padding that was fed before is forgotten too.
        """
        self._whole()
        if len(lengths) != self.batch_size or any(
            not 0 <= n <= old for n, old in zip(lengths, self.lengths, strict=True)
        ):
            raise InputError(f"rows hold {self.lengths} tokens and can't be cut to {list(lengths)}")
        for row, (kept, held) in enumerate(zip(lengths, self.lengths, strict=True)):
            for layer in self.layers:
                layer.keys[row, :, kept:held] = 0
                layer.values[row, :, kept:held] = 0
        if list(lengths) != self.lengths:
            self.lengths = list(lengths)
            self.columns = max(self.lengths)

    def _form(self) -> list[tuple[object, ...]]:
        """Heads, widths and dtype of each layer."""
        return [(x.keys.shape[1], x.keys.shape[3], x.values.shape[3], x.keys.dtype) for x in self.layers]

    def _whole(self) -> None:
        if self.is_view:
            raise InputError(
                "this cache is the view of one layer: keep, append and truncate on the whole cache instead"
            )

    def _copy(self, layers: list[LayerCache]) -> Self:
        other = object.__new__(type(self))
        other.layers, other.columns, other.is_view = layers, self.columns, False
        other.lengths, other.capacities = list(self.lengths), list(self.capacities)
        return other


class KeyValue(tuple[Tensor, Tensor]):
    """Keys ``(B, K, P, key_dim)`` and values ``(B, K, P, head_dim)`` of one layer, as a plain pair that can grow.

    Where no gradients are recorded, `extended` writes behind the pair's last column, in room kept for it, unless the
    same pair was extended before; then, and when the room is used up, it copies to twice the room. Earlier pairs never
    change.
    """

    _shared: _Shared | None = None

    @classmethod
    def extended(cls, past: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> KeyValue:
        """``past`` and the new columns ``k`` and ``v``, ``(B, K, T, E)``; where gradients are recorded, by joining."""
        if past is None:
            return cls((k, v))
        held = past[0].shape[2]
        if torch.is_grad_enabled():
            return cls((torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)))
        wanted = held + k.shape[2]
        shared = past._shared if isinstance(past, KeyValue) else None
        if shared is None or not shared.claim(held, wanted):
            shared = _Shared(*(_enlarged(t, max(wanted, 2 * held)) for t in past))
            shared.claim(held, wanted)
        grown = cls(shared.write(k, v, Slots(visible=wanted, start=held)))
        grown._shared = shared
        return grown


class _Shared(LayerCache):
    """Room that pairs made one from another share; who is first to extend a pair has the columns behind it."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys, values)
        self._claims: dict[int, object] = {}

    def claim(self, held: int, wanted: int) -> bool:
        """Whether the columns from ``held`` to ``wanted`` are the caller's; of several threads one gets True."""
        if self.keys.shape[2] < wanted or self.keys.is_inference() != torch.is_inference_mode_enabled():
            return False
        mine = object()
        return self._claims.setdefault(held, mine) is mine


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """The rows of both, ``(B, K, S, E)`` each, in the larger room."""
    rows, heads, room, width = first.shape
    both = first.new_zeros(rows + len(second), heads, max(room, second.shape[2]), width)
    both[:rows, :, :room] = first
    both[rows:, :, : second.shape[2]] = second
    return both


def _enlarged(store: Tensor, room: int) -> Tensor:
    """A copy of ``store`` ``(B, K, S, E)`` with ``room`` slots, zeros behind."""
    batch, heads, held, width = store.shape
    larger = store.new_zeros(batch, heads, room, width)
    larger[:, :, :held] = store
    return larger
