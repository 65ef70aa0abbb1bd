from __future__ import annotations

import math
from dataclasses import replace

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.checkpoint.hf import hf_config
from cyberslm.config import parse, to_mapping
from cyberslm.errors import ConfigError, GenerationError, InputError
from cyberslm.model.cache import KVCache
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM

SMALL = CyberSLMConfig(
    vocab_size=60, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_dim=48, max_seq_len=48
)


def model_with(kv_heads: int = 2, **changes: object) -> CyberSLM:
    model = CyberSLM(replace(SMALL, num_kv_heads=kv_heads, **changes), seed=3).eval()
    with torch.no_grad():  # larger weights than at the start, so that differences show
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


MODELS = {kv_heads: model_with(kv_heads) for kv_heads in (4, 2, 1)}


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 60, shape, generator=torch.Generator().manual_seed(seed))


def test_default_model_has_exactly_the_reference_size() -> None:
    config = CyberSLMConfig()
    assert config.num_parameters == 33_531_264
    assert sum(p.numel() for p in CyberSLM(config, device="meta").parameters()) == 33_531_264


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_counted_parameters_are_the_parameters(kv_heads: int, *, tie_weights: bool) -> None:
    config = replace(SMALL, num_kv_heads=kv_heads, tie_weights=tie_weights, head_dim=10)
    assert config.num_parameters == sum(p.numel() for p in CyberSLM(config).parameters())


def test_one_rotary_table_serves_the_model() -> None:
    model = CyberSLM(SMALL)
    assert len({buffer.data_ptr() for buffer in model.buffers()}) == 2
    assert all(layer.self_attn.rope is model.rope for layer in model.layers)
    assert not any("cos" in name or "sin" in name for name in model.state_dict())


def test_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one = CyberSLM(SMALL, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = CyberSLM(SMALL, seed=1).state_dict(), CyberSLM(SMALL, seed=2).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embed_tokens.weight"], other["embed_tokens.weight"])


def test_initial_spread_is_as_documented() -> None:
    weights = CyberSLM(replace(SMALL, hidden_dim=256, ffn_hidden_dim=512), seed=0).state_dict()
    assert weights["embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        residual = weights[f"layers.1.{name}.weight"].std().item()
        assert residual == pytest.approx(0.02 / math.sqrt(2 * SMALL.num_layers), rel=0.05)
    assert weights["norm.weight"].eq(1).all()
    biased = CyberSLM(replace(SMALL, bias=True, norm="layer", qk_norm=True)).state_dict()
    assert all(value.eq(float(not name.endswith(".bias"))).all() for name, value in biased.items() if value.ndim == 1)


@settings(deadline=None, max_examples=60)
@given(
    kv_heads=st.sampled_from([4, 2, 1]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_cached_equals_uncached_for_every_split(kv_heads: int, sizes: list[int], batch: int, seed: int) -> None:
    model = MODELS[kv_heads]
    ids = random_ids(batch, sum(sizes), seed=seed)
    cache = model.new_cache(batch, sum(sizes))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in ids.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), atol=1e-5, rtol=1e-5)
    assert cache.lengths == [sum(sizes)] * batch


@settings(deadline=None, max_examples=60)
@given(
    kv_heads=st.sampled_from([4, 2, 1]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    left=st.booleans(),
    cuts=st.sets(st.integers(1, 11), max_size=3),
    seed=st.integers(0, 99),
)
def test_padded_chunked_batch_equals_each_row_alone(
    kv_heads: int, lengths: list[int], left: bool, cuts: set[int], seed: int
) -> None:
    """G04, G05: in a batch of prompts of different lengths the shorter rows came out different."""
    model, width = MODELS[kv_heads], max(lengths)
    ids = random_ids(len(lengths), width, seed=seed)
    columns = torch.arange(width)
    ends = torch.tensor(lengths).unsqueeze(1)
    mask = columns >= width - ends if left else columns < ends
    edges = [0, *sorted(cut for cut in cuts if cut < width), width]
    cache = model.new_cache(len(lengths), width + 1)
    with torch.no_grad():
        plain = model(ids, mask)
        chunks = [model(ids[:, a:b], mask[:, :b], cache=cache) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        chunked = torch.cat(chunks, 1)
        step = model(ids[:, :1], cache=cache)
        for row in range(len(lengths)):
            own = ids[row : row + 1][:, mask[row]]
            alone = model(torch.cat((own, ids[row : row + 1, :1]), 1))[0]
            torch.testing.assert_close(plain[row, mask[row]], alone[:-1], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(chunked[row, mask[row]], alone[:-1], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(step[row, 0], alone[-1], atol=1e-5, rtol=1e-5)
    assert cache.lengths == [length + 1 for length in lengths]


@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1, 3, 5)])
def test_output_never_depends_on_later_tokens(chunks: tuple[int, ...]) -> None:
    """G02: with a cache that was not empty, causality was switched off within the chunk."""
    model = MODELS[2]
    ids = random_ids(1, 9)
    changed = ids.clone()
    changed[0, 8] = (ids[0, 8] + 1) % 60
    outputs = []
    for sequence in (ids, changed):
        cache = model.new_cache(1, 9)
        outputs.append(torch.cat([model(part, cache=cache) for part in sequence.split(list(chunks), dim=1)], 1))
    assert torch.equal(outputs[0][0, :8], outputs[1][0, :8])
    assert not torch.equal(outputs[0][0, 8], outputs[1][0, 8])


def test_cache_refuses_what_does_not_fit() -> None:
    model = MODELS[2]
    cache = model.new_cache(2, 6)
    model(random_ids(2, 4), cache=cache)
    with pytest.raises(InputError, match=r"row 0 would hold 7 tokens \(4 and 3 new\) and the cache has room for 6"):
        model(random_ids(2, 3), cache=cache)
    with pytest.raises(InputError, match="1 rows and the cache 2"):
        model(random_ids(1, 1), cache=cache)
    with pytest.raises(InputError, match=r"\(2, 5\), not \(2, 1\)"):
        model(random_ids(2, 1), torch.ones(2, 1, dtype=torch.bool), cache=cache)
    with pytest.raises(InputError, match="marks .* past tokens as real and the cache holds"):
        model(random_ids(2, 1), torch.tensor([[0, 1, 1, 1, 1], [1] * 5]), cache=cache)
    with pytest.raises(InputError, match="capacity from 1 to max_seq_len 48"):
        KVCache(SMALL, batch_size=1, capacity=49)
    with pytest.raises(InputError, match="floating point numbers, not torch.int8"):
        KVCache(SMALL, batch_size=1, capacity=4, dtype=torch.int8)
    longer = KVCache(replace(SMALL, max_seq_len=64), batch_size=1, capacity=64)
    model(random_ids(1, 48), cache=longer)
    with pytest.raises(InputError, match="position 48 is outside the rotary table of 48"):
        model(random_ids(1, 1), cache=longer)
    for other in (replace(SMALL, num_kv_heads=1), replace(SMALL, num_layers=3), replace(SMALL, head_dim=4)):
        with pytest.raises(InputError, match="made for another model"):
            model(random_ids(1, 1), cache=KVCache(other, batch_size=1, capacity=4))


def test_cache_rows_can_be_kept_reordered_and_cut() -> None:
    """G06: rows that are reordered must take their keys along."""
    model = MODELS[2]
    ids = random_ids(3, 6)
    cache = model.new_cache(3, 12)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.keep([2, 0, 2])
        cache.truncate([6, 4, 6])
        follow = random_ids(3, 1, seed=9)
        got = model(follow, cache=cache)
        for row, (source, length) in enumerate(((2, 6), (0, 4), (2, 6))):
            whole = torch.cat((ids[source : source + 1, :length], follow[row : row + 1]), 1)
            torch.testing.assert_close(got[row, 0], model(whole)[0, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_generate_equals_the_uncached_greedy_loop(kv_heads: int) -> None:
    model = MODELS[kv_heads]
    ids = random_ids(3, 7)
    got = model.generate(ids, 12)
    for row in range(3):
        wanted = oracles.greedy(model, ids[row].tolist(), 12, stop=model.config.eos_token_id)
        assert got[row].tolist()[:7] == ids[row].tolist()
        assert got[row].tolist()[7 : 7 + len(wanted)] == wanted
        assert set(got[row].tolist()[7 + len(wanted) :]) <= {model.config.pad_token_id}


@pytest.mark.parametrize("left", [True, False])
def test_generate_of_a_padded_batch_equals_each_row_alone(*, left: bool) -> None:
    model = MODELS[2]
    ids = random_ids(3, 9)
    lengths = [9, 4, 1]
    mask = torch.stack([torch.tensor([0] * (9 - n) + [1] * n if left else [1] * n + [0] * (9 - n)) for n in lengths])
    got = model.generate(ids, 8, attention_mask=mask)
    for row in range(3):
        own = ids[row][mask[row].bool()]
        alone = model.generate(own.unsqueeze(0), 8)[0, len(own) :].tolist()
        assert got[row, 9 : 9 + len(alone)].tolist() == alone


def test_generate_leaves_mode_and_global_random_state_alone() -> None:
    """G16: sampling during training left the model in eval mode, or used up the global random numbers."""
    model = model_with().train()
    before = torch.random.get_rng_state()
    model.generate(random_ids(1, 4), 5, temperature=1.0, seed=1)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(GenerationError):
        model.generate(random_ids(1, 4), 500)
    assert model.training


def test_generate_takes_every_setting_of_sampling() -> None:
    ids = random_ids(2, 5)
    free = MODELS[2].generate(ids, 6)
    banned = MODELS[2].generate(ids, 6, banned_ids=free[:, 5].tolist())
    assert not set(free[:, 5].tolist()) & set(banned[:, 5:].flatten().tolist())
    several = MODELS[2].generate(ids, 6, n=3, temperature=1.0, seed=2)
    assert several[:, :5].tolist() == ids.repeat_interleave(3, 0).tolist()
    assert several[0].tolist()[:5] == MODELS[2].generate(ids, 6, temperature=1.0, seed=2)[0].tolist()[:5]
    best = MODELS[2].generate(ids, 6, beams=4, n=2)
    assert best.shape[0] == 4
    for words, setting in (("unknown setting 'temprature'", {"temprature": 1}), ("stop is for Engine", {"stop": "x"})):
        with pytest.raises(GenerationError, match=words):
            MODELS[2].generate(ids, 6, **setting)
    with pytest.raises(GenerationError, match="logprobs is for Engine"):
        MODELS[2].generate(ids, 6, logprobs=0)


def test_one_step_of_decoding_equals_the_pass_over_all() -> None:
    model, ids = MODELS[2], random_ids(2, 6)
    cache = model.new_cache(2, 6)
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
        torch.testing.assert_close(model.next_logits(ids[:, 5], cache), model(ids)[:, -1], atol=1e-5, rtol=1e-5)
    assert cache.lengths == [6, 6]


def test_generate_checks_prompt_and_budget_before_any_work() -> None:
    with pytest.raises(GenerationError, match="prompt's 40 tokens and max_new_tokens 9 do not fit .* context of 48"):
        MODELS[2].generate(random_ids(1, 40), 9)
    with pytest.raises(InputError, match="ids from 0 to 59"):
        MODELS[2].generate(torch.tensor([[60]]), 1)
    with pytest.raises(GenerationError, match="empty"):
        MODELS[2].generate(random_ids(1, 4), 1, attention_mask=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "hidden_dim 32 is not a multiple of num_heads 5"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be a whole number from 1"),
        ({"vocab_size": 1 << 40}, "vocab_size must be a whole number from 1 to 16,777,216"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rope_base": 0.5}, "rope_base"),
        ({"eos_token_id": 60}, "eos_token_id must be from 0 to vocab_size - 1 = 59"),
        ({"num_layers": 0, "hidden_dim": -1}, "num_layers"),
        ({"hidden_dim": "64"}, "hidden_dim must be a whole number, not '64'"),
        ({"hidden_dim": 64.0}, "hidden_dim must be a whole number"),
        ({"num_layers": True}, "num_layers must be a whole number"),
        ({"rope_base": math.inf}, "rope_base must be above 1 and finite"),
        ({"max_seq_len": 1 << 22}, "max_seq_len must be at most 1,048,576"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **changes)


def test_all_problems_of_a_config_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"key_dim .*; num_kv_heads 3 .*; dropout .*; rope_base .*; sliding_window"):
        replace(SMALL, num_kv_heads=3, key_dim=3, dropout=2.0, rope_base=0.0, sliding_window=0)


@pytest.mark.parametrize("window", [0, -1, (), (3, -1), 1 << 30])
def test_window_that_means_nothing_is_refused(window: object) -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        replace(SMALL, sliding_window=window)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "rmsnorm"}, "norm must be one of 'rms', 'layer', not 'rmsnorm'"),
        ({"activation": "silu", "rope_layout": "x"}, "activation must be one of .*; rope_layout must be one of"),
        ({"qk_norm": "no"}, "qk_norm must be True or False, not 'no'"),
        ({"pad_token_id": 1.5}, "pad_token_id must be a whole number, not 1.5"),
        ({"rope_base": "1e4"}, "rope_base must be a number"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must be RopeScaling or None"),
        ({"sliding_window": (4, 0, 7)}, "sliding_window lists 3 sizes and there are num_layers 2"),
        ({"max_seq_len": 1 << 20, "head_dim": 1 << 10}, "the rotary table may have 268,435,456 numbers"),
        ({"num_layers": 10_001}, "num_layers must be at most 10,000"),
        ({"hidden_dim": 1 << 24, "ffn_hidden_dim": 1 << 24, "num_heads": 1 << 20}, "parameters: at most"),
    ],
)
def test_configuration_made_in_python_is_checked_as_one_from_yaml(changes: dict, words: str) -> None:
    """A misspelt choice was taken for the other one, or failed deep inside with a KeyError."""
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **changes)


def test_scaling_of_another_type_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="type must be one of 'linear', 'dynamic', 'yarn', 'llama3', not 'longrope'"):
        RopeScaling(type="longrope", factor=2.0, original_max_seq_len=4)  # type: ignore[arg-type]


@torch.no_grad()
def test_eps_of_each_norm_is_the_setting() -> None:
    x = torch.randn(3, 32) * 1e-3
    for kind in ("rms", "layer"):
        block = CyberSLM(replace(SMALL, norm=kind, norm_eps=0.5, qk_norm=True)).layers[0]
        assert block.input_layernorm(x).abs().max() < 0.01
        assert block.self_attn.q_norm(x[:, :8]).abs().max() < 0.01


def test_dropout_acts_in_each_of_its_places() -> None:
    model = CyberSLM(replace(SMALL, dropout=0.5)).train()
    calls: list[float] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, inputs, out: calls.append((out == 0).float().mean().item()))
    model(random_ids(4, 20))
    assert len(calls) == 1 + 2 * SMALL.num_layers
    assert all(0.4 < share < 0.6 for share in calls)


def test_windows_repeat_their_pattern_over_the_layers() -> None:
    config = replace(SMALL, num_layers=5, sliding_window=(4, 4, 0))
    assert config.windows == (4, 4, None, 4, 4)
    assert replace(config, sliding_window=7).windows == (7,) * 5
    assert SMALL.windows == (None, None)


def test_variants_are_written_in_yaml_and_by_dotted_keys() -> None:
    text = {"sliding_window": [4, 0], "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_seq_len": 24}}
    config = parse(text, CyberSLMConfig, where="x.yaml")
    assert config.windows[:2] == (4, None)
    assert config.rope_scaling == RopeScaling(type="yarn", factor=2.0, original_max_seq_len=24)
    assert parse(to_mapping(config), CyberSLMConfig, where="x.yaml") == config


@torch.no_grad()
def test_norms_and_activations_are_the_formulas() -> None:
    x = torch.randn(3, 32)
    layer_norm = CyberSLM(replace(SMALL, norm="layer", bias=True)).norm
    layer_norm.weight.normal_()
    layer_norm.bias.normal_()
    centred = x - x.mean(-1, keepdim=True)
    right = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer_norm.weight + layer_norm.bias
    torch.testing.assert_close(layer_norm(x), right)
    gates = {
        "swiglu": lambda g, u: g * torch.sigmoid(g) * u,
        "geglu": lambda g, u: g * 0.5 * (1 + torch.erf(g / math.sqrt(2))) * u,
        "gelu": lambda _, u: u * 0.5 * (1 + torch.erf(u / math.sqrt(2))),
        "relu2": lambda _, u: u.clamp(min=0) ** 2,
    }
    for name, formula in gates.items():
        mlp = CyberSLM(replace(SMALL, activation=name), seed=2).layers[0].mlp
        up = x @ mlp.up_proj.weight.T
        gate = up if mlp.gate_proj is None else x @ mlp.gate_proj.weight.T
        torch.testing.assert_close(mlp(x), formula(gate, up) @ mlp.down_proj.weight.T, atol=1e-6, rtol=1e-4)


def test_logits_stay_within_the_softcap() -> None:
    plain, capped = model_with(), model_with(logit_softcap=2.0)
    ids = random_ids(1, 6)
    assert plain(ids).abs().max() > 2
    torch.testing.assert_close(capped(ids), 2 * torch.tanh(plain(ids) / 2))


def test_documents_are_refused_with_a_cache_and_in_another_form() -> None:
    ids = random_ids(2, 5)
    docs = torch.zeros_like(ids)
    with pytest.raises(InputError, match="docs and cache were given together"):
        MODELS[2](ids, docs=docs, cache=MODELS[2].new_cache(2, 8))
    with pytest.raises(InputError, match=r"docs must have shape \(batch, tokens\) = \(2, 5\), not \(2, 4\)"):
        MODELS[2](ids, docs=docs[:, :4])
    with pytest.raises(InputError, match="whole numbers, one for each position, not torch.float32"):
        MODELS[2](ids, docs=docs.float())


def test_padding_whose_embedding_is_broken_reaches_neither_logits_nor_gradients() -> None:
    gradients = []
    for broken in (0.0, torch.nan):
        model = model_with()
        with torch.no_grad():
            model.embed_tokens.weight[0] = broken
        ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.bool)
        ids[0, :3], mask[0, :3] = 0, False
        loss = model.features(ids, mask)[mask].square().sum()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients)


SCALING = {kind: RopeScaling(type=kind, factor=4.0, original_max_seq_len=4) for kind in ("dynamic", "yarn", "llama3")}
EFFECTS: dict[str, tuple[object, dict[str, object]]] = {
    # the field: another value, and what else must be set for it to matter
    "max_seq_len": (40, {}),
    "hidden_dim": (64, {}),
    "num_layers": (3, {}),
    "num_heads": (2, {}),
    "num_kv_heads": (1, {}),
    "head_dim": (16, {}),
    "key_dim": (6, {}),
    "attn_scale": ("key_dim", {"key_dim": 6}),
    "qk_norm": (True, {}),
    "sliding_window": ((3, 0), {}),
    "ffn_hidden_dim": (40, {}),
    "activation": ("geglu", {}),
    "norm": ("layer", {}),
    "vocab_size": (61, {}),
    "bias": (True, {}),
    "bias_q": (True, {}),
    "bias_kv": (True, {}),
    "bias_out": (True, {}),
    "rope_base": (500.0, {}),
    "rope_layout": ("interleaved", {}),
    "rope_scaling": (RopeScaling(type="linear", factor=2.0), {}),
    "norm_eps": (1e-2, {}),
    "tie_weights": (False, {}),
    "logit_softcap": (0.1, {}),
    "dropout": (0.5, {}),
    "attn_dropout": (0.5, {}),
    "pad_token_id": (5, {}),
    "bos_token_id": (5, {}),
    "eos_token_id": (5, {}),
}
SCALING_EFFECTS: dict[str, tuple[object, RopeScaling]] = {
    "type": ("yarn", SCALING["llama3"]),
    "factor": (8.0, SCALING["yarn"]),
    "original_max_seq_len": (3, SCALING["dynamic"]),
    "beta_fast": (400.0, replace(SCALING["yarn"], original_max_seq_len=4096)),
    "beta_slow": (0.2, replace(SCALING["yarn"], original_max_seq_len=16)),
    "attention_factor": (2.0, SCALING["yarn"]),
    "low_freq_factor": (0.1, replace(SCALING["llama3"], original_max_seq_len=16)),
    "high_freq_factor": (2.0, replace(SCALING["llama3"], original_max_seq_len=16)),
}


def fingerprint(config: CyberSLMConfig) -> tuple:
    """Shapes, logits and folder of a network with fixed random weights, in training mode."""
    model = CyberSLM(config, seed=1).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    logits = model(random_ids(1, 6))
    written = {key: value for key, value in hf_config(config).items() if key != "cyberslm"}
    return shapes, logits.shape, logits.sum().item(), model.rope.cos.shape, written


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_has_an_effect(field: str) -> None:
    """G55: an option existed, was printed, and did nothing. Here each changes the shapes, the outputs or the folder."""
    value, others = EFFECTS[field]
    base = replace(SMALL, **others)
    assert fingerprint(base) != fingerprint(replace(base, **{field: value}))


@pytest.mark.parametrize("field", ["sliding_window", "rope_layout", "norm", "activation", "logit_softcap", "qk_norm"])
def test_every_variant_changes_the_logits(field: str) -> None:
    assert fingerprint(SMALL)[2] != fingerprint(replace(SMALL, **{field: EFFECTS[field][0]}))[2]


@pytest.mark.parametrize("field", SCALING_EFFECTS)
def test_every_field_of_a_rope_scaling_has_an_effect(field: str) -> None:
    value, base = SCALING_EFFECTS[field]
    one, other = (fingerprint(replace(SMALL, rope_scaling=s)) for s in (base, replace(base, **{field: value})))
    assert one[2] != other[2]


def test_every_field_is_listed_above() -> None:
    assert set(EFFECTS) == set(CyberSLMConfig.__dataclass_fields__)
    assert set(SCALING_EFFECTS) == set(RopeScaling.__dataclass_fields__)


@pytest.mark.parametrize("bad", [torch.ones(3, dtype=torch.long), torch.ones(2, 2), torch.ones(2, 0, dtype=torch.long)])
def test_input_ids_of_another_form_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(InputError, match="input_ids must be a non-empty int64 or int32 tensor"):
        MODELS[2](bad)
