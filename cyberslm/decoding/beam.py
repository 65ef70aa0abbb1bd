"""Beam search: the most likely whole answers to one prompt, ``beams`` of them kept on the way.

Of each step's continuations the likeliest ``beams`` go on; every one that ends is ranked among the finished by

    sum of log-probabilities / length ** length_penalty        (length: tokens of the answer, its stop id included)

Log-probabilities are those after masks, bias and penalties. The search ends when no live beam, at its best possible
length, can still overtake the last of the ``n`` answers found. Wide enough to hold all beginnings, it is exhaustive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm.decoding.choice import Chooser, Ids, hide, likelihood, require_finite, shape
from cyberslm.decoding.feed import PREFILL_CHUNK, LanguageModel, evaluating, prefill
from cyberslm.decoding.history import History
from cyberslm.decoding.request import FinishReason, Fitted, Likelihood, Request, Step, check


class Beam(NamedTuple):
    """One answer: its ids, a stop id included, its rank and why it ended."""

    ids: tuple[int, ...]
    score: float
    finish: FinishReason
    likelihoods: tuple[Likelihood, ...] = ()

    def steps(self, row: int, sample: int) -> Iterator[Step]:
        """The answer as the loop would have told it; the score comes with the last step."""
        if not self.ids:
            yield Step(row, None, self.finish, sample, score=self.score)
        for place, token in enumerate(self.ids):
            last = place + 1 == len(self.ids)
            seen = self.likelihoods[place] if self.likelihoods else None
            yield Step(row, token, self.finish if last else None, sample, seen, self.score if last else None)


class _Live(NamedTuple):
    total: float
    chooser: Chooser
    likelihoods: tuple[Likelihood, ...] = ()


class _Child(NamedTuple):
    parent: int
    token: int
    total: float


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    request: Request,
    *,
    stop_ids: frozenset[int] = frozenset(),
    never: Ids | None = None,
    chunk: int = PREFILL_CHUNK,
) -> list[Beam]:
    """The ``n`` best answers that the search finds, best first; fewer if there are fewer.

    ``never`` are ids that can't be made. Raises `GenerationError` as `Batch.join` does. If nothing may follow at all,
    the one answer is empty and "blocked".
    """
    stops, never = stop_ids | frozenset(request.params.stop_ids), Ids() if never is None else never
    fitted = check(request, model.vocab_size, model.max_seq_len, never=never.ids - stops)
    search = _Search(request, fitted, stops, never)
    cache = model.new_cache(1, [len(fitted.prompt) + fitted.budget])
    with evaluating(model):
        logits_BV = prefill(model, [fitted.prompt], cache, chunk=chunk)
        while children := search.step(logits_BV):
            cache.keep([child.parent for child in children])
            logits_BV = model.next_logits(torch.tensor([child.token for child in children], device=model.device), cache)
    return search.found or [Beam((), -torch.inf, "blocked")]


class _Search:
    def __init__(self, request: Request, fitted: Fitted, stops: frozenset[int], never: Ids) -> None:
        self.params, self.fitted, self.stops = request.params, fitted, stops
        chooser = Chooser(request.params, History(fitted.prompt), never=never, stops=stops, guide=request.guide)
        self.never = never
        self.live = [_Live(0.0, chooser)]
        self.found: list[Beam] = []

    def step(self, logits_BV: Tensor) -> list[_Child]:
        """Rank the continuations of the live beams; those that go on, none when the search is over."""
        scores_BV = self._scores(logits_BV)
        made = len(self.live[0].chooser.history.answer) + 1
        ends = sorted(token for token in self.stops if token < scores_BV.shape[-1])
        for place, row in enumerate(scores_BV[:, ends].tolist()):
            for token, total in zip(ends, row, strict=True):
                self._finish(logits_BV, _Child(place, token, total), "stop")
        scores_BV[:, ends] = -torch.inf
        children, live = [], []
        for child in self._best(scores_BV):
            parent = self.live[child.parent]
            guide = None if parent.chooser.guide is None else parent.chooser.guide.fork()
            if guide is not None:
                guide.accept(child.token)
            if made == self.fitted.budget or (guide is not None and guide.done):
                self._finish(logits_BV, child, "stop" if guide is not None and guide.done else self.fitted.at_budget)
                continue
            history = History(self.fitted.prompt, [*parent.chooser.history.answer, child.token])
            chooser = Chooser(self.params, history, never=self.never, stops=self.stops, guide=guide)
            live.append(_Live(child.total, chooser, self._seen(logits_BV, child)))
            children.append(child)
        self.live = live
        return children if children and not self._decided(made) else []

    def _scores(self, logits_BV: Tensor) -> Tensor:
        """Sums of log-probabilities in float64 ``(B, V)``; ``-inf`` for what can't be."""
        choosers = [each.chooser for each in self.live]
        masked_BV = hide(logits_BV.float(), choosers)
        shaped_BV = torch.cat([shape(masked_BV[i : i + 1], each) for i, each in enumerate(choosers)])
        dead = require_finite(shaped_BV, logits_BV)
        totals = torch.tensor([each.total for each in self.live], dtype=torch.float64, device=logits_BV.device)
        scores_BV = shaped_BV.log_softmax(-1).double() + totals.unsqueeze(1)
        return scores_BV.masked_fill(dead.unsqueeze(1), -torch.inf)

    def _best(self, scores_BV: Tensor) -> list[_Child]:
        size = scores_BV.shape[-1]
        best = scores_BV.flatten().topk(min(self.params.beams, scores_BV.numel()))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [_Child(place // size, place % size, total) for place, total in pairs if total > -torch.inf]

    def _finish(self, logits_BV: Tensor, child: _Child, reason: FinishReason) -> None:
        answer = self.live[child.parent].chooser.history.answer
        score = self._score(child.total, len(answer) + 1)
        worst = self.found[-1].score if len(self.found) == self.params.n else -torch.inf
        if score > worst:
            beam = Beam((*answer, child.token), score, reason, self._seen(logits_BV, child))
            self.found = sorted([*self.found, beam], key=lambda each: -each.score)[: self.params.n]

    def _score(self, total: float, length: int) -> float:
        return total / length**self.params.length_penalty

    def _seen(self, logits_BV: Tensor, child: _Child) -> tuple[Likelihood, ...]:
        wanted = self.params.logprobs
        if wanted is None:
            return ()
        return (*self.live[child.parent].likelihoods, likelihood(logits_BV[child.parent], child.token, wanted))

    def _decided(self, made: int) -> bool:
        """Whether no live beam can overtake: sums only fall, so each is judged at its best length to come."""
        best_length = self.fitted.budget if self.params.length_penalty > 0 else made + 1
        most = max(self._score(each.total, best_length) for each in self.live)
        return len(self.found) == self.params.n and self.found[-1].score >= most


def search_steps(beams: Sequence[Beam], row: int) -> Iterator[Step]:
    """All answers of a search, one after the other, best first."""
    for sample, beam in enumerate(beams):
        yield from beam.steps(row, sample)
