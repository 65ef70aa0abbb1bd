"""The same network in the form that other tools have: half-split rotation, and biases everywhere or nowhere.

Turning the layout reorders the rows of queries and keys, exactly (`deinterleave`); a bias that isn't there is one of
zeros. Neither changes a logit but by the order of sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cyberslm.checkpoint.folder import ModelParts
from cyberslm.model.rope import deinterleave


def canonical(parts: ModelParts, *, qwen2_words: bool) -> ModelParts:
    """The parts rewritten; ``qwen2_words`` says that biases without an output bias may stay, as Qwen2 has them."""
    config = parts.config
    names = {"q_proj": config.num_heads, "k_proj": config.kv_heads, "q_norm": 1, "k_norm": 1}
    turned = config.rope_layout == "interleaved"
    flags = (config.bias_q, config.bias_kv, config.bias_out)
    mixed = not config.bias and len(set(flags)) > 1 and not (qwen2_words and flags == (True, True, False))
    fields: dict[str, Any] = dict.fromkeys(("bias_q", "bias_kv", "bias_out"), True) if mixed else {}
    absent = {
        part
        for part, there in zip(("q_proj", "k_proj", "v_proj", "o_proj"), (flags[0], flags[1], *flags[1:]), strict=True)
        if mixed and not there
    }
    outputs = {
        "q_proj": config.num_heads * config.key_size,
        "k_proj": config.kv_heads * config.key_size,
        "v_proj": config.kv_heads * config.head_size,
        "o_proj": config.hidden_dim,
    }

    def tensor(name: str) -> Tensor:
        part = name.split(".")[-2]
        if part in absent and name.endswith(".bias"):
            return torch.zeros(outputs[part])
        weight = parts.tensor(name)
        return deinterleave(weight, names[part]) if turned and part in names else weight

    return parts._replace(config=replace(config, rope_layout="half", **fields), tensor=tensor)
