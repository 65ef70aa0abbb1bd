"""GGUF files come in as they are meant, or are refused by what is wrong with them, before memory is taken."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyberslm.checkpoint.folder import load_model
from cyberslm.errors import ConfigError, CyberSLMError, IntegrityError
from cyberslm.interop.container import read_gguf
from cyberslm.interop.gguf import read_source
from cyberslm.interop.ropes import factors_of_scaling, notes_of_scaling, scaling_of_factors
from cyberslm.interop.source import write_source
from cyberslm.model.config import RopeScaling
from cyberslm.model.rope import deinterleave
from cyberslm.text.hfjson import byte_letters
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import load_tokenizer

WIDTH, HEADS = 256, 4
LETTERS = list(byte_letters())
TOKENS = ["<|end|>", "<|start|>", *LETTERS, "th", "the", "[PAD260]", "[PAD261]"]
KINDS = [3, 3, *[1] * 258, 5, 5]
SETTINGS: dict[str, object] = {
    "llama.block_count": 1,
    "llama.context_length": 32,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 50_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
    "general.license": "mit",
    "someone.note": "kept for nobody",
}
SHAPES = {
    "token_embd.weight": (len(TOKENS), WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_v.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_gate.weight": (512, WIDTH),
    "blk.0.ffn_up.weight": (512, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, 512),
}
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kinds.get(type(value), writer.add_array)(key, value)


def make(
    path: Path,
    values: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    kind: str = "F32",
) -> dict[str, np.ndarray]:
    """Write a file with changes (``...`` takes a key or tensor away); returns what its tensors mean."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    for key, value in {**SETTINGS, **(values or {})}.items():
        if value is not ...:
            add(writer, key, value)
    meant = {}
    for name, shape in {**SHAPES, **(tensors or {})}.items():
        if shape is ...:
            continue
        if isinstance(shape, np.ndarray):
            meant[name] = shape
            writer.add_tensor(name, shape)
            continue
        chosen = GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        stored = blocks(chosen, shape, rng)
        meant[name] = gguf.quants.dequantize(stored, chosen).reshape(shape)
        writer.add_tensor(name, stored, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def blocks(kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values of that type; where the library can't round to it, random blocks whose scales are small numbers."""
    values = rng.standard_normal(shape).astype(np.float32) * 0.1
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
        for place in places:
            raw[..., place : place + 2] = scale
        return raw.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_becomes_the_numbers_it_stands_for(tmp_path: Path, kind: str) -> None:
    meant = make(tmp_path / "m.gguf", kind=kind)
    write_source(read_source(tmp_path / "m.gguf"), tmp_path / "ours")
    found = load_model(tmp_path / "ours")
    weights = {name: p.detach() for name, p in found.model.named_parameters()}
    assert torch.equal(weights["layers.0.mlp.down_proj.weight"], torch.from_numpy(meant["blk.0.ffn_down.weight"]))
    assert torch.equal(weights["embed_tokens.weight"], torch.from_numpy(meant["token_embd.weight"]))
    for ours, theirs, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", 2)):
        wanted = deinterleave(torch.from_numpy(meant[f"blk.0.{theirs}.weight"]), heads)
        assert torch.equal(weights[f"layers.0.self_attn.{ours}.weight"], wanted)
    source = found.manifest["source"]
    assert source["weights"] == ("as in the file" if kind == "F32" else f"roundings to {kind}")
    assert source["files"]["m.gguf"]["size"] == (tmp_path / "m.gguf").stat().st_size
    assert source["says"]["license"] == "mit"
    assert found.extras.chat_template == "{{ messages }}"


def test_settings_and_tokens_are_read(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", {"tokenizer.ggml.eot_token_id": 1, "llama.attention.head_count_kv": [2]})
    parts = read_source(tmp_path / "m.gguf").parts
    config = parts.config
    assert (config.norm_eps, config.rope_base, config.max_seq_len, config.num_kv_heads) == (1e-6, 50_000.0, 32, 2)
    assert (config.head_dim, config.tie_weights, config.bias_q) == (None, True, False)
    assert (config.eos_token_id, config.bos_token_id, parts.extras.stop_ids) == (0, 1, (1,))
    assert parts.tokenizer.vocab_size == 260
    assert config.vocab_size == 262
    space = TOKENS.index(next(letter for letter, byte in byte_letters().items() if byte == 32))
    assert parts.tokenizer.encode("the t") == [259, space, TOKENS.index("t")]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_qwen_are_not_turned(tmp_path: Path, architecture: str) -> None:
    values = {key: ... for key in SETTINGS if key.startswith("llama.")}
    values |= {key.replace("llama.", f"{architecture}."): value for key, value in SETTINGS.items() if "llama." in key}
    tensors: dict[str, Any] = {
        f"blk.0.attn_{part}.bias": (size,) for part, size in (("q", 256), ("k", 128), ("v", 128))
    }
    if architecture == "qwen3":
        tensors = {f"blk.0.attn_{part}_norm.weight": (WIDTH // HEADS,) for part in "qk"}
    meant = make(tmp_path / "m.gguf", values, tensors, architecture=architecture)
    parts = read_source(tmp_path / "m.gguf").parts
    assert torch.equal(parts.tensor("layers.0.self_attn.q_proj.weight"), torch.from_numpy(meant["blk.0.attn_q.weight"]))
    assert (parts.config.qk_norm, parts.config.bias_q, parts.config.bias_out) == (
        architecture == "qwen3",
        architecture == "qwen2",
        False,
    )


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "setting": ({"llama.attention.scale": 0.5}, {}, "llama.attention.scale is not known"),
    "experts": ({"llama.expert_count": 8}, {}, "expert_count is 8"),
    "window": ({"llama.attention.sliding_window": 8}, {}, "sliding_window is 8"),
    "rope type": ({"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
    "rope factor": ({"llama.rope.scaling.attn_factor": 2.0}, {}, "attn_factor beside"),
    "yarn's factor": ({"llama.rope.scaling.yarn_attn_factor": 2.0}, {}, "yarn_attn_factor is 2.0"),
    "vast template": ({"tokenizer.chat_template": "x" * (1 << 21)}, {}, "chat template of 2,097,152 bytes"),
    "partial rotation": ({"llama.rope.dimension_count": 32}, {}, "dimension_count is 32"),
    "value width": ({"llama.attention.value_length": 32}, {}, "value_length is 32"),
    "no layers": ({"llama.block_count": ...}, {}, "llama.block_count is missing"),
    "vast": ({"llama.block_count": 4_000_000_000}, {}, "num_layers"),
    "by layer": ({"llama.feed_forward_length": [512, 256]}, {}, "differs by layer"),
    "words": ({"llama.embedding_length": "many"}, {}, "embedding_length must be a whole number"),
    "vocabulary": ({"llama.vocab_size": 9}, {}, "vocab_size is 9"),
    "part": ({"split.count": 3}, {}, "one of 3 parts"),
    "adapter": ({"general.type": "adapter"}, {}, "adapter"),
    "rule": ({"tokenizer.ggml.pre": "tekken"}, {}, "pre is 'tekken'"),
    "no rule": ({"tokenizer.ggml.pre": ...}, {}, "pre is None"),
    "tokenizer": ({"tokenizer.ggml.model": "t5"}, {}, "model is 't5'"),
    "tokenizer setting": ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, {}, "precompiled_charsmap"),
    "adds eos": ({"tokenizer.ggml.add_eos_token": True}, {}, "add_eos_token is True"),
    "no eos": ({"tokenizer.ggml.eos_token_id": ...}, {}, "eos_token_id is missing"),
    "eos outside": ({"tokenizer.ggml.eos_token_id": 4000}, {}, "eos_token_id is 4000"),
    "eot outside": ({"tokenizer.ggml.eot_token_id": 4000}, {}, "stop id 4000"),
    "twice": ({"tokenizer.ggml.tokens": [*TOKENS[:-3], "th", *TOKENS[-2:]]}, {}, "occurs twice"),
    "kinds": ({"tokenizer.ggml.token_type": KINDS[1:]}, {}, "token_type"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, {}, "no pair"),
    "merges of nothing": ({"tokenizer.ggml.merges": ["q z"]}, {}, "tokenizers library refuses"),
    "unknown tensor": ({}, {"blk.0.ffn_gate_inp.weight": (4, 256)}, "ffn_gate_inp.weight' is unknown"),
    "odd tensor": ({}, {"v.blk.0.weight": (4, 256)}, "v.blk.0.weight' is unknown"),
    "missing tensor": ({}, {"blk.0.ffn_up.weight": ...}, "up_proj.weight' is missing"),
    "no embedding": ({}, {"token_embd.weight": ...}, "token_embd.weight is missing"),
    "shape": ({}, {"blk.0.ffn_up.weight": (512, 255)}, "has shape"),
    "layer of two names": ({}, {"blk.00.ffn_up.weight": (512, 256)}, "blk.00.ffn_up.weight' is unknown"),
    "another layer": ({}, {"blk.7.ffn_up.weight": (512, 256)}, "layers.7"),
    "integers": ({}, {"blk.0.ffn_up.weight": np.ones((512, 256), np.int8)}, "ggml type 24"),
    "factors": ({}, {"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32) ** 2}, "not those of a known llama3"),
    "factors' shape": ({}, {"rope_freqs.weight": np.ones(31, np.float32)}, "rope_freqs.weight has shape"),
    "not finite": ({}, {"blk.0.ffn_up.weight": np.full((512, 256), np.inf, np.float32)}, "not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, name: str) -> None:
    values, tensors, words = WRONG[name]
    make(tmp_path / "m.gguf", values, tensors)
    with pytest.raises(CyberSLMError, match=words):
        write_source(read_source(tmp_path / "m.gguf"), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_other_architecture_is_named(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", architecture="gemma3")
    with pytest.raises(ConfigError, match="'gemma3' is not supported"):
        read_source(tmp_path / "m.gguf")


@given(
    factor=st.floats(1.5, 64), trained=st.sampled_from([512, 8192, 4000]), low=st.floats(0.5, 3), high=st.floats(3.5, 9)
)
@settings(deadline=None, max_examples=60)
def test_factors_and_their_notes_give_the_scaling_again(factor: float, trained: int, low: float, high: float) -> None:
    chosen = {"factor": round(factor, 2), "low_freq_factor": round(low, 2), "high_freq_factor": round(high, 2)}
    scaling = RopeScaling(type="llama3", original_max_seq_len=trained, **chosen)
    factors = factors_of_scaling(scaling, 64, 500_000.0)
    notes = notes_of_scaling(scaling)
    noted: dict = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in notes.items()}
    found = scaling_of_factors(factors, 64, 500_000.0, noted, where="here")
    np.testing.assert_allclose(factors_of_scaling(found, 64, 500_000.0), factors, rtol=1e-5)
    with pytest.raises(ConfigError, match="not those of a known llama3"):
        scaling_of_factors(factors * np.linspace(1, 2, 32, dtype=np.float32), 64, 500_000.0, noted, where="here")


def test_factors_of_llama_3_give_its_settings_without_notes() -> None:
    for factor in (8.0, 32.0):
        scaling = RopeScaling(type="llama3", factor=factor, original_max_seq_len=8192)
        factors = factors_of_scaling(scaling, 128, 500_000.0)
        assert scaling_of_factors(factors, 128, 500_000.0, {}, where="here") == scaling


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    make(path)
    return path.read_bytes()


@given(data=st.data())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_ends_in_an_error_of_ours_or_is_read(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    header = 9_000
    at = data.draw(st.integers(0, header))
    width = data.draw(st.integers(1, 9))
    new = data.draw(st.binary(min_size=width, max_size=width))
    content = whole[:at] + new + whole[at + width :]
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CyberSLMError):
        read_source(path)


def packed(*parts: tuple[str, int] | bytes) -> bytes:
    return b"".join(part if isinstance(part, bytes) else struct.pack("<" + part[0], part[1]) for part in parts)


def head(tensors: int, keys: int) -> bytes:
    return packed(b"GGUF", ("I", 3), ("Q", tensors), ("Q", keys))


KEY = packed(head(0, 1), ("Q", 1), b"k")
TENSOR = packed(head(1, 0), ("Q", 1), b"t")
HOSTILE = {
    "empty": (b"", "can't be read"),
    "magic": (b"GGML" + bytes(60), "begins with"),
    "version": (packed(b"GGUF", ("I", 1), bytes(60)), "version 1"),
    "byte order": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "other byte order"),
    "tensors": (head(1 << 60, 0), "tensors; the limit"),
    "keys": (head(0, 1 << 63), "keys; the limit"),
    "long key": (packed(head(0, 1), ("Q", 1 << 50)), "the limit is"),
    "key beyond": (packed(head(0, 1), ("Q", 1 << 20)), "are left"),
    "kind": (packed(KEY, ("I", 77)), "unknown type 77"),
    "array": (packed(KEY, ("I", 9), ("I", 8), ("Q", 1 << 40)), "items; the limit"),
    "array beyond": (packed(KEY, ("I", 9), ("I", 8), ("Q", 1 << 20)), "are left"),
    "nested": (packed(KEY, ("I", 9), ("I", 9), ("Q", 1)), "array of type 9"),
    "dimensions": (packed(TENSOR, ("I", 1 << 30)), "dimensions"),
    "size": (packed(TENSOR, ("I", 2), ("Q", 1 << 62), ("Q", 1 << 62), ("I", 0), ("Q", 0)), "does not lie in"),
    "offset": (packed(TENSOR, ("I", 1), ("Q", 8), ("I", 0), ("Q", (1 << 64) - 32), bytes(128)), "does not lie in"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_absurd_counts_and_sizes_are_refused_before_memory_is_taken(tmp_path: Path, name: str) -> None:
    content, words = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(IntegrityError, match=words):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary_encodes_as_the_model_it_came_from(
    tmp_path: Path, trained: Path, *, prefix: bool
) -> None:
    tokenizer = load_tokenizer(trained / "run" / "final")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    pieces = tokenizer.model.pieces
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.text for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.token_type": [piece.kind for piece in pieces],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.ggml.unknown_token_id": tokenizer.unk_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_id,
        "tokenizer.ggml.add_space_prefix": prefix,
        **{f"tokenizer.ggml.{key}": ... for key in ("pre", "merges")},
    }
    make(tmp_path / "m.gguf", values, {"token_embd.weight": (len(pieces), WIDTH)})
    found = read_source(tmp_path / "m.gguf").parts.tokenizer
    assert isinstance(found, SentencePieceTokenizer)
    assert found.add_bos
    for text in (topics["class"][:3000], "", " a", "CVE-2024-3094 \u6f22 \U0001f600"):
        ids = found.encode(text)
        wanted = tokenizer.encode(" " + text if prefix and text else text)
        assert ids == wanted
        assert found.decode(ids) == text
