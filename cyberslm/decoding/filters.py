"""Logit filters: pure functions ``(logits (R, V), params, history)`` in the one table that states their order.

    hidden ids and the guide's mask  ->  logit bias, penalties, no-repeat n-gram  ->  temperature, top-k, top-p, min-p,
    typical  ->  the draw

All in fp32. What a request doesn't use isn't run, so a penalty of 1 is none, bit for bit. Functions that ask for the
history see one row; the others any number of rows with equal settings, each as if it were alone. ``-inf`` is what can't
be made. Where several tokens tie at the border of what is kept, all of them stay: order of ids is no reason.

Order and meaning are those of transformers' processors (presence and frequency: of the OpenAI API). Sources: top-p
Holtzman et al. 2020 (https://arxiv.org/abs/1904.09751), min-p Nguyen et al. 2024 (https://arxiv.org/abs/2407.01082),
typical Meister et al. 2022 (https://arxiv.org/abs/2202.00666), repetition penalty Keskar et al. 2019
(https://arxiv.org/abs/1909.05858).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cyberslm.decoding.history import History
from cyberslm.decoding.sampling import SamplingParams

HOTTEST = 1e30
"""A larger temperature is no hotter than uniform and would overflow fp32."""

FIRST_LOOK = 256
"""Most likely tokens that top-p looks at before it sorts all, which costs eight times as much."""


def bias(logits_RV: Tensor, params: SamplingParams, history: History) -> Tensor:  # noqa: ARG001
    """Add ``logit_bias``."""
    ids = torch.tensor(list(params.logit_bias), device=logits_RV.device)
    added = torch.tensor(list(params.logit_bias.values()), device=logits_RV.device)
    return logits_RV.index_add(-1, ids, added.expand(len(logits_RV), -1))


def repetition(logits_RV: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Divide positive and multiply negative logits of all tokens of prompt and answer, once each."""
    ids, penalty = history.all().ids.to(logits_RV.device), params.repetition_penalty
    held = logits_RV[:, ids]
    return logits_RV.index_copy(-1, ids, torch.where(held < 0, held * penalty, held / penalty))


def presence_and_frequency(logits_RV: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Take the presence penalty and, for each time it came, the frequency penalty from the answer's tokens."""
    said = history.said()
    taken = params.presence_penalty + params.frequency_penalty * said.counts
    device = logits_RV.device
    return logits_RV.index_add(-1, said.ids.to(device), -taken.to(device).expand(len(logits_RV), -1))


def no_repeat_ngram(logits_RV: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Hide what would repeat a sequence of ``no_repeat_ngram`` tokens of prompt and answer."""
    again = sorted(history.followers(params.no_repeat_ngram))
    return logits_RV.index_fill(-1, torch.tensor(again, dtype=torch.int64, device=logits_RV.device), -torch.inf)


def scale(logits_RV: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:  # noqa: ARG001
    """Divide by the temperature; shifted first, so that a tiny temperature cannot overflow."""
    return (logits_RV - logits_RV.amax(-1, keepdim=True)) / min(params.temperature, HOTTEST)


def top_k(logits_RV: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:  # noqa: ARG001
    """Keep the ``top_k`` largest."""
    if params.top_k >= logits_RV.shape[-1]:
        return logits_RV
    return _below(logits_RV, logits_RV, logits_RV.topk(params.top_k).values[:, -1:])


def top_p(logits_RV: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:  # noqa: ARG001
    """Keep the fewest most likely tokens whose probabilities reach ``top_p``; never none."""
    probs_RV, size = logits_RV.softmax(-1), logits_RV.shape[-1]
    best = probs_RV.topk(min(FIRST_LOOK, size)).values
    if size > FIRST_LOOK and not bool((best.cumsum(-1)[:, -1] >= params.top_p).all()):
        best = torch.from_numpy(np.sort(probs_RV.cpu().numpy(), axis=-1)).flip(-1)  # four times as fast as torch's
    return _below(logits_RV, probs_RV, best.gather(-1, _last(best, params.top_p)))


def min_p(logits_RV: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:  # noqa: ARG001
    """Keep tokens whose probability is at least ``min_p`` times the largest."""
    probs_RV = logits_RV.softmax(-1)
    return _below(logits_RV, probs_RV, params.min_p * probs_RV.amax(-1, keepdim=True))


def typical_p(logits_RV: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:  # noqa: ARG001
    """Keep the tokens whose surprise is nearest to the entropy, until they reach ``typical_p``; never none."""
    log_RV = logits_RV.log_softmax(-1)
    probs_RV = log_RV.exp()
    entropy_R1 = -(probs_RV * log_RV).nansum(-1, keepdim=True)
    nearness_RV = -(log_RV + entropy_R1).abs()
    nearest, order = nearness_RV.sort(dim=-1, descending=True, stable=True)
    return _below(logits_RV, nearness_RV, nearest.gather(-1, _last(probs_RV.gather(-1, order), params.typical_p)))


def _last(probs: Tensor, share: float) -> Tensor:
    """The place ``(R, 1)`` of the token that lets the sum reach ``share``, or the last."""
    return (probs.cumsum(-1) < share).sum(-1, keepdim=True).clamp_(max=probs.shape[-1] - 1)


def _below(logits_RV: Tensor, measure_RV: Tensor, least_R1: Tensor) -> Tensor:
    """Hide tokens whose measure is below ``least_R1``."""
    return torch.where(measure_RV < least_R1, -torch.inf, logits_RV)


class Filter(NamedTuple):
    """A filter and the settings that it obeys; a request uses it if one of them isn't the default."""

    apply: Callable[[Tensor, SamplingParams, History], Tensor]
    settings: tuple[str, ...]
    of_row: bool = False
    """It asks for the row's own history or ids, and matters to greedy rows too."""

    def used(self, params: SamplingParams) -> bool:
        return (self.of_row or not params.greedy) and any(
            getattr(params, name) != getattr(_DEFAULTS, name) for name in self.settings
        )


_DEFAULTS = SamplingParams()

FILTERS: tuple[Filter, ...] = (
    Filter(bias, ("logit_bias",), of_row=True),
    Filter(repetition, ("repetition_penalty",), of_row=True),
    Filter(presence_and_frequency, ("presence_penalty", "frequency_penalty"), of_row=True),
    Filter(no_repeat_ngram, ("no_repeat_ngram",), of_row=True),
    Filter(scale, ("temperature",)),
    Filter(top_k, ("top_k",)),
    Filter(top_p, ("top_p",)),
    Filter(min_p, ("min_p",)),
    Filter(typical_p, ("typical_p",)),
)


def filters_of(params: SamplingParams) -> tuple[Filter, ...]:
    """Those that a request uses, in order."""
    return tuple(each for each in FILTERS if each.used(params))
