"""The kernel in C++ against the formula in float64, forward and backward, in every shape its blocks can be cut into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cyberslm.model.causal import causal_attention
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.kernels import KERNELS, explicit
from cyberslm.model.model import CyberSLM
from cyberslm.model.native import native_attention, takes
from cyberslm.model.sight import Sight, find_runs, in_order

SCALE = 0.3
pytestmark = pytest.mark.usefixtures("native_cache")


def inputs(
    heads: tuple[int, int], tokens: int, widths: tuple[int, int] = (8, 6), *, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Two rows of queries, keys and values, as views of (B, T, H, E), as projections give them."""
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(2, tokens, count, width, generator=generator).transpose(1, 2).to(dtype).requires_grad_()
        for count, width in ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    ]


def truth(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    allowed = sight.mask(q.shape[2], k.shape[2], q.device)
    scores = (q.double() @ k.mT * SCALE).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def cut(tokens: int, seed: int) -> Tensor:
    """The runs of two rows of documents, the first of which ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    docs = (torch.rand(2, tokens, generator=generator) < 0.1).long().cumsum(1)
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[0, tokens - tokens // 3 :] = False
    runs = find_runs(real, docs)
    assert runs is not None
    return runs


def found_and_right(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> list[tuple[Tensor, Tensor]]:
    """Output and the three gradients, each with the truth."""
    mixed, right = native_attention(q, k, v, sight, SCALE), truth(q, k, v, sight)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own, expected = (torch.autograd.grad(out, (q, k, v), grad.to(out.dtype)) for out in (mixed, right))
    return list(zip((mixed, *own), (right, *expected), strict=True))


def error(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm().clamp(min=1e-6)).item()


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(2, 200),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    widths=st.sampled_from([(8, 6), (64, 64), (20, 33), (7, 1)]),
    window=st.none() | st.integers(1, 150),
    seed=st.none() | st.integers(0, 5),
)
def test_native_kernel_is_the_formula(
    tokens: int, heads: tuple[int, int], widths: tuple[int, int], window: int | None, seed: int | None
) -> None:
    q, k, v = inputs(heads, tokens, widths)
    sight = Sight(causal=seed is None, runs=None if seed is None else cut(tokens, seed), window=window)
    for one, other in found_and_right(q, k, v, sight):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=3e-5)


@torch.no_grad()
@settings(deadline=None, max_examples=60)
@given(
    new=st.integers(32, 100),
    past=st.integers(1, 200),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (9, 3), (6, 1)]),
    window=st.none() | st.integers(1, 250),
)
def test_queries_of_the_last_tokens_see_what_was_before(
    new: int, past: int, heads: tuple[int, int], window: int | None
) -> None:
    """The second chunk of a prompt used to take another kernel, so that one in chunks took twice as long."""
    q, k, v = inputs(heads, past + new)
    sight = in_order(past, new, window, torch.device("cpu"))
    q, k, v = q[:, :, past:], k[:, :, sight.skip :], v[:, :, sight.skip :]
    assert takes(q, k, v, sight)
    assert error(native_attention(q, k, v, sight, SCALE), truth(q, k, v, sight)) < 1e-5
    assert error(explicit(q, k, v, sight, SCALE, 0.0), truth(q, k, v, sight)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_in_chunks_is_the_prompt_as_a_whole(dtype: torch.dtype, window: int | None) -> None:
    sizes = {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 96}
    config = CyberSLMConfig(vocab_size=100, max_seq_len=1024, sliding_window=window, **sizes)
    model = CyberSLM(config).to(dtype).eval()
    model.use_native()
    ids = torch.randint(100, (1, 900), generator=torch.Generator().manual_seed(0))
    whole = model(ids)
    cache = model.new_cache(1, 900)
    parts = torch.cat([model(part, cache=cache) for part in ids.split([512, 20, 368], dim=1)], dim=1)
    assert torch.allclose(parts, whole, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)


def test_gradients_through_what_was_before_go_to_the_fused_kernel() -> None:
    q, k, v = inputs((4, 2), 90)
    sight = in_order(50, 40, None, torch.device("cpu"))
    assert not takes(q[:, :, 50:], k, v, sight)
    with torch.no_grad():
        assert takes(q[:, :, 50:], k, v, sight)
        assert not takes(q[:, :, 80:], k, v, in_order(80, 10, None, torch.device("cpu")))


@pytest.mark.parametrize("cuts", [False, True])
def test_bf16_is_as_exact_as_the_blocks_of_products(cuts: bool) -> None:
    q, k, v = inputs((4, 2), 300, (64, 64), dtype=torch.bfloat16)
    sight = Sight(runs=cut(300, 1)) if cuts else Sight(causal=True)
    errors = [error(*pair) for pair in found_and_right(q, k, v, sight)]
    mixed = causal_attention(q, k, v, SCALE, runs=sight.runs)
    right = truth(q, k, v, sight)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = (mixed, *torch.autograd.grad(mixed, (q, k, v), grad.bfloat16()))
    expected = (right, *torch.autograd.grad(right, (q, k, v), grad))
    assert max(errors) <= 1.1 * max(map(error, blocks, expected))


def test_number_of_threads_changes_no_bit() -> None:
    q, k, v = inputs((4, 2), 150)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            mixed = native_attention(q, k, v, Sight(causal=True), SCALE)
            results.append((mixed, *torch.autograd.grad(mixed.square().sum(), (q, k, v))))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_columns_in_no_run_get_zeros_and_give_none() -> None:
    q, k, v = inputs((2, 2), 40)
    runs = cut(40, 0)
    mixed = native_attention(q, k, v, Sight(runs=runs), SCALE)
    grads = torch.autograd.grad(mixed.square().sum(), (q, k, v))
    padding = (runs < 0)[0]
    assert padding.any()
    for found in (mixed, *grads):
        assert not found[0, :, padding].any()
        assert found[0, :, ~padding].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_hidden_stays_hidden_even_if_it_is_not_finite(value: float) -> None:
    q, k, v = (t.detach() for t in inputs((2, 2), 70))
    v[:, :, 50] = value
    sight = Sight(causal=True)
    mixed = KERNELS["native"](q, k, v, sight, SCALE, 0.0)
    torch.testing.assert_close(mixed, explicit(q, k, v, sight, SCALE, 0.0), equal_nan=True)
    assert mixed[:, :, :50].isfinite().all()


def test_compiled_graph_takes_the_kernel_as_it_is() -> None:
    q, k, v = inputs((4, 2), 150)
    sight = Sight(causal=True)
    compiled = torch.compile(native_attention, backend="aot_eager", fullgraph=True)
    pairs = [f(q, k, v, sight, SCALE) for f in (compiled, native_attention)]
    assert torch.equal(*pairs)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in pairs]
    assert all(torch.equal(*each) for each in zip(*grads, strict=True))


@pytest.mark.parametrize("change", ["mixed dtypes", "float64", "a mask", "all keys"])
def test_what_it_is_not_for_goes_to_the_fused_kernel(change: str) -> None:
    q, k, v = (t.detach() for t in inputs((2, 2), 9))
    sight = Sight(causal=True)
    if change == "mixed dtypes":
        k = k.bfloat16()
    elif change == "float64":
        q, k, v = q.double(), k.double(), v.double()
    elif change == "a mask":
        sight = Sight(allowed=torch.rand(1, 1, 9, 9) < 0.5)
    else:
        sight = Sight()
    assert not takes(q, k, v, sight)
    if change != "mixed dtypes":
        both = [KERNELS[name](q, k, v, sight, SCALE, 0.0) for name in ("native", "fused")]
        torch.testing.assert_close(*both)


def test_network_with_native_layers_is_the_same_network() -> None:
    config = CyberSLMConfig(
        vocab_size=50,
        hidden_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_dim=48,
        max_seq_len=100,
        qk_norm=True,
        sliding_window=(7, 0),
    )
    model = CyberSLM(config)
    ids = torch.randint(0, 50, (2, 90), generator=torch.Generator().manual_seed(0))
    found = []
    for on in (False, True):
        model.use_native(on=on)
        assert all(layer.self_attn.native is on for layer in model.layers)
        logits = model(ids)
        found.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
