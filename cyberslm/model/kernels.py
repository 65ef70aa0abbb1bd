"""Attention kernels: queries, keys, values and what may be seen in, mixed values out.

    weights = softmax(q k^T * scale)        output = weights v

Every kernel in `KERNELS` has the signature `Kernel` and gives the same numbers, and zeros for a query that sees
nothing. ``explicit`` is the formula, and lets nothing hidden through, be it NaN or infinite. ``fused`` is torch's
kernel, which multiplies hidden values by a weight of 0, so that NaN would spread: on the CPU its result is looked at,
and if it is not finite the formula decides. On other devices, and in a compiled graph, looking costs more than it is
worth: there a NaN can reach an earlier query of the same run or mask. ``native`` is the library in C++ for whole rows
on a CPU, and ``fused`` for the rest. ``flex`` is for documents on a GPU, which torch's kernel would take as a boolean
of every pair, at a fraction of its speed.

Letters: B batch, T queries, S keys, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cyberslm.model import native as in_cpp
from cyberslm.model.causal import causal_attention
from cyberslm.model.norm import at_least_fp32
from cyberslm.model.sight import Sight

SHORTEST = 64
"""Tokens of an uncut bf16 row from which torch's kernel is the slower one."""

Kernel = Callable[[Tensor, Tensor, Tensor, Sight, float, float], Tensor]
"""``(q (B, H, T, Eq), k (B, K, S, Eq), v (B, K, S, Ev), sight, scale, dropout)`` -> ``(B, H, T, Ev)``."""


def fused(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float) -> Tensor:
    """torch's ``scaled_dot_product_attention``, or `causal_attention` where that is faster."""
    if not dropout and _has_own(q, sight):
        mixed = causal_attention(q, k, v, scale, window=sight.window, runs=sight.runs)
    else:
        plain = sight.causal and sight.window is None and sight.allowed is None
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if plain else sight.mask(q.shape[2], k.shape[2], q.device),
            dropout_p=dropout,
            is_causal=plain,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return explicit(q, k, v, sight, scale, dropout) if _looks_broken(mixed) else mixed


def native(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float) -> Tensor:
    """`native_attention` where it is for these, else `fused`."""
    if dropout or not in_cpp.takes(q, k, v, sight):
        return fused(q, k, v, sight, scale, dropout)
    mixed = in_cpp.native_attention(q, k, v, sight, scale)
    return explicit(q, k, v, sight, scale, dropout) if _looks_broken(mixed) else mixed


def _has_own(q: Tensor, sight: Sight) -> bool:
    if q.device.type != "cpu" or sight.allowed is not None or not (sight.causal or sight.runs is not None):
        return False
    cut = sight.runs is not None or sight.window is not None
    return cut or (q.dtype == torch.bfloat16 and q.shape[2] >= SHORTEST)


def _looks_broken(mixed: Tensor) -> bool:
    if mixed.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not math.isfinite(mixed.detach().sum().item())


def explicit(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float) -> Tensor:
    """The formula itself, in at least fp32."""
    with torch.autocast(q.device.type, enabled=False):
        return _explicit(q, k, v, sight, scale, dropout)


def _explicit(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float) -> Tensor:
    weights_BHTS = F.dropout(explicit_weights(q, k, sight, scale), dropout)
    v_BHSE = _each_head(v, q.shape[1]).to(weights_BHTS.dtype)
    mixed_BHTE = weights_BHTS @ _finite(v_BHSE)
    broken_BHSE = ~v_BHSE.isfinite()
    if broken_BHSE.any():
        allowed = sight.mask(q.shape[2], k.shape[2], q.device)
        seen_BHTS = torch.ones_like(weights_BHTS) if allowed is None else allowed.to(weights_BHTS.dtype)
        mixed_BHTE = mixed_BHTE.masked_fill(seen_BHTS @ broken_BHSE.to(weights_BHTS.dtype) > 0, torch.nan)
    return mixed_BHTE.to(v.dtype)


def explicit_weights(q_BHTE: Tensor, k_BKSE: Tensor, sight: Sight, scale: float) -> Tensor:
    """The weights ``(B, H, T, S)`` in at least fp32, by the formula."""
    with torch.autocast(q_BHTE.device.type, enabled=False):
        return _weights(q_BHTE, k_BKSE, sight, scale)


def _weights(q_BHTE: Tensor, k_BKSE: Tensor, sight: Sight, scale: float) -> Tensor:
    wide = at_least_fp32(q_BHTE.dtype)
    q, k = q_BHTE.to(wide), _each_head(k_BKSE, q_BHTE.shape[1]).to(wide)
    scores_BHTS = _finite(q) @ _finite(k).mT * scale
    scores_BHTS = scores_BHTS.masked_fill(_is_broken(q).unsqueeze(-1) | _is_broken(k).unsqueeze(-2), torch.nan)
    allowed = sight.mask(q.shape[2], k.shape[2], q.device)
    if allowed is None:
        return scores_BHTS.softmax(-1)
    blind = ~allowed.any(-1, keepdim=True)
    scores_BHTS = scores_BHTS.masked_fill(~allowed, -torch.inf).masked_fill(blind, 0.0)
    return scores_BHTS.softmax(-1).masked_fill(blind, 0.0)


def flex(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float) -> Tensor:
    """torch's ``flex_attention``, which skips hidden blocks, where the pass made some; else, or to drop, `fused`.

    It is for compiled graphs on a GPU: elsewhere torch makes the whole square, and on a CPU no gradients.
    """
    if sight.blocks is None or dropout:
        return fused(q, k, v, sight, scale, dropout)
    from torch.nn.attention.flex_attention import flex_attention

    grouped = q.shape[1] != k.shape[1]
    return flex_attention(q, k, v, block_mask=sight.blocks, scale=scale, enable_gqa=grouped)


KERNELS: dict[str, Kernel] = {"fused": fused, "explicit": explicit, "native": native, "flex": flex}


def _each_head(x_BKSE: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for each query head of their group."""
    return x_BKSE if x_BKSE.shape[1] == heads else x_BKSE.repeat_interleave(heads // x_BKSE.shape[1], dim=1)


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)


def _is_broken(x: Tensor) -> Tensor:
    """Which vectors hold anything that is not finite."""
    return ~x.isfinite().all(-1)
