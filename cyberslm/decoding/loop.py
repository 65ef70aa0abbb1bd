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
from cyberslm.decoding.draft import WIDEST, Guesses, Speculation
from cyberslm.decoding.feed import PREFILL_CHUNK, Cache, LanguageModel, evaluating
from cyberslm.decoding.history import History
from cyberslm.decoding.prefixes import PrefixCache, prefill_new
from cyberslm.decoding.request import FinishReason, Fitted, Request, Step, check, window
from cyberslm.errors import GenerationError

SHORT = 64
"""Texts of up to so many tokens are fed together, whatever their lengths."""


@dataclass
class _Row:
    number: int
    sample: int
    fitted: Fitted
    chooser: Chooser
    guesses: Guesses | None = None
    draft: Sequence[int] = ()
    """Tokens that the last pass has fed behind the row's last, ..."""
    drafted_TV: Tensor | None = None
    """... and the logits after each."""
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
    which each request adds its own stop ids; ``stop_ids`` end every row. With ``speculation`` a step may make several
    tokens of a row, the same ones in fewer passes. With ``prefixes`` what prompts have in common with earlier ones is
    not fed again. Raises `GenerationError` for prefixes that the model can't share."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        stop_ids: frozenset[int] = frozenset(),
        allowed: Tensor | None = None,
        chunk: int = PREFILL_CHUNK,
        speculation: Speculation | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        if prefixes is not None:
            prefixes.serve(model)
        self._model, self._stop_ids, self._chunk = model, stop_ids, chunk
        self._speculation, self._prefixes = speculation, prefixes
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
            if self._speculation is not None:
                rows[-1].guesses = self._speculation.guesses(rows[-1].capacity)
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
        """One more token of every row, more where drafts were right, in the order of rows and answers."""
        if not len(self):
            self._rows, self._cache = [], None
            return []
        with evaluating(self._model):
            logits_BV = self._logits()
        tokens = choose(logits_BV, [row.chooser for row in self._rows])
        steps = [self._take(*each) for each in zip(self._rows, tokens, logits_BV, strict=True)]
        if any(row.draft for row in self._rows):
            steps += self._follow_drafts()
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

    def _follow_drafts(self) -> list[Step]:
        """Choose on where the last choice is what was drafted; what was fed and not chosen leaves the cache."""
        steps = []
        lengths = [] if self._cache is None else list(self._cache.lengths)
        for place, row in enumerate(self._rows):
            if row.guesses is None or row.drafted_TV is None:
                continue
            right = 0
            for token, logits_V in zip(row.draft, row.drafted_TV, strict=True):
                if row.finish is not None or row.chooser.history.answer[-1] != token:
                    break
                right += 1
                (chosen,) = choose(logits_V.unsqueeze(0), [row.chooser])
                steps.append(self._take(row, chosen, logits_V))
            lengths[place] -= len(row.draft) - right
            row.guesses.record(len(row.draft), right)
            row.draft, row.drafted_TV = (), None
        if self._cache is not None and lengths != self._cache.lengths:
            self._cache.truncate(lengths)
        return steps

    def _draft(self, cache: Cache) -> bool:
        """Let the rows guess; whether any did. A guess stays within budget and context."""
        if self._speculation is None:
            return False
        most = WIDEST // len(self._rows) - 1
        for row, held, capacity in zip(self._rows, cache.lengths, cache.capacities, strict=True):
            room = min(capacity - held, row.fitted.budget - len(row.chooser.history.answer)) - 1
            row.draft = row.guesses.next(row.chooser.history, min(most, room)) if row.guesses is not None else ()
        return any(row.draft for row in self._rows)

    def _next_logits(self, cache: Cache) -> Tensor:
        """The logits ``(B, V)`` after each row's last token; those after drafts are left with their rows."""
        last = [row.chooser.history.answer[-1] for row in self._rows]
        if not self._draft(cache):
            return self._model.next_logits(torch.tensor(last, device=self._model.device), cache)
        fed = [[token, *row.draft] for token, row in zip(last, self._rows, strict=True)]
        counts = [len(tokens) for tokens in fed]
        flat = torch.tensor([token for tokens in fed for token in tokens], device=self._model.device)
        parts = self._model.next_logits(flat, cache, counts).split(counts)
        for row, logits_TV in zip(self._rows, parts, strict=True):
            row.drafted_TV = logits_TV[1:] if row.draft else None
        return torch.stack([logits_TV[0] for logits_TV in parts])

    def _logits(self) -> Tensor:
        """The logits ``(B, V)`` of all that are not done, whose order `_rows` then has."""
        staying: list[int] = []
        full: list[int] = []
        for place, row in enumerate(self._rows):
            if row.finish is None:
                (staying if self._held(place) < self._model.max_seq_len else full).append(place)
        sliding = [[self._rows[place]] for place in full]
        # first: if it fails, those in the cache are as they were
        fed = [*map(self._feed, _alike(sliding)), *map(self._feed, _alike(self._waiting))]
        parts = []
        if len(staying) < len(self._rows) and staying and self._cache is not None:
            self._cache.keep(staying)
        self._rows = [self._rows[place] for place in staying]
        if self._rows and self._cache is not None:
            parts.append(self._next_logits(self._cache))
        for rows, logits_BV, cache in fed:
            parts.append(logits_BV)
            if self._rows and self._cache is not None:
                self._cache.append(cache)
            else:
                self._cache = cache
            self._rows += rows
        self._waiting = []
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _held(self, place: int) -> int:
        return 0 if self._cache is None else self._cache.lengths[place]

    def _feed(self, groups: list[list[_Row]]) -> tuple[list[_Row], Tensor, Cache]:
        """Feed the text of each group of rows once: the rows, and their logits and cache."""
        limit = self._model.max_seq_len
        texts = []
        for rows in groups:
            tokens = rows[0].chooser.history.tokens
            texts.append(tokens if len(tokens) <= limit else window(tokens, rows[0].chooser.params.sinks, limit))
        capacities = [min(rows[0].capacity, limit) for rows in groups]
        prefixes = None if groups[0][0].chooser.history.answer else self._prefixes  # a window never comes again
        logits_BV, cache = prefill_new(self._model, texts, capacities, chunk=self._chunk, prefixes=prefixes)
        copies = [place for place, rows in enumerate(groups) for _ in rows]
        if len(copies) > len(groups):
            cache.keep(copies)
            logits_BV = logits_BV[copies]
        return [row for rows in groups for row in rows], logits_BV, cache


def _alike(groups: list[list[_Row]]) -> list[list[list[_Row]]]:
    """Groups whose texts are fed together: none twice as long as another, so that less than half is padding."""
    buckets: list[list[list[_Row]]] = []
    shortest = 0
    for rows in sorted(groups, key=lambda rows: len(rows[0].chooser.history)):
        length = len(rows[0].chooser.history)
        if not buckets or length > max(2 * shortest, SHORT):
            buckets.append([])
            shortest = length
        buckets[-1].append(rows)
    return buckets


def decode(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    stop_ids: frozenset[int] = frozenset(),
    allowed: Tensor | None = None,
    speculation: Speculation | None = None,
) -> Iterator[Step]:
    """Continue every request; yield tokens step by step, then those of beam searches, each when it has ended.

    Everything is checked when this is called, before the first forward pass.
    """
    batch = Batch(model, stop_ids=stop_ids, allowed=allowed, speculation=speculation)
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
