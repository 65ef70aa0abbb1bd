"""What a product takes in and is cheaper to make again than to keep: a norm's result, an activated gate.

A product keeps what went into it for its weight's gradient. Where that came of one pass over numbers that are kept
anyway (`cyberslm.model.native_rows`), the backward pass makes it again just before it is used, to the same bits: the
trade of Chen et al. (2016, https://arxiv.org/abs/1604.06174) where it costs least. Graph compilers choose themselves
what they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Recipe = Callable[[], Tensor]


def not_kept(value: Tensor, recipe: Recipe | None) -> AbstractContextManager[object]:
    """Within, nothing that is recorded keeps ``value``: ``recipe`` makes it again. None: all is kept as ever.

    Hooks of the caller's own for saved tensors don't hear of what is kept within.
    """
    if recipe is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    remade = Remade(value, recipe)
    return saved_tensors_hooks(remade.pack, remade.unpack)


class _View(NamedTuple):
    """Where a tensor lies in the value's memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Remade:
    """One value, its views that operators wanted kept, and the value itself while they are asked for."""

    def __init__(self, value: Tensor, recipe: Recipe) -> None:
        self._memory, self._recipe = value.untyped_storage().data_ptr(), recipe
        self._value: Tensor | None = None
        self._views = self._left = 0

    def pack(self, kept: Tensor) -> Tensor | _View:
        if kept.untyped_storage().data_ptr() != self._memory:
            return kept
        self._views += 1
        return _View(kept.shape, kept.stride(), kept.storage_offset())

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._value is None:
            with torch.no_grad():
                self._value, self._left = self._recipe(), self._views
        view = self._value.as_strided(*packed)
        self._left -= 1
        if not self._left:
            self._value = None
        return view
