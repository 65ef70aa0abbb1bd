"""How a `CyberSLMConfig` and its parameters are written so that Hugging Face tools open the folder as it is.

The network is exactly what `transformers` calls Llama: ``config.json`` says so in its keys, tensors carry its names,
and our own settings sit beside them under ``cyberslm``, which is the only part that is read back.
"""

from __future__ import annotations

from cyberslm.config import parse, to_mapping
from cyberslm.errors import IntegrityError
from cyberslm.model.config import CyberSLMConfig

PREFIX = "model."
HEAD = "lm_head."
FORMAT = 1


def disk_name(name: str) -> str:
    """Parameter name -> tensor name."""
    return name if name.startswith(HEAD) else PREFIX + name


def hf_config(config: CyberSLMConfig) -> dict[str, object]:
    """The content of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.ffn_hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.attn_dropout,
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


def generation_config(config: CyberSLMConfig) -> dict[str, object]:
    """The content of ``generation_config.json``."""
    return {
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


def config_from_json(value: object, *, where: str) -> CyberSLMConfig:
    """Read ``config.json`` back. Raises `IntegrityError` unless CyberSLM wrote it, `ConfigError` for a bad value."""
    own = value.get("cyberslm") if isinstance(value, dict) else None
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        raise IntegrityError(f"{where}: not written by CyberSLM (no 'cyberslm' section of format {FORMAT})")
    return parse({key: item for key, item in own.items() if key != "format"}, CyberSLMConfig, where=where)
