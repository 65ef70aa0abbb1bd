"""From a GGUF file to the parts of a model folder: settings and tensors by table, the rest refused by name.

Architecture ``llama`` (Llama, Mistral, SmolLM2) stores the rows of queries and keys in the interleaved order of its
rotary kernel, ``qwen2`` and ``qwen3`` in Hugging Face's half-split one. Quantised weights become the fp32 numbers that
they stand for, which are roundings of the original ones; the record says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cyberslm.checkpoint.folder import Extras, ModelParts
from cyberslm.checkpoint.hf import disk_name
from cyberslm.errors import ConfigError, TokenizerError
from cyberslm.interop.container import GgufFile, Value, read_gguf
from cyberslm.interop.ropes import scaling_of_factors
from cyberslm.interop.source import Source, check_tensors, file_records
from cyberslm.interop.vocabulary import TEMPLATE, read_tokenizer, stop_ids
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.rope import deinterleave
from cyberslm.text.tokenizer import Tokenizer

Scalar = int | float | bool | str

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"

OUTER = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

_TENSOR = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?([a-z_]+)\.(weight|bias)")
_SIZES = {
    "block_count": "num_layers",
    "context_length": "max_seq_len",
    "embedding_length": "hidden_dim",
    "feed_forward_length": "ffn_hidden_dim",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.freq_base": "rope_base",
}
_SCALING = {
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
}
_CHECKED = {"vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count"}
_WITHOUT_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout"}
_ONLY = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.yarn_attn_factor": 1.0,
}


def read_source(path: Path) -> Source:
    """Open a GGUF file. Raises `IntegrityError` when it is damaged, `ConfigError` or `TokenizerError` naming what can't
    be expressed here."""
    file = read_gguf(path)
    turned = file.values.get("general.architecture") == "llama"
    names = {name: _own_name(name, path) for name in file.tensors if not (turned and name == ROPE_FACTORS)}
    try:
        tokenizer = read_tokenizer(file.values)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    config = _config(file, set(names.values()), tokenizer, path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(f"{path}: {tokenizer.vocab_size:,} tokens and {config.vocab_size:,} rows of the embedding")
    check_tensors(config, {disk_name(own): file.tensors[name].shape for name, own in names.items()}, str(path))
    stored = {own: name for name, own in names.items()}

    def tensor(name: str) -> Tensor:
        weight = torch.from_numpy(file.array(stored[name]))
        heads = {"q_proj": config.num_heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        return deinterleave(weight, heads) if turned and heads else weight

    template = file.values.get(TEMPLATE)
    extras = Extras(template if isinstance(template, str) else None, _stops(file.values, config))
    return Source(ModelParts(config, tensor, tokenizer, extras), _record(file, path))


def _own_name(name: str, path: Path) -> str:
    match = _TENSOR.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    table = OUTER if layer is None else INNER
    if part not in table:
        raise ConfigError(f"{path}: tensor {name!r:.120} is unknown, and leaving it out would change the result")
    return f"{table[part]}.{kind}" if layer is None else f"layers.{int(layer)}.{table[part]}.{kind}"


def _config(file: GgufFile, names: set[str], tokenizer: Tokenizer, path: Path) -> CyberSLMConfig:
    kind, settings = _settings(file.values, path)
    missing = next((f"{kind}.{key}" for key in _NEEDED if key not in settings), None)
    if missing or "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{path}: {missing or 'tensor token_embd.weight'} is missing")
    rows = file.tensors["token_embd.weight"].shape[0]
    if settings.get("vocab_size", rows) != rows:
        raise ConfigError(f"{path}: {kind}.vocab_size is {settings['vocab_size']} and the embedding has {rows} rows")
    usual, width = _head_widths(settings, f"{path}: {kind}")
    biases = {part for part in INNER.values() if f"layers.0.{part}.bias" in names}
    every = "mlp.up_proj" in biases
    fields: dict[str, Any] = {field: settings[key] for key, field in _SIZES.items() if key in settings}
    fields |= {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("pad", "bos", "eos")}
    try:
        return CyberSLMConfig(
            **fields,
            vocab_size=rows,
            head_dim=None if width == usual else width,
            qk_norm="layers.0.self_attn.q_norm.weight" in names,
            tie_weights="lm_head.weight" not in names,
            bias=every,
            bias_q=not every and "self_attn.q_proj" in biases,
            bias_kv=not every and "self_attn.k_proj" in biases,
            bias_out=not every and "self_attn.o_proj" in biases,
            rope_scaling=_scaling(file, settings, width, path),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


_NEEDED = [key for key in _SIZES if key not in ("attention.head_count_kv", "rope.freq_base")]


def _settings(values: Mapping[str, Value], path: Path) -> tuple[str, dict[str, Scalar]]:
    """The settings of the architecture without its name in front, each of them known."""
    kind = values.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {kind!r:.40} is not supported; {', '.join(ARCHITECTURES)} are")
    if values.get("general.type", "model") != "model":
        raise ConfigError(f"{path}: general.type is {values['general.type']!r:.40}, not a whole model")
    if values.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{path} is one of {values['split.count']} parts: join them first (llama-gguf-split --merge)")
    settings = {key.removeprefix(kind + "."): value for key, value in values.items() if key.startswith(kind + ".")}
    known = {*_SIZES, *_SCALING, *_CHECKED, *_WITHOUT_EFFECT, *_ONLY, "attention.sliding_window"}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{path}: {kind}.{name} is not known here, and it may change the result")
        if name in _ONLY and value != _ONLY[name]:
            raise ConfigError(f"{path}: {kind}.{name} is {value!r:.40}; only {_ONLY[name]!r} can be imported")
    plain = {name: _plain(value, f"{path}: {kind}.{name}") for name, value in settings.items()}
    window = _whole(plain, "attention.sliding_window", f"{path}: {kind}", default=0)
    if 0 < window < _whole(plain, "context_length", f"{path}: {kind}", default=0):
        raise ConfigError(
            f"{path}: {kind}.attention.sliding_window is {window}; llama.cpp runs this architecture without windows,"
            " so import the model from its Hugging Face folder"
        )
    return kind, plain


def _plain(value: Value, where: str) -> Scalar:
    """Arrays of one value, one a layer, as that value; fp32 as the shortest decimal that means it."""
    if isinstance(value, np.ndarray):
        different = set(value.tolist())
        if len(different) != 1:
            raise ConfigError(f"{where} differs by layer ({sorted(different)!r:.80}); only one value can be imported")
        (value,) = different
    if isinstance(value, list | np.ndarray):
        raise ConfigError(f"{where} is a list of strings")
    return float(np.format_float_scientific(np.float32(value))) if isinstance(value, float) else value


def _whole(settings: Mapping[str, Scalar], key: str, where: str, *, default: int) -> int:
    value = settings.get(key, default)
    if type(value) is not int:
        raise ConfigError(f"{where}.{key} must be a whole number, not {value!r:.40}")
    return value


def _head_widths(settings: Mapping[str, Scalar], where: str) -> tuple[float, int]:
    """Hidden width by heads, and the width that a head has."""
    heads = max(1, _whole(settings, "attention.head_count", where, default=1))
    usual = _whole(settings, "embedding_length", where, default=0) / heads
    width = _whole(settings, "attention.key_length", where, default=int(usual))
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, width) != width:
            raise ConfigError(
                f"{where}.{key} is {settings[key]} and heads are {width} wide; only equal can be imported"
            )
    return usual, width


def _scaling(file: GgufFile, settings: Mapping[str, Scalar], width: int, path: Path) -> RopeScaling | None:
    kind = settings.get("rope.scaling.type", "linear" if "rope.scale_linear" in settings else "none")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 1.0))
    if kind != "yarn" and settings.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ConfigError(f"{path}: rope.scaling.attn_factor beside rope.scaling.type {kind!r:.40} can't be imported")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ConfigError(f"{path}: rope.scaling.type {kind!r:.40} and {ROPE_FACTORS} can't be imported together")
        base = settings.get("rope.freq_base", 10_000.0)
        if not isinstance(base, float):
            raise ConfigError(f"{path}: rope.freq_base must be a number, not {base!r:.40}")
        where = f"{path}: {ROPE_FACTORS}"
        return scaling_of_factors(file.array(ROPE_FACTORS), width, base, file.values, where=where)
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return RopeScaling(type="linear", factor=cast(float, factor))
    if kind == "yarn":
        return _yarn(settings, factor)
    raise ConfigError(f"{path}: rope.scaling.type {kind!r:.40} is not supported; none, linear and yarn are")


def _yarn(settings: Mapping[str, Scalar], factor: Scalar) -> RopeScaling:
    given = settings.get("rope.scaling.attn_factor", 1.0)
    fields: dict[str, Any] = {
        "factor": factor,
        "original_max_seq_len": settings.get("rope.scaling.original_context_length", settings["context_length"]),
    }
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in settings:
            fields[name] = settings[f"rope.scaling.yarn_{name}"]
    if isinstance(given, float) and given != 1.0 and isinstance(factor, float) and factor > 1:
        fields["attention_factor"] = float(f"{given * (0.1 * math.log(factor) + 1.0):.7g}")
    return RopeScaling(type="yarn", **fields)


def _stops(values: Mapping[str, Value], config: CyberSLMConfig) -> tuple[int, ...]:
    found = dict.fromkeys(index for index in stop_ids(values) if index != config.eos_token_id)
    if wrong := [index for index in found if not 0 <= index < config.vocab_size]:
        raise ConfigError(f"stop id {wrong[0]} is outside the vocabulary of {config.vocab_size:,}")
    return tuple(found)


def _record(file: GgufFile, path: Path) -> dict[str, object]:
    types = Counter(info.type for info in file.tensors.values())
    rounded = sorted(set(types) - {"F32"})
    notes = {
        key.removeprefix("general."): value
        for key, value in file.values.items()
        if key.startswith(
            ("general.license", "general.name", "general.organization", "general.url", "general.repo_url")
        )
        and isinstance(value, str)
    }
    return {
        "kind": "gguf",
        "files": file_records([path]),
        "tensor_types": dict(sorted(types.items())),
        "weights": f"roundings to {', '.join(rounded)}" if rounded else "as in the file",
        "says": {key: value[:1000] for key, value in notes.items()},
    }
