"""What a network costs, by formula: bytes of weights, cache and activations, and floating point operations.

A multiply-add counts as two operations. Attention is counted over the whole T x T square, the field's convention
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), though a causal kernel does about half of it.
Counts are those of the arithmetic, whatever the kernel; the tests hold them against what torch counts and keeps.
"""

from __future__ import annotations

from cyberslm.model.config import GATED, CyberSLMConfig
from cyberslm.model.lora import LoraConfig


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


def trained_flops_per_token(config: CyberSLMConfig, *, frozen: bool = False) -> float:
    """Operations of training that a token needs on average: attention counts only the keys that a query sees.

    With a ``frozen`` base its matrices get no gradient, a third of their products less; adapters are not counted.
    For whole rows of ``max_seq_len``; what a kernel computes besides, and then hides, is no part of it.
    """
    seen = sum(_mean_seen(config.max_seq_len, window) for window in config.windows)
    at_all = config.num_layers * config.max_seq_len
    whole = flops_per_token(config, config.max_seq_len, training=True)
    per_key = 6 * config.num_heads * (config.key_size + config.head_size)
    saved = 0
    if frozen:
        saved = flops_per_token(config, 0, training=False)
    return whole - per_key * (at_all - seen) - saved


def _mean_seen(tokens: int, window: int | None) -> float:
    """Keys that a query sees, on average over a row: 1, 2, 3 ... up to the window."""
    most = tokens if window is None else min(window, tokens)
    return (most * (most + 1) / 2 + (tokens - most) * most) / tokens


def activation_bytes(  # noqa: PLR0913
    config: CyberSLMConfig, batch: int, tokens: int, *, bf16: bool = False, native: bool = False, compiled: bool = False
) -> int:
    """Bytes kept for the backward pass of a loss on ``batch`` rows of ``tokens``, without dropout.

    The head's gradients are worked out with the loss (`cyberslm.training.cross_entropy`) and are among them.
    ``bf16``: under autocast, where inputs of products and the weights as they were used are kept in bf16. ``native``:
    with what is in C++ (`CyberSLM.use_native`), whose norms keep their input alone and give it to products without a
    copy, and whose gate is kept but not its activation; unless ``compiled`` neither a norm's result nor an activated
    gate is kept either (`cyberslm.model.remade`). For the fused kernel on whole causal rows; windows, documents and
    ``key_dim`` keep more.
    """
    queries, keys = config.num_heads * config.key_size, config.kv_heads * config.key_size
    values, mixed = config.kv_heads * config.head_size, config.num_heads * config.head_size
    rms, gate = config.norm == "rms", config.activation in GATED
    shared = native and rms
    inside = config.hidden_dim + (1 if shared else config.hidden_dim + 1 if rms else 2)
    into_products = config.hidden_dim * (5 if gate else 4)  # of a block, a copy for each in bf16
    outputs = into_products if bf16 and not shared else 2 * config.hidden_dim
    if shared and not compiled:
        outputs = 0
    heads = queries + keys + values + mixed
    head_norms = config.num_heads + config.kv_heads if config.qk_norm else 0
    normed = queries + keys if config.qk_norm else 0
    feed_forward = ((4 if not native else 3 if compiled else 2) if gate else 2) * config.ffn_hidden_dim
    full = config.num_layers * (2 * inside + config.num_heads + head_norms + (0 if native else 2 * normed)) + inside
    products = config.num_layers * (outputs + heads + feed_forward + (normed if native else 0)) + config.hidden_dim
    head_gradient = 4 * config.vocab_size * config.hidden_dim
    ids = 8
    tables = 8 * config.key_size  # of one row's positions
    weights = cast_bytes(config) if bf16 else 0
    return batch * tokens * (4 * full + (2 if bf16 else 4) * products + ids) + tokens * tables + head_gradient + weights


def adapted_activation_bytes(  # noqa: PLR0913
    config: CyberSLMConfig,
    lora: LoraConfig,
    batch: int,
    tokens: int,
    *,
    bf16: bool = False,
    native: bool = False,
    compiled: bool = False,
) -> int:
    """`activation_bytes` where adapters alone are trained, the matrices under them kept in the dtype of the products.

    Frozen matrices and gains have no gradient, so their inputs are not kept. A first block without adapters on its
    attention keeps less than the others, which is not counted.
    """
    ends = _ends(config)
    heads = sum(ends[name][1] for name in _INTO_ATTENTION) + ends["o_proj"][0]
    gated, shared_norms = config.activation in GATED, native and config.norm == "rms"
    copies, remade = bf16 and not shared_norms, native and not compiled
    first = 0  # what the first block keeps besides: the norm of an input that isn't kept itself
    if lora.dropout:
        inputs = 2 * sum(ends[name][0] for name in lora.targets)  # what is left of them, and which those are
    else:
        shared = [sum(name in lora.targets for name in group) for group in (_INTO_ATTENTION, _INTO_GATE)]
        inputs = sum(shared if copies else map(bool, shared)) * config.hidden_dim
        if remade and shared_norms:
            inputs, first = 0, config.hidden_dim if set(_INTO_ATTENTION) & set(lora.targets) else 0
        inputs += config.ffn_hidden_dim if "down_proj" in lora.targets and not (remade and gated) else 0
    normed = ends["q_proj"][1] + ends["k_proj"][1] if config.qk_norm else 0
    products = heads + ((2 if native else 3) if gated else 1) * config.ffn_hidden_dim + inputs
    products += lora.rank * len(lora.targets) + (normed if native else 0)
    norm = config.hidden_dim + (1 if config.norm == "rms" else 2)
    norms = 2 * norm + (config.num_heads + config.kv_heads if config.qk_norm else 0) + (0 if native else normed)
    full = config.num_layers * (norms + config.num_heads)  # with the last norm, without the first
    per_token = 4 * full + (2 if bf16 else 4) * (config.num_layers * products + first + config.hidden_dim)
    tables = 8 * config.key_size
    return batch * tokens * per_token + tokens * tables + (adapted_cast_bytes(config, lora) if bf16 else 0)


def adapted_cast_bytes(config: CyberSLMConfig, lora: LoraConfig) -> int:
    """`cast_bytes` where adapters alone are trained: those of adapters, and of the matrices without one."""
    each = _ends(config).items()
    adapters = sum(lora.rank * sum(ends) for name, ends in each if name in lora.targets)
    others = sum(width * height for name, (width, height) in each if name not in lora.targets)
    return 2 * config.num_layers * (adapters + others)


_INTO_ATTENTION, _INTO_GATE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _ends(config: CyberSLMConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's matrices."""
    hidden, inner = config.hidden_dim, config.ffn_hidden_dim
    keys, values = config.kv_heads * config.key_size, config.kv_heads * config.head_size
    found = {"q_proj": (hidden, config.num_heads * config.key_size), "k_proj": (hidden, keys)}
    found |= {"v_proj": (hidden, values), "o_proj": (config.num_heads * config.head_size, hidden)}
    found |= {"gate_proj": (hidden, inner)} if config.activation in GATED else {}
    return found | {"up_proj": (hidden, inner), "down_proj": (inner, hidden)}


def cast_bytes(config: CyberSLMConfig) -> int:
    """Bytes of bf16 weights that autocast keeps for the backward pass: all but those of embeddings and head."""
    return 2 * (config.num_parameters - config.num_embedding_parameters)
