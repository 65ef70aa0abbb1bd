"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and its scalings.

Two channels of a head are turned together by the angle ``position * frequency``, so a query-key product depends on the
distance of their positions only. Pair i has the frequency ``base^(-2i / E)``. In the half-split layout of Llama it is
made of channels i and i + E/2, in the interleaved one of the paper of 2i and 2i + 1: the same network with its channels
in another order (`interleave`).

Scalings reach past the trained context: ``linear`` (Chen et al. 2023, https://arxiv.org/abs/2306.15595), ``dynamic``
NTK, ``yarn`` (Peng et al. 2023, https://arxiv.org/abs/2309.00071) and ``llama3`` (the published code of Llama 3.1). All
but ``dynamic`` are one table; ``dynamic`` depends on how long the sequence is, or with a cache is going to be.

Invariants: one table serves the whole model; it is computed in fp64, kept in fp32 through ``.to(bfloat16)`` and
``.half()``, and never saved (it follows from the configuration). A position outside the table is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from cyberslm.errors import ConfigError, InputError
from cyberslm.model import native_rows
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.norm import at_least_fp32


class Rotation(NamedTuple):
    """Factors of a channel and of its partner, fp32, ``(T, E)`` or ``(B, T, E)`` for positions that differ by row."""

    cos: Tensor
    sin: Tensor
    """With the sign that the partner has."""
    interleaved: bool

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Rotation:
        """From the cosine and sine of each pair's angle, ``(..., T, E/2)``."""
        if interleaved:
            cos, sin = (torch.stack(pair, dim=-1).flatten(-2) for pair in ((cos, cos), (-sin, sin)))
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cls(cos, sin, interleaved)


class RotaryPositionEmbedding(nn.Module):
    """The table of angles for positions ``0 .. max_seq_len - 1`` of queries and keys ``head_dim`` wide."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        base: float = 10_000.0,
        *,
        scaling: RopeScaling | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2 or max_seq_len < 1:
            raise ConfigError(
                f"a rotary table needs an even head_dim and at least one position, not {head_dim} and {max_seq_len}"
            )
        self.head_dim, self.max_seq_len, self.base = head_dim, max_seq_len, base
        self.scaling, self.interleaved = scaling, interleaved
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim // 2), persistent=False)
        self.reset()

    @classmethod
    def of(cls, config: CyberSLMConfig) -> Self:
        return cls(
            config.key_size,
            config.max_seq_len,
            config.rope_base,
            scaling=config.rope_scaling,
            interleaved=config.rope_layout == "interleaved",
        )

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on the length of the sequence."""
        return self.scaling is not None and self.scaling.type == "dynamic"

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the table; done by itself when the module leaves the meta device, where there is nothing to fill."""
        if self.cos.is_meta:
            return
        frequencies, factor = scaled_frequencies(self.head_dim, self.base, self.scaling)
        positions = torch.arange(self.max_seq_len, dtype=torch.float64)
        angles = torch.outer(positions, frequencies)
        self.cos.copy_(angles.cos() * factor)
        self.sin.copy_(angles.sin() * factor)

    def allocate(self, device: torch.device | str) -> None:
        """Leave the meta device, filled. ``to_empty`` does so too, and imports torch's compiler: half a second."""
        self.cos, self.sin = (torch.empty(table.shape, device=device) for table in (self.cos, self.sin))
        self.reset()

    def forward(self, positions: Tensor) -> Rotation:
        """Look up int64 ``positions`` of any shape; ``InputError`` names one that lies outside the table."""
        if positions.dtype not in (torch.int64, torch.int32):
            raise InputError(f"positions must be int64, not {positions.dtype}")
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

    def lookup(self, positions: Tensor, lengths: Tensor | None = None) -> Rotation:
        """`forward` for a caller that knows on the host that the positions are inside: nothing waits for a device.

        ``lengths``, of a shape that broadcasts to that of ``positions``, counts the tokens of each one's sequence; it
        matters only for a scaling `by_length`.
        """
        return Rotation.of(*self.half_angles(positions, lengths), interleaved=self.interleaved)

    def half_angles(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair's angle, fp32 ``(..., key_dim / 2)``; arguments as in `lookup`."""
        if self.scaling is None or lengths is None or not self.by_length:
            return self.cos[positions], self.sin[positions]
        excess = (lengths / cast(int, self.scaling.original_max_seq_len)).double().clamp(min=1.0) - 1.0
        stretched = (1.0 + self.scaling.factor * excess) ** (self.head_dim / (self.head_dim - 2))
        bases = self.base * stretched.unsqueeze(-1)
        angles = positions.unsqueeze(-1) * bases ** -_exponents(self.head_dim, bases.device)
        return angles.cos().float(), angles.sin().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 (torch's signature)
        kept = self.cos, self.sin
        super()._apply(fn, recurse)
        if kept[0].is_meta:
            self.reset()
        elif self.cos.dtype != torch.float32:
            device = self.cos.device
            self.cos, self.sin = (table.to(device) for table in kept)
        return self


def scaled_frequencies(head_dim: int, base: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """Angle per position of each channel pair, fp64 ``(E/2,)``, and a factor on cosines and sines.

    ``dynamic`` gives the frequencies of sequences within the trained context.
    """
    plain = base ** -_exponents(head_dim)
    if scaling is None or scaling.type == "dynamic":
        return plain, 1.0
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _blend(plain, scaling.factor, keep=_llama3_keep(plain, scaling)), 1.0
    given = scaling.attention_factor
    attention_factor = 0.1 * math.log(scaling.factor) + 1.0 if given is None else given
    return _blend(plain, scaling.factor, keep=_yarn_keep(head_dim, base, scaling)), attention_factor


def _exponents(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim


def _blend(frequencies: Tensor, factor: float, *, keep: Tensor) -> Tensor:
    """Frequencies kept where ``keep`` is 1, divided by ``factor`` where it is 0, mixed between."""
    return frequencies * keep + frequencies / factor * (1.0 - keep)


def _llama3_keep(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """By how often a channel turns within the trained context, from low_freq_factor times to high_freq_factor."""
    turns = cast(int, scaling.original_max_seq_len) * frequencies / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_keep(head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """By the channel's number, between the channels that turn beta_fast and beta_slow times, rounded outwards."""

    trained = cast(int, scaling.original_max_seq_len)

    def channel(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    low = max(math.floor(channel(scaling.beta_fast)), 0)
    high = min(math.ceil(channel(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    return 1.0 - ramp.clamp(0.0, 1.0)


def apply_rope(x: Tensor, rotation: Rotation, *, native: bool = False) -> Tensor:
    """Turn ``x`` of shape ``(B, heads, T, E)``; computed in at least fp32, returned in the dtype of ``x``.

    ``native``: by the library in C++ where it is for these.
    """
    angles = rotation.cos
    if native and native_rows.takes(x) and angles.dtype == torch.float32 and not angles.requires_grad:
        return native_rows.turn(x, rotation.cos, rotation.sin, interleaved=rotation.interleaved)
    cos, sin = rotation.cos.unsqueeze(-3), rotation.sin.unsqueeze(-3)
    wide = x.to(at_least_fp32(x.dtype))
    if rotation.interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(wide.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, partner, sin.to(wide.dtype)).to(x.dtype)


def interleave(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the output rows of a half-split query or key projection ``(heads * E, ...)`` for the interleaved layout.

    `deinterleave` is its inverse. Both work on a weight, a bias, or (with one head) a gain of QK-norm.
    """
    width = rows.shape[0] // num_heads
    return rows.unflatten(0, (num_heads, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def deinterleave(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleave`."""
    width = rows.shape[0] // num_heads
    return rows.unflatten(0, (num_heads, width // 2, 2)).transpose(1, 2).flatten(0, 2)
