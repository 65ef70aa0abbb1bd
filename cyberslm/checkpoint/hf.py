"""How a `CyberSLMConfig` and its parameters are written so that Hugging Face tools open the folder as it is.

Where the network is exactly what `transformers` calls Llama, Qwen2, Qwen3 or Mistral, ``config.json`` says so in its
keys; where none of them can express it, it names a model type of our own, which those tools refuse. Tensors carry the
same names in all. Our own settings sit beside them under ``cyberslm``, which is the only part that is read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from cyberslm.config import parse, to_mapping
from cyberslm.errors import IntegrityError
from cyberslm.model.config import CyberSLMConfig, RopeScaling

PREFIX = "model."
HEAD = "lm_head."
FORMAT = 1
QWEN2_BIASES = (True, True, False)
"""Of queries, of keys and values, of attention's output."""

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
ARCHITECTURES: dict[Family | None, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    None: "CyberSLM",
}


def disk_name(name: str) -> str:
    """Parameter name -> tensor name."""
    return name if name.startswith(HEAD) else PREFIX + name


def family(config: CyberSLMConfig) -> Family | None:
    """The Hugging Face architecture that is exactly this network, if there is one."""
    if misfit(config) is not None:
        return None
    if config.qk_norm:
        return "qwen3"
    if _attention_biases(config) == QWEN2_BIASES:
        return "qwen2"
    return "llama" if set(config.windows) == {None} and config.hidden_dim % config.num_heads == 0 else "mistral"


def misfit(config: CyberSLMConfig) -> str | None:
    """Which setting keeps the network from being any of their architectures, and what they have; None if it is one."""
    needed = {"activation": "swiglu", "norm": "rms", "rope_layout": "half", "logit_softcap": None}
    found = [
        f"{name} is {getattr(config, name)!r}, theirs is {value!r}"
        for name, value in needed.items()
        if getattr(config, name) != value
    ]
    if config.key_size != config.head_size:
        found.append(f"key_dim is {config.key_size} and head_dim {config.head_size}, theirs are equal")
    return next(iter([*found, *_bias_misfits(config), *_window_misfits(config)]), None)


def _bias_misfits(config: CyberSLMConfig) -> Iterator[str]:
    biases = _attention_biases(config)
    if len(set(biases)) > 1 and (biases != QWEN2_BIASES or config.qk_norm):
        yield f"bias_q, bias_kv and bias_out are {biases}, theirs are equal, or without the last in Qwen2"
    if config.qk_norm and config.bias:
        yield "bias is true beside qk_norm, theirs have none in the feed-forward then"
    if all(biases) and not config.qk_norm and config.hidden_dim % config.num_heads:
        yield f"bias beside hidden_dim {config.hidden_dim}, which is no multiple of num_heads {config.num_heads}"


def _window_misfits(config: CyberSLMConfig) -> Iterator[str]:
    sizes, biases = set(config.windows), _attention_biases(config)
    by_layer = config.qk_norm or biases == QWEN2_BIASES
    if len(sizes - {None}) > 1:
        yield f"sliding_window has several sizes ({list(config.windows)}), theirs have one"
    elif len(sizes) > 1 and not by_layer:
        yield f"sliding_window is not the same in all layers ({list(config.windows)}), theirs is without qk_norm"
    if sizes != {None} and any(biases) and not by_layer:
        yield "sliding_window beside biases, which theirs with a window have not"


def hf_config(config: CyberSLMConfig, *, qwen2_words: bool = True) -> dict[str, object]:
    """The content of ``config.json``.

    transformers 5 cuts text in Qwen2's way under that name, whatever tokenizer.json says. So a network like Qwen2's has
    the name only where its tokenizer cuts so (``qwen2_words``), and else none.
    """
    kind = family(config)
    if kind == "qwen2" and not qwen2_words:
        kind = None
    scaling = config.rope_scaling
    trained = scaling.original_max_seq_len if scaling is not None and scaling.type == "dynamic" else None
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind or "cyberslm",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": trained or config.max_seq_len,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.ffn_hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu" if config.activation == "swiglu" else config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_theta": config.rope_base, **_rope_parameters(scaling)},
        **_bias_keys(config, kind),
        "attention_dropout": config.attn_dropout,
        **_windows(config, kind),
        "tie_word_embeddings": config.tie_weights,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "dtype": "float32",
        "use_cache": True,
        "cyberslm": {"format": FORMAT, **to_mapping(config)},
    }


def _attention_biases(config: CyberSLMConfig) -> tuple[bool, bool, bool]:
    return config.bias or config.bias_q, config.bias or config.bias_kv, config.bias or config.bias_out


def _bias_keys(config: CyberSLMConfig, kind: Family | None) -> dict[str, object]:
    """The keys that the architecture has: with Qwen2 the name alone says it, and Mistral has no biases."""
    if kind in ("qwen2", "mistral"):
        return {}
    attention = {"attention_bias": any(_attention_biases(config))}
    return {**attention} if kind == "qwen3" else {**attention, "mlp_bias": config.bias}


def _rope_parameters(scaling: RopeScaling | None) -> dict[str, object]:
    if scaling is None:
        return {"rope_type": "default"}
    kept = {
        "linear": (),
        "dynamic": (),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
    }[scaling.type]
    trained = None if scaling.type == "dynamic" else scaling.original_max_seq_len
    return {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        **({} if trained is None else {"original_max_position_embeddings": trained}),
        **{name: value for name in kept if (value := getattr(scaling, name)) is not None},
    }


def _windows(config: CyberSLMConfig, kind: Family | None) -> dict[str, object]:
    size = next((window for window in config.windows if window is not None), None)
    if kind in ("qwen2", "qwen3"):
        types = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        return {"use_sliding_window": size is not None, "sliding_window": size, "layer_types": types}
    return {"sliding_window": size} if size is not None or kind == "mistral" else {}


def generation_config(config: CyberSLMConfig, stop_ids: Sequence[int] = ()) -> dict[str, object]:
    """The content of ``generation_config.json``; ``stop_ids`` end an answer besides the end of a document."""
    others = [index for index in stop_ids if index != config.eos_token_id]
    return {
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": [config.eos_token_id, *others] if others else config.eos_token_id,
    }


def config_from_json(value: object, *, where: str) -> CyberSLMConfig:
    """Read ``config.json`` back. Raises `IntegrityError` unless CyberSLM wrote it, `ConfigError` for a bad value."""
    own = value.get("cyberslm") if isinstance(value, dict) else None
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        raise IntegrityError(f"{where}: not written by CyberSLM (no 'cyberslm' section of format {FORMAT})")
    return parse({key: item for key, item in own.items() if key != "format"}, CyberSLMConfig, where=where)
