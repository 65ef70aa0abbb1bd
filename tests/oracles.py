"""Slow, obvious truths that every fast path must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """One query at a time, in float64: ``q`` (B, H, T, E), ``k`` and ``v`` (B, K, S, E), ``allowed`` bool (B, T, S)."""
    batch, heads, queries, width = q.shape
    out = torch.zeros(batch, heads, queries, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = (t[b, h * t.shape[1] // heads].double() for t in (k, v))
            for t in range(queries):
                seen = [s for s in range(keys.shape[0]) if allowed[b, t, s]]
                if not seen:
                    continue
                scores = torch.stack([q[b, h, t].double() @ keys[s] / math.sqrt(width) for s in seen])
                for weight, s in zip(torch.softmax(scores, 0), seen, strict=True):
                    out[b, h, t] += weight * values[s]
    return out


def rope(x: Tensor, positions: Sequence[int], base: float) -> Tensor:
    """Rotate ``x`` (T, E) as complex numbers made of the two halves, in float64."""
    half = x.shape[-1] // 2
    out = x.double().clone()
    for t, position in enumerate(positions):
        for i in range(half):
            angle = position * base ** (-2 * i / x.shape[-1])
            a, b = float(x[t, i]), float(x[t, i + half])
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + half] = a * math.sin(angle) + b * math.cos(angle)
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
