"""Root-mean-square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    y = x / sqrt(mean(x^2) + eps) * weight

The statistics and the division are fp32 whatever the dtype of ``x``; the result returns to it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Scale the last axis, of size ``dim``, to unit root mean square, then by a learned gain."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
