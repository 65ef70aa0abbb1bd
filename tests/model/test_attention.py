from __future__ import annotations

import oracles
import pytest
import torch
from conftest import usable_kernels

from cyberslm.errors import ConfigError, InputError
from cyberslm.model.attention import MultiHeadSelfAttention
from cyberslm.model.cache import KVCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.kernels import KERNELS, explicit_weights
from cyberslm.model.rope import RotaryPositionEmbedding
from cyberslm.model.sight import Sight, visible

SCALE = 8**-0.5
HEADS = [(4, 4), (4, 2), (4, 1)]


def layer(kv_heads: int = 2, **changes: object) -> MultiHeadSelfAttention:
    torch.manual_seed(0)
    config = CyberSLMConfig(
        **{"vocab_size": 50, "hidden_dim": 32, "num_heads": 4, "num_kv_heads": kv_heads, "max_seq_len": 32, **changes}
    )
    return MultiHeadSelfAttention(config).eval()


def random_qkv(heads: int, kv_heads: int, queries: int = 5, keys: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(3, h, n, 8, generator=generator) for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("kernel", sorted(usable_kernels()))
def test_every_kernel_equals_the_explicit_sum(kernel: str, heads: int, kv_heads: int) -> None:
    q, k, v = random_qkv(heads, kv_heads)
    allowed = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed[0, 0] = False
    got = KERNELS[kernel](q, k, v, Sight(allowed=allowed.unsqueeze(1)), SCALE, 0.0)
    torch.testing.assert_close(got.double(), oracles.attention(q, k, v, allowed), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("kernel", sorted(usable_kernels()))
def test_causal_flag_equals_the_causal_mask(kernel: str, heads: int, kv_heads: int) -> None:
    q, k, v = random_qkv(heads, kv_heads, 6, 6)
    got = KERNELS[kernel](q, k, v, Sight(causal=True), SCALE, 0.0)
    triangle = torch.ones(6, 6, dtype=torch.bool).tril().expand(3, 6, 6)
    torch.testing.assert_close(got.double(), oracles.attention(q, k, v, triangle), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", sorted(usable_kernels()))
def test_query_that_sees_nothing_gets_zeros_and_finite_gradients(kernel: str) -> None:
    """G01 (pytorch#110213): the fused kernel and a hand-written softmax disagreed on fully masked rows (0 and NaN)."""
    q, k, v = (t.requires_grad_() for t in random_qkv(4, 2))
    allowed = torch.ones(3, 1, 5, 7, dtype=torch.bool)
    allowed[1] = False
    out = KERNELS[kernel](q, k, v, Sight(allowed=allowed), SCALE, 0.0)
    out.square().sum().backward()
    assert out[1].eq(0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_weights_of_a_blind_query_are_zero_and_others_sum_to_one() -> None:
    q, k, _ = random_qkv(4, 2)
    allowed = torch.ones(3, 1, 5, 7, dtype=torch.bool)
    allowed[2, :, 3] = False
    weights = explicit_weights(q, k, Sight(allowed=allowed), SCALE)
    assert weights[2, :, 3].eq(0).all()
    torch.testing.assert_close(weights.sum(-1)[:2], torch.ones(2, 4, 5))


def test_visible_joins_order_and_padding() -> None:
    positions = torch.arange(3).unsqueeze(0)
    real = torch.tensor([[False, True, True]])
    allowed = visible(positions, positions, real=(real, real))
    assert allowed[0, 0].int().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("split", [(12,), (5, 7), (1,) * 12, (9, 1, 1, 1), (3, 4, 5)])
def test_any_split_with_a_kv_pair_equals_one_pass(kv_heads: int, split: tuple[int, ...]) -> None:
    """G02: causality must hold within a chunk when the cache is not empty."""
    attention = layer(kv_heads)
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(3))
    whole = attention(x).output
    past, parts, start = None, [], 0
    for size in split:
        result = attention(x[:, start : start + size], kv_cache=past, use_cache=True)
        past, start = result.present, start + size
        parts.append(result.output)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_row_equals_the_row_alone(side: str) -> None:
    attention = layer()
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, : 4 if side == "left" else None] = 0
    if side == "right":
        mask[1] = torch.tensor([1] * 6 + [0] * 4)
    result = attention(x, mask, return_attn_weights=True)
    alone = attention(x[1:, 4:] if side == "left" else x[1:, :6]).output
    real = result.output[1, 4:] if side == "left" else result.output[1, :6]
    torch.testing.assert_close(real, alone[0], atol=1e-5, rtol=0)
    pads = mask[1] == 0
    assert result.output[1, pads].eq(0).all()
    assert result.attn_weights is not None
    assert result.attn_weights[1][:, pads].eq(0).all()
    assert result.attn_weights[1][:, :, pads].eq(0).all()


def test_asking_for_weights_does_not_change_the_output() -> None:
    attention = layer()
    x = torch.randn(2, 6, 32)
    assert torch.equal(attention(x).output, attention(x, return_attn_weights=True).output)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 5), "boolean or integer"),
        (torch.zeros(2, 6), "additive"),
        (torch.ones(2, 5, dtype=torch.long), r"\(2, 6\), not \(2, 5\)"),
        (torch.ones(1, 6, dtype=torch.bool), r"not \(1, 6\)"),
        (torch.ones(2, 1, dtype=torch.bool), r"not \(2, 1\)"),
        (torch.full((2, 6), 2), "only 1"),
    ],
)
def test_mask_of_another_form_is_refused(mask: torch.Tensor, words: str) -> None:
    """G03 (pytorch#103963): the meaning of a mask was guessed, or it was broadcast in silence."""
    with pytest.raises(InputError, match=words):
        layer()(torch.randn(2, 6, 32), mask)


def test_mask_must_cover_past_and_new_keys() -> None:
    """G05: a mask of length 1 broadcast over the whole cache while decoding and masked nothing."""
    attention = layer()
    past = attention(torch.randn(2, 4, 32), use_cache=True).present
    with pytest.raises(InputError, match=r"past \+ new\) = \(2, 5\), not \(2, 1\)"):
        attention(torch.randn(2, 1, 32), torch.ones(2, 1, dtype=torch.bool), kv_cache=past)


def test_shared_table_is_used_and_is_not_a_child() -> None:
    config = CyberSLMConfig(vocab_size=50, hidden_dim=32, num_heads=4, max_seq_len=16)
    table = RotaryPositionEmbedding(config.head_size, 16)
    attention = MultiHeadSelfAttention(config, table)
    assert attention.rope is table
    assert list(attention.buffers()) == []
    assert list(MultiHeadSelfAttention(config).buffers()) != []


def test_arguments_may_be_given_by_position() -> None:
    attention = layer()
    x, mask = torch.randn(2, 6, 32), torch.ones(2, 6, dtype=torch.bool)
    output, weights, present = attention(x, mask, True, None, True)  # noqa: FBT003
    assert (output.shape, weights.shape, weights.dtype) == ((2, 6, 32), (2, 4, 6, 6), torch.float32)
    k, v = present
    assert k.shape == v.shape == (2, 2, 6, 8)


@pytest.mark.parametrize("window", [None, 3])
def test_weights_are_the_softmax_over_what_is_seen(window: int | None) -> None:
    attention = layer(sliding_window=window, attn_dropout=0.5).train()
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        pair = attention(x[:, :5], use_cache=True).present
        weights = attention(x[:, 5:], return_attn_weights=True, kv_cache=pair).attn_weights
    assert weights.shape == (2, 4, 2, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 2))
    seen = [[s <= 5 + t and (window is None or s > 5 + t - window) for s in range(7)] for t in range(2)]
    assert torch.equal(weights.gt(0), torch.tensor(seen).expand(2, 4, 2, 7))


def test_dropout_acts_on_the_weights_in_training_only() -> None:
    attention, x = layer(attn_dropout=0.5), torch.randn(2, 6, 32)
    assert torch.equal(attention(x).output, attention(x).output)
    attention.train()
    assert not torch.equal(attention(x).output, attention(x).output)


def test_pair_and_view_that_do_not_fit_are_refused() -> None:
    attention, x = layer(), torch.randn(2, 3, 32)
    pair = (torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8))
    assert attention(x, kv_cache=pair).output.shape == (2, 3, 32)
    for bad in ((pair[0][:1], pair[1][:1]), (pair[0], pair[1][..., :6]), (pair[0], pair[1][:, :, :3])):
        with pytest.raises(InputError, match=r"kv_cache must hold .* = \(2, 2, past, 8 and 8\)"):
            attention(x, kv_cache=bad)
    config = CyberSLMConfig(vocab_size=50, hidden_dim=32, num_heads=4, num_kv_heads=2, num_layers=2)
    cache = KVCache(config, batch_size=2, capacity=8)
    with pytest.raises(InputError, match=r"holds 2 layers: give the view of one, cache.view\(layer\)"):
        attention(x, kv_cache=cache)
    with pytest.raises(InputError, match=r"\(batch, tokens, 32\) .*, not \(2, 3, 31\)"):
        attention(x[..., :31])


def test_gradients_flow_through_a_pair() -> None:
    attention, x = layer(), torch.randn(1, 6, 32)
    whole = x.clone().requires_grad_()
    attention(whole).output[:, 4:].square().sum().backward()
    parts = x.clone().requires_grad_()
    past = attention(parts[:, :4], use_cache=True).present
    attention(parts[:, 4:], kv_cache=past).output.square().sum().backward()
    torch.testing.assert_close(parts.grad, whole.grad, atol=1e-5, rtol=1e-4)


def test_weights_and_the_formula_are_fp32_under_autocast_and_in_bf16() -> None:
    """Autocast turned the weights and the formula's products into bf16."""
    attention, x = layer().eval(), torch.randn(2, 6, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(x, return_attn_weights=True).attn_weights.dtype == torch.float32
        q, k, v = random_qkv(4, 2, 6, 6)
        mixed = KERNELS["explicit"](q, k, v, Sight(causal=True), SCALE, 0.0)
    triangle = torch.ones(6, 6, dtype=torch.bool).tril().expand(3, 6, 6)
    torch.testing.assert_close(mixed.double(), oracles.attention(q, k, v, triangle), atol=1e-5, rtol=0)
    assert attention.bfloat16()(x.bfloat16(), return_attn_weights=True).attn_weights.dtype == torch.float32


@pytest.mark.parametrize("kernel", sorted(usable_kernels()))
def test_every_kernel_drops_weights(kernel: str) -> None:
    torch.manual_seed(0)
    q, k = (torch.zeros(2, 4, 200, 8) for _ in range(2))
    ones = torch.ones(2, 4, 200, 8)
    mixed = KERNELS[kernel](q, k, ones, Sight(), SCALE, 0.5)
    assert mixed.mean().item() == pytest.approx(1.0, abs=0.05)
    assert mixed.std().item() > 0.01


def test_layer_number_and_empty_input_out_of_range_are_refused() -> None:
    config = CyberSLMConfig(vocab_size=50, hidden_dim=32, num_heads=4, num_layers=2)
    for number in (2, -1):
        with pytest.raises(ConfigError, match=f"layer must be from 0 to num_layers - 1 = 1, not {number}"):
            MultiHeadSelfAttention(config, layer=number)
    with pytest.raises(InputError, match="with tokens >= 1"):
        layer()(torch.randn(2, 0, 32))
