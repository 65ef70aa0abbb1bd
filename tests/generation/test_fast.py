"""The compiled step against the plain network; the library is built once for all of it, or everything skips."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.loop import complete
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.generation.config import DecodingConfig
from cyberslm.generation.fast import prepare
from cyberslm.generation.native import build
from cyberslm.generation.native.build import BuildError, find_compiler
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import pack_matrices

SIZES = {"vocab_size": 100, "hidden_dim": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_dim": 96, "max_seq_len": 64}
ON = DecodingConfig(fast="on")
VARIANTS = {
    "reference": {},
    "grouped heads, qk norm": {"num_kv_heads": 2, "qk_norm": True},
    "GPT-2's": {"norm": "layer", "bias": True, "activation": "gelu"},
    "interleaved, windows": {"activation": "relu2", "rope_layout": "interleaved", "sliding_window": [5, 0]},
    "untied, capped": {"activation": "geglu", "tie_weights": False, "logit_softcap": 5.0, "key_dim": 8},
    "odd widths": {"hidden_dim": 20, "num_heads": 2, "head_dim": 10, "ffn_hidden_dim": 37},
    "one kv head": {"num_kv_heads": 1, "bias_q": True, "bias_kv": True, "bias_out": True},
    "dynamic rope": {"rope_scaling": RopeScaling(type="dynamic", factor=2.0, original_max_seq_len=16)},
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for the module, with the library in it."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["CYBERSLM_CACHE"] = str(folder)
    try:
        build.build_library(find_compiler())
    except BuildError as error:
        pytest.skip(f"no compiled step here: {error}")
    yield folder
    del os.environ["CYBERSLM_CACHE"]


def network(**variant: object) -> CyberSLM:
    """With weights large enough that logits differ."""
    windows = variant.get("sliding_window")
    model = CyberSLM(CyberSLMConfig(**{**SIZES, **variant, "sliding_window": tuple(windows) if windows else None}))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)
        else:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model.eval()


@torch.no_grad()
def logits_of(model: CyberSLM, rows: list[list[int]], steps: int) -> torch.Tensor:
    """Of ``steps`` random tokens after prompts of any lengths: (steps, B, V)."""
    cache = model.new_cache(len(rows), [len(row) + steps for row in rows])
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    model.features(ids, mask, cache=cache)
    tokens = torch.randint(model.config.vocab_size, (steps, len(rows)), generator=torch.Generator().manual_seed(0))
    return torch.stack([model.next_logits(t, cache) for t in tokens])


def prompts(*lengths: int) -> list[list[int]]:
    return [[(7 * row + i) % 100 for i in range(length)] for row, length in enumerate(lengths)]


@pytest.mark.parametrize("rows", [1, 3, 8, 11, 35])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_equals_the_plain_network(name: str, rows: int) -> None:
    model = network(**VARIANTS[name])
    texts = prompts(*(1 + row % 9 for row in range(rows)))
    plain = logits_of(model, texts, 12)
    prepare(model, ON, threads=2)
    assert torch.allclose(logits_of(model, texts, 12), plain, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_packed_equals_the_packed_plain_network(packing: str, rows: int) -> None:
    """Many rows of int8 weights may be rounded to bf16, which has 8 bits."""
    model = network()
    pack_matrices(model, packing)
    texts = prompts(*([4] * rows))
    plain = logits_of(model, texts, 6)
    prepare(model, ON, threads=1)
    off = 2**-7 * plain.abs().max() if packing == "int8" and rows > 4 else 2e-5
    assert (logits_of(model, texts, 6) - plain).abs().max() < off


@pytest.mark.parametrize("rows", [1, 9])
def test_bf16_is_the_fp32_network_of_the_rounded_weights(rows: int) -> None:
    """Within what the cache's bf16 rounds; torch's own bf16 arithmetic is ten times further away."""
    model, wide = network().bfloat16(), network()
    wide.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    prepare(model, ON, threads=1)
    texts = prompts(*([1] * rows))
    assert torch.allclose(logits_of(model, texts, 6), logits_of(wide, texts, 6), rtol=0.02, atol=0.02)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), budget=st.integers(1, 20))
def test_greedy_ids_are_the_plain_ones(lengths: list[int], budget: int) -> None:
    """Rows leave at different times, so that the cache is cut between steps."""
    model, texts = network(), prompts(*lengths)
    params = [SamplingParams(max_new_tokens=1 + (budget + row) % 20) for row in range(len(texts))]
    plain = complete(model, texts, params, stop_ids=frozenset({3}))
    prepare(model, ON, threads=1)
    assert complete(model, texts, params, stop_ids=frozenset({3})) == plain
