"""Every path through the network against the rule in words, over drawn variants, masks, documents and splits.

The same properties run on few cases here and on thousands with ``-m slow``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import oracles
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import CONTEXT, VOCABULARY, WIDTH, variants, weighted
from torch import Tensor

from cyberslm.errors import InputError
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.kernels import KERNELS
from cyberslm.model.plan import over_columns


class Rows(NamedTuple):
    """Marks of real tokens and document numbers, ``(B, T)``."""

    real: Tensor
    docs: Tensor


@st.composite
def rows(draw: st.DrawFn, *, pads: tuple[str, ...] = ("none", "left", "right", "holes", "all")) -> Rows:
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    real = torch.ones(batch, tokens, dtype=torch.bool)
    docs = torch.zeros(batch, tokens, dtype=torch.int64)
    for row in range(batch):
        side, size = draw(st.sampled_from(pads)), draw(st.integers(0, tokens - 1))
        if side == "left":
            real[row, :size] = False
        elif side == "right":
            real[row, tokens - size :] = False
        elif side == "holes":
            real[row] = torch.tensor(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
        elif side == "all":
            real[row] = False
        numbers = draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
        docs[row] = torch.tensor(sorted(numbers) if draw(st.booleans()) else numbers)
    return Rows(real, docs)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_like(like: Tensor, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, like.shape, generator=torch.Generator().manual_seed(seed))


SEEDS = st.integers(0, 999)


@given(
    config=variants(), rows=rows(), seed=SEEDS, kernel=st.sampled_from(sorted(KERNELS)), dtype=st.sampled_from([0, 1])
)
def every_kernel_equals_the_rule(config: CyberSLMConfig, rows: Rows, seed: int, kernel: str, dtype: int) -> None:
    layer = weighted(config, seed).layers[-1].self_attn
    layer.kernel = kernel
    x = noise(seed, *rows.real.shape, WIDTH)
    right = oracles.self_attention(layer, x, rows.real, rows.docs)
    cast, tolerance = ((torch.float32, 1e-5), (torch.bfloat16, 0.1))[dtype]
    rope, layer, x = layer.rope, layer.to(cast), x.to(cast)
    plan = over_columns(x, rows.real, rows.docs, rope=rope, windows=[layer.window])
    output = layer.attend(x, plan, None)
    torch.testing.assert_close(output.double(), right, atol=tolerance, rtol=tolerance)
    assert output[~rows.real].eq(0).all()


@given(config=variants(), rows=rows(), seed=SEEDS)
def hidden_nonsense_reaches_nobody(config: CyberSLMConfig, rows: Rows, seed: int) -> None:
    layer = weighted(config, seed).layers[0].self_attn
    clean = noise(seed, *rows.real.shape, WIDTH)
    nonsense = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(clean.numel()) % 3].view(clean.shape)
    x = torch.where(rows.real.unsqueeze(-1), clean, nonsense)
    wanted = layer(clean, rows.real, return_attn_weights=True)
    parameters = list(layer.parameters())
    right = torch.autograd.grad(wanted.output.square().sum(), parameters)
    for kernel in KERNELS:
        layer.kernel = kernel
        got = layer(x, rows.real, return_attn_weights=True)
        torch.testing.assert_close(got.output, wanted.output, atol=1e-5, rtol=1e-5)
        assert torch.equal(got.attn_weights, wanted.attn_weights)
        gradients = torch.autograd.grad(got.output.square().sum(), parameters)
        torch.testing.assert_close(gradients, right, atol=1e-3, rtol=1e-3)


@given(config=variants(), rows=rows(), seed=SEEDS)
def a_broken_token_reaches_only_those_who_see_it(config: CyberSLMConfig, rows: Rows, seed: int) -> None:
    layer = weighted(config, seed).layers[0].self_attn
    x, broken = noise(seed, *rows.real.shape, WIDTH), noise(seed, *rows.real.shape, WIDTH)
    column = seed % x.shape[1]
    broken[:, column] = torch.nan
    allowed, _ = oracles.rule(rows.real, rows.docs, layer.window)
    spared = rows.real & ~allowed[:, :, column]
    for kernel in KERNELS:
        layer.kernel = kernel
        clean, got = (
            layer.attend(t, over_columns(t, rows.real, rows.docs, rope=layer.rope, windows=[layer.window]), None)
            for t in (x, broken)
        )
        torch.testing.assert_close(got[spared], clean[spared], atol=1e-5, rtol=1e-5)
        assert got[rows.real & allowed[:, :, column]].isnan().all()


@given(
    config=variants(), rows=rows(pads=("none", "left", "right", "holes")), cuts=st.sets(st.integers(1, 8)), seed=SEEDS
)
def any_split_equals_one_pass(config: CyberSLMConfig, rows: Rows, cuts: set[int], seed: int) -> None:
    """With a cache, with a layer's view of one, and with a pair of keys and values; then one more token each."""
    model, ids = weighted(config, seed), tokens_like(rows.real, seed)
    batch, width = ids.shape
    edges = [0, *sorted(cut for cut in cuts if cut < width), width]
    chunks = list(zip(edges[:-1], edges[1:], strict=True))
    mask = None if bool(rows.real.all()) else rows.real
    with torch.no_grad():
        whole = model(ids, mask)
        cache = model.new_cache(batch, width + 1)
        parts = [model(ids[:, a:b], None if mask is None else mask[:, :b], cache=cache) for a, b in chunks]
        torch.testing.assert_close(torch.cat(parts, 1)[rows.real], whole[rows.real], atol=1e-5, rtol=1e-5)
        assert cache.lengths == rows.real.sum(1).tolist()
        step = model(ids[:, :1], cache=cache)[:, 0]
        for row in range(batch):
            own = torch.cat((ids[row, rows.real[row]], ids[row, :1])).unsqueeze(0)
            torch.testing.assert_close(step[row], model(own)[0, -1], atol=1e-5, rtol=1e-5)
        layer, x = model.layers[0].self_attn, noise(seed, batch, width, WIDTH)
        alone, pair, view = layer(x, mask), None, model.new_cache(batch, width).view(0)
        for a, b in chunks:
            here = None if mask is None else mask[:, :b]
            by_pair = layer(x[:, a:b], here, kv_cache=pair, use_cache=True)
            by_view = layer(x[:, a:b], here, kv_cache=view, use_cache=True)
            pair = by_pair.present
            assert by_view.present is view
            for got in (by_pair, by_view):
                torch.testing.assert_close(got.output, alone.output[:, a:b], atol=1e-5, rtol=1e-5)


@given(config=variants(), rows=rows(pads=("none", "left", "right")), seed=SEEDS)
def packed_documents_equal_the_documents_alone(config: CyberSLMConfig, rows: Rows, seed: int) -> None:
    model, ids = weighted(config, seed), tokens_like(rows.real, seed)
    with torch.no_grad():
        packed = model(ids, rows.real, docs=rows.docs)
        for row in range(ids.shape[0]):
            for number in rows.docs[row].unique():
                own = rows.real[row] & (rows.docs[row] == number)
                if own.any():
                    alone = model(ids[row, own].unsqueeze(0))[0]
                    torch.testing.assert_close(packed[row, own], alone, atol=1e-5, rtol=1e-5)


@given(
    kind=st.sampled_from(["dynamic", "yarn", "llama3"]),
    rows=rows(pads=("none", "left", "right", "holes")),
    cuts=st.sets(st.integers(1, 8)),
    seed=SEEDS,
)
def scaled_positions_obey_the_rule_too(kind: str, rows: Rows, cuts: set[int], seed: int) -> None:
    """Documents alone and splits with a cache of just their length, for angles that depend on the length too."""
    scaling = RopeScaling(type=kind, factor=4.0, original_max_seq_len=3)
    base = CyberSLMConfig(vocab_size=VOCABULARY, hidden_dim=WIDTH, num_layers=2, num_heads=2, ffn_hidden_dim=16)
    packed_documents_equal_the_documents_alone.hypothesis.inner_test(
        replace(base, max_seq_len=CONTEXT, rope_scaling=scaling), rows, seed
    )
    model = weighted(replace(base, max_seq_len=CONTEXT, rope_scaling=scaling), seed)
    ids, width = tokens_like(rows.real, seed), rows.real.shape[1]
    lengths = rows.real.sum(1).clamp(min=1).tolist()
    edges = [0, *sorted(cut for cut in cuts if cut < width), width]
    with torch.no_grad():
        cache = model.new_cache(len(lengths), lengths)
        parts = [model(ids[:, a:b], rows.real[:, :b], cache=cache) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        whole = model(ids, rows.real)
    torch.testing.assert_close(torch.cat(parts, 1)[rows.real], whole[rows.real], atol=1e-5, rtol=1e-5)


@given(config=variants(), cut=st.integers(0, 8), seed=SEEDS)
def forks_truncations_and_reordered_rows_go_on_alike(config: CyberSLMConfig, cut: int, seed: int) -> None:
    model, ids = weighted(config, seed), tokens_like(torch.zeros(2, 9), seed)
    other = tokens_like(torch.zeros(2, 3), seed + 1)
    with torch.no_grad():
        cache = model.new_cache(2, 12)
        model(ids, cache=cache)
        fork = cache.fork()
        model(other, cache=cache)
        fork.truncate([9 - cut, 9])
        fork.keep([1, 0, 1])
        lengths = [9, 9 - cut, 9]
        got = model(other[[1, 0, 1]], cache=fork)
        for row, (source, length) in enumerate(zip((1, 0, 1), lengths, strict=True)):
            sequence = torch.cat((ids[source, :length], other[source])).unsqueeze(0)
            torch.testing.assert_close(got[row], model(sequence)[0, length:], atol=1e-5, rtol=1e-5)
        with pytest.raises(InputError, match="room for 12"):
            model(ids[[0, 0, 0], :4], cache=fork)


PROPERTIES: dict[Callable[..., Any], int] = {
    every_kernel_equals_the_rule: 100,
    hidden_nonsense_reaches_nobody: 40,
    a_broken_token_reaches_only_those_who_see_it: 40,
    any_split_equals_one_pass: 80,
    packed_documents_equal_the_documents_alone: 40,
    scaled_positions_obey_the_rule_too: 30,
    forks_truncations_and_reordered_rows_go_on_alike: 20,
}


def run(check: Callable[..., Any], examples: int, *, repeatable: bool) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings(max_examples=examples, derandomize=repeatable, deadline=None, suppress_health_check=quiet)(check)()


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_property(check: Callable[..., Any]) -> None:
    run(check, PROPERTIES[check], repeatable=True)


@pytest.mark.slow
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_property_on_thousands(check: Callable[..., Any]) -> None:
    run(check, 5000 * PROPERTIES[check] // sum(PROPERTIES.values()) + 1, repeatable=False)
