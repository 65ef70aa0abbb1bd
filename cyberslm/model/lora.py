"""Low-rank adapters on the linear layers of the blocks (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    y = x W^T + b + s (drop(x) A^T) B^T        s = alpha / rank, or alpha / sqrt(rank) with rslora

W and b are frozen, A is drawn and B is 0, so an adapted network begins as the one it adapts. The product B A is never
made in training: both passes are one operator each, which adds the low-rank part to what the large product wrote and
makes no gradient of W (rslora: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732). W may be kept in bf16, as the
products of a bf16 run use it.

`merge` works in fp32 and rounds once, and gives back plain layers: nothing is ever merged in place and taken out again.
Embedding and head take no adapter: where they are tied, one would change the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.errors import ConfigError
from cyberslm.model.model import CyberSLM

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MARK = "lora_"
"""What the names of adapter parameters, ``....q_proj.lora_A``, have in their last part."""
MOST_RANK = 4096


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the base stays as it is, and two thin matrices beside each chosen one are trained."""

    rank: int = 16
    """Inner width of the adapters: what they can learn, and what they cost."""

    alpha: float = 32.0
    """Strength: the adapter's product is multiplied by alpha / rank."""

    dropout: float = 0.0
    """Dropout on what goes into the adapters, in training."""

    targets: tuple[str, ...] = TARGETS
    """Linear layers of every block that get an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which keeps high ranks learning."""

    base_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """How the frozen matrices are kept in memory while training; auto = bf16 where the run's products are bf16."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise ConfigError(f"rank must be from 1 to {MOST_RANK:,}, not {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be above 0 and finite, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"targets must name one layer or more, each once, not {list(self.targets)}")
        for name in self.targets:
            if name in ("lm_head", "embed_tokens"):
                raise ConfigError(
                    f"targets has {name!r}: embedding and head take no adapter, as they may be one matrix; train them"
                    " whole with trainable, or add rows with extend_vocab"
                )
            if name not in TARGETS:
                raise ConfigError(f"targets has {name!r}: known are {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and its adapter ``lora_A`` ``(rank, in)``, ``lora_B`` ``(out, rank)``, both fp32."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        like: dict[str, Any] = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.zeros(config.rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, config.rank, **like))
        self.scale = config.scale
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x = x.to(dtype)
        inner = self.dropout(x) if self.training and self.dropout.p else None
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(x, inner, self.weight, bias, self.lora_A.to(dtype), self.lora_B.to(dtype), self.scale)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer of the sum, worked out in fp32 and of the base's dtype."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        total = torch.addmm(self.weight.float(), self.lora_B, self.lora_A, alpha=self.scale)
        plain.weight = nn.Parameter(total.to(self.weight.dtype))
        plain.bias = self.bias
        return plain


def add_adapters(model: CyberSLM, config: LoraConfig, *, seed: int = 0, only: Collection[str] | None = None) -> None:
    """Freeze the network and give its ``config.targets``, or the layers named in ``only``, a new adapter each.

    A is uniform within 1/sqrt(in), a function of ``seed``. Raises `ConfigError` naming a layer that isn't there.
    """
    model.requires_grad_(False)
    names = list(_linears(model, config.targets) if only is None else only)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        base = _layer(model, name)
        adapted = AdaptedLinear(base, config)
        if adapted.lora_A.device.type != "meta":
            bound = base.in_features**-0.5
            drawn = torch.empty(adapted.lora_A.shape).uniform_(-bound, bound, generator=generator)
            adapted.lora_A.data.copy_(drawn)
        _put(model, name, adapted)


def adapters(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The adapted layers by name, such as ``layers.0.self_attn.q_proj``."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}


def merge(model: CyberSLM) -> CyberSLM:
    """Put plain layers in the place of the adapted ones; the same model."""
    for name, layer in adapters(model).items():
        _put(model, name, layer.merged())
    return model


@torch.no_grad()
def keep_base_in(model: CyberSLM, dtype: torch.dtype) -> None:
    """Keep the frozen matrices under adapters, and a frozen embedding and head, in ``dtype``.

    Gains, biases and what is trained stay as they are; so does the residual stream.
    """
    places: list[nn.Module | None] = [*adapters(model).values(), model.embed_tokens, model.lm_head]
    for layer in places:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, nn.Parameter) and not weight.requires_grad:
            weight.data = weight.data.to(dtype)


def _linears(model: CyberSLM, targets: Collection[str]) -> Iterator[str]:
    found = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith("layers.") and name.rpartition(".")[2] in targets
    ]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in found):
            raise ConfigError(f"lora.targets has {target!r}, and the base has no such layer: leave it out")
    yield from found


def _layer(model: CyberSLM, name: str) -> nn.Linear:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear) or isinstance(layer, AdaptedLinear) or not name.startswith("layers."):
        raise ConfigError(f"an adapter is for {name!r:.80}, which is no linear layer of a block without one")
    return layer


def _put(model: CyberSLM, name: str, layer: nn.Module) -> None:
    model.use_step(None)  # which would go on with the layer that was there
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


class _How(NamedTuple):
    """What a backward pass is to give besides the adapter's gradients."""

    scale: float
    apart: bool
    """What went into the adapter had dropout, so its gradient is its own."""
    needs_x: bool
    """Whether anything below learns."""


class _Product(torch.autograd.Function):
    """The two operators, which a compiler takes as they are; ``inner`` is None where it is ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor | None, *terms: Any) -> Tensor:
        w, _, a, b, scale = terms
        out, low = torch.ops.cyberslm.adapted_forward(x, inner, *terms)
        ctx.save_for_backward(x if inner is None else inner, low, w, a, b)
        ctx.how = _How(scale, inner is not None, ctx.needs_input_grad[0])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.how
        dx, d_inner, da, db = torch.ops.cyberslm.adapted_backward(grad.contiguous(), *ctx.saved_tensors, *how)
        return dx if how.needs_x else None, d_inner if how.apart else None, None, None, da, db, None


def _forward(x: Tensor, inner: Tensor | None, w: Tensor, bias: Tensor | None, *adapter: Any) -> tuple[Tensor, Tensor]:
    a, b, scale = adapter
    flat = x.flatten(0, -2)
    low = (flat if inner is None else inner.flatten(0, -2)) @ a.mT
    out = F.linear(flat, w.to(x.dtype), bias)
    out.addmm_(low, b.mT, alpha=scale)
    return out.unflatten(0, x.shape[:-1]), low


def _backward(grad: Tensor, inner: Tensor, low: Tensor, w: Tensor, *adapter: Any) -> tuple[Tensor, ...]:
    a, b, *options = adapter
    how = _How(*options)
    flat, shape = grad.flatten(0, -2), inner.shape
    d_low = (flat @ b).mul_(how.scale)
    da, db = d_low.mT @ inner.flatten(0, -2), (low.mT @ flat).mul_(how.scale).mT.contiguous()
    dx = d_inner = grad.new_empty(0)
    if how.apart:
        d_inner = (d_low @ a).view(shape)
    if how.needs_x:
        dx = flat @ w.to(grad.dtype)
        dx = (dx if how.apart else dx.addmm_(d_low, a)).view(shape)
    return dx, d_inner, da, db


def _forward_shape(x: Tensor, _inner: Any, w: Tensor, _bias: Any, a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], w.shape[0])), x.new_empty((x.shape[:-1].numel(), a.shape[0]))


def _backward_shapes(grad: Tensor, inner: Tensor, _low: Any, _w: Any, *adapter: Any) -> tuple[Tensor, ...]:
    a, b, *options = adapter
    how, nothing = _How(*options), grad.new_empty(0)
    dx, d_inner = (torch.empty_like(inner) if wanted else nothing for wanted in (how.needs_x, how.apart))
    return dx, d_inner, torch.empty_like(a), torch.empty_like(b)


torch.library.define(
    "cyberslm::adapted_forward",
    "(Tensor x, Tensor? inner, Tensor w, Tensor? bias, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)",
)
torch.library.define(
    "cyberslm::adapted_backward",
    "(Tensor grad, Tensor inner, Tensor low, Tensor w, Tensor a, Tensor b, float scale, bool apart, bool needs_x)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("cyberslm::adapted_forward", "CompositeExplicitAutograd", _forward)
torch.library.impl("cyberslm::adapted_backward", "CompositeExplicitAutograd", _backward)
torch.library.register_fake("cyberslm::adapted_forward", _forward_shape)
torch.library.register_fake("cyberslm::adapted_backward", _backward_shapes)
