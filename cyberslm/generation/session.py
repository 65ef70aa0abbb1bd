"""`Session`: text requests that come and go while tokens are made. The engine's ``stream`` is a session that ends.

It adds to the decoding loop what needs a tokenizer: encoding prompts, text that streams without ever cutting a
character, stop strings of which no part is let out, and ids that must not be made (control ids but those that stop,
rows of the embedding beyond the vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from cyberslm.decoding.beam import search_steps
from cyberslm.decoding.guide import Guide
from cyberslm.decoding.loop import Batch
from cyberslm.decoding.request import FinishReason, Request, Step
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.generation.stops import StopStrings
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or ids, which may be control ids too."""


class TokenEvent(NamedTuple):
    """One new token of the prompt ``row``, or the end of an answer without one (``token_id`` None).

    ``text`` is what may be shown now: it can be empty while a character or a stop string is incomplete, and the last
    event (``finish_reason`` set) releases what was held back. What stops an answer has no text. Log-probabilities, in
    nats, are the model's own, before masks, filters and temperature, and are there where they were asked for.
    """

    row: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None
    sample: int = 0
    """Which of the ``n`` answers."""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The likeliest ids with theirs, best first."""
    entropy: float | None = None
    """Of the distribution that the token was taken from, in nats."""
    score: float | None = None
    """Rank of a beam, with its last token."""
    truncated: int = 0
    """Tokens that the prompt lost on its left."""


class _Answer:
    """The text of one answer, as far as it may be shown."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams, truncated: int) -> None:
        self._ends = stops_of(tokenizer, params)
        self._decoder = tokenizer.stream_decoder(after=prompt)
        self._stops = StopStrings(params.stop)
        self._deaf = params.min_new_tokens
        self._truncated = truncated

    def take(self, step: Step, row: int) -> TokenEvent:
        self._deaf -= 1
        text = "" if step.token is None or step.token in self._ends else self._decoder.push(step.token)
        if step.finish is not None:
            text += self._decoder.finish()
        finish = step.finish
        if self._deaf <= 0:
            text, stopped = self._stops.push(text)
            if stopped:
                finish = "stop"
            elif finish is not None:
                text += self._stops.finish()
        event = TokenEvent(row, step.token, text, finish, step.sample, score=step.score, truncated=self._truncated)
        if step.likelihood is None:
            return event
        logprob, top, entropy = step.likelihood
        return event._replace(logprob=logprob, top_logprobs=top, entropy=entropy)


class _Job(NamedTuple):
    row: int
    """In the session."""
    answers: dict[int, _Answer]
    """Those that are not done, by sample."""


class Session:
    """Requests that are continued together; new ones may join between two steps."""

    def __init__(self, model: CyberSLM, tokenizer: Tokenizer, allowed: Tensor, stop_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)
        self._batch = Batch(model, stop_ids=frozenset({tokenizer.eos_id}), allowed=allowed)
        self._jobs: dict[int, _Job] = {}
        """By row of the batch."""
        self._searches: list[tuple[Request, _Job]] = []
        self._joined = 0

    def __len__(self) -> int:
        """Answers that are not done."""
        return len(self._batch) + sum(len(job.answers) for _, job in self._searches)

    def join(self, prompt: Prompt, params: SamplingParams | None = None, guide: Guide | None = None) -> int:
        """Let a request take part from the next step on; its row number, counted from 0.

        Raises `GenerationError` before any work for what can't be: ids outside the vocabulary, a prompt and budget that
        exceed the context.
        """
        params = SamplingParams() if params is None else params
        if self._stop_ids:
            params = replace(params, stop_ids=tuple(dict.fromkeys((*params.stop_ids, *self._stop_ids))))
        request = Request(self._ids(prompt), params, guide)
        fitted = self._batch.check(request)
        answers = {
            sample: _Answer(self._tokenizer, fitted.prompt, params, fitted.truncated) for sample in range(params.n)
        }
        job = _Job(self._joined, answers)
        if params.beams > 1:
            self._searches.append((request, job))
        else:
            self._jobs[self._batch.join(request)] = job
        self._joined += 1
        return job.row

    def step(self) -> list[TokenEvent]:
        """One more token of every answer. Then, while nothing else is to be done, all tokens of one beam search."""
        if not len(self._batch) and self._searches:
            request, job = self._searches.pop(0)
            return [
                job.answers[step.sample].take(step, job.row) for step in search_steps(self._batch.search(request), 0)
            ]
        events = [self._take(step) for step in self._batch.step()]
        self._jobs = {row: job for row, job in self._jobs.items() if job.answers}
        return events

    def cancel(self, row: int, sample: int | None = None) -> list[TokenEvent]:
        """Give up a request, or one of its answers, now; the last events of those that were not done."""
        self._searches = [(request, job) for request, job in self._searches if job.row != row]
        found = [number for number, job in self._jobs.items() if job.row == row]
        return [self._take(step) for number in found for step in self._batch.cancel(number, sample)]

    def _take(self, step: Step) -> TokenEvent:
        job = self._jobs[step.row]
        event = job.answers[step.sample].take(step, job.row)
        if event.finish_reason is not None:
            del job.answers[step.sample]
            if step.finish is None:  # a stop string, which the batch knows nothing of
                self._batch.cancel(step.row, step.sample)
        return event

    def _ids(self, prompt: Prompt) -> list[int]:
        """An empty text starts a document."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt) or [self._tokenizer.eos_id]
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool):
                raise GenerationError(f"a prompt must be a text or a list of ids, not {prompt!r:.80}")
        return list(prompt)


def stops_of(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """Ids that end an answer and have no text."""
    return frozenset({tokenizer.eos_id, *params.stop_ids})
