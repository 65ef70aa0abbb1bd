"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split layout of Llama.

Channel ``i`` of the first half of a head and channel ``i`` of the second half are turned together by the angle
``position * base^(-2i / head_dim)``, so a query-key product depends on the distance of their positions only.

Invariants: one table serves the whole model; it is computed in fp64, kept in fp32 through ``.to(bfloat16)`` and
``.half()``, and never saved (it follows from the configuration). A position outside the table is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from cyberslm.errors import InputError


class Rotation(NamedTuple):
    """Cosines and sines of the angles, fp32, ``(T, E)`` or ``(B, T, E)`` for positions that differ by row."""

    cos: Tensor
    sin: Tensor


class RotaryPositionEmbedding(nn.Module):
    """The table of angles for positions ``0 .. max_seq_len - 1`` of heads ``head_dim`` wide."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim, self.max_seq_len, self.base = head_dim, max_seq_len, base
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the table; needed again after a build on the meta device, where there is nothing to fill."""
        if self.cos.is_meta:
            return
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=self.cos.device) / self.head_dim
        positions = torch.arange(self.max_seq_len, dtype=torch.float64, device=self.cos.device)
        angles = torch.outer(positions, self.base**-exponents).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, positions: Tensor) -> Rotation:
        """Look up int64 ``positions`` of any shape; ``InputError`` names one that lies outside the table."""
        if positions.numel() and not positions.is_meta:
            for edge in positions.aminmax():
                self.require(int(edge))
        return self.lookup(positions)

    def require(self, position: int) -> None:
        """Raise ``InputError`` for a position outside the table."""
        if not 0 <= position < self.max_seq_len:
            raise InputError(
                f"position {position} is outside the rotary table of {self.max_seq_len} positions (max_seq_len):"
                " shorten the input or build the model with a larger max_seq_len"
            )

    def lookup(self, positions: Tensor) -> Rotation:
        """`forward` for a caller that knows on the host that the positions are inside: nothing waits for a device."""
        return Rotation(self.cos[positions], self.sin[positions])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 (torch's signature)
        kept = self.cos, self.sin
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            device = self.cos.device
            self.cos, self.sin = (table.to(device) for table in kept)
        return self


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn ``x`` of shape ``(B, heads, T, E)``; computed in fp32, returned in the dtype of ``x``."""
    cos, sin = (t.unsqueeze(-3) for t in rotation)
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
