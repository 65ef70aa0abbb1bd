"""Scaled dot-product attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) with grouped heads.

    q, k, v = W_q x, W_k x, W_v x        q and k turned by their positions (and normed before, if asked for)
    output  = W_o concat_h( softmax(q_h k_g^T * scale) v_g )        g is the key/value head of query head h

Mask convention: boolean, True = may look, combined with ``&`` and never added. `cyberslm.model.sight` makes every mask
and `cyberslm.model.kernels` obeys it; a query that sees nothing gets exact zeros, in the output and in the weights. A
causal order is anchored at the end: query i of a new block sees the keys 0 .. past + i.

`MultiHeadSelfAttention`, which the network is made of, and `Attention`, which takes any queries, keys and values, are
fronts of one path: project, rotate, attend, merge.

Letters: B batch, T queries, S keys, D width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.errors import ConfigError, InputError
from cyberslm.model.cache import KeyValue, KVCache, LayerCache, Slots
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.kernels import KERNELS, explicit_weights
from cyberslm.model.norm import RMSNorm
from cyberslm.model.plan import Plan, over_cache, over_columns
from cyberslm.model.quantised import products
from cyberslm.model.rope import RotaryPositionEmbedding, Rotation, apply_rope
from cyberslm.model.sight import Sight, visible


class AttentionOutput(NamedTuple):
    """Output ``(B, T, D)``; if asked for, fp32 weights ``(B, H, T, S)`` before dropout, and what to go on from."""

    output: Tensor
    attn_weights: Tensor | None = None
    present: tuple[Tensor, Tensor] | KVCache | None = None


class _Heads(nn.Module, ABC):
    """The path of both fronts; a front names its projections and says what may be seen."""

    kernel = "fused"
    native = False
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, *, heads: int, kv_heads: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.scale, self.dropout = heads, kv_heads, scale, dropout
        self.q_norm = self.k_norm = None

    @abstractmethod
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """Those of queries, keys, values and output."""

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries ``(B, H, T, E)`` and keys ``(B, K, S, E)``, and values."""
        to_q, to_k, to_v, _ = self.projections()
        if query is key is value:
            q, k, v = products(query, to_q, to_k, to_v)
        else:
            q, k, v = to_q(query), to_k(key), to_v(value)
        q_BTHE, k_BSKE, v_BSKE = (
            t.unflatten(-1, (heads, -1)) for t, heads in ((q, self.num_heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BSKE = self.q_norm(q_BTHE), self.k_norm(k_BSKE)
        q_BHTE, k_BKSE, v_BKSE = (t.transpose(1, 2) for t in (q_BTHE, k_BSKE, v_BSKE))
        if rotation is not None:
            q_BHTE, k_BKSE = (apply_rope(t, rotation, native=self.native) for t in (q_BHTE, k_BKSE))
        return q_BHTE, k_BKSE, v_BKSE

    def mix(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, sight: Sight) -> Tensor:
        """Attend and merge: ``(B, T, D)``."""
        k_BKSE, v_BKSE = k_BKSE[:, :, sight.skip :], v_BKSE[:, :, sight.skip :]
        dropout = self.dropout if self.training else 0.0
        kernel = "flex" if sight.blocks is not None else "native" if self.native else self.kernel
        mixed_BHTE = KERNELS[kernel](q_BHTE, k_BKSE, v_BKSE, sight, self.scale, dropout)
        out_proj = self.projections()[3]
        output = out_proj(mixed_BHTE.transpose(1, 2).flatten(-2))
        blind = None if out_proj.bias is None else sight.blind()
        return output if blind is None else output.masked_fill(blind.to(output.device), 0.0)

    def weights(self, q_BHTE: Tensor, k_BKSE: Tensor, sight: Sight) -> Tensor:
        """The weights of all keys, ``(B, H, T, S)``."""
        return F.pad(explicit_weights(q_BHTE, k_BKSE[:, :, sight.skip :], sight, self.scale), (sight.skip, 0))


class MultiHeadSelfAttention(_Heads):
    """Causal self-attention with rotary positions, in the variants of ``config``; ``layer`` chooses its window.

    Inside the model the rotary table is shared and each layer runs `attend` on what the model worked out once; used
    alone, the layer makes its own table and `forward` works everything out.
    """

    def __init__(self, config: CyberSLMConfig, rope: RotaryPositionEmbedding | None = None, *, layer: int = 0) -> None:
        heads, kv_heads = config.num_heads, config.kv_heads
        super().__init__(heads=heads, kv_heads=kv_heads, scale=config.score_scale, dropout=config.attn_dropout)
        width, q_bias, kv_bias = config.hidden_dim, config.bias or config.bias_q, config.bias or config.bias_kv
        self.q_proj = nn.Linear(width, heads * config.key_size, bias=q_bias)
        self.k_proj = nn.Linear(width, kv_heads * config.key_size, bias=kv_bias)
        self.v_proj = nn.Linear(width, kv_heads * config.head_size, bias=kv_bias)
        self.o_proj = nn.Linear(heads * config.head_size, width, bias=config.bias or config.bias_out)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.key_size, config.norm_eps)
            self.k_norm = RMSNorm(config.key_size, config.norm_eps)
        if not 0 <= layer < config.num_layers:
            raise ConfigError(f"layer must be from 0 to num_layers - 1 = {config.num_layers - 1}, not {layer}")
        self.window = config.windows[layer]
        self.own_rope = RotaryPositionEmbedding.of(config) if rope is None else None
        self._shared_rope = (rope,)  # in a tuple, so that the shared table is not a child of every layer

    @property
    def rope(self) -> RotaryPositionEmbedding:
        return self.own_rope or cast(RotaryPositionEmbedding, self._shared_rope[0])

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        return_attn_weights: bool = False,  # noqa: FBT001, FBT002 (the reference's signature)
        kv_cache: tuple[Tensor, Tensor] | KVCache | None = None,
        use_cache: bool = False,  # noqa: FBT001, FBT002
    ) -> AttentionOutput:
        """Attend from ``x`` ``(B, T, D)`` over what ``kv_cache`` holds and itself.

        ``kv_cache`` is a pair of keys and values, each ``(B, K, P, E)``, as ``present`` returns with ``use_cache``; or
        a `KVCache` of one layer such as ``cache.view(layer)``, which is written to without recording gradients and is
        its own ``present``; weights then are over its slots, which hold no padding.
        ``attention_mask`` ``(B, past + T)`` marks real tokens 1 and padding 0, on either side; past columns are those
        of the pair, or the cache's ``columns``. Raises `InputError` for a wrong shape or dtype or a full cache.
        """
        if x.ndim != 3 or not x.shape[1] or x.shape[-1] != self.q_proj.in_features:
            raise InputError(
                f"x must have shape (batch, tokens, {self.q_proj.in_features}) with tokens >= 1, not {tuple(x.shape)}"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not isinstance(kv_cache, KVCache)):
            return self._forward(x, attention_mask, return_attn_weights, kv_cache, use_cache)

    def _forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        return_attn_weights: bool,  # noqa: FBT001
        kv_cache: tuple[Tensor, Tensor] | KVCache | None,
        use_cache: bool,  # noqa: FBT001
    ) -> AttentionOutput:
        plan = self._plan(x, attention_mask, kv_cache)
        if plan.real is not None:
            x = x.masked_fill(~plan.real.unsqueeze(-1), 0.0)
        q, k, v = self.project(x, x, x, plan.rotation)
        present: KeyValue | KVCache
        if isinstance(kv_cache, KVCache):
            k, v = kv_cache.layers[0].write(k, v, cast(Slots, plan.slots))
            kv_cache.advance(plan.new_tokens, x.shape[1])
            present = kv_cache
        else:
            k, v = present = KeyValue.extended(kv_cache, k, v)
        sight = plan.sights[self.window]
        weights = self.weights(q, k, sight) if return_attn_weights else None
        return AttentionOutput(self.mix(q, k, v, sight), weights, present if use_cache else None)

    def attend(self, x: Tensor, plan: Plan, cache: LayerCache | None) -> Tensor:
        """The layer as the model runs it: everything about positions and masks is given."""
        q, k, v = self.project(x, x, x, plan.rotation)
        if cache is not None:
            k, v = cache.write(k, v, cast(Slots, plan.slots))
        return self.mix(q, k, v, plan.sights[self.window])

    def _plan(self, x: Tensor, attention_mask: Tensor | None, kv_cache: tuple[Tensor, Tensor] | KVCache | None) -> Plan:
        widths = self.q_proj.out_features // self.num_heads, self.v_proj.out_features // self.kv_heads
        if kv_cache is None:
            return over_columns(x, attention_mask, None, rope=self.rope, windows=[self.window])
        layer = kv_cache.layers[0] if isinstance(kv_cache, KVCache) else LayerCache(*kv_cache)
        past = layer.keys.shape[2]
        expected = [(x.shape[0], self.kv_heads, past, width) for width in widths]
        if [tuple(layer.keys.shape), tuple(layer.values.shape)] != expected:
            raise InputError(
                f"kv_cache must hold keys and values (batch, kv_heads, past, width) = ({x.shape[0]}, {self.kv_heads},"
                f" past, {widths[0]} and {widths[1]}), not {tuple(layer.keys.shape)} and {tuple(layer.values.shape)}"
            )
        if isinstance(kv_cache, KVCache):
            if len(kv_cache.layers) != 1:
                raise InputError(
                    f"kv_cache holds {len(kv_cache.layers)} layers: give the view of one, cache.view(layer)"
                )
            return over_cache(x, attention_mask, kv_cache, rope=self.rope, windows=[self.window])
        return over_columns(x, attention_mask, None, past=past, rope=self.rope, windows=[self.window])


class Attended(NamedTuple):
    """Output ``(B, T, head_dim * n_heads)`` and, if asked for, fp32 weights ``(B, H, T, S)`` before dropout."""

    output: Tensor
    scores: Tensor | None = None


class Attention(_Heads):
    """Attention of any queries over any keys and values: MHA, GQA or MQA, self or cross, with or without rotation.

    ``head_dim = d_model // total_n_heads`` (default ``n_heads``) is the width of a head's values, and the output's
    width is ``head_dim * n_heads``; queries and keys are ``key_dim`` wide (default ``head_dim``). ``scale`` multiplies
    the scores: the root of 1 / head_dim, of 1 / key_dim, or a number. Interface, names of parameters and the default
    scale, which stays 1/sqrt(head_dim) when ``key_dim`` differs, are those of the class ``Attention`` of the PyPI
    package dual-attention, so that weights carry over. Raises `ConfigError` for sizes that don't fit.
    """

    def __init__(  # noqa: PLR0913 (the reference's signature)
        self,
        d_model: int,
        n_heads: int,
        dropout: float,
        key_dim: int | None = None,
        n_kv_heads: int | None = None,
        add_bias_kv: bool = False,  # noqa: FBT001, FBT002 (the reference's signature)
        add_bias_out: bool = False,  # noqa: FBT001, FBT002
        total_n_heads: int | None = None,
        *,
        scale: Literal["head_dim", "key_dim"] | float = "head_dim",
    ) -> None:
        kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        total = n_heads if total_n_heads is None else total_n_heads
        _check_sizes(d_model, n_heads, kv_heads, total, dropout, key_dim)
        head_dim = d_model // total
        key_dim = head_dim if key_dim is None else key_dim
        scales = {"head_dim": head_dim**-0.5, "key_dim": key_dim**-0.5}
        factor = scales.get(scale) if isinstance(scale, str) else scale
        if factor is None or not 0 < factor < math.inf:
            raise ConfigError(f"scale must be 'head_dim', 'key_dim' or a number above 0 such as 0.125, not {scale!r}")
        super().__init__(heads=n_heads, kv_heads=kv_heads, scale=factor, dropout=dropout)
        self.d_model, self.head_dim, self.key_dim = d_model, head_dim, key_dim
        self.wq = nn.Linear(d_model, n_heads * key_dim, bias=False)
        self.wk = nn.Linear(d_model, kv_heads * key_dim, bias=add_bias_kv)
        self.wv = nn.Linear(d_model, kv_heads * head_dim, bias=add_bias_kv)
        self.wo = nn.Linear(n_heads * head_dim, n_heads * head_dim, bias=add_bias_out)
        self.resid_dropout = nn.Dropout(dropout)

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        return self.wq, self.wk, self.wv, self.wo

    def forward(  # noqa: PLR0913 (the reference's signature)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        freqs_cos: Tensor | None = None,
        freqs_sin: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,  # noqa: FBT001, FBT002 (the reference's signature)
        need_weights: bool = False,  # noqa: FBT001, FBT002
    ) -> Attended:
        """Attend from ``query`` ``(B, T, d_model)`` over ``key`` and ``value`` ``(B, S, d_model)``.

        ``freqs_cos`` and ``freqs_sin`` ``(T, key_dim / 2)`` turn queries and keys of equal length by position, in the
        interleaved layout. ``attn_mask``, boolean, True = may attend, has shape ``(T, S)``, ``(B, T, S)`` or
        ``(B, 1 or H, T, S)``. ``is_causal`` is anchored at the end: query i sees the keys up to ``S - T + i``.
        Raises `InputError` for another shape or dtype, one table without the other, or a mask with ``is_causal``.
        """
        self._check_inputs(query, key, value)
        rotation = self._rotation(freqs_cos, freqs_sin, query.shape[1], key.shape[1])
        if attn_mask is not None:
            if is_causal:
                raise InputError("attn_mask and is_causal were given together: join the causal order into attn_mask")
            allowed = self._mask(attn_mask, query.shape[0], query.shape[1], key.shape[1])
            sight = Sight(allowed=allowed)
            unseen = ~allowed.any(2).any(1).unsqueeze(-1)
            key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
        else:
            sight = _causal(query.shape[1], key.shape[1], query.device) if is_causal else Sight()
        if (blind := sight.blind()) is not None:
            query = query.masked_fill(blind, 0.0)
        q, k, v = self.project(query, key, value, rotation)
        scores = self.weights(q, k, sight) if need_weights else None
        return Attended(self.resid_dropout(self.mix(q, k, v, sight)), scores)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shapes = [tuple(t.shape) for t in (query, key, value)]
        alike = len({shape[0] for shape in shapes if shape}) == 1 and shapes[1] == shapes[2]
        if not alike or any(len(shape) != 3 or not shape[1] or shape[-1] != self.d_model for shape in shapes):
            raise InputError(
                f"query must have shape (batch, tokens, {self.d_model}), key and value (batch, keys, {self.d_model}),"
                f" none of them empty, not {shapes[0]}, {shapes[1]} and {shapes[2]}"
            )

    def _rotation(self, cos: Tensor | None, sin: Tensor | None, queries: int, keys: int) -> Rotation | None:
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            raise InputError(f"freqs_{'cos' if cos is None else 'sin'} is missing: give both rotary tables or none")
        if queries != keys:
            raise InputError(f"rotary tables are for self-attention: there are {queries} queries and {keys} keys")
        wanted = (queries, self.key_dim // 2)
        if self.key_dim % 2 or cos.shape != wanted or sin.shape != wanted:
            raise InputError(
                f"freqs_cos and freqs_sin must have shape (tokens, key_dim / 2) = ({queries}, {self.key_dim / 2:g}),"
                f" not {tuple(cos.shape)} and {tuple(sin.shape)}"
            )
        return Rotation.of(cos.float(), sin.float(), interleaved=True)

    def _mask(self, attn_mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
        shape = tuple(attn_mask.shape)
        if attn_mask.dtype != torch.bool:
            raise InputError(
                f"attn_mask must be boolean, True = may attend, not {attn_mask.dtype}: additive is not taken"
            )
        if shape == (queries, keys):
            return attn_mask.reshape(1, 1, queries, keys)
        if shape == (batch, queries, keys):
            return attn_mask.unsqueeze(1)
        if shape in ((batch, 1, queries, keys), (batch, self.num_heads, queries, keys)):
            return attn_mask
        raise InputError(
            f"attn_mask must have shape (queries, keys) = ({queries}, {keys}), with ({batch},) or ({batch},"
            f" 1 or {self.num_heads}) before it, not {shape}"
        )


def _causal(queries: int, keys: int, device: torch.device) -> Sight:
    if queries == keys:
        return Sight(causal=True)
    places = torch.arange(max(queries, keys), device=device).unsqueeze(0)
    return Sight(allowed=visible(places[:, :queries] + (keys - queries), places[:, :keys]))


def _check_sizes(d_model: int, heads: int, kv_heads: int, total: int, dropout: float, key_dim: int | None) -> None:
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": kv_heads, "total_n_heads": total}
    if key_dim is not None:
        sizes["key_dim"] = key_dim
    problems = [
        f"{name} must be a whole number from 1, not {n!r}" for name, n in sizes.items() if type(n) is not int or n < 1
    ]
    if not problems:
        if d_model % total:
            problems.append(f"total_n_heads {total} does not divide d_model {d_model}")
        if heads % kv_heads:
            problems.append(f"n_kv_heads {kv_heads} does not divide n_heads {heads}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        problems.append(f"dropout must be at least 0 and below 1, not {dropout}")
    if problems:
        raise ConfigError("; ".join(problems))
