"""What a network costs, by formula: bytes of weights, cache and activations, and floating point operations.

A multiply-add counts as two operations. Attention is counted over the whole T x T square, the field's convention
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), though a causal kernel does about half of it.
Counts are those of the arithmetic, whatever the kernel; the tests hold them against what torch counts and keeps.
"""

from __future__ import annotations

from cyberslm.model.config import GATED, CyberSLMConfig


def cache_bytes_per_token(config: CyberSLMConfig, *, bytes_per_number: int = 4) -> int:
    """Bytes that a `KVCache` takes for each slot of each row: keys and values of the key/value heads alone."""
    return config.num_layers * config.kv_heads * (config.key_size + config.head_size) * bytes_per_number


def flops_per_token(config: CyberSLMConfig, tokens: int, *, training: bool) -> int:
    """Operations for one token of a row of ``tokens``, logits included: forward, or forward and backward."""
    queries, keys = config.num_heads * config.key_size, config.kv_heads * config.key_size
    values, mixed = config.kv_heads * config.head_size, config.num_heads * config.head_size
    projections = config.hidden_dim * (queries + keys + values + mixed)
    feed_forward = (3 if config.activation in GATED else 2) * config.hidden_dim * config.ffn_hidden_dim
    attention = tokens * (queries + mixed)
    products = config.num_layers * (projections + feed_forward + attention) + config.hidden_dim * config.vocab_size
    return 2 * products * (3 if training else 1)


def activation_bytes(config: CyberSLMConfig, batch: int, tokens: int) -> int:
    """Bytes kept for the backward pass of a loss on ``batch`` rows of ``tokens``, in fp32 without dropout.

    The head's gradients are worked out with the loss (`cyberslm.training.cross_entropy`) and are among them.

    For the fused kernel on whole causal rows; windows, documents and ``key_dim`` keep more.
    """
    queries, keys = config.num_heads * config.key_size, config.kv_heads * config.key_size
    values, mixed = config.kv_heads * config.head_size, config.num_heads * config.head_size
    norm = 3 * config.hidden_dim + 1 if config.norm == "rms" else 2 * config.hidden_dim + 2
    heads = queries + keys + values + mixed + config.num_heads
    if config.qk_norm:
        heads += 2 * (queries + keys) + config.num_heads + config.kv_heads
    feed_forward = (4 if config.activation in GATED else 2) * config.ffn_hidden_dim
    numbers = config.num_layers * (2 * norm + heads + feed_forward) + norm
    head_gradient = 4 * config.vocab_size * config.hidden_dim
    ids = 8
    tables = 8 * config.key_size  # of one row's positions
    return batch * tokens * (4 * numbers + ids) + tokens * tables + head_gradient
