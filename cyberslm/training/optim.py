"""Parameter groups and the optimizer, and its state as named tensors.

Three groups: ``hidden`` (the matrices inside the network), ``embeddings`` (the table and an untied head) and ``gains``
(gains and biases, which never decay). Each has a peak rate, and the schedule scales all alike. State is keyed by
parameter name, so it doesn't depend on the order of groups, and it is restored exactly: same dtype, same values, same
step counters, or an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.training.muon import Adjustment, Muon
from cyberslm.training.shards import cut_like

ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")
MUON_STATE = ("momentum_buffer",)
SCALARS = ("step",)
EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101), fused, or Muon with it."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of attention and feed-forward layers, AdamW for the rest."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of warm-up."""

    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; gains and biases never decay."""

    decay_embeddings: bool = True
    """Whether the token embeddings and the output head decay too."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    muon_lr: float | None = None
    """Peak rate of Muon's matrices; null = lr, which suits muon_adjust match_rms_adamw. original wants about 0.02."""

    muon_momentum: float = 0.95
    """Decay rate of Muon's running mean of the gradient (Nesterov)."""

    muon_adjust: Adjustment = "match_rms_adamw"
    """Size of Muon's step: as large as AdamW's, or the original sqrt(max(1, rows / columns))."""

    def __post_init__(self) -> None:
        for name in ("lr", "muon_lr"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) <= 10:
                raise ConfigError(f"{name} must be above 0 and at most 10, not {getattr(self, name)}")
        if not 0 <= self.weight_decay < 10:
            raise ConfigError(f"weight_decay must be at least 0 and below 10, not {self.weight_decay}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        if not 0 < self.eps < 1:
            raise ConfigError(f"eps must be between 0 and 1, not {self.eps}")
        if not 0 <= self.muon_momentum < 1:
            raise ConfigError(f"muon_momentum must be at least 0 and below 1, not {self.muon_momentum}")
        if self.name != "muon":
            for name in ("muon_lr", "muon_momentum", "muon_adjust"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ConfigError(f"{name} is for name: muon, and name is {self.name}")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The named groups, with the rate (``lr``) and decay of each; a group without parameters is left out."""
    found: dict[str, list[nn.Parameter]] = {"hidden": [], "embeddings": [], "gains": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[_group_of(name, parameter)].append(parameter)
    muon = config.name == "muon"
    decay, lr = config.weight_decay, config.lr
    settings: dict[str, dict[str, Any]] = {
        "hidden": {"muon": muon, "lr": config.muon_lr or lr if muon else lr, "weight_decay": decay},
        "embeddings": {"lr": lr, "weight_decay": decay if config.decay_embeddings else 0.0},
        "gains": {"lr": lr, "weight_decay": 0.0},
    }
    return [{"name": name, "params": params, **settings[name]} for name, params in found.items() if params]


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, products: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """The optimizer of ``config``; ``products`` is the type of the matrix products that Muon makes."""
    groups = parameter_groups(model, config)
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": 0.0}
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **adamw, fused=True)
    return Muon(groups, momentum=config.muon_momentum, adjustment=config.muon_adjust, products=products, adamw=adamw)


def set_rates(optimizer: torch.optim.Optimizer, share: float) -> dict[str, float]:
    """Give each group ``share`` of its peak rate; return the rates by group."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
    return {group.get("name", str(number)): group["lr"] for number, group in enumerate(optimizer.param_groups)}


def group_sizes(model: nn.Module, config: OptimizerConfig) -> dict[str, dict[str, object]]:
    """For people and records: each group's number of parameters, algorithm, peak rate and decay."""
    return {
        group["name"]: {
            "parameters": sum(parameter.numel() for parameter in group["params"]),
            "algorithm": "muon" if group.get("muon") else "adamw",
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
        }
        for group in parameter_groups(model, config)
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Every state tensor under ``kind/parameter name``, such as ``exp_avg/layers.0.mlp.up_proj.weight``."""
    return {
        f"{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave, whole, each cut as its parameter is; nothing is the state before the first
    update.

    Raises `IntegrityError` naming a tensor that is missing, unknown, or of another shape or type.
    """
    parameters = dict(model.named_parameters())
    kinds = {
        parameter: MUON_STATE if group.get("muon") else ADAMW_STATE
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    shapes = {
        f"{kind}/{name}": () if kind in SCALARS else tuple(parameter.shape)
        for name, parameter in parameters.items()
        for kind in kinds.get(parameter, ())
    }
    if tensors and (odd := sorted(set(shapes) ^ set(tensors))):
        raise IntegrityError(f"optimizer state {odd[0]} is {'missing' if odd[0] in shapes else 'unknown'}")
    for key, value in tensors.items():
        if value.shape != shapes[key] or value.dtype != torch.float32:
            raise IntegrityError(
                f"optimizer state {key} is {value.dtype} {tuple(value.shape)}, not float32 {shapes[key]}"
            )
    optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parameter, there = parameters[name], value.to(parameters[name].device)
        optimizer.state[parameter][kind] = there if kind in SCALARS else cut_like(there, parameter)


def _group_of(name: str, parameter: Tensor) -> str:
    if parameter.ndim < 2:
        return "gains"
    return "embeddings" if set(name.split(".")) & set(EMBEDDINGS) else "hidden"
