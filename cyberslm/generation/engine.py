"""`Engine`: text in, text out. `generate` collects `stream`, which is a `Session` run to its end; one prompt is a batch
of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from cyberslm.decoding.draft import Speculation
from cyberslm.decoding.guide import Guide
from cyberslm.decoding.prefixes import PrefixCache
from cyberslm.decoding.request import FinishReason, Likelihood, fit
from cyberslm.decoding.sampling import SamplingParams, with_settings
from cyberslm.errors import GenerationError
from cyberslm.generation.demand import NOTHING, Demand
from cyberslm.generation.session import Prompt, Session, TokenEvent, prompt_ids, stops_of
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cyberslm.generation.guides import Guides

Prompts = str | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]
Demands = Demand | Sequence[Demand]


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
    valid: bool | None = None
    """Whether the answer is whole and keeps to what its demand asks; None where nothing was asked."""


class _Request(NamedTuple):
    prompt: Prompt
    params: SamplingParams
    demand: Demand


class Engine:
    """A model and its tokenizer, ready to continue text. ``stop_ids`` end every answer, as ``<eos>`` does.

    With ``speculation`` the same tokens come in fewer passes where drafts are right; with ``prefixes`` what a prompt
    has in common with earlier ones is not read again. Raises `GenerationError` for parts that don't fit together.
    """

    def __init__(
        self,
        model: CyberSLM,
        tokenizer: Tokenizer,
        *,
        stop_ids: Sequence[int] = (),
        speculation: Speculation | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise GenerationError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model {model.config.vocab_size} rows:"
                " they don't belong together"
            )
        if speculation is not None and speculation.model is not None:
            theirs = speculation.model.vocab_size
            if theirs != model.vocab_size:
                raise GenerationError(
                    f"the draft model has {theirs} ids and the model {model.vocab_size}: it needs the same tokenizer"
                )
        if prefixes is not None:
            prefixes.serve(model)
        self.model, self.tokenizer, self.stop_ids = model, tokenizer, tuple(stop_ids)
        self._speculation, self._prefixes = speculation, prefixes
        allowed = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        allowed[: tokenizer.vocab_size] = True
        allowed[[i for i in tokenizer.control_ids if i != tokenizer.eos_id]] = False
        self._allowed = allowed
        self._guides: Guides | None = None

    def session(self) -> Session:
        """An empty session, for requests that come and go."""
        return Session(
            self.model,
            self.tokenizer,
            self._allowed,
            self.stop_ids,
            speculation=self._speculation,
            prefixes=self._prefixes,
        )

    def stream(
        self,
        prompts: Prompts,
        params: Params | None = None,
        *,
        demand: Demands = NOTHING,
        guides: Sequence[Guide | None] | None = None,
        **overrides: object,
    ) -> Iterator[TokenEvent]:
        """Continue the prompts together; yield each token as it is made. Answers by beam search come last, each whole.

        A prompt is a text, or a list of ids, such as a rendered chat's. ``params`` is one setting for all or one per
        prompt (default: greedy), and so is ``demand``, a constraint or grounding; ``guides``, one for each prompt, take
        the place of a demand. ``overrides`` are fields of `SamplingParams` that replace theirs. Everything is checked
        before the first forward pass: `GenerationError`.
        """
        session = self.session()
        requests = self._requests(prompts, params, demand, overrides)
        for request, guide in zip(requests, self._guides_of(requests, guides), strict=True):
            session.join(request.prompt, request.params, guide)
        return _events(session)

    def guide(self, prompt: Prompt, params: SamplingParams, demand: Demand) -> Guide | None:
        """What a session takes to keep the answer to one prompt to a demand. Raises `GenerationError`."""
        if not demand:
            return None
        ids = prompt_ids(self.tokenizer, prompt)
        budget = fit(ids, params, self.model.max_seq_len).budget
        stops = stops_of(self.tokenizer, params).union(self.stop_ids)
        return self._of_guides().guide(demand, prompt_ids=ids, budget=budget, stop_ids=stops)

    def generate(
        self,
        prompts: Prompts,
        params: Params | None = None,
        *,
        demand: Demands = NOTHING,
        guides: Sequence[Guide | None] | None = None,
        **overrides: object,
    ) -> list[Completion]:
        """`stream`, collected: in the order of the prompts, for each its ``n`` answers."""
        requests = self._requests(prompts, params, demand, overrides)
        drafts: dict[tuple[int, int], list[TokenEvent]] = {}
        asked = [request.demand for request in requests]
        for event in self.stream(
            [r.prompt for r in requests], [r.params for r in requests], demand=asked, guides=guides
        ):
            drafts.setdefault((event.row, event.sample), []).append(event)
        return [self._completion(requests[row], drafts[row, sample]) for row, sample in sorted(drafts)]

    def _requests(
        self, prompts: Prompts, params: Params | None, demand: Demands, overrides: dict[str, object]
    ) -> list[_Request]:
        given = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(given, Sequence) or not all(
            isinstance(p, Sequence) and not isinstance(p, bytes) for p in given
        ):
            raise GenerationError(
                f"prompts must be a string or a list of strings, not {prompts!r:.80} (a list of ids may stand for each)"
            )
        settings = self._settings(len(given), params, overrides)
        demands = [demand] * len(given) if isinstance(demand, Demand) else list(demand)
        if len(demands) != len(given):
            raise GenerationError(f"{len(given)} prompts were given and {len(demands)} demands: give one each")
        return list(map(_Request, given, settings, demands))

    def _guides_of(self, requests: list[_Request], given: Sequence[Guide | None] | None) -> list[Guide | None]:
        if given is None:
            return [self.guide(*request) for request in requests]
        if len(given) != len(requests) or any(request.demand for request in requests):
            raise GenerationError(
                f"{len(requests)} prompts were given and {len(given)} guides: give one each, and no demand"
            )
        return list(given)

    def _of_guides(self) -> Guides:
        """Made when first asked for, as the vocabulary's table takes a moment."""
        if self._guides is None:
            from cyberslm.generation.guides import Guides

            self._guides = Guides(self.tokenizer)
        return self._guides

    def _completion(self, request: _Request, events: list[TokenEvent]) -> Completion:
        prompt, params, demand = request
        ids = [event.token_id for event in events if event.token_id is not None]
        if ids and ids[-1] in stops_of(self.tokenizer, params).union(self.stop_ids):
            ids.pop()
        last = events[-1]
        text = "".join(event.text for event in events)
        return Completion(
            prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt),
            text,
            tuple(ids),
            last.finish_reason or "cancelled",
            last.sample,
            tuple(Likelihood(e.logprob, e.top_logprobs, e.entropy or 0.0) for e in events if e.logprob is not None),
            last.score,
            last.truncated,
            self._is_met(prompt, demand, ids, text),
        )

    def _is_met(self, prompt: Prompt, demand: Demand, ids: list[int], text: str) -> bool | None:
        if not demand:
            return None
        given = prompt_ids(self.tokenizer, prompt)
        return self._of_guides().is_met(demand, prompt_ids=given, ids=ids, text=text)

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
