"""`Attention` against the class of that name in dual-attention 0.0.7, and the right values where that one is wrong."""

from __future__ import annotations

import itertools

import dual_attention.attention as reference
import oracles
import pytest
import torch
from conftest import usable_kernels
from dual_attention.attention_utils import compute_causal_mask, precompute_freqs_cis

from cyberslm.errors import ConfigError, InputError
from cyberslm.model.attention import Attention

WIDTH = 24
SHAPES = [  # n_heads, n_kv_heads, total_n_heads, key_dim
    (heads, kv_heads, total, key_dim)
    for heads, total in ((4, None), (4, 8), (1, 3), (2, 2))
    for kv_heads in (None, 1, 2)
    if heads % (kv_heads or 1) == 0
    for key_dim in (None, 2, 10)
]
BIASES = list(itertools.product([False, True], repeat=2))


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(shape: tuple, biases: tuple[bool, bool] = (True, True)) -> tuple[Attention, reference.Attention]:
    heads, kv_heads, total, key_dim = shape
    arguments = (WIDTH, heads, 0.0, key_dim, kv_heads, *biases, total)
    ours, theirs = Attention(*arguments).eval(), reference.Attention(*arguments).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_over_its_arguments(shape: tuple, biases: tuple[bool, bool]) -> None:
    ours, theirs = both(shape, biases)
    mask = noise(3, 7, 7) > -0.5
    mask.fill_diagonal_(True)
    self_masks = ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": compute_causal_mask(7)})
    cross_masks = ({}, {"attn_mask": mask[:5]})
    tables = dict(zip(("freqs_cos", "freqs_sin"), precompute_freqs_cis(ours.key_dim, 7), strict=True))
    x, context = noise(1, 2, 7, WIDTH), noise(2, 2, 5, WIDTH)
    for need_weights in (False, True):
        for kernel in usable_kernels():
            ours.kernel = kernel
            for masks, turned in itertools.product(self_masks, ({}, tables) if ours.key_dim % 2 == 0 else ({},)):
                got = ours(x, x, x, **turned, **masks, need_weights=need_weights)
                output, scores = theirs(x, x, x, **turned, **masks, need_weights=need_weights)
                torch.testing.assert_close(got.output, output, atol=1e-5, rtol=1e-5)
                assert (got.scores is None) == (scores is None)
                if scores is not None:
                    torch.testing.assert_close(got.scores, scores, atol=1e-5, rtol=1e-5)
            for masks in cross_masks:
                got = ours(context, x, x.flip(1), **masks, need_weights=need_weights)
                output, _ = theirs(context, x, x.flip(1), **masks, need_weights=need_weights)
                torch.testing.assert_close(got.output, output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:6])
def test_gradients_equal_those_of_the_reference(shape: tuple) -> None:
    ours, theirs = both(shape)
    gradients = []
    for module in (ours, theirs):
        x = noise(1, 2, 6, WIDTH).requires_grad_()
        module(x, x, x, is_causal=True)[0].square().sum().backward()
        gradients.append([x.grad, *(p.grad for _, p in sorted(module.named_parameters()))])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_fully_masked_queries_get_exact_zeros_where_the_reference_gives_nan() -> None:
    """G01: its explicit path gives NaN, its fused path the output bias."""
    ours, theirs = both((4, 2, None, 10))
    x = noise(1, 2, 6, WIDTH).requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[2] = False
    assert theirs(x, x, x, attn_mask=mask, need_weights=True)[0].isnan().any()
    for kernel in usable_kernels():
        ours.kernel = kernel
        got = ours(x, x, x, attn_mask=mask, need_weights=True)
        assert got.output[:, 2].eq(0).all()
        assert got.scores[:, :, 2].eq(0).all()
        got.output.square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3), (1, 5), (5, 1)])
def test_causal_order_is_anchored_at_the_end_where_the_reference_begins_at_the_start(queries: int, keys: int) -> None:
    ours, _ = both((2, 1, None, None), (False, False))
    query, context = noise(1, 2, queries, WIDTH), noise(2, 2, keys, WIDTH)
    allowed = torch.tensor([[s <= keys - queries + t for s in range(keys)] for t in range(queries)])
    with torch.no_grad():
        q, k, v = ours.project(query, context, context, None)
        mixed = oracles.attention(q, k, v, allowed.expand(2, -1, -1)).transpose(1, 2).flatten(-2)
        right = ours.wo.double()(mixed)
        ours.float()
        for kernel in usable_kernels():
            ours.kernel = kernel
            got = ours(query, context, context, is_causal=True)
            torch.testing.assert_close(got.output.double(), right, atol=1e-5, rtol=1e-5)
            same = ours(query, context, context, attn_mask=allowed)
            torch.testing.assert_close(same.output, got.output, atol=1e-6, rtol=1e-6)


def test_masks_of_a_batch_and_of_each_head_are_obeyed() -> None:
    ours, _ = both((4, 2, None, None))
    x = noise(1, 2, 5, WIDTH)
    masks = noise(4, 2, 4, 5, 5) > 0
    masks[..., 0] = True
    for b in range(2):
        one = ours(x[b : b + 1], x[b : b + 1], x[b : b + 1], attn_mask=masks[b, 0], need_weights=True)
        batch = ours(x, x, x, attn_mask=masks[:, 0], need_weights=True)
        spread = ours(x, x, x, attn_mask=masks[:, :1], need_weights=True)
        torch.testing.assert_close(batch.output[b], one.output[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(batch.output, spread.output)
    heads = ours(x, x, x, attn_mask=masks, need_weights=True)
    assert torch.equal(heads.scores.gt(0), masks)


def test_hidden_nonsense_reaches_neither_outputs_nor_gradients() -> None:
    ours, _ = both((4, 2, None, 10))
    x, context = noise(1, 2, 5, WIDTH), noise(2, 2, 6, WIDTH)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[:, 4], mask[3] = False, False
    broken, bad_query = context.clone(), x.clone()
    broken[:, 4], bad_query[:, 3] = torch.nan, torch.inf
    for kernel in usable_kernels():
        ours.kernel = kernel
        results = []
        for query, keys in ((x, context), (bad_query, broken)):
            ours.zero_grad()
            output = ours(query, keys, keys, attn_mask=mask).output
            output.square().sum().backward()
            results.append([output.detach(), *(p.grad.clone() for p in ours.parameters())])
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_blind_queries_of_a_causal_order_keep_their_nonsense_out_of_gradients() -> None:
    ours, _ = both((4, 2, None, None))
    query, context = noise(1, 1, 5, WIDTH), noise(2, 1, 3, WIDTH)
    query[:, 0] = torch.nan
    ours(query, context, context, is_causal=True).output.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


def test_scale_is_a_choice() -> None:
    scales = [Attention(WIDTH, 2, 0.0, key_dim=4, scale=scale).scale for scale in ("head_dim", "key_dim", 0.5)]
    assert scales == [12**-0.5, 0.5, 0.5]
    for scale in ("both", float("nan"), -1.0, 0):
        with pytest.raises(ConfigError, match="scale must be"):
            Attention(WIDTH, 2, 0.0, scale=scale)  # type: ignore[arg-type]


def test_dropout_acts_on_weights_and_on_the_output_in_training_only() -> None:
    torch.manual_seed(0)
    ours = Attention(WIDTH, 2, 0.5)
    x = noise(1, 2, 9, WIDTH)
    trained = ours(x, x, x, need_weights=True)
    assert trained.output.eq(0).float().mean() == pytest.approx(0.5, abs=0.1)
    assert torch.equal(trained.scores, ours.eval()(x, x, x, need_weights=True).scores)
    assert torch.equal(ours(x, x, x).output, ours(x, x, x).output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"freqs_cos": torch.ones(5, 6)}, "freqs_sin is missing"),
        ({"freqs_sin": torch.ones(5, 6)}, "freqs_cos is missing"),
        ({"freqs_cos": torch.ones(5, 12), "freqs_sin": torch.ones(5, 12)}, r"\(5, 6\), not \(5, 12\) and \(5, 12\)"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, "given together"),
        ({"attn_mask": torch.zeros(5, 5)}, "must be boolean, .* not torch.float32: additive"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.long)}, "must be boolean, .* not torch.int64"),
        ({"attn_mask": torch.ones(5, 4, dtype=torch.bool)}, r"\(5, 5\), with .*, not \(5, 4\)"),
        ({"attn_mask": torch.ones(1, 5, dtype=torch.bool)}, r"not \(1, 5\)"),
        ({"attn_mask": torch.ones(2, 5, dtype=torch.bool)}, r"not \(2, 5\)"),
        ({"attn_mask": torch.ones(2, 3, 5, 5, dtype=torch.bool)}, r"not \(2, 3, 5, 5\)"),
    ],
)
def test_arguments_of_another_form_are_refused(arguments: dict, words: str) -> None:
    x = noise(1, 2, 5, WIDTH)
    with pytest.raises(InputError, match=words):
        Attention(WIDTH, 2, 0.0)(x, x, x, **arguments)


def test_inputs_that_do_not_fit_together_are_refused() -> None:
    ours, x = Attention(WIDTH, 2, 0.0), noise(1, 2, 5, WIDTH)
    table = torch.ones(5, 6)
    with pytest.raises(InputError, match="5 queries and 3 keys"):
        ours(x, x[:, :3], x[:, :3], table, table)
    for query, key, value in (
        (x[0], x, x),
        (x, x[:1], x[:1]),
        (x, x, x[:, :3]),
        (x[..., :3], x, x),
        (x, x[:, :0], x[:, :0]),
    ):
        with pytest.raises(InputError, match="query must have shape"):
            ours(query, key, value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"d_model": 10, "n_heads": 3}, "total_n_heads 3 does not divide d_model 10"),
        ({"d_model": 12, "n_heads": 3, "n_kv_heads": 2}, "n_kv_heads 2 does not divide n_heads 3"),
        ({"d_model": 12, "n_heads": 0}, "n_heads must be a whole number from 1, not 0"),
        ({"d_model": 12, "n_heads": 2, "total_n_heads": 0}, "total_n_heads must be a whole number from 1, not 0"),
        ({"d_model": 12, "n_heads": 2, "dropout": "0.1"}, "dropout must be"),
        ({"d_model": 12, "n_heads": 2, "key_dim": 0, "dropout": 1.0}, "key_dim must .*; dropout must"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Attention(**{"dropout": 0.0, **arguments})
