"""What one forward pass works out once and hands to every layer: rotation, sight, and where new keys go.

Three kinds of pass, one rule (`cyberslm.model.sight`): over the input's own columns, over a pair of earlier keys and
values that keeps padding columns, and over a `KVCache`, which stores none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm.errors import InputError
from cyberslm.model.cache import KVCache, Slots
from cyberslm.model.rope import RotaryPositionEmbedding, Rotation
from cyberslm.model.sight import (
    Sight,
    block_mask,
    document_numbers,
    find_runs,
    in_order,
    key_padding,
    positions_among,
    positions_in,
    visible,
)

Windows = Sequence[int | None]
"""The sliding windows that layers have."""


class Plan(NamedTuple):
    """What one forward pass hands to every layer."""

    rotation: Rotation
    sights: dict[int | None, Sight]
    """By the layer's window."""
    real: Tensor | None = None
    """Marks of the new tokens ``(B, T)``, where some may be padding."""
    slots: Slots | None = None
    """Where the new keys go, with a cache."""
    new_tokens: tuple[int, ...] = ()
    """Real new tokens per row, with a cache."""


def over_columns(
    x: Tensor,
    attention_mask: Tensor | None,
    docs: Tensor | None,
    *,
    past: int = 0,
    rope: RotaryPositionEmbedding,
    windows: Windows,
) -> Plan:
    """A pass of ``x`` ``(B, T, ...)`` whose keys are ``past`` earlier columns and its own.

    ``attention_mask`` ``(B, past + T)`` marks real tokens; ``docs`` ``(B, T)`` numbers documents, without a past.
    What must fit ``max_seq_len`` are positions, not columns.
    """
    batch, new, device = x.shape[0], x.shape[1], x.device
    if past and rope.by_length:
        raise InputError(
            "rope_scaling of type dynamic turns keys by the length of the whole sequence, which a pair of earlier keys"
            " and values doesn't know: use a KVCache, whose capacity says it"
        )
    real = None if attention_mask is None else key_padding(attention_mask, batch, past + new)
    if docs is not None:
        docs = document_numbers(docs, batch, new)
    if real is None and docs is None:
        return _plain(past, new, rope, windows, device)
    if past == 0 and device.type == "cpu" and (runs := find_runs(real, docs)) is not None:
        if bool((runs == torch.arange(batch).unsqueeze(1)).all()):
            return _plain(past, new, rope, windows, device)
        positions, lengths = positions_in(runs)
        rope.require(int(positions.max()))
        sights = {window: Sight(runs=runs, window=window) for window in set(windows)}
        return Plan(rope.lookup(positions, lengths), sights, real)
    positions, lengths = positions_among(real, docs)
    if past + new > rope.max_seq_len:
        rope.require(int(positions.max()))
    marks = None if real is None else (real[:, past:], real)
    numbers = None if docs is None else (docs, docs)
    sights = {
        window: Sight(allowed=visible(positions[:, past:], positions, real=marks, docs=numbers, window=window))
        for window in set(windows)
    }
    rotation = rope.lookup(positions[:, past:], lengths[:, past:])
    return Plan(rotation, sights, None if real is None else real[:, past:])


def over_documents(docs: Tensor, *, rope: RotaryPositionEmbedding, windows: Windows) -> Plan:
    """`over_columns` of packed documents ``(B, T)``, with block masks for flex attention; no wait for a device."""
    columns = docs.shape[1]
    docs = document_numbers(docs, *docs.shape)
    rope.require(columns - 1)
    positions, lengths = positions_among(None, docs)
    sights = {window: Sight(blocks=block_mask(positions, docs, window)) for window in set(windows)}
    return Plan(rope.lookup(positions, lengths), sights)


def over_cache(
    x: Tensor, attention_mask: Tensor | None, cache: KVCache, *, rope: RotaryPositionEmbedding, windows: Windows
) -> Plan:
    """A pass of ``x`` ``(B, T, ...)`` that follows what ``cache`` holds; room for it is made.

    ``attention_mask`` ``(B, cache.columns + T)`` marks real tokens.
    """
    batch, new, device = x.shape[0], x.shape[1], x.device
    if batch != cache.batch_size:
        raise InputError(f"the input has {batch} rows and the cache {cache.batch_size}")
    if cache.layers[0].keys.is_inference() and not torch.is_inference_mode_enabled():
        raise InputError("the cache was made in torch.inference_mode: use it there too, or make it outside")
    real = None if attention_mask is None else _new_marks(attention_mask, cache, new)
    added = (new,) * batch if real is None else tuple(real.sum(1).tolist())
    longest = max(1, cache.admit(added))  # of nothing but padding one empty slot is looked at, by nobody
    rope.require(longest - 1)
    cache.reserve(longest)
    ends = torch.tensor(cache.capacities, device=device).unsqueeze(1) if rope.by_length else None
    if real is None and len(set(cache.lengths)) == 1:
        start = cache.lengths[0]
        positions = torch.arange(start, start + new, device=device)
        rotation = rope.lookup(positions if ends is None else positions.expand(batch, new), ends)
        sights = {window: in_order(start, new, window, device) for window in set(windows)}
        return Plan(rotation, sights, slots=Slots(visible=longest, start=start), new_tokens=added)
    held = torch.tensor(cache.lengths, device=device).unsqueeze(1)
    marks = torch.ones(batch, new, dtype=torch.bool, device=device) if real is None else real
    positions = (held + marks.cumsum(1) - 1).masked_fill(~marks, 0)
    rows, columns = marks.nonzero(as_tuple=True)
    slots = Slots(visible=longest, rows=rows, slots=positions[rows, columns], columns=columns)
    sights = {window: _ragged(positions, marks, longest, min(cache.lengths), window) for window in set(windows)}
    return Plan(rope.lookup(positions, ends), sights, real, slots, added)


def _plain(past: int, new: int, rope: RotaryPositionEmbedding, windows: Windows, device: torch.device) -> Plan:
    rope.require(past + new - 1)
    positions = torch.arange(past, past + new, device=device)
    length = torch.full((1,), past + new, device=device)  # torch.tensor would copy from the host, which waits
    sights = {window: in_order(past, new, window, device) for window in set(windows)}
    return Plan(rope.lookup(positions, length), sights)


def _ragged(positions: Tensor, marks: Tensor, longest: int, shortest_past: int, window: int | None) -> Sight:
    skip = 0 if window is None else max(0, shortest_past - window + 1)
    slots = torch.arange(skip, longest, device=positions.device).unsqueeze(0)
    every = torch.ones_like(slots, dtype=torch.bool)
    return Sight(allowed=visible(positions, slots, real=(marks, every), window=window), skip=skip)


def _new_marks(attention_mask: Tensor, cache: KVCache, new: int) -> Tensor:
    real = key_padding(attention_mask, cache.batch_size, cache.columns + new)
    if (held := real[:, : cache.columns].sum(1).tolist()) != cache.lengths:
        raise InputError(f"attention_mask marks {held} past tokens as real and the cache holds {cache.lengths}")
    return real[:, cache.columns :]
