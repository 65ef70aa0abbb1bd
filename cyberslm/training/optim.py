"""Parameter groups and the optimizer, and its state as named tensors.

Weight decay acts on matrices only, never on gains. State is keyed by parameter name, so it doesn't depend on the order
of groups, and it is restored exactly: same dtype, same values, same step counters, or an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cyberslm.errors import ConfigError, IntegrityError

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = (*MOMENTS, "step")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101), fused."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of warm-up."""

    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 10:
            raise ConfigError(f"lr must be above 0 and at most 10, not {self.lr}")
        if not 0 <= self.weight_decay < 10:
            raise ConfigError(f"weight_decay must be at least 0 and below 10, not {self.weight_decay}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        if not 0 < self.eps < 1:
            raise ConfigError(f"eps must be between 0 and 1, not {self.eps}")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two named groups: ``decay`` (matrices) and ``no_decay`` (gains)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"name": "decay", "params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Every state tensor under ``kind/parameter name``, such as ``exp_avg/layers.0.mlp.up_proj.weight``."""
    return {
        f"{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave; nothing at all is the state before the first update.

    Raises `IntegrityError` naming a tensor that is missing, unknown, or of another shape or type.
    """
    parameters = dict(model.named_parameters())
    shapes = {f"{kind}/{name}": p.shape if kind in MOMENTS else () for name, p in parameters.items() for kind in STATE}
    if tensors and (odd := sorted(set(shapes) ^ set(tensors))):
        raise IntegrityError(f"optimizer state {odd[0]} is {'missing' if odd[0] in shapes else 'unknown'}")
    for key, value in tensors.items():
        if value.shape != shapes[key] or value.dtype != torch.float32:
            raise IntegrityError(
                f"optimizer state {key} is {value.dtype} {tuple(value.shape)}, not float32 {tuple(shapes[key])}"
            )
        kind, _, name = key.partition("/")
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device)
