"""The compiled step against the plain network; everything skips where there is no compiler."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.loop import complete
from cyberslm.decoding.request import Request
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import ConfigError, InputError
from cyberslm.generation import fast
from cyberslm.generation.config import DecodingConfig
from cyberslm.generation.fast import prepare
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.lora import LoraConfig, adapters, add_adapters
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import pack_matrices, set_precision
from cyberslm.native.build import BuildError, find_compiler, kept_library, multiplies_bytes

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


AUTO = DecodingConfig()


pytestmark = pytest.mark.usefixtures("native_cache")


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


@pytest.mark.parametrize(
    ("packing", "name"),
    [("int8", "reference"), ("int8", "odd widths"), ("int8", "GPT-2's"), ("int4", "reference"), ("int4", "GPT-2's")],
)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_packed_equals_the_packed_plain_network(name: str, rows: int, packing: str) -> None:
    """int8 rounds rows to steps of 1/127: where both ways are a rounding of fp32 apart, now and then a whole step."""
    model = network(**VARIANTS[name])
    pack_matrices(model, packing)

    def fed() -> torch.Tensor:
        cache = model.new_cache(rows, 20)
        tokens = torch.randint(100, (12, rows), generator=torch.Generator().manual_seed(2))
        return torch.stack([model.next_logits(some, cache) for some in tokens])

    plain = fed()
    prepare(model, ON, threads=1)
    off = (fed() - plain).abs()
    assert off.median() < 2e-5
    assert off.max() < (0.05 * plain.abs().max() if packing == "int8" else 2e-5)


@torch.no_grad()
def test_an_int8_prompt_equals_the_plain_networks() -> None:
    """Prompts go through in bf16 between products, which is a quarter of int8's own steps."""
    model = network()
    pack_matrices(model, "int8")
    ids = torch.randint(100, (3, 40), generator=torch.Generator().manual_seed(2))
    plain = model(ids)
    prepare(model, ON, threads=1)
    off = (model(ids) - plain).abs() / plain.abs().max()
    assert off.median() < 0.01
    assert off.max() < 0.06
    assert model(ids).dtype == torch.float32


@pytest.mark.parametrize("packing", [None, "int8", "int4"])
def test_a_row_is_the_same_alone_and_in_company(packing: str | None) -> None:
    """Nine rows of int8 weights used to be rounded to bf16 and one not, so that batches could say something else."""
    model = network()
    if packing is not None:
        pack_matrices(model, packing)
    prepare(model, ON, threads=2)
    tokens = torch.randint(100, (12, 9), generator=torch.Generator().manual_seed(1))

    def fed(rows: list[int]) -> torch.Tensor:
        cache = model.new_cache(len(rows), 20)
        return torch.stack([model.next_logits(some[rows], cache) for some in tokens])

    alone = torch.cat([fed([row]) for row in range(9)], dim=1)
    if packing == "int8" and multiplies_bytes():
        assert torch.equal(fed(list(range(9))), alone)
    else:
        assert torch.allclose(fed(list(range(9))), alone, rtol=0, atol=0.1 if packing == "int8" else 1e-5)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_int8_rows_have_the_same_bits_in_any_company(name: str) -> None:
    """Alone, side by side in eights and sixteens, and as several tokens of one row."""
    model = network(**VARIANTS[name])
    pack_matrices(model, "int8")
    prepare(model, ON, threads=2)
    if not multiplies_bytes():
        pytest.skip("this processor adds up no products of bytes")
    tokens = torch.randint(100, (14, 35), generator=torch.Generator().manual_seed(1))

    def fed(rows: range) -> torch.Tensor:
        cache = model.new_cache(len(rows), 20)
        return torch.stack([model.next_logits(some[list(rows)], cache) for some in tokens])

    alone = torch.cat([fed(range(row, row + 1)) for row in range(5)], dim=1)
    for count in (4, 5, 20, 35):
        assert torch.equal(fed(range(count))[:, :4], alone[:, :4]), count
    cache = model.new_cache(1, 20)
    at_once = torch.cat([model.next_logits(tokens[a:b, 0], cache, [b - a]) for a, b in ((0, 3), (3, 14))])
    assert torch.equal(at_once, alone[:, 0])


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_several_tokens_of_a_row_equal_the_plain_network(name: str) -> None:
    """Drafts: rows with other counts, cut back in between."""
    model = network(**VARIANTS[name])

    def fed() -> torch.Tensor:
        cache, found = model.new_cache(3, 40), []
        generator = torch.Generator().manual_seed(3)
        for counts in ([1, 1, 1], [1, 4, 2], [3, 3, 3], [9, 1, 1], [1, 1, 1]):
            tokens = torch.randint(100, (sum(counts),), generator=generator)
            found.append(model.next_logits(tokens, cache, counts))
            cache.truncate([length - (count > 1) for length, count in zip(cache.lengths, counts, strict=True)])
        return torch.cat(found)

    plain = fed()
    prepare(model, ON, threads=2)
    assert torch.allclose(fed(), plain, rtol=1e-5, atol=2e-5)


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
    requests = [Request(text, SamplingParams(max_new_tokens=1 + (budget + row) % 20)) for row, text in enumerate(texts)]
    plain = complete(model, requests, stop_ids=frozenset({3}))
    prepare(model, ON, threads=1)
    assert complete(model, requests, stop_ids=frozenset({3})) == plain


def test_rows_of_a_damaged_model_are_not_hidden() -> None:
    """A NaN in one weight reaches the logits as it does in the plain network."""
    model = network()
    model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.nan
    prepare(model, ON, threads=1)
    assert logits_of(model, prompts(3), 1).isnan().all()


def test_ids_rows_and_room_are_checked() -> None:
    model = network()
    prepare(model, ON)
    cache = model.new_cache(1, 1)
    for tokens, message in (
        ([100], "ids from 0 to 99"),
        ([-1], "ids from 0 to 99"),
        ([1, 2], "2 tokens were given for the 1 rows"),
    ):
        with pytest.raises(InputError, match=message):
            model.next_logits(torch.tensor(tokens), cache)
    model.next_logits(torch.tensor([1]), cache)
    with pytest.raises(InputError, match="room for 1"):
        model.next_logits(torch.tensor([1]), cache)


def test_weights_are_held_once_and_may_change_in_place() -> None:
    model = network()
    prepare(model, ON, threads=1)
    before = logits_of(model, prompts(3), 1)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(0.5)
    after = logits_of(model, prompts(3), 1)
    prepare(model, DecodingConfig(fast="off"))
    assert not torch.allclose(after, before)
    assert torch.allclose(logits_of(model, prompts(3), 1), after, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("variant", ["qk norm", "GPT-2's"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_norms_and_biases_may_change_in_place(variant: str, precision: str) -> None:
    """In bf16 the step had copied them when it was opened, and went on with the old ones."""
    model = network(**({"qk_norm": True} if variant == "qk norm" else VARIANTS[variant]))
    set_precision(model, precision)
    prepare(model, ON, threads=1)
    for name, vector in list(model.named_parameters()):
        if vector.ndim > 1:
            continue
        before = logits_of(model, prompts(3), 2)
        with torch.no_grad():
            vector.mul_(torch.linspace(-2, 1, len(vector))).add_(torch.linspace(-1, 0.5, len(vector)))
        after = logits_of(model, prompts(3), 2)
        assert not torch.allclose(after, before), name
    other = copy.deepcopy(model)
    prepare(other, ON, threads=1)
    assert torch.equal(logits_of(other, prompts(3), 2), after)


@pytest.mark.parametrize("change", ["adapters", "cast", "int8"])
def test_weights_that_are_replaced_are_not_passed_over(change: str) -> None:
    """The step went on with the weights it was opened with: it never saw an adapter that was trained afterwards."""
    model = network()
    prepare(model, ON, threads=1)
    logits_of(model, prompts(3), 1)
    if change == "adapters":
        add_adapters(model, LoraConfig(rank=2))
        for layer in adapters(model).values():
            torch.nn.init.ones_(layer.lora_B)
    elif change == "cast":
        model.bfloat16()
    else:
        set_precision(model, "int8")
    after = logits_of(model, prompts(3), 1)
    prepare(model, DecodingConfig(fast="off"))
    assert torch.equal(logits_of(model, prompts(3), 1), after)


def test_a_model_with_a_step_can_be_copied() -> None:
    """`copy.deepcopy` met the pointers of the step and failed."""
    model = network()
    prepare(model, ON, threads=1)
    before = logits_of(model, prompts(3), 1)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(model.embed_tokens.weight)
    assert torch.allclose(logits_of(other, prompts(3), 1), before, rtol=1e-5, atol=2e-5)


def test_caches_that_the_step_cannot_read_are_left_to_the_network() -> None:
    model = network()
    prepare(model, ON)
    cache = model.new_cache(1, 4, dtype=torch.float64)
    with torch.no_grad():
        assert model.next_logits(torch.tensor([1]), cache).isfinite().all()


def test_the_network_answers_while_the_step_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch falls between two tokens of one answer, and the ids are those of the network alone."""
    model, requests = network(), [Request(prompts(5)[0], SamplingParams(max_new_tokens=40))]
    plain = complete(model, requests)
    monkeypatch.setattr(fast, "kept_library", lambda _: None)
    library, calls = kept_library(find_compiler()), []
    monkeypatch.setattr(fast, "build_library", lambda _: library)
    real = fast.NativeStep.__call__
    monkeypatch.setattr(fast.NativeStep, "__call__", lambda *a: calls.append(1) or real(*a))
    prepare(model, AUTO)
    assert complete(model, requests) == plain
    assert 0 < len(calls) < 40 - fast.HANDFUL


def test_without_a_compiler_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    model, requests = network(), [Request(prompts(5)[0], SamplingParams(max_new_tokens=40))]
    plain = complete(model, requests)
    prepare(model, AUTO)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler was found") as found:
        assert complete(model, requests) == plain
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complete(model, requests)
    with pytest.raises(BuildError, match="CXX"):
        prepare(model, ON)


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="error: no such thing"):
        prepare(network(), ON)
    assert capfd.readouterr() == ("", "")


def test_networks_that_it_cannot_run_are_named() -> None:
    model = network()
    model.layers[1].mlp.up_proj = torch.nn.Sequential(model.layers[1].mlp.up_proj)
    prepare(model, AUTO)
    with pytest.raises(ConfigError, match="Sequential is not a plain matrix"):
        prepare(model, ON)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="precision must be one of 'auto'"):
        DecodingConfig(precision="fp8")  # type: ignore[arg-type]
