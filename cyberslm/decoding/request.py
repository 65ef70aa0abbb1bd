"""What is asked of the loop and what comes out: requests, steps; and how prompt and budget are made to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cyberslm.decoding.guide import Guide
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError

DEFAULT_BUDGET = 256

FinishReason = Literal["stop", "length", "context", "cancelled", "blocked"]
"""Why an answer ended: a stop id, a stop string or a guide that is done; the tokens asked for were made; the context is
full though no number was asked for; the caller gave it up; or settings and guide left no token that may be made."""


@dataclass(frozen=True)
class Request:
    """One prompt, as ids, and how to continue it."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    guide: Guide | None = None


class Likelihood(NamedTuple):
    """What the model itself thought of a token, before masks, filters and temperature; in nats."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest ids with their log-probabilities, best first."""
    entropy: float


class Step(NamedTuple):
    """One new token of one row, or its end: ``finish`` is set on the last. ``token`` is None where a row ended without
    one, cancelled or blocked. A stop id is a token too."""

    row: int
    token: int | None
    finish: FinishReason | None
    sample: int = 0
    """Which of the request's ``n`` answers."""
    likelihood: Likelihood | None = None
    score: float | None = None
    """Of a beam, with its last step."""


class Fitted(NamedTuple):
    """A prompt as it will be fed, the tokens that may follow, and why the last of them ends the answer."""

    prompt: Sequence[int]
    budget: int
    at_budget: FinishReason = "length"
    truncated: int = 0
    """Leading tokens of the prompt that were dropped."""


def check(request: Request, vocab_size: int, max_seq_len: int, *, never: frozenset[int] = frozenset()) -> Fitted:
    """The prompt and budget as they will be. ``never`` are ids that can't be made.

    Raises `GenerationError` for ids outside the vocabulary, forced ids that can't be made, and as `fit` does.
    """
    for token in request.prompt:
        if not 0 <= token < vocab_size:
            raise GenerationError(f"the prompt must hold ids from 0 to {vocab_size - 1} (vocab_size - 1), not {token}")
    request.params.check_ids(vocab_size)
    if barred := never & set(request.params.forced_ids):
        raise GenerationError(f"forced_ids must be ids that can be made, not {min(barred)}, a control id or no token")
    return fit(request.prompt, request.params, max_seq_len)


def budget_for(prompt_length: int, params: SamplingParams, max_seq_len: int) -> int:
    """Tokens that may be made after the prompt. Raises `GenerationError` as `fit` does."""
    return fit([0] * prompt_length, params, max_seq_len).budget


def fit(prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> Fitted:
    """Bring prompt and budget within the context by the rule of ``params.context``.

    Raises `GenerationError` for an empty prompt, and with the three numbers for what doesn't fit.
    """
    if not len(prompt):
        raise GenerationError("the prompt is empty: it needs at least one token, such as <bos>")
    fitted = _RULES[params.context](prompt, params, max_seq_len)
    for name, wanted in (("min_new_tokens", params.min_new_tokens), ("forced_ids", len(params.forced_ids))):
        if wanted > fitted.budget:
            raise GenerationError(
                f"{name} asks for {wanted} tokens and after the prompt's {len(prompt)} the model's context of"
                f" {max_seq_len} leaves {fitted.budget}: ask for fewer or set max_new_tokens"
            )
    return fitted


def _whole(prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> Fitted:
    wanted, room = params.max_new_tokens, max_seq_len - len(prompt)
    if room < (wanted or 1):
        asked = "" if wanted is None else f" and max_new_tokens {wanted}"
        ways = "shorten the prompt" + (f" or ask for at most {room} new tokens" if room > 0 else "")
        raise GenerationError(
            f"the prompt's {len(prompt)} tokens{asked} do not fit the model's context of {max_seq_len}: {ways}, or"
            " choose context truncate-left or slide"
        )
    if wanted is not None:
        return Fitted(prompt, wanted)
    return Fitted(prompt, min(room, DEFAULT_BUDGET), "context" if room < DEFAULT_BUDGET else "length")


def _cut_left(prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> Fitted:
    wanted = params.max_new_tokens
    if wanted is None:
        wanted = min(DEFAULT_BUDGET, max(max_seq_len - len(prompt), max_seq_len // 2, 1))
    if wanted >= max_seq_len:
        raise GenerationError(
            f"max_new_tokens {wanted} leaves no room for any of the prompt's {len(prompt)} tokens in the model's"
            f" context of {max_seq_len}: ask for at most {max_seq_len - 1}, or choose context slide"
        )
    dropped = max(0, len(prompt) + wanted - max_seq_len)
    return Fitted(prompt[dropped:], wanted, truncated=dropped)


def _slide(prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> Fitted:
    recent = recent_tokens(params.sinks, max_seq_len)
    if recent < 1:
        raise GenerationError(
            f"sinks must be below {recent_tokens(0, max_seq_len)} to slide in the model's context of {max_seq_len},"
            f" not {params.sinks}"
        )
    budget = DEFAULT_BUDGET if params.max_new_tokens is None else params.max_new_tokens
    if len(prompt) <= max_seq_len:
        return Fitted(prompt, budget)
    kept = window(prompt, params.sinks, max_seq_len)
    return Fitted(kept, budget, truncated=len(prompt) - len(kept))


_RULES = {"error": _whole, "truncate-left": _cut_left, "slide": _slide}


def recent_tokens(sinks: int, max_seq_len: int) -> int:
    """Tokens besides the sinks that a window holds after it has slid: a quarter of the context is made free."""
    return max_seq_len - max(1, max_seq_len // 4) - sinks


def window(tokens: Sequence[int], sinks: int, max_seq_len: int) -> Sequence[int]:
    """What remains of a full context after it has slid: the first ``sinks`` tokens and the most recent ones."""
    return [*tokens[:sinks], *tokens[len(tokens) - recent_tokens(sinks, max_seq_len) :]]
