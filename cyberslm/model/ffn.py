"""The feed-forward of a block, with a gate (Shazeer 2020, https://arxiv.org/abs/2002.05202) or without.

swiglu, geglu   down(act(gate(x)) * up(x))      act = SiLU, GELU
gelu, relu2     down(act(up(x)))                act = GELU, max(0, x)^2 (So et al. 2021)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.model import native_rows
from cyberslm.model.config import GATED, CyberSLMConfig
from cyberslm.model.quantised import products
from cyberslm.model.remade import not_kept


def relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """Map ``(..., hidden_dim)`` to the same shape through ``ffn_hidden_dim`` units."""

    native = False
    remakes = True
    """Whether the activated gate is made again in a backward pass where that is cheap (`cyberslm.model.remade`)."""

    def __init__(self, config: CyberSLMConfig) -> None:
        super().__init__()
        outer, inner, bias = config.hidden_dim, config.ffn_hidden_dim, config.bias
        self.name, self.activation = config.activation, ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(outer, inner, bias=bias) if config.activation in GATED else None
        self.up_proj = nn.Linear(outer, inner, bias=bias)
        self.down_proj = nn.Linear(inner, outer, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        gate, up = products(x, self.gate_proj, self.up_proj)
        if self.native and native_rows.takes(gate, up):
            inner = native_rows.gated(gate, up, self.name)
            with not_kept(inner, native_rows.gated_again(gate, up, self.name) if self.remakes else None):
                return self.down_proj(inner)
        return self.down_proj(self.activation(gate) * up)
