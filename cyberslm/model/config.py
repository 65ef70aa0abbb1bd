"""`CyberSLMConfig`: the sizes and variants of one network, frozen and checked when made.

The defaults are the reference model of 33,531,264 parameters. Every field changes the network or its files; the field
names of Hugging Face's Llama are accepted in YAML as aliases. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from cyberslm.errors import ConfigError
from cyberslm.model.checks import type_problems

LIMIT = 1 << 24  # larger sizes are typing errors or hostile files; checked before anything is allocated
LONGEST = 1 << 20  # tokens of context; the rotary table is made for all of them
LARGEST_TABLE = 1 << 28  # numbers of the rotary table
MOST_LAYERS = 10_000
MOST_PARAMETERS = 1 << 40

Activation = Literal["swiglu", "geglu", "gelu", "relu2"]
GATED = frozenset({"swiglu", "geglu"})


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed so that a model reaches past the context it was trained with."""

    type: Literal["linear", "dynamic", "yarn", "llama3"] = field(metadata={"alias": "rope_type"})
    """linear: positions divided by factor; dynamic: base raised with the length (NTK); yarn: by wavelength; llama3."""

    factor: float
    """How many times longer than the trained context the context becomes."""

    original_max_seq_len: int | None = field(default=None, metadata={"alias": "original_max_position_embeddings"})
    """dynamic, yarn, llama3: context length in tokens that the model was trained with."""

    beta_fast: float = 32.0
    """yarn: channels that turn at least this often within the original context keep their frequency."""

    beta_slow: float = 1.0
    """yarn: channels that turn at most this often are divided by factor."""

    attention_factor: float | None = None
    """yarn: factor on cosines and sines; null = 0.1 ln(factor) + 1."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_seq_len / low_freq_factor are divided by factor."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_seq_len / high_freq_factor stay."""

    def __post_init__(self) -> None:
        if problems := type_problems(self):
            raise ConfigError("; ".join(problems))
        problems = [
            f"{name} must be above 0 and finite, not {value}"
            for name in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "attention_factor")
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf
        ]
        if not 1 <= self.factor < math.inf:
            problems.append(f"factor must be at least 1 and finite, not {self.factor}")
        trained = self.original_max_seq_len
        if self.type != "linear" and (trained is None or not 1 <= trained <= LONGEST):
            problems.append(
                f"original_max_seq_len, which type {self.type} needs, must be from 1 to {LONGEST:,}, not {trained}"
            )
        if self.beta_fast <= self.beta_slow:
            problems.append(f"beta_fast {self.beta_fast} must be above beta_slow {self.beta_slow}")
        if self.high_freq_factor <= self.low_freq_factor:
            problems.append(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )
        problems += [
            f"{name} has no effect with type {self.type}: leave it out"
            for name, kinds in _KINDS_WITH.items()
            if self.type not in kinds and getattr(self, name) != type(self).__dataclass_fields__[name].default
        ]
        if problems:
            raise ConfigError("; ".join(problems))


_KINDS_WITH = {
    "original_max_seq_len": ("dynamic", "yarn", "llama3"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
}


@dataclass(frozen=True, kw_only=True)
class CyberSLMConfig:
    """Sizes and variants of a pre-norm decoder with rotary positions; the defaults are Llama's network."""

    vocab_size: int = 32_000
    """Rows of the embedding; at least the tokenizer's vocabulary. Left out, it is the tokenizer's."""

    max_seq_len: int = field(default=1024, metadata={"alias": "max_position_embeddings"})
    """Context length in tokens: rows of training, and prompt plus answer in generation."""

    hidden_dim: int = field(default=384, metadata={"alias": "hidden_size"})
    """Width of the residual stream."""

    num_layers: int = field(default=12, metadata={"alias": "num_hidden_layers"})
    """Decoder blocks."""

    num_heads: int = field(default=6, metadata={"alias": "num_attention_heads"})
    """Query heads."""

    num_kv_heads: int | None = field(default=None, metadata={"alias": "num_key_value_heads"})
    """Key and value heads, a divisor of num_heads: null = num_heads (MHA), 1 = MQA, between = GQA."""

    head_dim: int | None = None
    """Width of one head; null = hidden_dim / num_heads."""

    key_dim: int | None = None
    """Width of one head's queries and keys, even; null = head_dim, which the values always have."""

    attn_scale: Literal["head_dim", "key_dim"] = "head_dim"
    """Scores are divided by the root of this width."""

    qk_norm: bool = False
    """RMSNorm on each head's queries and keys before rotation, as in Qwen3."""

    sliding_window: int | tuple[int, ...] | None = None
    """Tokens that a query sees, itself included: one number, or a pattern over the layers such as [256, 256, 0]."""

    ffn_hidden_dim: int = field(default=1024, metadata={"alias": "intermediate_size"})
    """Inner width of the feed-forward."""

    activation: Activation = "swiglu"
    """Feed-forward: swiglu and geglu have a gate, gelu and relu2 (squared ReLU) have none."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm."""

    norm_eps: float = field(default=1e-5, metadata={"alias": "rms_norm_eps"})
    """Added to the mean square in the norms."""

    bias: bool = False
    """Biases in every projection of the blocks and in layer norms, as in GPT-2."""

    bias_q: bool = False
    """A bias in the query projection."""

    bias_kv: bool = False
    """Biases in the key and value projections."""

    bias_out: bool = False
    """A bias in attention's output projection."""

    rope_base: float = field(default=10_000.0, metadata={"alias": "rope_theta"})
    """Base of the rotary frequencies."""

    rope_layout: Literal["half", "interleaved"] = "half"
    """Channels turned together: i and i + key_dim / 2 as in Hugging Face's models, or 2i and 2i + 1 as in the paper."""

    rope_scaling: RopeScaling | None = None
    """Frequencies for a context longer than the one trained with; null = none."""

    tie_weights: bool = field(default=True, metadata={"alias": "tie_word_embeddings"})
    """Use the embedding matrix as the output head too."""

    logit_softcap: float | None = field(default=None, metadata={"alias": "final_logit_softcapping"})
    """Bound c of the logits, c tanh(logits / c); null = none."""

    dropout: float = 0.0
    """Dropout on each block's two residual branches and on the embeddings, in training."""

    attn_dropout: float = field(default=0.0, metadata={"alias": "attention_dropout"})
    """Dropout on the attention weights, in training."""

    pad_token_id: int = 0
    """Control id of padding; the tokenizer's."""

    bos_token_id: int = 2
    """Control id that begins a document; the tokenizer's."""

    eos_token_id: int = 3
    """Control id that ends a document; the tokenizer's."""

    def __post_init__(self) -> None:
        problems = type_problems(self)
        if not problems:
            problems = [*self._size_problems(), *self._value_problems(), *self._window_problems()]
        if not problems and self.num_parameters > MOST_PARAMETERS:
            problems = [
                f"these sizes make {self.num_parameters:,} parameters: at most {MOST_PARAMETERS:,} are possible"
            ]
        if problems:
            raise ConfigError("; ".join(problems))

    def _size_problems(self) -> list[str]:
        sizes = ("vocab_size", "max_seq_len", "hidden_dim", "num_layers", "num_heads", "ffn_hidden_dim")
        optional = tuple(name for name in ("num_kv_heads", "head_dim", "key_dim") if getattr(self, name) is not None)
        problems = [
            f"{name} must be a whole number from 1 to {LIMIT:,}, not {getattr(self, name)!r}"
            for name in (*sizes, *optional)
            if not _is_size(getattr(self, name))
        ]
        if problems:
            return problems
        if self.max_seq_len > LONGEST:
            problems.append(f"max_seq_len must be at most {LONGEST:,}, not {self.max_seq_len}")
        if self.num_layers > MOST_LAYERS:
            problems.append(f"num_layers must be at most {MOST_LAYERS:,}, not {self.num_layers}")
        if self.head_dim is None and self.hidden_dim % self.num_heads:
            problems.append(
                f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}:"
                " change one or set head_dim"
            )
        elif self.key_size % 2:
            name = "head_dim" if self.key_dim is None else "key_dim"
            problems.append(f"{name} must be even for rotary positions, not {self.key_size}")
        if self.max_seq_len * self.key_size > LARGEST_TABLE:
            problems.append(
                f"max_seq_len {self.max_seq_len} x head width {self.key_size} (head_dim, key_dim) is"
                f" {self.max_seq_len * self.key_size:,}: the rotary table may have {LARGEST_TABLE:,} numbers"
            )
        if self.num_heads % self.kv_heads:
            problems.append(f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}")
        scaling = self.rope_scaling
        if scaling is not None and scaling.type == "dynamic" and self.key_size < 4:
            problems.append(f"rope_scaling.type dynamic needs heads of at least 4 channels, not {self.key_size}")
        return problems

    def _value_problems(self) -> list[str]:
        problems = [
            f"{name} must be at least 0 and below 1, not {getattr(self, name)}"
            for name in ("dropout", "attn_dropout")
            if not 0 <= getattr(self, name) < 1
        ]
        if not 1 < self.rope_base < math.inf:
            problems.append(f"rope_base must be above 1 and finite, not {self.rope_base}")
        if not 0 < self.norm_eps < 1:
            problems.append(f"norm_eps must be between 0 and 1, not {self.norm_eps}")
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            problems.append(f"logit_softcap must be above 0 and finite, not {self.logit_softcap}")
        problems += [
            f"{name} must be from 0 to vocab_size - 1 = {self.vocab_size - 1}, not {getattr(self, name)}"
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
            if not 0 <= getattr(self, name) < self.vocab_size
        ]
        return problems

    def _window_problems(self) -> Iterator[str]:
        window = self.sliding_window
        if isinstance(window, tuple):
            if not window or not all(size == 0 or _is_size(size) for size in window):
                yield (
                    "sliding_window as a pattern lists one size a layer, 0 for the whole context, such as"
                    f" [256, 256, 0], not {list(window)}"
                )
            elif len(window) > self.num_layers:
                yield f"sliding_window lists {len(window)} sizes and there are num_layers {self.num_layers}: shorten it"
        elif window is not None and not _is_size(window):
            yield f"sliding_window must be from 1 to {LIMIT:,}, null or a pattern, not {window!r}"

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head's values."""
        return self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def key_size(self) -> int:
        """Width of one head's queries and keys."""
        return self.head_size if self.key_dim is None else self.key_dim

    @property
    def score_scale(self) -> float:
        """What query-key products are multiplied with."""
        return (self.head_size if self.attn_scale == "head_dim" else self.key_size) ** -0.5

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window; None where a query sees its whole past."""
        pattern = self.sliding_window if isinstance(self.sliding_window, tuple) else (self.sliding_window,)
        return tuple(pattern[layer % len(pattern)] or None for layer in range(self.num_layers))

    @property
    def num_embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_dim * (1 if self.tie_weights else 2)

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, a tied head counted once."""
        norm = self.hidden_dim * (2 if self.norm == "layer" and self.bias else 1)
        block = self._attention_parameters() + self._feed_forward_parameters() + 2 * norm
        return self.num_embedding_parameters + self.num_layers * block + norm

    def _attention_parameters(self) -> int:
        queries, keys = self.num_heads * self.key_size, self.kv_heads * self.key_size
        values, mixed = self.kv_heads * self.head_size, self.num_heads * self.head_size
        biases = (self.bias or self.bias_q) * queries + (self.bias or self.bias_kv) * (keys + values)
        biases += (self.bias or self.bias_out) * self.hidden_dim
        return self.hidden_dim * (queries + keys + values + mixed) + biases + self.qk_norm * 2 * self.key_size

    def _feed_forward_parameters(self) -> int:
        inner = 2 if self.activation in GATED else 1
        biases = self.bias * (inner * self.ffn_hidden_dim + self.hidden_dim)
        return (inner + 1) * self.hidden_dim * self.ffn_hidden_dim + biases


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= LIMIT
