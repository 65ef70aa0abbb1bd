"""The two norms: root mean square (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) and layer norm
(Ba et al. 2016, https://arxiv.org/abs/1607.06450).

    rms    y = x / sqrt(mean(x^2) + eps) * weight
    layer  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Statistics and division are at least fp32 whatever the dtype of ``x``; the result returns to it, or is bf16 where the
norm is told that what follows takes that (`CyberSLM.use_native`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.model import native_rows
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.remade import Recipe


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for arithmetic that needs fp32: wider types stay."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """Scale the last axis, of size ``dim``, to unit root mean square, then by a learned gain."""

    native = narrow = False

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = self._native_dtype(x)
        if dtype is not None:
            return native_rows.rms_norm(x, self.weight.float(), self.eps, dtype)
        wide = at_least_fp32(x.dtype)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(torch.bfloat16 if self.narrow else x.dtype)

    def add(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """``x + added`` in the wider of their dtypes, and its norm."""
        dtype = self._native_dtype(x)
        if dtype is not None and added.dtype == dtype and added.shape == x.shape:
            return native_rows.add_rms_norm(x, added, self.weight.float(), self.eps)
        total = x + added
        return total, self(total)

    def recipe(self, x: Tensor, normed: Tensor) -> Recipe | None:
        """What makes ``normed``, the norm of ``x``, again; None where that isn't cheap."""
        if self._native_dtype(x) != normed.dtype:
            return None
        return native_rows.norm_again(x, normed, self.weight.float(), self.eps)

    def _native_dtype(self, x: Tensor) -> torch.dtype | None:
        """That of the result where `native_rows` makes it: the one that the next product takes."""
        return native_rows.normed_dtype(x, narrow=self.narrow) if self.native else None


class LayerNorm(nn.Module):
    """Shift and scale the last axis, of size ``dim``, to mean 0 and variance 1, then by a learned gain and bias."""

    narrow = False

    def __init__(self, dim: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def add(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """``x + added`` in the wider of their dtypes, and its norm."""
        total = x + added
        return total, self(total)

    def recipe(self, _x: Tensor, _normed: Tensor) -> Recipe | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        normed = F.layer_norm(x.to(wide), self.weight.shape, self.weight.to(wide), bias, self.eps)
        return normed.to(torch.bfloat16 if self.narrow else x.dtype)


def make_norm(config: CyberSLMConfig) -> RMSNorm | LayerNorm:
    """The norm of the residual stream that ``config`` asks for."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_dim, config.norm_eps)
    return LayerNorm(config.hidden_dim, config.norm_eps, bias=config.bias)
