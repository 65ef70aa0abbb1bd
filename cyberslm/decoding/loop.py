"""The one decoding loop: prompts of any lengths in, one token per row and step out.

It works on ids alone and on anything that behaves like `LanguageModel`, so that the network's ``generate`` and the text
engine above it are both fronts of it. A `Batch` owns the cache and the rows. Between two steps others may join: their
prompts are fed together and their keys put behind those held. A row leaves when it is done. What a row says depends on
its own request alone, whenever and beside whomever it is made.

A row that slides gives up the oldest tokens of its full context but the first few, a quarter of it at a time, and what
remains is fed anew, as if the text had begun so (attention sinks: Xiao et al. 2023, https://arxiv.org/abs/2309.17453).
That costs a pass over three quarters of the context for every quarter that is made: about three more tokens read for
each one made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cyberslm.decoding.beam import Beam, beam_search, search_steps
from cyberslm.decoding.choice import Chooser, Ids, choose, likelihood
from cyberslm.decoding.feed import PREFILL_CHUNK, Cache, LanguageModel, evaluating, prefill
from cyberslm.decoding.history import History
from cyberslm.decoding.request import FinishReason, Fitted, Request, Step, check, window
from cyberslm.errors import GenerationError


@dataclass
class _Row:
    number: int
    sample: int
    fitted: Fitted
    chooser: Chooser
    finish: FinishReason | None = None

    @property
    def capacity(self) -> int:
        return len(self.fitted.prompt) + self.fitted.budget

    def add(self, token: int) -> FinishReason | None:
        """Take up a token and say whether it is the last."""
        chooser = self.chooser
        chooser.history.add(token)
        if token in chooser.stops:
            return "stop"
        if chooser.guide is not None:
            chooser.guide.accept(token)
            if chooser.guide.done:
                return "stop"
        return self.fitted.at_budget if len(chooser.history.answer) == self.fitted.budget else None


class Batch:
    """Rows that are continued together. ``allowed`` is a boolean ``(V,)`` of ids that may be made (default: all), to
    which each request adds its own stop ids; ``stop_ids`` end every row."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        stop_ids: frozenset[int] = frozenset(),
        allowed: Tensor | None = None,
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        self._model, self._stop_ids, self._chunk = model, stop_ids, chunk
        never = () if allowed is None else (~allowed).nonzero().flatten().tolist()
        self._never = Ids(never, model.device)
        self._rows: list[_Row] = []
        """Those in the cache, in its order; finished ones until the next pass."""
        self._waiting: list[list[_Row]] = []
        """Rows of each request whose prompt is still to be fed."""
        self._cache: Cache | None = None
        self._joined = 0

    def __len__(self) -> int:
        """Rows that are not done."""
        return len(self._live())

    def join(self, request: Request) -> int:
        """Let a request take part from the next step on; return its row number, counted from 0.

        Its ``n`` answers share the pass over the prompt. Raises `GenerationError` before any work for what can't be.
        """
        params = request.params
        if params.beams > 1:
            raise GenerationError(f"beams must be 1 to join a batch, not {params.beams}: call its search")
        fitted = self.check(request)
        stops = self._stops(request)
        rows = []
        for sample in range(params.n):
            guide = request.guide if sample == 0 or request.guide is None else request.guide.fork()
            history = History(fitted.prompt)
            chooser = Chooser(params, history, never=self._never, stops=stops, guide=guide, sample=sample)
            rows.append(_Row(self._joined, sample, fitted, chooser))
        self._waiting.append(rows)
        self._joined += 1
        return self._joined - 1

    def check(self, request: Request) -> Fitted:
        """The prompt and budget that the request would have; `GenerationError` for what can't be."""
        return check(
            request, self._model.vocab_size, self._model.max_seq_len, never=self._never.ids - self._stops(request)
        )

    def search(self, request: Request) -> list[Beam]:
        """A beam search, apart from the rows, under the same rules for ids."""
        return beam_search(self._model, request, stop_ids=self._stop_ids, never=self._never, chunk=self._chunk)

    def cancel(self, row: int, sample: int | None = None) -> list[Step]:
        """End a request, or one of its answers, now; the last steps of those that were not done."""
        ended = [each for each in self._live() if each.number == row and sample in (None, each.sample)]
        for each in ended:
            each.finish = "cancelled"
        self._waiting = [kept for rows in self._waiting if (kept := [row for row in rows if row.finish is None])]
        return [Step(each.number, None, "cancelled", each.sample) for each in ended]

    @torch.no_grad()
    def step(self) -> list[Step]:
        """One more token of every row, in the order of rows and answers."""
        if not len(self):
            self._rows, self._cache = [], None
            return []
        with evaluating(self._model):
            logits_BV = self._logits()
        tokens = choose(logits_BV, [row.chooser for row in self._rows])
        steps = [self._take(*each) for each in zip(self._rows, tokens, logits_BV, strict=True)]
        return sorted(steps, key=lambda step: (step.row, step.sample))

    def _stops(self, request: Request) -> frozenset[int]:
        return self._stop_ids | frozenset(request.params.stop_ids)

    def _live(self) -> list[_Row]:
        return [row for row in (*self._rows, *(row for rows in self._waiting for row in rows)) if row.finish is None]

    def _take(self, row: _Row, token: int | None, logits_V: Tensor) -> Step:
        if token is None:
            row.finish = "blocked"
            return Step(row.number, None, "blocked", row.sample)
        wanted = row.chooser.params.logprobs
        seen = None if wanted is None else likelihood(logits_V, token, wanted)
        row.finish = row.add(token)
        return Step(row.number, token, row.finish, row.sample, seen)

    def _logits(self) -> Tensor:
        """The logits ``(B, V)`` of all that are not done, whose order `_rows` then has."""
        staying: list[int] = []
        full: list[int] = []
        for place, row in enumerate(self._rows):
            if row.finish is None:
                (staying if self._held(place) < self._model.max_seq_len else full).append(place)
        groups = [[self._rows[place]] for place in full] + self._waiting
        fresh = self._feed(groups) if groups else None  # first: if it fails, those in the cache are as they were
        parts = []
        if len(staying) < len(self._rows) and staying and self._cache is not None:
            self._cache.keep(staying)
        self._rows = [self._rows[place] for place in staying]
        if self._rows:
            tokens = torch.tensor([row.chooser.history.answer[-1] for row in self._rows], device=self._model.device)
            parts.append(self._model.next_logits(tokens, self._cache))
        if fresh is not None:
            logits_BV, cache = fresh
            parts.append(logits_BV)
            if self._rows and self._cache is not None:
                self._cache.append(cache)
            else:
                self._cache = cache
            self._rows += [row for rows in groups for row in rows]
            self._waiting = []
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _held(self, place: int) -> int:
        return 0 if self._cache is None else self._cache.lengths[place]

    def _feed(self, groups: list[list[_Row]]) -> tuple[Tensor, Cache]:
        """Feed the tokens of each group of rows once; logits and a cache with a row for each of them."""
        limit = self._model.max_seq_len
        texts = []
        for rows in groups:
            chooser = rows[0].chooser
            tokens = chooser.history.tokens
            texts.append(tokens if len(tokens) <= limit else window(tokens, chooser.params.sinks, limit))
        cache = self._model.new_cache(len(groups), [min(rows[0].capacity, limit) for rows in groups])
        logits_BV = prefill(self._model, texts, cache, chunk=self._chunk)
        copies = [place for place, rows in enumerate(groups) for _ in rows]
        if len(copies) > len(groups):
            cache.keep(copies)
            logits_BV = logits_BV[copies]
        return logits_BV, cache


def decode(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    stop_ids: frozenset[int] = frozenset(),
    allowed: Tensor | None = None,
) -> Iterator[Step]:
    """Continue every request; yield tokens step by step, then those of beam searches, each when it has ended.

    Everything is checked when this is called, before the first forward pass.
    """
    batch = Batch(model, stop_ids=stop_ids, allowed=allowed)
    for request in requests:
        batch.check(request)
    return _steps(batch, requests)


def _steps(batch: Batch, requests: Sequence[Request]) -> Iterator[Step]:
    single = [place for place, request in enumerate(requests) if request.params.beams == 1]
    for place in single:
        batch.join(requests[place])
    while len(batch):
        for step in batch.step():
            yield step._replace(row=single[step.row])
    for place, request in enumerate(requests):
        if request.params.beams > 1:
            yield from search_steps(batch.search(request), place)


def complete(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    stop_ids: frozenset[int] = frozenset(),
    allowed: Tensor | None = None,
) -> list[list[list[int]]]:
    """All of `decode`, collected: the new ids of each request's answers, a final stop id included."""
    answers: list[list[list[int]]] = [[[] for _ in range(request.params.n)] for request in requests]
    for step in decode(model, requests, stop_ids=stop_ids, allowed=allowed):
        if step.token is not None:
            answers[step.row][step.sample].append(step.token)
    return answers
