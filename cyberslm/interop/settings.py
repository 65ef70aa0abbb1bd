"""A Hugging Face ``config.json`` -> `CyberSLMConfig`, key by key.

Each key is read, known to change nothing, or an error that names it. What a file leaves out has the value that the
family's class in ``transformers`` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cyberslm.errors import ConfigError
from cyberslm.model.config import MOST_LAYERS, CyberSLMConfig, RopeScaling

Json = Mapping[str, Any]

DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

_WINDOWED = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_OF_FAMILY = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": _WINDOWED,
    "qwen3": _WINDOWED | {"attention_bias"},
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_dim",
    "intermediate_size": "ffn_hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_READ = {
    *_SIZES,
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "hidden_act",
        "attention_dropout",
        "model_type",
        "architectures",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
# Notes, and settings of training, of the library or of generation: no logits depend on them.
_WITHOUT_EFFECT = {
    *("torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "_name_or_path", "cyberslm"),
    *("pretraining_tp", "is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed"),
    *("tokenizer_class", "id2label", "label2id", "problem_type", "return_dict", "output_attentions"),
    *("output_hidden_states", "gradient_checkpointing", "_attn_implementation_autoset", "chunk_size_feed_forward"),
}
_ONLY: dict[str, object] = {
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "attention_bias": False,
    "mlp_bias": False,  # where the family has none
}
_ROPE = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "finetuned"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
}


def config_of(data: Json, roles: Mapping[str, int], *, where: str) -> CyberSLMConfig:
    """The network that ``config.json`` describes; ``roles`` are the tokenizer's ids. Raises `ConfigError`."""
    family = _family(data, where)
    settings = {**DEFAULTS[family], **data}  # a null is said by the file: it means none, not the default
    if missing := next((key for key in _SIZES if settings.get(key) is None), None):
        raise ConfigError(f"{where}: {missing} is missing")
    fields: dict[str, Any] = {field: settings[key] for key, field in _SIZES.items()}
    try:
        fields |= {**roles, **_biases(family, settings, where), **_rope(settings, where)}
        return CyberSLMConfig(
            **fields,
            num_kv_heads=settings.get("num_key_value_heads"),
            head_dim=_head_dim(settings),
            norm_eps=_given(settings, "rms_norm_eps", 1e-6),
            tie_weights=_given(settings, "tie_word_embeddings", False),
            attn_dropout=float(settings.get("attention_dropout") or 0.0),
            qk_norm=family == "qwen3",
            sliding_window=_windows(family, settings, where),
        )
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ConfigError(f"{where}: a setting has a value of the wrong type: {error}") from error


def _given(settings: Json, key: str, default: Any) -> Any:
    value = settings.get(key)
    return default if value is None else value


def _family(data: Json, where: str) -> str:
    family = data.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        own = "; a CyberSLM model folder needs no import" if family == "cyberslm" else ""
        raise ConfigError(f"{where}: model_type {family!r:.40} is not supported; {known} are{own}")
    wanted = f"{CLASSES[family]}ForCausalLM"
    if data.get("architectures", [wanted]) != [wanted]:
        raise ConfigError(f"{where}: architectures is {data['architectures']!r:.80}; only {wanted} can be imported")
    if data.get("quantization_config"):
        raise ConfigError(
            f"{where}: quantization_config: the weights are packed; import the unquantised model or a GGUF"
        )
    if data.get("auto_map"):
        raise ConfigError(f"{where}: auto_map names code of the model's own, which is not run; its result is unknown")
    without_doubt = _READ | _WITHOUT_EFFECT | _OF_FAMILY[family]
    for key, value in data.items():
        if key in without_doubt or value is None:
            continue
        if key not in _ONLY:
            raise ConfigError(f"{where}: {key!r:.80} is not known here, and it may change the result")
        if value != _ONLY[key]:
            raise ConfigError(f"{where}: {key} is {value!r:.40}; only {_ONLY[key]!r} can be imported")
    if data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {data['hidden_act']!r:.40}; only 'silu' can be imported")
    return family


def _head_dim(settings: Json) -> int | None:
    given = settings.get("head_dim")
    return None if given is None or given * settings["num_attention_heads"] == settings["hidden_size"] else given


def _biases(family: str, settings: Json, where: str) -> dict[str, bool]:
    if family == "qwen2":
        return {"bias_q": True, "bias_kv": True}
    attention, inner = settings.get("attention_bias", False), settings.get("mlp_bias", False)
    if inner and not attention:
        raise ConfigError(f"{where}: mlp_bias without attention_bias can't be expressed here")
    return {"bias": True} if inner else dict.fromkeys(("bias_q", "bias_kv", "bias_out"), bool(attention))


def _windows(family: str, settings: Json, where: str) -> int | tuple[int, ...] | None:
    if family == "mistral":
        return settings.get("sliding_window")
    if family == "llama" or not settings.get("use_sliding_window", False):
        if "sliding_attention" in (settings.get("layer_types") or ()):
            raise ConfigError(f"{where}: layer_types names sliding_attention and use_sliding_window is false")
        return None
    size, layers = settings.get("sliding_window", 4096), settings["num_hidden_layers"]
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise ConfigError(f"{where}: num_hidden_layers must be from 1 to {MOST_LAYERS:,}, not {layers!r:.40}")
    first = _given(settings, "max_window_layers", 28)
    usual = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = _given(settings, "layer_types", usual)
    if not isinstance(kinds, list) or set(kinds) - {"sliding_attention", "full_attention"} or len(kinds) != layers:
        raise ConfigError(f"{where}: layer_types must name full_attention or sliding_attention for each layer")
    sizes = tuple((size or 0) if kind == "sliding_attention" else 0 for kind in kinds)
    if len(set(sizes)) > 1:
        return sizes
    return sizes[0] or None


def _rope(settings: Json, where: str) -> dict[str, Any]:
    given = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: {name} must be an object, not {given!r:.80}")
    rope = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(set(rope) - _ROPE):
        raise ConfigError(f"{where}: {name}.{unknown[0]} is not known here, and it may change the result")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{where}: {name}.partial_rotary_factor is {rope['partial_rotary_factor']}; only 1.0 can be imported"
        )
    other = settings.get("rope_parameters") or {}
    base = rope.get("rope_theta", _given(settings, "rope_theta", other.get("rope_theta", 10_000.0)))
    trained = settings["max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = _scaling(kind, rope, trained, f"{where}: {name}")
    longest = trained
    if kind == "dynamic" and scaling is not None:
        longest = math.floor(trained * scaling.factor)
    return {"rope_base": float(base), "rope_scaling": scaling, "max_seq_len": longest}


def _scaling(kind: object, rope: Json, trained: int, where: str) -> RopeScaling | None:
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise ConfigError(
            f"{where}.rope_type {kind!r:.40} is not supported; default, linear, dynamic, yarn, llama3 are"
        )
    if missing := [key for key in _NEEDED.get(kind, ("factor",)) if key not in rope]:
        raise ConfigError(f"{where}.{missing[0]} is missing")
    fields: dict[str, Any] = {"type": kind, "factor": float(rope["factor"])}
    if kind == "dynamic":
        fields["original_max_seq_len"] = trained
    if kind in ("yarn", "llama3"):
        fields["original_max_seq_len"] = rope.get("original_max_position_embeddings", trained)
    kept = {"yarn": ("beta_fast", "beta_slow", "attention_factor"), "llama3": ("low_freq_factor", "high_freq_factor")}
    fields |= {key: float(rope[key]) for key in kept.get(kind, ()) if rope.get(key)}
    if kind == "yarn":
        if rope.get("truncate", True) is not True:
            raise ConfigError(f"{where}.truncate is {rope['truncate']!r:.20}; only true can be imported")
        if "attention_factor" not in fields and rope.get("mscale") and rope.get("mscale_all_dim"):
            one, other = (0.1 * rope[key] * math.log(fields["factor"]) + 1.0 for key in ("mscale", "mscale_all_dim"))
            fields["attention_factor"] = one / other
    return RopeScaling(**fields)


_NEEDED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor")}
