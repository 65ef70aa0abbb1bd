"""One pre-norm decoder block: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``."""

from __future__ import annotations

from torch import Tensor, nn

from cyberslm.model.attention import MultiHeadSelfAttention, Sight
from cyberslm.model.cache import LayerCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.ffn import SwiGLUFeedForward
from cyberslm.model.norm import RMSNorm
from cyberslm.model.rope import RotaryPositionEmbedding, Rotation


class DecoderBlock(nn.Module):
    def __init__(self, config: CyberSLMConfig, rope: RotaryPositionEmbedding) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.self_attn = MultiHeadSelfAttention(config, rope)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.mlp = SwiGLUFeedForward(config.hidden_dim, config.ffn_hidden_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation, sight: Sight, cache: LayerCache | None) -> Tensor:
        x = x + self.dropout(self.self_attn.attend(self.input_layernorm(x), rotation, sight, cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
