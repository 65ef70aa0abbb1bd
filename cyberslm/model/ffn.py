"""The gated feed-forward of a block: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLUFeedForward(nn.Module):
    """Map ``(..., hidden_dim)`` to the same shape through ``ffn_hidden_dim`` gated units, without biases."""

    def __init__(self, hidden_dim: int, ffn_hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_dim, ffn_hidden_dim, bias=False)
        self.up_proj = nn.Linear(hidden_dim, ffn_hidden_dim, bias=False)
        self.down_proj = nn.Linear(ffn_hidden_dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
