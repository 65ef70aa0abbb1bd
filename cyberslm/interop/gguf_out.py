"""A model as a GGUF file that llama.cpp runs: the tables of ``gguf`` read the other way, one tensor after the other.

Matrices are rounded as asked; norms, biases and rotary factors stay fp32, as llama.cpp wants them, and in 4 bits the
embedding and the head have 8, as they decide most. A width that is no multiple of a block of 32 is kept in f16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from cyberslm.checkpoint.folder import ModelParts
from cyberslm.checkpoint.hf import family, misfit
from cyberslm.errors import ConfigError, StorageError
from cyberslm.interop.container import library
from cyberslm.interop.gguf import INNER, OUTER, ROPE_FACTORS
from cyberslm.interop.ropes import factors_of_scaling, notes_of_scaling
from cyberslm.interop.source import parameter_shapes
from cyberslm.interop.vocabulary import PREFIX, STOPS, TEMPLATE
from cyberslm.interop.vocabulary_out import vocabulary_of
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.rope import interleave

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
FILE_TYPES: dict[GgufType, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
"""llama.cpp's numbers for what most tensors of a file are."""

_BLOCK = 32
_LARGEST_HALF = 65_504.0
_STORED = {own: name for table in (OUTER, INNER) for name, own in table.items()}


class Written(NamedTuple):
    """What a reader of the file should know."""

    architecture: str
    notes: tuple[str, ...]


def write_gguf(path: Path, parts: ModelParts, dtype: GgufType, about: Mapping[str, str]) -> Written:
    """Write a canonical model. Raises `ConfigError` naming what GGUF can't express, before anything is written."""
    config = parts.config
    architecture = architecture_of(config)
    words = vocabulary_of(parts.tokenizer, config.vocab_size)
    constants, quants = library()
    from gguf import GGUFWriter

    writer = GGUFWriter(None, architecture)
    writer.add_type("model")
    _add_settings(writer, config, architecture, dtype)
    for key, value in {**about, **words.values, **_chat(parts)}.items():
        _add(writer, key, value)
    shapes = parameter_shapes(config)
    types = {name: _type_of(name, shape, dtype).upper() for name, shape in shapes.items()}
    for name, shape in shapes.items():
        kind = constants.GGMLQuantizationType[types[name]]
        block, width = constants.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(_stored_name(name), shape, np.dtype(np.float32), math.prod(shape) // block * width, kind)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in shapes:
            weight = _weight(parts, name, turned=architecture == "llama")
            writer.write_tensor_data(_rounded(name, weight, constants.GGMLQuantizationType[types[name]], quants))
        if factors is not None:
            writer.write_tensor_data(factors)
    except OSError as error:
        raise StorageError(f"{path.name} could not be written: {error.strerror or error}") from error
    finally:
        writer.close()
    return Written(architecture, words.notes)


def architecture_of(config: CyberSLMConfig) -> str:
    """llama.cpp's name for a canonical network. Raises `ConfigError` naming the setting that it has none for."""
    why = misfit(config)
    if why is None and any(window is not None and window < config.max_seq_len for window in config.windows):
        why = f"sliding_window is {config.sliding_window}; llama.cpp runs these architectures without windows"
    if why is None and config.rope_scaling is not None and config.rope_scaling.type == "dynamic":
        why = "rope_scaling.type is dynamic; GGUF has linear, yarn and llama3"
    if why is None and config.qk_norm and _has_factors(config):
        why = "rope_scaling.type is llama3 beside qk_norm; llama.cpp reads its factors for Llama alone"
    if why is None and config.qk_norm and any((config.bias_q, config.bias_kv, config.bias_out)):
        why = "biases beside qk_norm; llama.cpp has none for Qwen3"
    if why is not None:
        raise ConfigError(f"this model can't be a GGUF: {why}")
    if config.qk_norm:
        return "qwen3"
    # Its kernel has heads of one width only; as Llama, which may have any of the biases, the rest has a name too.
    usual = config.head_size * config.num_heads == config.hidden_dim
    return "qwen2" if family(config) == "qwen2" and usual and not _has_factors(config) else "llama"


def _add_settings(writer: Any, config: CyberSLMConfig, architecture: str, dtype: GgufType) -> None:
    writer.add_file_type(FILE_TYPES[dtype])
    if dtype.startswith("q"):
        writer.add_quantization_version(2)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn_hidden_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    scaling = config.rope_scaling
    if scaling is None:
        return
    where = f"{architecture}.rope.scaling."
    if scaling.type in ("linear", "yarn"):
        writer.add_string(where + "type", scaling.type)
        writer.add_float32(where + "factor", scaling.factor)
    if scaling.type == "llama3":
        for key, value in notes_of_scaling(scaling).items():
            _add(writer, key, value)
    if scaling.type == "yarn":
        writer.add_uint32(where + "original_context_length", scaling.original_max_seq_len)
        writer.add_float32(where + "yarn_beta_fast", scaling.beta_fast)
        writer.add_float32(where + "yarn_beta_slow", scaling.beta_slow)
        if scaling.attention_factor is not None:
            usual = 0.1 * math.log(scaling.factor) + 1.0
            writer.add_float32(where + "attn_factor", scaling.attention_factor / usual)


def _add(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _chat(parts: ModelParts) -> dict[str, object]:
    """The template, and further ids that end an answer under the names that llama.cpp has for them."""
    template, stops = parts.extras
    if len(stops) > len(STOPS):
        raise ConfigError(f"{len(stops)} ids end an answer besides <eos>; GGUF has names for {len(STOPS)}")
    found: dict[str, object] = {PREFIX + key: index for key, index in zip(STOPS, stops, strict=False)}
    return found if template is None else {**found, TEMPLATE: template}


def _stored_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{_STORED[parts[0]]}.{parts[1]}"
    return f"blk.{parts[1]}.{_STORED['.'.join(parts[2:-1])]}.{parts[-1]}"


def _type_of(name: str, shape: tuple[int, ...], dtype: GgufType) -> GgufType:
    if len(shape) < 2:
        return "f32"
    if dtype.startswith("q") and shape[-1] % _BLOCK:
        return "f16"
    return "q8_0" if dtype == "q4_0" and name.startswith(("embed_tokens", "lm_head")) else dtype


def _rope_factors(config: CyberSLMConfig) -> np.ndarray | None:
    if config.rope_scaling is None or not _has_factors(config):
        return None
    return factors_of_scaling(config.rope_scaling, config.head_size, config.rope_base)


def _has_factors(config: CyberSLMConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling.type == "llama3"


def _weight(parts: ModelParts, name: str, *, turned: bool) -> np.ndarray:
    weight = parts.tensor(name).detach().to(device="cpu", dtype=torch.float32)
    heads = {"q_proj": parts.config.num_heads, "k_proj": parts.config.kv_heads}.get(name.split(".")[-2])
    return (interleave(weight, heads) if turned and heads else weight).contiguous().numpy()


def _rounded(name: str, weight: np.ndarray, kind: Any, quants: Any) -> np.ndarray:
    if not np.isfinite(weight).all():
        raise ConfigError(f"weight {name} is not finite: nothing was exported")
    if kind.name == "F16" and weight.size and np.abs(weight).max() > _LARGEST_HALF:
        raise ConfigError(f"weight {name} reaches {np.abs(weight).max():,.0f}, more than f16 holds: export bf16 or f32")
    return np.ascontiguousarray(quants.quantize(weight, kind))
