"""One pre-norm decoder block: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cyberslm.model.attention import MultiHeadSelfAttention
from cyberslm.model.cache import LayerCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.ffn import FeedForward
from cyberslm.model.norm import LayerNorm, RMSNorm, make_norm
from cyberslm.model.plan import Plan
from cyberslm.model.remade import Recipe, not_kept
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
        self.recompute = False

    def compute_again(self) -> None:
        """Keep only the input for a backward pass, and compute the block again in it (Chen et al. 2016,
        https://arxiv.org/abs/1604.06174)."""
        self.recompute = True
        self.mlp.remakes = False

    def narrow(self, *, on: bool) -> None:
        """Let what lies between the products be bf16, whatever the dtype of the residual stream."""
        self.input_layernorm.narrow = self.post_attention_layernorm.narrow = on

    def forward(self, x: Tensor, plan: Plan, cache: LayerCache | None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._compute, x, plan, cache, use_reentrant=False)
            return result
        return self._compute(x, plan, cache)

    def _compute(self, x: Tensor, plan: Plan, cache: LayerCache | None) -> Tensor:
        normed = self.input_layernorm(x)
        with not_kept(normed, self._recipe(self.input_layernorm, x, normed)):
            attended = self.dropout(self.self_attn.attend(normed, plan, cache))
        x, normed = self.post_attention_layernorm.add(x, attended)
        with not_kept(normed, self._recipe(self.post_attention_layernorm, x, normed)):
            added = self.dropout(self.mlp(normed))
            return x + added if torch.is_grad_enabled() else x.add_(added)

    def _recipe(self, norm: RMSNorm | LayerNorm, x: Tensor, normed: Tensor) -> Recipe | None:
        """None where nothing is kept, and where the whole block is made again."""
        return None if self.recompute or not torch.is_grad_enabled() else norm.recipe(x, normed)
