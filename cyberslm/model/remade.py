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


class Recipe(NamedTuple):
    """What makes a value again, whole and contiguous, and of what: tensors that are kept anyway, detached."""

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]


def not_kept(value: Tensor, recipe: Recipe | None) -> AbstractContextManager[object]:
    """Within, nothing that is recorded keeps ``value``: ``recipe`` makes it again. None: all is kept as ever.

    Hooks of the caller's own for saved tensors don't hear of what is kept within.
    """
    if recipe is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    if not value.is_contiguous() or value.storage_offset():
        return nullcontext()
    remade = Remade(value, recipe)
    return saved_tensors_hooks(remade.pack, remade.unpack)


class _Kept(NamedTuple):
    """A tensor that is none of the value's, without what made it (or an operator's own result would keep itself)."""

    tensor: Tensor
    version: int


class _View(NamedTuple):
    """Where a tensor lies in the value's memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Remade:
    """One value, its views that operators wanted kept, and the value itself while they are asked for."""

    def __init__(self, value: Tensor, recipe: Recipe) -> None:
        self._memory = value.untyped_storage().data_ptr()
        self._make, self._sources = recipe.make, [_Kept(each, each._version) for each in recipe.sources]
        self._value: Tensor | None = None
        self._views = self._left = 0

    def pack(self, tensor: Tensor) -> _Kept | _View:
        if tensor.untyped_storage().data_ptr() != self._memory:
            return _Kept(tensor.detach(), tensor._version)
        self._views += 1
        return _View(tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: _Kept | _View) -> Tensor:
        if isinstance(packed, _Kept):
            return _as_it_was(packed)
        if self._value is None:
            with torch.no_grad():
                self._value, self._left = self._make(*map(_as_it_was, self._sources)), self._views
        view = self._value.as_strided(*packed)
        self._left -= 1
        if not self._left:
            self._value = None
        return view


def _as_it_was(kept: _Kept) -> Tensor:
    """The tensor; autograd's own error, which hooks take away, where it was changed since."""
    if kept.tensor._version != kept.version:
        shape = list(kept.tensor.shape)
        raise RuntimeError(f"a tensor {shape} that the backward pass needs was modified by an inplace operation")
    return kept.tensor
