"""Muon for the matrices inside the network, AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) steps along the momentum of a matrix's gradient
made nearly orthogonal by five steps of a Newton-Schulz iteration. ``match_rms_adamw`` scales the step to the size of
AdamW's, so that AdamW's rate and decay carry over (Liu et al. 2025, https://arxiv.org/abs/2502.16982).

`torch.optim.Muon` iterates in bf16 always. On a processor without bf16 products that took 25 to 60 times as long as
fp32 (and half as long on one that has them), so here the caller says in which type; in bf16 the bits are torch's.

The iteration needs whole matrices. Where they are cut up over ranks, each rank gathers one matrix after the other, does
the same work on it, and keeps its own part of the step.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from cyberslm.training.shards import cut_like, own_part, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7
Adjustment = Literal["match_rms_adamw", "original"]


class Muon(torch.optim.Optimizer):
    """Groups with ``"muon": True`` hold matrices and take Muon's step; `torch.optim.AdamW`, fused, takes the others.

    Each group has its own ``lr`` and ``weight_decay``. State: ``momentum_buffer`` of a matrix, fp32; AdamW's of others.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float,
        adjustment: Adjustment,
        products: torch.dtype,
        adamw: dict[str, Any],
    ) -> None:
        super().__init__(groups, adamw)
        self._momentum, self._adjustment, self._products = momentum, adjustment, products
        self._adamw = torch.optim.AdamW(self._groups(muon=False), **adamw, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self._groups(muon=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, lr=group["lr"], decay=group["weight_decay"])
        self._adamw.state, self._adamw.param_groups = self.state, self._groups(muon=False)
        self._adamw.step()

    def _step(self, parameter: Tensor, gradient: Tensor, *, lr: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = own_part(state["momentum_buffer"]).lerp_(own_part(gradient), 1 - self._momentum)
        direction = torch.empty_like(gradient)
        own_part(direction).copy_(own_part(gradient).lerp(mean, self._momentum))
        update = cut_like(orthogonal(whole(direction), self._products), parameter)
        weight = own_part(parameter).mul_(1 - lr * decay)
        weight.add_(own_part(update), alpha=-lr * step_size(parameter.shape, self._adjustment))

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get("muon", False) is muon]


def orthogonal(matrix: Tensor, products: torch.dtype) -> Tensor:
    """About U V^T of ``matrix`` = U S V^T: singular values end between 0.7 and 1.2, which is near enough."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    if products == torch.float16:  # gradients are below its range as they are
        x = x / x.norm().clamp(min=SMALLEST_NORM)
    x = x.to(products)
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def step_size(shape: torch.Size, adjustment: Adjustment) -> float:
    """The factor of the rate for a matrix of ``shape``."""
    rows, columns = shape
    if adjustment == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
