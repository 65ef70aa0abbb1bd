"""Slow, obvious truths that every fast path must equal."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm.decoding.sampling import SamplingParams
from cyberslm.model.attention import MultiHeadSelfAttention


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """One query at a time, in float64: ``q`` (B, H, T, E), ``k`` and ``v`` (B, K, S, E), ``allowed`` bool (B, T, S)."""
    batch, heads, queries, width = q.shape
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = (t[b, h * t.shape[1] // heads].double() for t in (k, v))
            for t in range(queries):
                seen = [s for s in range(keys.shape[0]) if allowed[b, t, s]]
                if not seen:
                    continue
                factor = 1 / math.sqrt(width) if scale is None else scale
                scores = torch.stack([q[b, h, t].double() @ keys[s] * factor for s in seen])
                for weight, s in zip(torch.softmax(scores, 0), seen, strict=True):
                    out[b, h, t] += weight * values[s]
    return out


def rule(real: Tensor, docs: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """What each token sees, bool (B, T, T), and its position (B, T): token by token, from the rule's words."""
    batch, tokens = real.shape
    allowed = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
    positions = torch.zeros(batch, tokens, dtype=torch.int64)
    for b in range(batch):
        for t in range(tokens):
            if not real[b, t]:
                continue
            mates = [s for s in range(t + 1) if real[b, s] and docs[b, s] == docs[b, t]]
            positions[b, t] = len(mates) - 1
            for s in mates[-window:] if window else mates:
                allowed[b, t, s] = True
    return allowed, positions


@torch.no_grad()
def self_attention(layer: MultiHeadSelfAttention, x: Tensor, real: Tensor, docs: Tensor) -> Tensor:
    """The layer by `rule`, `rope` and `attention`, in float64."""
    allowed, positions = rule(real, docs, layer.window)
    layer = copy.deepcopy(layer).double()
    x = x.double()
    q = layer.q_proj(x).unflatten(-1, (layer.num_heads, -1))
    k = layer.k_proj(x).unflatten(-1, (layer.kv_heads, -1))
    v = layer.v_proj(x).unflatten(-1, (layer.kv_heads, -1))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    turned = [torch.zeros_like(t) for t in (q, k)]
    for out, t in zip(turned, (q, k), strict=True):
        for b in range(x.shape[0]):
            for h in range(t.shape[2]):
                out[b, :, h] = rope(
                    t[b, :, h], positions[b].tolist(), layer.rope.base, interleaved=layer.rope.interleaved
                )
    q, k, v = (t.transpose(1, 2) for t in (*turned, v))
    mixed = attention(q, k, v, allowed, layer.scale).transpose(1, 2).flatten(-2)
    return layer.o_proj(mixed).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def rope(x: Tensor, positions: Sequence[int], base: float, *, interleaved: bool = False) -> Tensor:
    """Rotate ``x`` (T, E) as complex numbers made of the two halves, or of neighbours, in float64."""
    half = x.shape[-1] // 2
    out = x.double().clone()
    for t, position in enumerate(positions):
        for i in range(half):
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = position * base ** (-2 * i / x.shape[-1])
            a, b = float(x[t, one]), float(x[t, other])
            out[t, one] = a * math.cos(angle) - b * math.sin(angle)
            out[t, other] = a * math.sin(angle) + b * math.cos(angle)
    return out


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: Sequence[int], new: int, stop: int | None = None) -> list[int]:
    """Feed the whole sequence anew for every token; no cache, no batch."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == stop:
            break
    return ids[len(prompt) :]


def cross_entropy(logits: Tensor, targets: Tensor, ignore: int = -100) -> tuple[float, int]:
    """Sum over tokens of -log softmax, one token at a time in Python floats; and how many counted."""
    total, count = 0.0, 0
    for row, target in zip(logits.reshape(-1, logits.shape[-1]).tolist(), targets.flatten().tolist(), strict=True):
        if target != ignore:
            top = max(row)
            total += top + math.log(sum(math.exp(value - top) for value in row)) - row[target]
            count += 1
    return total, count


def best_fit_decreasing(sizes: Sequence[int], room: int) -> list[list[int]]:
    """The items of each row: the largest first, each into the row with the least room that takes it."""
    rows: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= room]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            rows.append([size])
    return rows


def filtered(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """What the filters leave of one row's logits, number by number in the order that they state; -inf = hidden."""
    values = [value + params.logit_bias.get(i, 0.0) for i, value in enumerate(logits)]
    everything, n = [*prompt, *answer], params.no_repeat_ngram
    for i in range(len(values)):
        if i in everything:
            values[i] *= params.repetition_penalty if values[i] < 0 else 1 / params.repetition_penalty
        values[i] -= params.presence_penalty * (i in answer) + params.frequency_penalty * list(answer).count(i)
        grown = [*everything, i]
        if n and len(grown) > n and any(grown[j : j + n] == grown[-n:] for j in range(len(grown) - n)):
            values[i] = -math.inf
    if params.greedy:
        return values
    values = [value / params.temperature for value in values]
    if params.top_k:
        values = _at_least(values, values, sorted(values)[-min(params.top_k, len(values))])
    if params.top_p < 1:
        values = _reaching(values, _probabilities(values), params.top_p)
    if params.min_p:
        probs = _probabilities(values)
        values = _at_least(values, probs, params.min_p * max(probs))
    if params.typical_p < 1:
        probs = _probabilities(values)
        entropy = -sum(p * math.log(p) for p in probs if p)
        values = _reaching(values, [-abs(-math.log(p) - entropy) if p else -math.inf for p in probs], params.typical_p)
    return values


def _probabilities(values: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def _at_least(values: Sequence[float], measures: Sequence[float], least: float) -> list[float]:
    return [value if measure >= least else -math.inf for value, measure in zip(values, measures, strict=True)]


def _reaching(values: Sequence[float], measures: Sequence[float], share: float) -> list[float]:
    """Those of the highest measure whose probabilities reach ``share``, with all that tie with the last of them."""
    probs, total, least = _probabilities(values), 0.0, math.inf
    for i in sorted(range(len(values)), key=lambda i: -measures[i]):
        if total >= share:
            break
        total, least = total + probs[i], measures[i]
    return _at_least(values, measures, least)


LogitsOf = Callable[[list[int]], Tensor]


class Answer(NamedTuple):
    ids: tuple[int, ...]
    score: float


def every_answer(
    logits_of: LogitsOf, prompt: Sequence[int], budget: int, stop: int, length_penalty: float
) -> list[Answer]:
    """All answers to a prompt, the best first: sum of log-probabilities over length to the power."""
    found: list[Answer] = []

    def go_on(ids: list[int], total: float) -> None:
        for token, logprob in enumerate(logits_of([*prompt, *ids]).double().log_softmax(-1).tolist()):
            grown, reached = [*ids, token], total + logprob
            if token == stop or len(grown) == budget:
                found.append(Answer(tuple(grown), reached / len(grown) ** length_penalty))
            else:
                go_on(grown, reached)

    go_on([], 0.0)
    return sorted(found, key=lambda answer: -answer.score)


def beams(
    logits_of: LogitsOf, prompt: Sequence[int], budget: int, stop: int, width: int, length_penalty: float
) -> list[Answer]:
    """Beam search without a cache and without ending early, the best answer first."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    found: list[Answer] = []
    for _ in range(budget):
        grown: list[tuple[list[int], float]] = []
        for ids, total in live:
            for token, logprob in enumerate(logits_of([*prompt, *ids]).double().log_softmax(-1).tolist()):
                entry = ([*ids, token], total + logprob)
                if token == stop:
                    found.append(Answer(tuple(entry[0]), entry[1] / len(entry[0]) ** length_penalty))
                else:
                    grown.append(entry)
        live = sorted(grown, key=lambda entry: -entry[1])[:width]
    found += [Answer(tuple(ids), total / len(ids) ** length_penalty) for ids, total in live]
    return sorted(found, key=lambda answer: -answer.score)


@torch.no_grad()
def sliding_greedy(model: torch.nn.Module, prompt: Sequence[int], new: int, context: int, sinks: int) -> list[int]:
    """Greedy ids of a text whose full context gives up a quarter, all but its first tokens and the latest."""
    seen, answer = list(prompt), []
    for _ in range(new):
        if len(seen) > context:
            seen = seen[:sinks] + seen[len(seen) - (context - max(1, context // 4) - sinks) :]
        answer.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
        seen.append(answer[-1])
    return answer
