"""`Engine`: text in, text out. It adds to the decoding loop what needs a tokenizer: encoding prompts, text that streams
without ever cutting a character, and ids that must not be made (padding, unknown, beginning of document, rows of the
embedding beyond the vocabulary). `generate` collects `stream`; one prompt is a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cyberslm.decoding.loop import FinishReason, budget_for, decode
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.generation.guides import NOTHING, Demand, Guides
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer

Prompts = str | Sequence[str]
Params = SamplingParams | Sequence[SamplingParams]


class TokenEvent(NamedTuple):
    """One new token of the prompt ``row``. ``text`` is what may be shown now: it can be empty while a character is
    incomplete, and the last event (``finish_reason`` set) releases what was held back. The end id has no text."""

    row: int
    token_id: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """One finished answer: ``ids`` without the prompt and without the end-of-document id."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    valid: bool | None = None
    """Whether the answer is whole and keeps to its constraint and grounding; None when nothing was asked of it."""


class Engine:
    """A model and its tokenizer, ready to continue text."""

    def __init__(self, model: CyberSLM, tokenizer: Tokenizer) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise GenerationError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model {model.config.vocab_size} rows:"
                " they don't belong together"
            )
        self.model, self.tokenizer = model, tokenizer
        allowed = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        allowed[: tokenizer.vocab_size] = True
        allowed[[i for i in tokenizer.control_ids if i != tokenizer.eos_id]] = False
        self._allowed = allowed.to(model.device)
        self._guides: Guides | None = None

    def stream(
        self, prompts: Prompts, params: Params | None = None, *, demand: Demand = NOTHING, **overrides: object
    ) -> Iterator[TokenEvent]:
        """Continue the prompts together; yield each token as it is made.

        ``params`` is one setting for all or one per prompt (default: greedy); ``overrides`` are fields of
        `SamplingParams` that replace theirs. ``demand`` is the constraint and grounding of every answer. Everything is
        checked before the first forward pass: `GenerationError`.
        """
        texts = _texts(prompts)
        settings = self._settings(len(texts), params, overrides)
        ids = [self._prompt_ids(text) for text in texts]
        decoders = [self.tokenizer.stream_decoder(after=prompt) for prompt in ids]
        stops = frozenset({self.tokenizer.eos_id})
        guides = [
            self._of_guides().guide(
                demand,
                prompt=text,
                prompt_ids=prompt,
                budget=budget_for(len(prompt), one, self.model.max_seq_len),
                stop_ids=sorted(stops),
            )
            if demand
            else None
            for text, prompt, one in zip(texts, ids, settings, strict=True)
        ]
        steps = decode(self.model, ids, settings, stop_ids=stops, allowed=self._allowed, guides=guides)
        return self._events(steps, decoders)

    def generate(
        self, prompts: Prompts, params: Params | None = None, *, demand: Demand = NOTHING, **overrides: object
    ) -> list[Completion]:
        """`stream`, collected: one `Completion` per prompt, in their order."""
        texts = _texts(prompts)
        events: list[list[TokenEvent]] = [[] for _ in texts]
        for event in self.stream(texts, params, demand=demand, **overrides):
            events[event.row].append(event)
        made = [_completion(text, row, self.tokenizer.eos_id) for text, row in zip(texts, events, strict=True)]
        return [replace(one, valid=self._is_met(demand, one)) for one in made] if demand else made

    def _is_met(self, demand: Demand, made: Completion) -> bool:
        ids = self._prompt_ids(made.prompt)
        return self._of_guides().is_met(demand, prompt=made.prompt, prompt_ids=ids, text=made.text, ids=made.ids)

    def _of_guides(self) -> Guides:
        if self._guides is None:
            self._guides = Guides(self.tokenizer)
        return self._guides

    def _events(self, steps: Iterator, decoders: list) -> Iterator[TokenEvent]:
        for row, token, finish in steps:
            text = "" if token == self.tokenizer.eos_id else decoders[row].push(token)
            if finish is not None:
                text += decoders[row].finish()
            yield TokenEvent(row, token, text, finish)

    def _prompt_ids(self, text: str) -> list[int]:
        """An empty prompt starts a document."""
        ids = self.tokenizer.encode(text)
        return ids or [self.tokenizer.eos_id]

    @staticmethod
    def _settings(count: int, params: Params | None, overrides: dict[str, object]) -> list[SamplingParams]:
        given = SamplingParams() if params is None else params
        if not isinstance(given, SamplingParams | Sequence) or isinstance(given, str):
            raise GenerationError(f"params must be SamplingParams, one for all or one per prompt, not {given!r}")
        settings = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(settings) != count:
            raise GenerationError(
                f"{count} prompts were given and {len(settings)} settings: give one for all or one each"
            )
        if unknown := sorted(set(overrides) - set(SamplingParams.__dataclass_fields__)):
            known = ", ".join(SamplingParams.__dataclass_fields__)
            raise GenerationError(f"unknown setting {unknown[0]!r}; known: {known}")
        return [replace(one, **overrides) for one in settings] if overrides else settings  # type: ignore[arg-type]


def _texts(prompts: Prompts) -> list[str]:
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise GenerationError(f"prompts must be a string or a list of strings, not {prompts!r:.80}")
    return list(texts)


def _completion(prompt: str, events: list[TokenEvent], eos_id: int) -> Completion:
    last = events[-1]
    made = events[:-1] if last.token_id == eos_id else events
    return Completion(
        prompt,
        "".join(event.text for event in events),
        tuple(event.token_id for event in made),
        last.finish_reason or "stop",
    )
