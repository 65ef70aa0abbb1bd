"""`CyberSLMConfig`: the sizes of one network, frozen and checked when made.

The defaults are the reference model of 33,531,264 parameters. Every field changes the network or its files; the field
names of Hugging Face's Llama are accepted in YAML as aliases. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cyberslm.errors import ConfigError

LIMIT = 1 << 24  # larger sizes are typing errors or hostile files; checked before anything is allocated
LONGEST = 1 << 20  # tokens of context; the rotary table is made for all of them


@dataclass(frozen=True, kw_only=True)
class CyberSLMConfig:
    """Sizes of a pre-norm decoder with rotary positions, grouped heads and a SwiGLU feed-forward."""

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
    """Width of one head, even; null = hidden_dim / num_heads."""

    ffn_hidden_dim: int = field(default=1024, metadata={"alias": "intermediate_size"})
    """Inner width of the SwiGLU feed-forward."""

    rope_base: float = field(default=10_000.0, metadata={"alias": "rope_theta"})
    """Base of the rotary frequencies."""

    norm_eps: float = field(default=1e-5, metadata={"alias": "rms_norm_eps"})
    """Added to the mean square in RMSNorm."""

    tie_weights: bool = field(default=True, metadata={"alias": "tie_word_embeddings"})
    """Use the embedding matrix as the output head too."""

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
        problems = [*self._size_problems(), *self._value_problems()]
        if problems:
            raise ConfigError("; ".join(problems))

    def _size_problems(self) -> list[str]:
        sizes = ("vocab_size", "max_seq_len", "hidden_dim", "num_layers", "num_heads", "ffn_hidden_dim")
        optional = tuple(name for name in ("num_kv_heads", "head_dim") if getattr(self, name) is not None)
        problems = [
            f"{name} must be a whole number from 1 to {LIMIT:,}, not {getattr(self, name)!r}"
            for name in (*sizes, *optional)
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) <= LIMIT
        ]
        if not problems and self.max_seq_len > LONGEST:
            problems.append(f"max_seq_len must be at most {LONGEST:,}, not {self.max_seq_len}")
        if problems:
            return problems
        if self.head_dim is None and self.hidden_dim % self.num_heads:
            problems.append(
                f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}:"
                " change one or set head_dim"
            )
        elif self.head_size % 2:
            problems.append(f"head_dim must be even for rotary positions, not {self.head_size}")
        if self.num_heads % self.kv_heads:
            problems.append(f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}")
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
        problems += [
            f"{name} must be from 0 to vocab_size - 1 = {self.vocab_size - 1}, not {getattr(self, name)}"
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
            if not 0 <= getattr(self, name) < self.vocab_size
        ]
        return problems

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def num_embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_dim * (1 if self.tie_weights else 2)

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, a tied head counted once."""
        attention = self.hidden_dim * self.head_size * 2 * (self.num_heads + self.kv_heads)
        block = attention + 3 * self.hidden_dim * self.ffn_hidden_dim + 2 * self.hidden_dim
        return self.num_embedding_parameters + self.num_layers * block + self.hidden_dim
