from __future__ import annotations

import math
from dataclasses import replace

import oracles
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cyberslm.checkpoint.hf import hf_config
from cyberslm.config import parse
from cyberslm.errors import ConfigError, InputError
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM
from cyberslm.model.rope import RotaryPositionEmbedding, apply_rope, deinterleave, interleave, scaled_frequencies


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_complex_multiplication(*, interleaved: bool) -> None:
    x = torch.randn(1, 1, 6, 8)
    positions = [0, 1, 5, 17, 200, 999]
    got = apply_rope(x, RotaryPositionEmbedding(8, 1000, interleaved=interleaved)(torch.tensor(positions)))
    right = oracles.rope(x[0, 0], positions, 10_000.0, interleaved=interleaved)
    torch.testing.assert_close(got[0, 0].double(), right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_layouts_are_one_network_with_its_channels_in_another_order(*, qk_norm: bool) -> None:
    config = CyberSLMConfig(
        vocab_size=30, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, bias=True, qk_norm=qk_norm
    )
    half, other = CyberSLM(config), CyberSLM(replace(config, rope_layout="interleaved"))
    weights = {name: torch.randn(p.shape) * 0.2 for name, p in half.named_parameters()}
    moved = dict(weights)
    for name, value in weights.items():
        for kind, heads in (("q_proj", 4), ("k_proj", 2), ("q_norm", 1), ("k_norm", 1)):
            if kind in name:
                moved[name] = interleave(value, heads)
                assert torch.equal(deinterleave(moved[name], heads), value)
    half.load_state_dict(weights)
    other.load_state_dict(moved)
    ids = torch.randint(0, 30, (2, 12))
    torch.testing.assert_close(half(ids), other(ids), atol=1e-4, rtol=1e-5)
    assert any(not torch.equal(moved[name], weights[name]) for name in weights)


TRAINED = 32
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_seq_len": TRAINED},
    "yarn": {"factor": 4.0, "original_max_seq_len": TRAINED, "beta_fast": 16.0, "beta_slow": 0.5},
    "yarn with its own factor": {"factor": 4.0, "original_max_seq_len": TRAINED, "attention_factor": 0.7},
    "llama3": {"factor": 4.0, "original_max_seq_len": TRAINED, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
}


@pytest.mark.parametrize("length", [TRAINED // 2, TRAINED, TRAINED + 1, 3 * TRAINED, 4 * TRAINED])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_angles_equal_those_of_transformers(name: str, length: int) -> None:
    """G09: a rope_scaling entry was parsed and then ignored; position 0 was right and the error grew with length."""
    scaling = RopeScaling(type=name.split()[0], **SCALINGS[name])
    config = CyberSLMConfig(
        vocab_size=20, hidden_dim=32, num_layers=1, num_heads=2, max_seq_len=4 * TRAINED, rope_scaling=scaling
    )
    theirs = LlamaRotaryEmbedding(LlamaConfig(**hf_config(config)))
    positions = torch.arange(length)
    cos, sin = theirs(torch.zeros(1), positions.unsqueeze(0))
    ours = RotaryPositionEmbedding.of(config).lookup(positions, torch.tensor([length]))
    torch.testing.assert_close(ours.cos, cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.sin[:, 8:], sin[0, :, 8:], atol=1e-5, rtol=0)
    plain = RotaryPositionEmbedding(16, 4 * TRAINED)(positions)
    changed = (ours.cos - plain.cos).abs().max().item()
    assert changed > 0.1 or (name == "dynamic" and length <= TRAINED)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling.type must be one of .*longrope"):
        parse({"rope_scaling": {"type": "longrope", "factor": 2.0}}, CyberSLMConfig, where="x.yaml")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"type": "linear", "factor": 0.5}, "factor must be at least 1 and finite, not 0.5"),
        ({"type": "linear", "factor": 2.0, "original_max_seq_len": 8}, "original_max_seq_len has no effect with type"),
        ({"type": "yarn", "factor": 2.0}, "original_max_seq_len, which type yarn needs"),
        ({"type": "llama3", "factor": 2.0, "original_max_seq_len": 8, "beta_fast": 2.0}, "beta_fast has no effect"),
        ({"type": "yarn", "factor": 2.0, "original_max_seq_len": 8, "beta_fast": 0.5}, "beta_fast 0.5 must be above"),
        ({"type": "yarn", "factor": float("nan"), "original_max_seq_len": 0}, "factor must.*; original_max_seq_len"),
    ],
)
def test_scaling_that_means_nothing_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RopeScaling(**values)


def test_dynamic_rows_do_not_depend_on_their_batch() -> None:
    scaling = RopeScaling(type="dynamic", factor=4.0, original_max_seq_len=6)
    model = CyberSLM(CyberSLMConfig(vocab_size=20, hidden_dim=32, num_heads=2, max_seq_len=24, rope_scaling=scaling))
    ids = torch.randint(0, 20, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 9:] = False
    torch.testing.assert_close(model(ids, mask)[1, :9], model(ids[1:, :9])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_table_stays_fp32_when_the_model_is_cast(cast: torch.dtype) -> None:
    """G07 (gpt-neox#1003): casting the model rounded the rotary table, and distant positions collapsed."""
    model = CyberSLM(CyberSLMConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, max_seq_len=4096)).to(cast)
    assert model.dtype == cast
    for position in (257, 1857, 4095):
        rotation = model.rope(torch.tensor([position]))
        assert rotation.cos.dtype == torch.float32
        for i in range(4):
            angle = position * 10_000.0 ** (-2 * i / 8)
            assert rotation.cos[0, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert rotation.sin[0, i + 4].item() == pytest.approx(math.sin(angle), abs=1e-6)
    assert model(torch.tensor([[1, 2, 3]])).dtype == cast


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16)
    table = RotaryPositionEmbedding(16, 2048)
    scores = [
        (apply_rope(q, table(torch.tensor([at + 7]))) * apply_rope(k, table(torch.tensor([at])))).sum()
        for at in (0, 1000, 2000)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("position", "named"), [(64, "64"), (65, "65"), (-1, "-1")])
def test_position_outside_the_table_is_an_error_that_names_it(position: int, named: str) -> None:
    """G08 (litgpt#556): positions past the table were wrapped or read out of bounds."""
    table = RotaryPositionEmbedding(8, 64)
    table(torch.tensor([63]))
    with pytest.raises(InputError, match=f"position {named} is outside .* 64 positions"):
        table(torch.tensor([0, position]))


def test_model_refuses_an_input_longer_than_its_context() -> None:
    model = CyberSLM(CyberSLMConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, max_seq_len=8))
    assert model(torch.ones(1, 8, dtype=torch.long)).shape == (1, 8, 20)
    with pytest.raises(InputError, match="position 8 is outside the rotary table of 8"):
        model(torch.ones(1, 9, dtype=torch.long))


def test_dynamic_angles_of_a_cache_are_those_of_its_capacity_and_a_pair_is_refused() -> None:
    """Each chunk of a sequence fed with a pair was turned by another length."""
    scaling = RopeScaling(type="dynamic", factor=4.0, original_max_seq_len=6)
    config = CyberSLMConfig(
        vocab_size=20, hidden_dim=32, num_heads=2, num_layers=2, max_seq_len=24, rope_scaling=scaling
    )
    model, ids = CyberSLM(config, seed=1).eval(), torch.randint(0, 20, (1, 20))
    cache = model.new_cache(1, 20)
    parts = torch.cat([model(part, cache=cache) for part in ids.split([7, 5, 8], dim=1)], dim=1)
    torch.testing.assert_close(parts, model(ids), atol=1e-5, rtol=1e-5)
    layer, x = model.layers[0].self_attn, torch.randn(1, 3, 32)
    pair = layer(x, use_cache=True).present
    with pytest.raises(InputError, match="a pair of earlier keys and values doesn't know: use a KVCache"):
        layer(x, kv_cache=pair)


def test_positions_not_columns_must_fit_the_context() -> None:
    model = CyberSLM(CyberSLMConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, max_seq_len=8)).eval()
    ids = torch.randint(0, 20, (1, 12))
    mask = torch.arange(12).unsqueeze(0) >= 5
    torch.testing.assert_close(model(ids, mask)[:, 5:], model(ids[:, 5:]), atol=1e-5, rtol=1e-5)
    docs = torch.tensor([[0] * 6 + [1] * 6])
    torch.testing.assert_close(model(ids, docs=docs)[:, 6:], model(ids[:, 6:]), atol=1e-5, rtol=1e-5)
    scattered = torch.tensor([[0, 1] * 6])
    torch.testing.assert_close(model(ids, docs=scattered)[:, 1::2], model(ids[:, 1::2]), atol=1e-5, rtol=1e-5)
    for arguments in ({"attention_mask": torch.ones(1, 12, dtype=torch.bool)}, {"docs": docs * 0}):
        with pytest.raises(InputError, match="position 11 is outside"):
            model(ids, **arguments)
    with pytest.raises(InputError, match="position 8 is outside"):
        model(ids, docs=torch.tensor([[0] * 9 + [1] * 3]))


def test_leaving_the_meta_device_fills_the_table() -> None:
    """A model that was built on the meta device and given weights had garbage for angles."""
    config = CyberSLMConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, max_seq_len=8)
    whole, empty = CyberSLM(config, seed=1), CyberSLM(config, device="meta").to_empty(device="cpu")
    empty.load_state_dict(whole.state_dict())
    ids = torch.randint(0, 20, (1, 8))
    assert torch.equal(whole(ids), empty(ids))


@pytest.mark.parametrize(("width", "positions"), [(5, 8), (0, 8), (4, 0)])
def test_impossible_tables_are_refused(width: int, positions: int) -> None:
    with pytest.raises(ConfigError, match="even head_dim and at least one position"):
        RotaryPositionEmbedding(width, positions)
    with pytest.raises(InputError, match="positions must be int64, not torch.bool"):
        RotaryPositionEmbedding(4, 8)(torch.ones(3, dtype=torch.bool))


def test_yarn_of_narrow_heads_and_short_contexts_equals_transformers() -> None:
    """The ramp ends at channel E - 1 at most, which only narrow heads with a small base reach."""
    scaling = RopeScaling(type="yarn", factor=3.0, original_max_seq_len=4096, beta_fast=8.0, beta_slow=0.01)
    config = CyberSLMConfig(
        vocab_size=20, hidden_dim=16, num_heads=2, max_seq_len=64, rope_base=100.0, rope_scaling=scaling
    )
    theirs = LlamaRotaryEmbedding(LlamaConfig(**hf_config(config)))
    ours, factor = scaled_frequencies(8, 100.0, scaling)
    torch.testing.assert_close(ours.float(), theirs.inv_freq, atol=0, rtol=1e-6)
    assert factor == pytest.approx(theirs.attention_scaling)
