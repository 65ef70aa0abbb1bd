"""Peers that several benches build alike."""

from __future__ import annotations

from typing import Any


def dual_attention(config: Any) -> Any:
    """The reference system's network of the sizes of ``config``."""
    from dual_attention.language_models import TransformerLM

    return TransformerLM(
        vocab_size=config.vocab_size,
        d_model=config.hidden_dim,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        dff=config.ffn_hidden_dim,
        dropout_rate=0.0,
        activation="swiglu",
        norm_first=True,
        max_block_size=config.max_seq_len,
        norm_type="rmsnorm",
        bias=False,
        pos_enc_type="RoPE",
    )
