"""Flex attention sees what the rule allows. On a CPU torch has its forward pass alone; none of this ran on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data.loader import Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.kernels import KERNELS
from cyberslm.model.model import CyberSLM
from cyberslm.model.plan import over_columns, over_documents
from cyberslm.model.rope import RotaryPositionEmbedding
from cyberslm.model.sight import Sight
from cyberslm.training.compiled import compile_and_try
from cyberslm.training.loss import next_token_loss

CONFIG = CyberSLMConfig(
    vocab_size=50,
    hidden_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_dim=48,
    max_seq_len=40,
    sliding_window=(6, 0),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def documents(rows: int, tokens: int, seed: int, *, in_pieces: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if in_pieces:
        return torch.randint(-1, 3, (rows, tokens), generator=generator)
    return (torch.rand(rows, tokens, generator=generator) < 0.2).long().cumsum(1)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3),
    tokens=st.sampled_from([1, 5, 40, 130]),
    seed=st.integers(0, 99),
    window=st.sampled_from([None, 1, 6, 200]),
    in_pieces=st.booleans(),
)
def test_blocks_are_the_mask_of_the_rule(
    rows: int, tokens: int, seed: int, window: int | None, in_pieces: bool
) -> None:
    docs, rope = documents(rows, tokens, seed, in_pieces=in_pieces), RotaryPositionEmbedding(8, 130)
    own = over_documents(docs, rope=rope, windows=[window])
    right = over_columns(docs, None, docs, rope=rope, windows=[window])
    blocks, sight = own.sights[window], right.sights[window]
    mask = sight.mask(tokens, tokens, docs.device)
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask  # a single token sees itself
    assert torch.equal(blocks.mask(tokens, tokens, docs.device), allowed.expand(rows, 1, tokens, tokens))
    for turned, wanted in zip(own.rotation[:2], right.rotation[:2], strict=True):
        assert torch.equal(turned.expand(rows, -1, -1), wanted.expand(rows, -1, -1))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 6])
def test_flex_equals_the_formula(kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 150, 16, generator=generator) for heads in (4, kv_heads, kv_heads))
    docs = documents(2, 150, seed=1)
    sight = over_documents(docs, rope=RotaryPositionEmbedding(8, 150), windows=[window]).sights[window]
    own = KERNELS["flex"](q, k, v, sight, 0.3, 0.0)
    right = KERNELS["explicit"](q, k, v, sight, 0.3, 0.0)
    torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-5)
    assert not torch.equal(own, KERNELS["fused"](q, k, v, sight, 0.3, 0.0))  # it is another kernel


def test_flex_leaves_dropout_and_other_sights_to_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cyberslm.model.kernels.fused", lambda *_: "fused")
    x = torch.zeros(1, 2, 4, 16)
    sight = over_documents(torch.zeros(1, 4).long(), rope=RotaryPositionEmbedding(8, 4), windows=[None]).sights[None]
    assert KERNELS["flex"](x, x, x, sight, 1.0, 0.1) == "fused"
    assert KERNELS["flex"](x, x, x, Sight(causal=True), 1.0, 0.0) == "fused"


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's graphs, run by torch's plain operators."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def frozen() -> CyberSLM:
    """A network in training whose weights ask for no gradient, which flex attention has none of on a CPU."""
    return CyberSLM(CONFIG, seed=1).train().requires_grad_(requires_grad=False)


def test_compiled_blocks_with_flex_give_the_features_of_plain_ones_in_one_graph_for_all_documents(
    without_code: None,
) -> None:
    plain, own = frozen(), frozen()
    own.compile_blocks(flex=True)
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    seen = []
    kernels = KERNELS | {"flex": lambda *args: seen.append(args[3]) or KERNELS["flex"](*args)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cyberslm.model.attention.KERNELS", kernels)
        own.layers[0](torch.zeros(2, 40, 64), over_documents(ids, rope=own.rope, windows=CONFIG.windows), None)
        own.layers[1](torch.zeros(2, 40, 64), over_columns(ids, None, ids, rope=own.rope, windows=CONFIG.windows), None)
    assert len(seen) == 1  # it is the block mask that chooses
    own.features(ids, docs=documents(2, 40, 0))
    for seed in (1, 2):
        docs = documents(2, 40, seed)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(
                own.features(ids, docs=docs), plain.features(ids, docs=docs), atol=1e-5, rtol=1e-5
            )


def test_flex_that_fails_leaves_the_rest_compiled_and_says_why(
    without_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it has no gradients, so it does."""
    monkeypatch.setattr(CyberSLM, "takes_flex", True)
    model = CyberSLM(CONFIG, seed=1)
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids, documents(2, 40, 0))
    failed = compile_and_try(model, next_token_loss, batch, torch.enable_grad)
    assert failed is not None
    assert "backward on CPU" in failed
    assert model.is_compiled
    next_token_loss(model, batch).objective.backward()
    assert compile_and_try(model, next_token_loss, batch._replace(docs=None), torch.enable_grad) is None


def test_flex_is_for_gpus_and_whole_weights() -> None:
    assert not CyberSLM(CONFIG).takes_flex
    gpu = property(lambda _: torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CyberSLM, "device", gpu)
        assert CyberSLM(CONFIG).takes_flex
        assert not CyberSLM(replace(CONFIG, attn_dropout=0.1)).takes_flex
