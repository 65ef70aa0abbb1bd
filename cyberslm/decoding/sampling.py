"""`SamplingParams`: one request's settings, checked when they are made.

What they do to the logits is in `cyberslm.decoding.filters`, in the order that its table states. Settings that name
token ids are checked against a vocabulary by `check_ids`, before the first forward pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from cyberslm.errors import GenerationError

GREEDY_BELOW = 1e-6
"""A temperature under this is greedy: dividing by it would only turn rounding into order."""

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024
MAX_SAMPLES = 1024

ContextRule = Literal["error", "truncate-left", "slide"]


class _Range(NamedTuple):
    low: float
    high: float
    words: str
    above: bool = False
    """``low`` itself is out of range."""

    def holds(self, value: object) -> bool:
        numeric = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return numeric and (self.low < value if self.above else self.low <= value) and value <= self.high  # type: ignore[operator]


_SHARE = _Range(0, 1, "above 0 and at most 1", above=True)
_REAL = {
    "temperature": _Range(0, math.inf, "a finite number of at least 0"),
    "top_p": _SHARE,
    "min_p": _Range(0, 1, "a number from 0 to 1"),
    "typical_p": _SHARE,
    "repetition_penalty": _Range(0.01, 100, "a number from 0.01 to 100"),
    "presence_penalty": _Range(-100, 100, "a number from -100 to 100"),
    "frequency_penalty": _Range(-100, 100, "a number from -100 to 100"),
    "length_penalty": _Range(-10, 10, "a number from -10 to 10"),
}
_LARGEST = (1 << 63) - 1
_WHOLE: dict[str, tuple[int, int]] = {
    "max_new_tokens": (1, _LARGEST),
    "min_new_tokens": (0, _LARGEST),
    "top_k": (0, _LARGEST),
    "no_repeat_ngram": (0, 1024),
    "logprobs": (0, 20),
    "n": (1, MAX_SAMPLES),
    "beams": (1, MAX_SAMPLES),
    "sinks": (0, _LARGEST),
    "seed": (0, _LARGEST),
}
_OPTIONAL = ("max_new_tokens", "seed", "logprobs")
_IDS = ("banned_ids", "stop_ids", "forced_ids")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's settings. Raises `GenerationError` naming the field and its range."""

    max_new_tokens: int | None = None
    """Most new tokens; null = 256 or what the context still holds, whichever is less."""

    min_new_tokens: int = 0
    """Tokens before which no stop id is made and no stop string looked for."""

    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""

    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all."""

    min_p: float = 0.0
    """Keep tokens at least this share as likely as the most likely one; 0 keeps all."""

    typical_p: float = 1.0
    """Keep the tokens of most typical surprise whose probabilities reach this sum; 1 keeps all."""

    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that prompt or answer hold, and multiplies negative ones; 1 is off."""

    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer holds."""

    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the answer holds it."""

    no_repeat_ngram: int = 0
    """No sequence of so many tokens comes twice in prompt and answer; 0 is off."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these ids, each from -100 to 100."""

    banned_ids: Sequence[int] = ()
    """Ids that are never made."""

    forced_ids: Sequence[int] = ()
    """Ids that the answer begins with; they count as new tokens."""

    stop: str | Sequence[str] = ()
    """Texts that end the answer and are no part of it."""

    stop_ids: Sequence[int] = ()
    """Ids that end the answer, besides the end of document."""

    logprobs: int | None = None
    """Give the log-probability of each token, of so many of the likeliest, and the entropy, before any filter."""

    n: int = 1
    """Answers to each prompt; drawn ones share the prompt's pass, those of beam search are the best."""

    beams: int = 1
    """Width of a beam search for the most likely answer; 1 takes token by token."""

    length_penalty: float = 1.0
    """Beams are ranked by the sum of log-probabilities divided by length to this power."""

    context: ContextRule = "error"
    """What to do where prompt and answer exceed the context: error, truncate-left (drop the prompt's oldest tokens) or
    slide (forget the oldest tokens but the first, block by block)."""

    sinks: int = 4
    """First tokens of the text that sliding keeps."""

    seed: int | None = None
    """Seed of this request's own generator; null draws one."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._set("stop", _strings(self.stop))
        for name in _IDS:
            self._set(name, _ids(name, getattr(self, name)))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.context not in ("error", "truncate-left", "slide"):
            raise GenerationError(f"context must be error, truncate-left or slide, not {self.context!r}")
        self._check_together()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_ids(self, vocab_size: int) -> None:
        """Refuse an id outside the vocabulary: `GenerationError`."""
        for name in (*_IDS, "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise GenerationError(
                        f"{name} must be ids from 0 to {vocab_size - 1} (vocab_size - 1), not {token}"
                    )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name, limits in _REAL.items():
            if not limits.holds(value := getattr(self, name)):
                raise GenerationError(f"{name} must be {limits.words}, not {value!r}")
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                top = "2^63 - 1" if high == _LARGEST else high
                raise GenerationError(f"{name} must be a whole number from {low} to {top}, not {value!r}")

    def _check_together(self) -> None:
        most = self.max_new_tokens
        if most is not None and self.min_new_tokens > most:
            raise GenerationError(
                f"min_new_tokens must be at most max_new_tokens {most}, not {self.min_new_tokens}: raise that one"
            )
        if most is not None and len(self.forced_ids) > most:
            raise GenerationError(
                f"forced_ids must be at most max_new_tokens {most} ids, not {len(self.forced_ids)}: raise that one"
            )
        for name in ("banned_ids", "stop_ids"):
            if both := set(self.forced_ids) & set(getattr(self, name)):
                raise GenerationError(f"forced_ids must be none of {name}, not {min(both)}: take it out of one of them")
        if self.beams > 1:
            self._check_beams()
        elif self.n > 1 and self.greedy:
            raise GenerationError(
                f"n must be 1 without temperature, not {self.n}: greedy answers are all the same; give a temperature"
                " or beams"
            )

    def _check_beams(self) -> None:
        if self.n > self.beams:
            raise GenerationError(f"n must be at most beams {self.beams}, not {self.n}: search with more beams")
        problems = {
            "temperature must be 0": not self.greedy,
            "stop must be empty": bool(self.stop),
            "context must be error or truncate-left": self.context == "slide",
        }
        for problem in (words for words, found in problems.items() if found):
            name = problem.split()[0]
            raise GenerationError(
                f"{problem} with beams {self.beams}, not {getattr(self, name)!r}: leave out one of them"
            )


def with_settings(params: SamplingParams, changes: Mapping[str, object]) -> SamplingParams:
    """``params`` with some fields replaced; `GenerationError` for a name that is none."""
    if unknown := sorted(set(changes) - set(SamplingParams.__dataclass_fields__)):
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise GenerationError(f"unknown setting {unknown[0]!r}; known: {known}")
    return replace(params, **changes) if changes else params  # type: ignore[arg-type]


def _strings(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise GenerationError(f"stop must be a text or a list of texts, not {given!r:.80}")
    if len(texts) > MAX_STOP_STRINGS:
        raise GenerationError(f"stop must be at most {MAX_STOP_STRINGS} texts, not {len(texts)}")
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise GenerationError(f"stop must be texts of 1 to {MAX_STOP_LENGTH:,} characters, not of {len(text):,}")
    return tuple(dict.fromkeys(texts))


def _ids(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise GenerationError(f"{name} must be a list of ids, not {given!r:.80}")
    ids = tuple(given)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise GenerationError(f"{name} must be ids, whole numbers from 0, not {token!r:.80}")
    return ids


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise GenerationError(f"logit_bias must be numbers by id, not {given!r:.80}")
    _ids("logit_bias", given.keys())
    limits = _Range(-100, 100, "from -100 to 100")
    for token, bias in given.items():
        if not limits.holds(bias):
            raise GenerationError(f"logit_bias must be {limits.words}, not {bias!r:.80} (of id {token})")
    return {token: float(bias) for token, bias in given.items()}
