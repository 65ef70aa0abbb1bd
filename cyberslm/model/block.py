"""One pre-norm decoder block: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``."""

from __future__ import annotations

from torch import Tensor, nn

from cyberslm.model.attention import MultiHeadSelfAttention
from cyberslm.model.cache import LayerCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.ffn import FeedForward
from cyberslm.model.norm import make_norm
from cyberslm.model.plan import Plan
from cyberslm.model.rope import RotaryPositionEmbedding


class DecoderBlock(nn.Module):
    """Block number ``layer`` of the network."""

    def __init__(self, config: CyberSLMConfig, rope: RotaryPositionEmbedding, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = MultiHeadSelfAttention(config, rope, layer=layer)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, plan: Plan, cache: LayerCache | None) -> Tensor:
        x = x + self.dropout(self.self_attn.attend(self.input_layernorm(x), plan, cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
