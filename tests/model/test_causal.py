"""The own causal kernel against the formula in float64, forward and backward, whatever its blocks are cut into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cyberslm.model import causal
from cyberslm.model.causal import causal_attention
from cyberslm.model.sight import Sight, find_runs


def inputs(rows: int, heads: int, kv_heads: int, tokens: int, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6))
    return [
        torch.randn(rows, tokens, count, width, generator=generator, dtype=torch.float64)
        .transpose(1, 2)
        .to(dtype)
        .requires_grad_()
        for count, width in shapes
    ]


def truth(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float) -> Tensor:
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    allowed = sight.mask(q.shape[2], q.shape[2], q.device)
    scores = (q.double() @ k.mT * scale).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def cut_rows(rows: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Document numbers and marks of rows whose ends are padding."""
    docs = (torch.rand(rows, tokens, generator=generator) < 0.2).long().cumsum(1)
    real = torch.ones(rows, tokens, dtype=torch.bool)
    real[0, tokens - tokens // 3 :] = False
    return docs, real


@pytest.mark.parametrize("cut", [False, True])
@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(2, 40),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    block=st.integers(1, 17),
    scores=st.sampled_from([1, 300, 1 << 20]),
    window=st.none() | st.integers(1, 12),
)
def test_own_kernel_is_the_formula_with_any_blocks(
    cut: bool, tokens: int, heads: tuple[int, int], block: int, scores: int, window: int | None
) -> None:
    q, k, v = inputs(2, *heads, tokens)
    runs = find_runs(*reversed(cut_rows(2, tokens, torch.Generator().manual_seed(block)))) if cut else None
    sight = Sight(runs=runs, window=window) if cut else Sight(causal=True, window=window)
    right = truth(q, k, v, sight, 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "BLOCK", block)
        patch.setattr(causal, "SCORES", scores)
        mixed = causal_attention(q, k, v, 0.3, window=window, runs=runs)
        torch.testing.assert_close(mixed, right, rtol=0, atol=1e-12)
        grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own, expected = (torch.autograd.grad(out, (q, k, v), grad) for out in (mixed, right))
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_bf16_is_as_exact_as_torch_s_own_kernel() -> None:
    """Against float64: neither may be the better one by more than the rounding of scores to bf16 explains."""
    q, k, v = inputs(2, 4, 4, 300, dtype=torch.bfloat16)
    right = truth(q, k, v, Sight(causal=True), 8**-0.5)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.autograd.grad(right, (q, k, v), grad)
    errors = []
    for mixed in (causal_attention(q, k, v, 8**-0.5), F.scaled_dot_product_attention(q, k, v, is_causal=True)):
        found = (mixed, *torch.autograd.grad(mixed, (q, k, v), grad.bfloat16()))
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(found, (right, *expected), strict=True)])
    assert max(errors[0]) < max(0.01, 2 * max(errors[1]))


def test_compiled_graph_takes_the_kernel_as_it_is() -> None:
    q, k, v = inputs(2, 4, 2, 150)
    compiled = torch.compile(causal_attention, backend="aot_eager", fullgraph=True)
    pairs = [f(q, k, v, 0.3) for f in (compiled, causal_attention)]
    assert torch.equal(*pairs)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in pairs]
    assert all(torch.equal(*each) for each in zip(*grads, strict=True))
