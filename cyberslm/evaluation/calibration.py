"""From scores to probabilities that mean what they say: one temperature and one bias for each label.

    p(label | scores) = softmax(scores / temperature + bias)

Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599) with biases, which is logistic regression on
the scores with one slope (Platt 1999). It is fitted in fp64 by L-BFGS from a fixed start under a weak normal prior, so
that it is the same each time and finite where the labels can be told apart perfectly. What it is worth is measured on
records that it was not fitted on (cross-validation), with the uncertainty of so few of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm.errors import DataError

FOLDS = 5
BINS = 10
MIN_EXAMPLES = 20
THRESHOLDS = tuple(number / 20 for number in range(20))
PRIOR_STD = 3.0
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Calibration:
    """What is done to scores ``(N, L)`` before the softmax over labels; as it is made, nothing."""

    temperature: float = 1.0
    bias: tuple[float, ...] = ()

    def probabilities(self, scores_NL: Tensor) -> Tensor:
        """``(N, L)``, fp64."""
        scaled = scores_NL.double() / self.temperature
        if self.bias:
            scaled = scaled + torch.tensor(self.bias, dtype=torch.float64)
        return scaled.softmax(-1)


class Kept(NamedTuple):
    """What is left when answers under ``threshold`` are withheld."""

    threshold: float
    share: float
    accuracy: float | None
    """None where nothing is left."""


@dataclass(frozen=True)
class Report:
    """How good probabilities are on labelled records."""

    examples: int
    accuracy: float
    interval: tuple[float, float]
    """95 % confidence interval of the accuracy (Wilson)."""
    calibration_error: float
    """Expected calibration error: mean distance of confidence and accuracy over ten bins of equal width."""
    commonest: float
    """Accuracy of always giving the commonest label."""
    abstention: tuple[Kept, ...]


def fit(scores_NL: Tensor, labels: Sequence[int]) -> Calibration:
    """The temperature and biases under which the labels are likeliest."""
    scores = scores_NL.double() - scores_NL.double().mean(-1, keepdim=True)
    unit = max(float(scores.std()), 1e-6)
    scores = scores / unit
    targets = torch.tensor(labels)
    slope = torch.zeros((), dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(scores.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [slope, bias], max_iter=200, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        fits = torch.nn.functional.cross_entropy(scores * slope.exp() + bias, targets, reduction="sum")
        value = (fits + (slope.square() + bias.square().sum()) / (2 * PRIOR_STD**2)) / len(labels)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = bias.detach() - bias.detach().mean()
    return Calibration(unit / math.exp(slope.item()), tuple(found.tolist()))


def cross_validated(scores_NL: Tensor, labels: Sequence[int]) -> Tensor:
    """Probabilities ``(N, L)`` of each record by a calibration fitted on the folds that it is not in.

    Raises `DataError` for too few examples.
    """
    if len(labels) < MIN_EXAMPLES:
        raise DataError(f"{len(labels)} labelled records; calibration needs at least {MIN_EXAMPLES}")
    fold = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) % FOLDS
    found = torch.empty(scores_NL.shape, dtype=torch.float64)
    for number in range(FOLDS):
        others = fold != number
        fitted = fit(scores_NL[others], [label for label, other in zip(labels, others.tolist(), strict=True) if other])
        found[~others] = fitted.probabilities(scores_NL[~others])
    return found


def report(probabilities_NL: Tensor, labels: Sequence[int]) -> Report:
    """Accuracy with its interval, calibration error, and what abstaining would bring."""
    targets = torch.tensor(labels)
    confidence, chosen = probabilities_NL.max(-1)
    right = chosen == targets
    hits, total = int(right.sum()), len(labels)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = [
        abs(float(confidence[here].sum()) - int(right[here].sum()))
        for number in range(BINS)
        if (here := bins == number).any()
    ]
    kept = []
    for threshold in THRESHOLDS:
        left = confidence >= threshold
        number = int(left.sum())
        kept.append(Kept(threshold, number / total, int(right[left].sum()) / number if number else None))
    commonest = int(targets.bincount().max()) / total
    return Report(total, hits / total, wilson(hits, total), sum(gaps) / total, commonest, tuple(kept))


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), which is sound for few records and for shares near 0 and 1."""
    share, z2 = hits / total, Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)
