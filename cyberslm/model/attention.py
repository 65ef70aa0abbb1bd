"""Scaled dot-product attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) with grouped heads.

    weights = softmax(q k^T / sqrt(E))        output = weights v

What may be seen is one boolean, True = may look, made once per forward pass by `visible` and obeyed by every kernel:
a query at position p sees the keys at positions 0..p of its row, and no padding. A query that sees nothing gets zeros,
in the output and in the weights. Masks are combined with ``&``, never added.

Letters: B batch, T queries, S keys, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.errors import InputError
from cyberslm.model.cache import LayerCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.rope import RotaryPositionEmbedding, Rotation, apply_rope

KeyValue = tuple[Tensor, Tensor]


class AttentionOutput(NamedTuple):
    """Output ``(B, T, D)``; if asked for, fp32 weights ``(B, H, T, S)`` before dropout, and the keys and values."""

    output: Tensor
    attn_weights: Tensor | None = None
    present: KeyValue | None = None


class Sight(NamedTuple):
    """What the queries of one forward pass may look at."""

    allowed: Tensor | None
    """(B, 1, T, S) boolean, or None where plain causal order (``causal``) or everything (not ``causal``) is visible."""
    causal: bool
    """The new block is the whole sequence and each query sees the keys up to its own."""


def visible(
    q_positions: Tensor, k_positions: Tensor, *, q_real: Tensor | None = None, k_real: Tensor | None = None
) -> Tensor:
    """Boolean ``(B, 1, T, S)``: the key is not later than the query, and both are real tokens.

    Positions are ``(B or 1, T)`` and ``(B or 1, S)``; the boolean marks of real tokens have the same shapes.
    """
    allowed_BTS = k_positions.unsqueeze(1) <= q_positions.unsqueeze(2)
    if q_real is not None:
        allowed_BTS = allowed_BTS & q_real.unsqueeze(2)
    if k_real is not None:
        allowed_BTS = allowed_BTS & k_real.unsqueeze(1)
    return allowed_BTS.unsqueeze(1)


def key_padding(attention_mask: Tensor, batch: int, columns: int) -> Tensor:
    """A keep-mask (1 or True = real, 0 or False = padding) of exactly ``(batch, columns)``, checked, as boolean."""
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise InputError(
            "attention_mask must be boolean or integer (1 = real, 0 = padding; additive masks are not taken),"
            f" not {attention_mask.dtype}"
        )
    if attention_mask.shape != (batch, columns):
        raise InputError(
            f"attention_mask must have shape (batch, past + new) = ({batch}, {columns}),"
            f" not {tuple(attention_mask.shape)}"
        )
    if attention_mask.dtype != torch.bool and not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise InputError("attention_mask must hold only 1 (real) and 0 (padding)")
    return attention_mask.bool()


def fused(q: Tensor, k: Tensor, v: Tensor, sight: Sight, dropout: float) -> Tensor:
    """torch's kernel; it returns zeros for a query that sees nothing."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=sight.allowed, dropout_p=dropout, is_causal=sight.causal, enable_gqa=grouped
    )


def explicit_weights(q_BHTE: Tensor, k_BKSE: Tensor, sight: Sight) -> Tensor:
    """The weights ``(B, H, T, S)`` in fp32, by the formula."""
    k_BHSE = k_BKSE.repeat_interleave(q_BHTE.shape[1] // k_BKSE.shape[1], dim=1)
    scores_BHTS = q_BHTE.float() @ k_BHSE.float().mT / math.sqrt(q_BHTE.shape[-1])
    allowed = sight.allowed
    if sight.causal:
        allowed = scores_BHTS.new_ones(scores_BHTS.shape[-2:], dtype=torch.bool).tril()
    if allowed is None:
        return scores_BHTS.softmax(-1)
    blind = ~allowed.any(-1, keepdim=True)
    return scores_BHTS.masked_fill(~(allowed | blind), -torch.inf).softmax(-1).masked_fill(blind, 0.0)


def explicit(q: Tensor, k: Tensor, v: Tensor, sight: Sight, dropout: float) -> Tensor:
    """The formula itself."""
    weights_BHTS = F.dropout(explicit_weights(q, k, sight), dropout)
    v_BHSE = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (weights_BHTS @ v_BHSE.float()).to(v.dtype)


Kernel = Callable[[Tensor, Tensor, Tensor, Sight, float], Tensor]
KERNELS: dict[str, Kernel] = {"fused": fused, "explicit": explicit}


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention with rotary positions: MHA, GQA or MQA by ``config.num_kv_heads``, no biases.

    Inside the model the rotary table is shared and each layer runs `attend` on what the model worked out once; used
    alone, the layer makes its own table and `forward` works everything out from the mask and the cached pair.
    """

    kernel = "fused"

    def __init__(self, config: CyberSLMConfig, rope: RotaryPositionEmbedding | None = None) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_size
        self.dropout = config.attn_dropout
        self.q_proj = nn.Linear(config.hidden_dim, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_dim, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_dim, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_dim, bias=False)
        shared = rope is not None
        self.own_rope = None if shared else RotaryPositionEmbedding(self.head_dim, config.max_seq_len, config.rope_base)
        self._shared_rope = (rope,)  # in a tuple, so that the shared table is not a child of every layer

    @property
    def rope(self) -> RotaryPositionEmbedding:
        return self.own_rope or cast(RotaryPositionEmbedding, self._shared_rope[0])

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        return_attn_weights: bool = False,
        kv_cache: KeyValue | None = None,
        use_cache: bool = False,
    ) -> AttentionOutput:
        """Attend from ``x`` ``(B, T, D)`` over itself and the keys and values of ``kv_cache``, each ``(B, K, P, E)``.

        ``attention_mask`` ``(B, P + T)`` marks real tokens 1 and padding 0, on either side.
        """
        batch, new, _ = x.shape
        past = 0 if kv_cache is None else kv_cache[0].shape[2]
        columns = torch.arange(past + new, device=x.device).unsqueeze(0)
        if attention_mask is None:
            positions = columns
            plain = past == 0 or new == 1
            sight = Sight(None if plain else visible(columns[:, past:], columns), causal=past == 0)
        else:
            real = key_padding(attention_mask, batch, past + new)
            positions = (real.cumsum(1) - 1).clamp(min=0)
            allowed = visible(columns[:, past:], columns, q_real=real[:, past:], k_real=real)
            sight = Sight(allowed, causal=False)
        rotation = self.rope(positions[:, past:])
        q, k, v = self._project(x, rotation)
        if kv_cache is not None:
            k, v = torch.cat((kv_cache[0], k), dim=2), torch.cat((kv_cache[1], v), dim=2)
        weights = explicit_weights(q, k, sight) if return_attn_weights else None
        return AttentionOutput(self._mix(q, k, v, sight), weights, (k, v) if use_cache else None)

    def attend(self, x: Tensor, rotation: Rotation, sight: Sight, cache: LayerCache | None) -> Tensor:
        """The layer as the model runs it: everything about positions and masks is given."""
        q, k, v = self._project(x, rotation)
        if cache is not None:
            k, v = cache.write(k, v)
        return self._mix(q, k, v, sight)

    def _project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTE = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k_BKTE = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        v_BKTE = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return apply_rope(q_BHTE, rotation), apply_rope(k_BKTE, rotation), v_BKTE

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        mixed_BHTE = KERNELS[self.kernel](q, k, v, sight, self.dropout if self.training else 0.0)
        return self.o_proj(mixed_BHTE.transpose(1, 2).flatten(-2))
