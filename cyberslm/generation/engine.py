"""`Engine`: text in, text out. `generate` collects `stream`, which is a `Session` run to its end; one prompt is a batch
of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cyberslm.decoding.guide import Guide
from cyberslm.decoding.request import FinishReason, Likelihood
from cyberslm.decoding.sampling import SamplingParams, with_settings
from cyberslm.errors import GenerationError
from cyberslm.generation.session import Prompt, Session, TokenEvent, stops_of
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer

Prompts = str | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]
Guides = Sequence[Guide | None]


@dataclass(frozen=True)
class Completion:
    """One finished answer: ``ids`` without the prompt and without the id that stopped it, and its text, which a stop
    string may have cut shorter than the ids."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    sample: int = 0
    """Which of the ``n`` answers to its prompt."""
    logprobs: tuple[Likelihood, ...] = ()
    """One for each token made, one that stopped the answer included, where they were asked for."""
    score: float | None = None
    """Rank of a beam: its sum of log-probabilities over length to the power of ``length_penalty``."""
    truncated: int = 0
    """Tokens that the prompt lost on its left to fit the context."""


class Engine:
    """A model and its tokenizer, ready to continue text. ``stop_ids`` end every answer, as ``<eos>`` does."""

    def __init__(self, model: CyberSLM, tokenizer: Tokenizer, *, stop_ids: Sequence[int] = ()) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise GenerationError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model {model.config.vocab_size} rows:"
                " they don't belong together"
            )
        self.model, self.tokenizer, self.stop_ids = model, tokenizer, tuple(stop_ids)
        allowed = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        allowed[: tokenizer.vocab_size] = True
        allowed[[i for i in tokenizer.control_ids if i != tokenizer.eos_id]] = False
        self._allowed = allowed

    def session(self) -> Session:
        """An empty session, for requests that come and go."""
        return Session(self.model, self.tokenizer, self._allowed, self.stop_ids)

    def stream(
        self, prompts: Prompts, params: Params | None = None, *, guides: Guides | None = None, **overrides: object
    ) -> Iterator[TokenEvent]:
        """Continue the prompts together; yield each token as it is made. Answers by beam search come last, each whole.

        A prompt is a text, or a list of ids, such as a rendered chat's. ``params`` is one setting for all or one per
        prompt (default: greedy), and so are ``guides``, of which there is none by default; ``overrides`` are fields of
        `SamplingParams` that replace theirs. Everything is checked before the first forward pass: `GenerationError`.
        """
        session = self.session()
        for prompt, one, guide in self._requests(prompts, params, guides, overrides):
            session.join(prompt, one, guide)
        return _events(session)

    def generate(
        self, prompts: Prompts, params: Params | None = None, *, guides: Guides | None = None, **overrides: object
    ) -> list[Completion]:
        """`stream`, collected: in the order of the prompts, for each its ``n`` answers."""
        requests = self._requests(prompts, params, guides, overrides)
        drafts: dict[tuple[int, int], list[TokenEvent]] = {}
        for event in self.stream(
            [prompt for prompt, _, _ in requests], [one for _, one, _ in requests], guides=[g for _, _, g in requests]
        ):
            drafts.setdefault((event.row, event.sample), []).append(event)
        return [self._completion(*requests[row][:2], drafts[row, sample]) for row, sample in sorted(drafts)]

    def _requests(
        self, prompts: Prompts, params: Params | None, guides: Guides | None, overrides: dict[str, object]
    ) -> list[tuple[Prompt, SamplingParams, Guide | None]]:
        given = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(given, Sequence) or not all(
            isinstance(p, Sequence) and not isinstance(p, bytes) for p in given
        ):
            raise GenerationError(
                f"prompts must be a string or a list of strings, not {prompts!r:.80} (a list of ids may stand for each)"
            )
        settings = self._settings(len(given), params, overrides)
        guides = [None] * len(given) if guides is None else guides
        if len(guides) != len(given):
            raise GenerationError(f"{len(given)} prompts were given and {len(guides)} guides: give one each")
        return list(zip(given, settings, guides, strict=True))

    def _completion(self, prompt: Prompt, params: SamplingParams, events: list[TokenEvent]) -> Completion:
        ids = [event.token_id for event in events if event.token_id is not None]
        if ids and ids[-1] in stops_of(self.tokenizer, params).union(self.stop_ids):
            ids.pop()
        last = events[-1]
        return Completion(
            prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt),
            "".join(event.text for event in events),
            tuple(ids),
            last.finish_reason or "cancelled",
            last.sample,
            tuple(Likelihood(e.logprob, e.top_logprobs, e.entropy or 0.0) for e in events if e.logprob is not None),
            last.score,
            last.truncated,
        )

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
        return [with_settings(one, overrides) for one in settings]


def _events(session: Session) -> Iterator[TokenEvent]:
    while len(session):
        yield from session.step()
