"""How well a model expects texts: the log-likelihood of each token of many texts, and of endings of a shared beginning.

A text is laid out as a document is in training: ``<bos>`` (where the tokenizer adds none, ``<eos>``, which ends the
document before), its tokens, ``<eos>``. Texts longer than the context go through windows that overlap by half, so that
every token is scored once, with at least half a context before it where the text has that much. Windows of like length
share a batch. The head works on a few rows at a time (`token_losses`), sums are in fp64, and nothing depends on the
neighbours in a batch but rounding.

Nats inside, bits outside. Bits per byte count the UTF-8 bytes of the text, so they don't depend on the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm.errors import InputError, IntegrityError
from cyberslm.model.model import CyberSLM
from cyberslm.text.codec import mend
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.training.cross_entropy import Head, token_losses

BATCH_TOKENS = 4096
"""Positions of one forward pass, padding included."""
NOT_FINITE = "the model's losses are not finite: its weights are damaged or training diverged"


class Surprise(NamedTuple):
    """A token that was expected little: characters ``start`` to ``end`` of the text that it spells or is a part of.

    The end of the text is the empty span behind it. Both are None where the tokenizer doesn't give the text back.
    """

    bits: float
    start: int | None
    end: int | None


@dataclass(frozen=True)
class TextScore:
    """``loss_sum`` nats over ``num_tokens`` tokens that spell ``num_bytes`` bytes; the end may count as a token."""

    loss_sum: float
    num_tokens: int
    num_bytes: int
    max_loss: float
    surprises: tuple[Surprise, ...] = ()
    """The most surprising tokens, the most surprising first."""

    @property
    def bits(self) -> float:
        return self.loss_sum / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits / max(1, self.num_bytes)

    @property
    def bits_per_token(self) -> float:
        return self.bits / max(1, self.num_tokens)

    @property
    def max_bits(self) -> float:
        return self.max_loss / math.log(2)


class EndingScore(NamedTuple):
    """Nats over the tokens of an ending."""

    loss_sum: float
    num_tokens: int


def score_texts(
    model: CyberSLM,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    with_end: bool = True,
    surprises: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> list[TextScore]:
    """The score of each text, with its ``surprises`` most surprising tokens.

    ``with_end`` counts ``<eos>``, as training does. One batch holds at most ``batch_tokens`` positions, or one window.
    Raises `InputError` for numbers out of range, `IntegrityError` for losses that are not finite.
    """
    if surprises < 0 or batch_tokens < 1:
        raise InputError(f"surprises ({surprises}) must be at least 0 and batch_tokens ({batch_tokens}) at least 1")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    last = [tokenizer.eos_id] if with_end else []
    begin = opening_id(tokenizer)
    losses = token_losses_of(model, [[begin, *row, *last] for row in ids], batch_tokens=batch_tokens)
    return [
        _text_score(text, row, own, tokenizer, surprises) for text, row, own in zip(texts, ids, losses, strict=True)
    ]


def opening_id(tokenizer: Tokenizer) -> int:
    """The id that stands before the first token of a document."""
    return tokenizer.bos_id if tokenizer.add_bos else tokenizer.eos_id


@torch.no_grad()
def token_losses_of(
    model: CyberSLM, sequences: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS
) -> list[Tensor]:
    """Nats of every id but the first of each sequence, fp64 on the CPU."""
    losses = [torch.zeros(max(0, len(ids) - 1), dtype=torch.float64) for ids in sequences]
    windows = [
        _Window(number, *window)
        for number, ids in enumerate(sequences)
        for window in rolling_windows(len(ids) - 1, model.max_seq_len)
    ]
    windows.sort(key=lambda window: -window.length)
    with _evaluating(model):
        for batch in _batches(windows, batch_tokens):
            inputs = [list(sequences[w.row][w.start : w.stop]) for w in batch]
            features_BTD = model.features(*_padded(inputs, model.device))
            wanted = [range(w.fresh - w.start, w.length) for w in batch]
            found = _losses_at(model, features_BTD, wanted, [sequences[w.row][w.fresh + 1 : w.stop + 1] for w in batch])
            for window, own in zip(batch, found, strict=True):
                losses[window.row][window.fresh : window.stop] = own
    if not all(bool(own.isfinite().all()) for own in losses):
        raise IntegrityError(NOT_FINITE)
    return losses


def rolling_windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Windows (start, stop, fresh) over ``length`` inputs; each input is in ``fresh`` to ``stop`` of exactly one."""
    start = done = 0
    while done < length:
        stop = min(start + context, length)
        yield start, stop, done
        done, start = stop, start + max(1, context // 2)


@torch.no_grad()
def score_endings(
    model: CyberSLM, questions: Sequence[Sequence[Sequence[int]]], *, batch_tokens: int = BATCH_TOKENS
) -> list[list[EndingScore]]:
    """For each question, a list of id sequences that begin alike, the scores of what follows their common beginning.

    The beginning is computed once. Every ending has at least one id, so one sequence may begin another. Raises
    `InputError` for an empty question, a sequence of fewer than two ids and one that exceeds the context,
    `IntegrityError` for losses that are not finite.
    """
    asked = [_Question.of(sequences, model.max_seq_len) for sequences in questions]
    order = sorted(range(len(asked)), key=lambda number: -asked[number].size)
    answers: list[list[EndingScore]] = [[] for _ in asked]
    with _evaluating(model):
        while order:
            count = max(1, min(len(order), batch_tokens // asked[order[0]].size))
            batch, order = order[:count], order[count:]
            for number, scores in zip(batch, _endings(model, [asked[number] for number in batch]), strict=True):
                answers[number] = scores
    if not all(math.isfinite(score.loss_sum) for scores in answers for score in scores):
        raise IntegrityError(NOT_FINITE)
    return answers


class _Window(NamedTuple):
    row: int
    start: int
    stop: int
    fresh: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class _Question(NamedTuple):
    beginning: list[int]
    endings: list[list[int]]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], context: int) -> _Question:
        shortest, longest = min(map(len, sequences), default=0), max(map(len, sequences), default=0)
        if shortest < 2 or longest > context + 1:
            raise InputError(f"alternatives need 2 to {context + 1} tokens each, not {shortest} to {longest}")
        shared = 0
        while shared < shortest - 1 and len({ids[shared] for ids in sequences}) == 1:
            shared += 1
        if not shared:
            raise InputError("alternatives must begin with the same token")
        return cls(list(sequences[0][:shared]), [list(ids[shared:]) for ids in sequences])

    @property
    def size(self) -> int:
        """Positions that the question takes in the cache."""
        return sum(len(self.beginning) + len(ids) for ids in self.endings)


def _endings(model: CyberSLM, batch: Sequence[_Question]) -> list[list[EndingScore]]:
    capacities = [len(q.beginning) + max(map(len, q.endings)) - 1 for q in batch]
    cache = model.new_cache(len(batch), capacities)
    ids, real = _padded([q.beginning for q in batch], model.device)
    features_BTD = model.features(ids, real, cache=cache)
    ends = torch.tensor([len(q.beginning) - 1 for q in batch], device=model.device)
    last_BD = features_BTD[torch.arange(len(batch), device=model.device), ends]
    width = max(len(q.endings) for q in batch)
    firsts = torch.tensor([[e[0] for e in q.endings] + [0] * (width - len(q.endings)) for q in batch])
    head = _head(model)
    sums = token_losses(last_BD, head, firsts.to(model.device)).double().tolist()
    longer = [(row, at) for row, q in enumerate(batch) for at, ending in enumerate(q.endings) if len(ending) > 1]
    if longer:
        cache.keep([row for row, _ in longer])
        rests = [batch[row].endings[at] for row, at in longer]
        ids, more = _padded([rest[:-1] for rest in rests], model.device)
        before = torch.ones(len(batch), cache.columns, dtype=torch.bool) if real is None else real.cpu()
        after = torch.ones(ids.shape, dtype=torch.bool) if more is None else more.cpu()
        mask = torch.cat((before[[row for row, _ in longer]], after), dim=1).to(model.device)
        features_BTD = model.features(ids, mask, cache=cache)
        places = [range(len(rest) - 1) for rest in rests]
        for (row, at), own in zip(longer, _losses_at(model, features_BTD, places, [r[1:] for r in rests]), strict=True):
            sums[row][at] += float(own.sum())
    return [
        [EndingScore(sums[row][at], len(ending)) for at, ending in enumerate(q.endings)] for row, q in enumerate(batch)
    ]


def _losses_at(
    model: CyberSLM, features_BTD: Tensor, places: Sequence[range], targets: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """The losses of each row's targets after the inputs at its places, fp64 on the CPU."""
    rows = torch.tensor([row for row, span in enumerate(places) for _ in span], device=features_BTD.device)
    columns = torch.tensor([at for span in places for at in span], device=features_BTD.device)
    ids = torch.tensor([target for own in targets for target in own], device=features_BTD.device)
    losses = token_losses(features_BTD[rows, columns], _head(model), ids.unsqueeze(1))
    return losses.squeeze(1).double().cpu().split([len(own) for own in targets])


def _head(model: CyberSLM) -> Head:
    return Head(model.head_weight, model.config.logit_softcap)


def _batches(windows: Sequence[_Window], limit: int) -> Iterator[Sequence[_Window]]:
    """Runs of windows, the longest first, whose padded sizes fit ``limit``; never fewer than one."""
    first = 0
    while first < len(windows):
        count = max(1, limit // windows[first].length)
        yield windows[first : first + count]
        first += count


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids ``(B, T)`` padded on the right and the mask of what is real; None where all is."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    if all(len(row) == width for row in rows):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device) < lengths.unsqueeze(1)


@contextmanager
def _evaluating(model: CyberSLM) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _text_score(text: str, ids: Sequence[int], losses: Tensor, tokenizer: Tokenizer, surprises: int) -> TextScore:
    text = mend(text).text
    most: tuple[Surprise, ...] = ()
    if surprises and losses.numel():
        values, places = losses.topk(min(surprises, losses.numel()))
        spans = token_spans(text, ids, tokenizer)
        most = tuple(
            Surprise(value / math.log(2), *(spans[place] if spans else (None, None)))
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
        )
    worst = float(losses.max()) if losses.numel() else 0.0
    return TextScore(float(losses.sum()), losses.numel(), len(text.encode()), worst, most)


def token_spans(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """The characters of ``text`` that each id spells or is a part of, and the empty span behind the last.

    Empty where decoding the ids gives another text.
    """
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(token) for token in ids]
    rest = decoder.finish()
    if "".join(pieces) + rest != text:
        return []
    spans, at = [], 0
    for piece in pieces:
        end = at + len(piece)
        spans.append((at, min(max(end, at + 1), len(text))))
        at = end
    return [*spans, (len(text), len(text))]
