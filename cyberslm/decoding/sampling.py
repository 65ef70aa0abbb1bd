"""How the next token is chosen: settings that are checked when made, and filters that are pure functions of the logits.

Order: mask of allowed ids, temperature, top-k, top-p, then one draw from the request's own generator; all in fp32.
Temperature 0 takes the largest logit, the lowest id among equals.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cyberslm.errors import GenerationError

GREEDY_BELOW = 1e-6
"""A temperature under this is greedy: dividing by it would only turn rounding into order."""


HOTTEST = 1e30
"""A larger temperature is no hotter than uniform and would overflow fp32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's settings. Raises `GenerationError` naming the field and its range."""

    max_new_tokens: int | None = None
    """Most new tokens; null = 256 or what the context still holds, whichever is less."""

    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""

    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all."""

    seed: int | None = None
    """Seed of this request's own generator; null draws one."""

    def __post_init__(self) -> None:
        self._whole("max_new_tokens", low=1, optional=True)
        self._whole("top_k", low=0)
        self._whole("seed", low=0, optional=True)
        for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0)):
            value = getattr(self, name)
            numeric = (
                isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            )
            if not numeric or not low <= value <= high or (name == "top_p" and value == 0):
                limits = "a finite number of at least 0" if name == "temperature" else "above 0 and at most 1"
                raise GenerationError(f"{name} must be {limits}, not {value!r}")

    def _whole(self, name: str, *, low: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 63:
            raise GenerationError(f"{name} must be a whole number from {low} to 2^63 - 1, not {value!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def scale(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Divide by the temperature; shifted first, so that a tiny temperature cannot overflow."""
    return (logits_V - logits_V.max()) / min(params.temperature, HOTTEST)


def top_k(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Keep the ``top_k`` largest; ties with the last of them stay too."""
    if not 0 < params.top_k < logits_V.numel():
        return logits_V
    return logits_V.masked_fill(logits_V < logits_V.topk(params.top_k).values[-1], -torch.inf)


def top_p(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches ``top_p``; never fewer than one."""
    if params.top_p >= 1:
        return logits_V
    probs_V, order_V = logits_V.softmax(-1).sort(descending=True, stable=True)
    late_V = probs_V.cumsum(-1) - probs_V >= params.top_p
    late_V[0] = False
    return logits_V.masked_fill(torch.empty_like(late_V).scatter(-1, order_V, late_V), -torch.inf)


FILTERS: tuple[Callable[[Tensor, SamplingParams], Tensor], ...] = (scale, top_k, top_p)


def choose(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """The next id of one row, from its logits ``(V,)``."""
    logits_V = logits_V.float()
    if not torch.isfinite(logits_V.max()):
        raise GenerationError("the model's logits are not finite: its weights are damaged or training diverged")
    if params.greedy:
        return int(logits_V.argmax())
    for keep in FILTERS:
        logits_V = keep(logits_V, params)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))
