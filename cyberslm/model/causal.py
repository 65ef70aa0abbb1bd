"""Causal attention on a CPU, forward and backward, out of batched matrix products and softmax kernels.

Each block of queries looks only at the keys that some of them see, so that the upper half of the square, what is before
a window and other documents are never computed. A block's scores live in the processor's caches and are made anew in
the backward pass, for which queries, keys and values are all that is kept. With weights P and dP = dO V^T:

    S = scale Q K^T    P = softmax(S)    O = P V
    dS = P (dP - sum(P dP))    dV = P^T dO    dQ = scale dS K    dK = scale dS^T Q

(Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B.) Products are in the dtype of the inputs, softmax is
fp32 inside, gradients of keys and values are summed in fp32. In bf16 it takes about half the time of torch's own kernel
for CPUs (`scripts/bench attention`).

Letters: B batch, N batch times key/value heads, G query heads that share one, T tokens, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cyberslm.model.norm import at_least_fp32
from cyberslm.model.sight import cuts_of

BLOCK = 128
"""Queries whose scores are made at once ..."""
SCORES = 1 << 20
"""... in as many heads as give about this many scores, so that they stay in the caches."""


def causal_attention(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    scale: float,
    *,
    window: int | None = None,
    runs: Tensor | None = None,
) -> Tensor:
    """Each query sees the keys up to its own, the last ``window`` of them: ``(B, H, T, Ev)``, without dropout.

    ``runs`` ``(B, T)``, as `find_runs` numbers them, keep apart what lies in one row; columns in none get zeros.
    """
    kv_heads = k_BKTE.shape[1]
    q_NGTE = q_BHTE.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    how = _How(scale, window, kv_heads, runs)
    mixed_NGTE = _Causal.apply(q_NGTE, k_BKTE.flatten(0, 1), v_BKTE.flatten(0, 1), how)
    return mixed_NGTE.reshape(q_BHTE.shape[:3] + v_BKTE.shape[3:])


class _How(NamedTuple):
    scale: float
    window: int | None
    kv_heads: int
    """Of each row."""
    runs: Tensor | None


class _Causal(torch.autograd.Function):
    """The two operators, which a compiler takes as they are."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = how
        return torch.ops.cyberslm.causal_forward(q, k, v, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *torch.ops.cyberslm.causal_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.how), None


class _Block(NamedTuple):
    """Some heads' queries ``first`` to ``last`` and the keys that they look among, ``start`` to ``last``."""

    heads: slice
    start: int
    first: int
    last: int

    def queries(self, x_NGTE: Tensor) -> Tensor:
        return x_NGTE[self.heads, :, self.first : self.last].flatten(1, 2)

    def keys(self, x_NTE: Tensor) -> Tensor:
        return x_NTE[self.heads, self.start : self.last]

    def put(self, x_NGTE: Tensor, values: Tensor) -> None:
        x_NGTE[self.heads, :, self.first : self.last] = values.unflatten(1, (x_NGTE.shape[1], -1))


def _blocks(q_NGTE: Tensor, how: _How) -> Iterator[_Block]:
    heads, group, tokens, _ = q_NGTE.shape
    pieces = [(0, heads, 0, tokens)]
    if how.runs is not None:
        own = how.kv_heads
        pieces = [(row * own, (row + 1) * own, first, last) for row, first, last in cuts_of(how.runs).tolist()]
    for low, high, begin, end in pieces:
        at_once = max(1, SCORES // (group * BLOCK * (end - begin)))
        for head in range(low, high, at_once):
            for first in range(begin, end, BLOCK):
                start = begin if how.window is None else max(begin, first - how.window + 1)
                yield _Block(slice(head, min(head + at_once, high)), start, first, min(first + BLOCK, end))


def _weights(q_NGTE: Tensor, k_NTE: Tensor, block: _Block, hidden: Tensor, window: int | None) -> Tensor:
    """The block's weights ``(n, G * t, s)``."""
    scores = torch.bmm(block.queries(q_NGTE), block.keys(k_NTE).mT)
    size, before = block.last - block.first, block.first - block.start
    by_query = scores.unflatten(1, (-1, size))
    by_query[..., before:] += hidden[:size, :size]
    if window is not None and before + size > window:
        rows, columns = (torch.arange(length, device=scores.device) for length in (size, before + size))
        by_query.masked_fill_(rows.unsqueeze(1) + before - columns >= window, -torch.inf)
    return torch.softmax(scores, -1)


def _hidden(q: Tensor) -> Tensor:
    """What hides the later ones of a block's own keys when it is added to scores."""
    return q.new_full((BLOCK, BLOCK), -torch.inf).triu(1)


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    how = _How(*options)
    out = q.new_zeros(q.shape[:3] + v.shape[2:])
    scaled, hidden = q * how.scale, _hidden(q)
    for block in _blocks(q, how):
        block.put(out, torch.bmm(_weights(scaled, k, block, hidden, how.window), block.keys(v)))
    return out


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    how = _How(*options)
    scaled, hidden = q * how.scale, _hidden(q)
    wide = at_least_fp32(q.dtype)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for block in _blocks(q, how):
        weights, d_mixed = _weights(scaled, k, block, hidden, how.window), block.queries(grad)
        d_weights = torch.bmm(d_mixed, block.keys(v).mT)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, q.dtype)
        block.put(dq, torch.bmm(d_scores, block.keys(k)).mul_(how.scale))
        block.keys(dk).add_(torch.bmm(d_scores.mT, block.queries(scaled)))
        block.keys(dv).add_(torch.bmm(weights.mT, d_mixed))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _forward_shape(q: Tensor, _k: Tensor, v: Tensor, *_options: Any) -> Tensor:
    return q.new_empty(q.shape[:3] + v.shape[2:])


def _backward_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_HOW = "float scale, int? window, int kv_heads, Tensor? runs"
torch.library.define("cyberslm::causal_forward", f"(Tensor q, Tensor k, Tensor v, {_HOW}) -> Tensor")
torch.library.define(
    "cyberslm::causal_backward", f"(Tensor grad, Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor, Tensor)"
)
torch.library.impl("cyberslm::causal_forward", "CPU", _forward)
torch.library.impl("cyberslm::causal_backward", "CPU", _backward)
torch.library.register_fake("cyberslm::causal_forward", _forward_shape)
torch.library.register_fake("cyberslm::causal_backward", _backward_shapes)
