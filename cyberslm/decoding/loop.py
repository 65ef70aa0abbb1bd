"""The one decoding loop: prompts of any lengths in, one token per row and step out.

It works on ids alone and on anything that behaves like `LanguageModel`, so that the network's ``generate`` and the text
engine above it are both fronts of it. Prompts are prefilled in chunks, right-padded; the cache stores no padding. A row
leaves the batch when it is done. Between two steps the model is in the mode in which it was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cyberslm.decoding.sampling import SamplingParams, choose
from cyberslm.errors import GenerationError

PREFILL_CHUNK = 512
DEFAULT_BUDGET = 256

FinishReason = Literal["stop", "length"]


class LanguageModel(Protocol):
    """What the loop needs of a network."""

    training: bool

    @property
    def max_seq_len(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def new_cache(self, batch_size: int, capacity: Sequence[int]) -> Any: ...
    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, cache: Any = None) -> Tensor: ...
    def head(self, features: Tensor) -> Tensor: ...
    def next_logits(self, tokens_B: Tensor, cache: Any) -> Tensor: ...
    def train(self, mode: bool = True) -> Any: ...  # noqa: FBT001, FBT002 (torch's signature)


class Step(NamedTuple):
    """One new token of one row; ``finish`` is set on the row's last."""

    row: int
    token: int
    finish: FinishReason | None


class _Row(NamedTuple):
    number: int
    params: SamplingParams
    budget: int
    generator: torch.Generator


def budget_for(prompt_length: int, params: SamplingParams, max_seq_len: int) -> int:
    """Tokens that may be made after the prompt. Raises `GenerationError` when prompt and budget exceed the context."""
    room = max_seq_len - prompt_length
    wanted = params.max_new_tokens
    if prompt_length < 1:
        raise GenerationError("the prompt is empty: it needs at least one token, such as <bos>")
    if room < (wanted or 1):
        asked = "" if wanted is None else f" and max_new_tokens {wanted}"
        ways = "shorten the prompt" + (f" or ask for at most {room} new tokens" if room > 0 else "")
        raise GenerationError(
            f"the prompt's {prompt_length} tokens{asked} do not fit the model's context of {max_seq_len}: {ways}"
        )
    return min(room, DEFAULT_BUDGET) if wanted is None else wanted


def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    stop_ids: frozenset[int],
    allowed: Tensor | None = None,
) -> Iterator[Step]:
    """Continue every prompt; yield tokens step by step, in row order within a step.

    ``allowed`` is a boolean ``(V,)`` of ids that may be made (default: all). A stop id is yielded too, with ``finish``
    "stop". Settings and lengths are checked before the first forward pass.
    """
    rows = [
        _Row(number, p, budget_for(len(prompt), p, model.max_seq_len), _generator(p))
        for number, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    return _steps(model, prompts, rows, stop_ids, allowed)


@torch.no_grad()
def _steps(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    rows: list[_Row],
    stop_ids: frozenset[int],
    allowed: Tensor | None,
) -> Iterator[Step]:
    if not rows:
        return
    cache = model.new_cache(len(rows), [len(prompt) + row.budget for prompt, row in zip(prompts, rows, strict=True)])
    with _evaluating(model):
        logits_BV = _prefill(model, prompts, cache)
    made = 0
    while rows:
        made += 1
        if allowed is not None:
            logits_BV = logits_BV.masked_fill(~allowed, -torch.inf)
        steps = [_step(row, logits, stop_ids, made) for row, logits in zip(rows, logits_BV, strict=True)]
        yield from steps
        going = [place for place, step in enumerate(steps) if step.finish is None]
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            cache.keep(going)
        tokens_B = torch.tensor([steps[place].token for place in going], device=model.device)
        with _evaluating(model):
            logits_BV = model.next_logits(tokens_B, cache)


def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    stop_ids: frozenset[int],
    allowed: Tensor | None = None,
) -> list[list[int]]:
    """All of `decode`, collected: the new ids of each prompt, a final stop id included."""
    answers: list[list[int]] = [[] for _ in prompts]
    for step in decode(model, prompts, params, stop_ids=stop_ids, allowed=allowed):
        answers[step.row].append(step.token)
    return answers


def _generator(params: SamplingParams) -> torch.Generator:
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def _step(row: _Row, logits_V: Tensor, stop_ids: frozenset[int], made: int) -> Step:
    token = choose(logits_V.cpu(), row.params, row.generator)
    finish: FinishReason | None = "stop" if token in stop_ids else "length" if made == row.budget else None
    return Step(row.number, token, finish)


def _prefill(model: LanguageModel, prompts: Sequence[Sequence[int]], cache: Any) -> Tensor:
    """Feed all prompts; the logits ``(B, V)`` after each one's last token."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    ids = ids.to(model.device)
    ends = torch.tensor(lengths, device=model.device)
    ragged = min(lengths) < longest
    mask = torch.arange(longest, device=model.device) < ends.unsqueeze(1) if ragged else None
    last: Tensor | None = None
    for start in range(0, longest, PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, longest)
        features = model.features(ids[:, start:stop], None if mask is None else mask[:, :stop], cache=cache)
        here = features[torch.arange(len(prompts)), (ends - 1 - start).clamp(0, stop - start - 1)]
        within = ((ends > start) & (ends <= stop)).unsqueeze(1)
        last = here if last is None else torch.where(within, here, last)
    return model.head(last)  # type: ignore[arg-type]


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    was = model.training
    if was:
        model.train(False)
    try:
        yield
    finally:
        if was:
            model.train(True)
