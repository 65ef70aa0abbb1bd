"""How each row's next token is chosen from its logits: hide what can't be made, filter, then the largest or a draw.

The draw is a race: each id has a clock, an exponential variable from the row's own generator over its probability, and
the first to ring wins (the same distribution as drawing by probability). Every step takes one number for every id of
the vocabulary, so neither neighbours nor what filters keep shift the numbers, and rounding, which differs with the size
of a batch, can change the outcome only where two clocks tie to within it.

Rows that want the same are worked on together, each as if it were alone, bit for bit. Plain greedy rows cost one argmax
and one copy to the host: nothing is hidden or copied unless the largest logit turns out to be a hidden one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from cyberslm.decoding.filters import filters_of
from cyberslm.decoding.guide import Guide
from cyberslm.decoding.history import History
from cyberslm.decoding.request import Likelihood
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError

LEAST = 2.0**-25
"""Half the step of a random fp32: stands for 0, whose clock would never ring."""

NOT_FINITE = "the model's logits are not finite: its weights are damaged or training diverged"

ROWS_OF = 1 << 17
"""Most numbers of rows that are drawn at once: what fits a core's cache, and no memory that malloc hands back."""


class Ids:
    """A set of ids, also as an index on the model's device."""

    def __init__(self, ids: Iterable[int] = (), device: torch.device | str = "cpu") -> None:
        self.ids = frozenset(ids)
        self.index = torch.tensor(sorted(self.ids), dtype=torch.int64, device=device)

    def changed(self, *, without: frozenset[int] = frozenset(), plus: Iterable[int] = ()) -> Ids:
        """This set less some and with some more; itself if that changes nothing."""
        ids = (self.ids - without) | frozenset(plus)
        return self if ids == self.ids else Ids(ids, self.index.device)

    def hide(self, logits: Tensor) -> Tensor:
        """``-inf`` for these."""
        return logits.index_fill(-1, self.index, -torch.inf) if len(self.index) else logits


class Chooser:
    """One row's settings, tokens, guide and random numbers.

    ``never`` are ids that can't be made, unless they are among ``stops``, the ids that end the row. ``sample`` counts
    the answers to one request, whose random numbers differ.
    """

    def __init__(
        self,
        params: SamplingParams,
        history: History,
        *,
        never: Ids | None = None,
        stops: frozenset[int] = frozenset(),
        guide: Guide | None = None,
        sample: int = 0,
    ) -> None:
        self.params, self.history, self.guide, self.stops = params, history, guide, stops
        self.filters = filters_of(params)
        never = Ids() if never is None else never
        self._never = never.changed(without=stops, plus=params.banned_ids)
        self._early = self._never.changed(plus=stops if params.min_new_tokens else ())
        self.generator = torch.Generator()
        if params.seed is not None:
            self.generator.manual_seed((params.seed + sample * 0x9E3779B97F4A7C15) % (1 << 63))
        elif not params.greedy:
            self.generator.seed()
        of_row = any(each.of_row for each in self.filters)
        settings = tuple(getattr(params, name) for each in self.filters for name in each.settings)
        names = tuple(each.apply.__name__ for each in self.filters)
        self.key: object = id(self) if of_row else (names, settings)
        """Rows with the same key are filtered and drawn together."""

    @property
    def hidden(self) -> Ids:
        """Ids that can't be the next token."""
        return self._early if len(self.history.answer) < self.params.min_new_tokens else self._never

    @property
    def forced(self) -> int | None:
        """The only id that can be the next token, if so."""
        made, forced = len(self.history.answer), self.params.forced_ids
        return forced[made] if made < len(forced) else None

    @property
    def simple(self) -> bool:
        """Whether what can't be made is `hidden` and nothing else."""
        return self.guide is None and self.forced is None


def choose(logits_BV: Tensor, choosers: Sequence[Chooser]) -> list[int | None]:
    """The next id of each row; None where no token is left.

    Raises `GenerationError` for logits that are not finite, rather than making a token of them.
    """
    logits_BV = logits_BV.float()
    tokens: list[int | None] = [None] * len(choosers)
    groups: dict[object, list[int]] = {}
    plain = [place for place, each in enumerate(choosers) if each.simple and not each.filters]
    for place, (token, best) in zip(plain, _largest(_rows(logits_BV, plain)), strict=True):
        if math.isfinite(best) and token not in choosers[place].hidden.ids:
            tokens[place] = token
        else:
            groups[place, None] = [place]
    for place in sorted(set(range(len(choosers))).difference(plain)):
        groups.setdefault(choosers[place].key, []).append(place)
    at_once = max(1, ROWS_OF // logits_BV.shape[-1])
    for places in (part for group in groups.values() for part in _parts(group, at_once)):
        rows, own_RV = [choosers[place] for place in places], _rows(logits_BV, places)
        for place, token, best, logits_V in zip(places, *_pick(hide(own_RV, rows), rows), own_RV, strict=True):
            if math.isfinite(best):
                tokens[place] = token
            elif best != -math.inf or not bool(logits_V.amax().isfinite()):
                raise GenerationError(NOT_FINITE)
    return tokens


def _rows(logits_BV: Tensor, places: Sequence[int]) -> Tensor:
    return logits_BV if len(places) == len(logits_BV) else logits_BV[places]


def _parts(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def hide(logits_BV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """``-inf`` for what can't be the next token of its row: hidden ids, and what a guide or forced id excludes."""
    hidden = choosers[0].hidden
    if all(each.simple and (each.hidden is hidden or each.hidden.ids == hidden.ids) for each in choosers):
        return hidden.hide(logits_BV)
    rows = [_hide_one(logits_BV[place : place + 1], each) for place, each in enumerate(choosers)]
    return torch.cat(rows)


def _hide_one(logits_1V: Tensor, chooser: Chooser) -> Tensor:
    masked = chooser.hidden.hide(logits_1V)
    if (forced := chooser.forced) is not None:
        only = torch.full_like(masked, -torch.inf)
        only[0, forced] = masked[0, forced]
        masked = only
    allowed = None if chooser.guide is None else chooser.guide.allowed()
    if allowed is None:
        return masked
    size = masked.shape[-1]
    if len(allowed) > size:
        raise GenerationError(
            f"the guide's mask covers {len(allowed)} ids and the model has {size}: it isn't this model's"
        )
    masked = torch.where(allowed.to(masked.device), masked[:, : len(allowed)], -torch.inf)
    return (
        masked if len(allowed) == size else torch.nn.functional.pad(masked, (0, size - len(allowed)), value=-torch.inf)
    )


def shape(logits_RV: Tensor, chooser: Chooser) -> Tensor:
    """The logits after the filters that matter to greedy rows too: bias, penalties, n-grams."""
    for each in chooser.filters:
        if each.of_row:
            logits_RV = each.apply(logits_RV, chooser.params, chooser.history)
    return logits_RV


def require_finite(shaped_BV: Tensor, logits_BV: Tensor) -> Tensor:
    """Rows, boolean ``(B,)``, that masks and filters left no token; `GenerationError` for logits that aren't finite."""
    best_B = shaped_BV.amax(-1)
    dead_B = (best_B == -torch.inf) & logits_BV.amax(-1).isfinite()
    if not bool((best_B.isfinite() | dead_B).all()):
        raise GenerationError(NOT_FINITE)
    return dead_B


def _pick(logits_RV: Tensor, rows: Sequence[Chooser]) -> tuple[list[int], list[float]]:
    """The ids of rows with one key, and the largest logit that each had left: -inf for none."""
    logits_RV = shape(logits_RV, rows[0])
    if rows[0].params.greedy:
        ids, best = zip(*_largest(logits_RV), strict=True)
        return list(ids), list(best)
    return _race(logits_RV.cpu(), rows), logits_RV.amax(-1).tolist()


def _largest(logits_RV: Tensor) -> list[tuple[int, float]]:
    """Id and value of each row's largest logit, the lowest id among equals; the value is NaN where one is."""
    if not len(logits_RV):
        return []
    if logits_RV.device.type == "cpu":
        array = logits_RV.numpy()  # whose argmax is ten times as fast as torch's here
        ids = array.argmax(-1)
        return list(zip(ids.tolist(), array[range(len(ids)), ids].tolist(), strict=True))
    best_R, ids_R = logits_RV.max(-1)
    pairs = torch.stack((ids_R.double(), best_R.double()), dim=1).tolist()
    return [(int(token), best) for token, best in pairs]


def _race(logits_RV: Tensor, rows: Sequence[Chooser]) -> list[int]:
    first = rows[0]
    for each in first.filters:
        if not each.of_row:
            logits_RV = each.apply(logits_RV, first.params, first.history)
    noise_RV = torch.empty_like(logits_RV)
    for noise_V, row in zip(noise_RV, rows, strict=True):
        torch.rand(len(noise_V), generator=row.generator, out=noise_V)
    minus_clocks_RV = noise_RV.clamp_(min=LEAST).log_()
    return logits_RV.softmax(-1).div_(minus_clocks_RV).numpy().argmin(-1).tolist()


def likelihood(logits_V: Tensor, token: int, alternatives: int) -> Likelihood:
    """What the unfiltered ``logits`` say of a token and of the likeliest ``alternatives``."""
    log_V = logits_V.float().log_softmax(-1)
    entropy = torch.special.entr(log_V.exp()).sum()
    values, ids = log_V.topk(min(alternatives, len(log_V)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Likelihood(float(log_V[token]), top, float(entropy))
