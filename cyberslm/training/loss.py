"""Loss modules: a model and a batch in, a *sum* over trained tokens and their number out.

Sums travel, means don't: they are divided once, by the number of trained tokens of the whole optimizer step. The loss
is cross-entropy in fp32 whatever the dtype of the logits. `measure` runs a loss over a validation split and adds the
UTF-8 bytes of the targets, which turn the sum into bits per byte, a figure that doesn't depend on the tokenizer.
Documents that a batch numbers don't see each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.model.model import CyberSLM
from cyberslm.training.cross_entropy import Head, linear_cross_entropy


class LossOutput(NamedTuple):
    """Sums over ``num_tokens`` trained tokens: what is minimised, and the loss in nats that is reported."""

    objective: Tensor
    loss_sum: Tensor
    num_tokens: Tensor
    pairs: Tensor | None = None
    """Where pairs are trained and counted in place of tokens: the sum of their margins, how many are ranked right, and
    the nats of the chosen answers."""


Loss = Callable[[CyberSLM, Batch], LossOutput]


def next_token_loss(model: CyberSLM, batch: Batch, *, z_loss: float = 0.0) -> LossOutput:
    """Cross-entropy of each row's next tokens; targets `IGNORE` don't count.

    The objective adds ``z_loss`` times the square of each softmax's log normaliser, which keeps logits from drifting
    (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5).
    """
    features_ND = model.features(batch.input_ids, docs=batch.docs).flatten(0, 1)
    head = Head(model.head_weight, model.config.logit_softcap, z_loss)
    targets_N = batch.targets.flatten()
    sums = linear_cross_entropy(features_ND, head, targets_N, ignore=IGNORE, native=model.native)
    return LossOutput(*sums, (targets_N != IGNORE).sum())


@dataclass(frozen=True)
class Score:
    """A loss summed over ``num_tokens`` targets that spell ``num_bytes`` bytes of text.

    ``by_source`` has the parts of the sources by name, where a split has several.
    """

    loss_sum: float
    num_tokens: int
    num_bytes: int
    by_source: Mapping[str, Score] = field(default_factory=dict)
    pairs: tuple[float, float, float] | None = None
    """As `LossOutput.pairs`; ``num_tokens`` is then the number of pairs, ``num_bytes`` counts the chosen answers."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / max(1, self.num_tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Of the trained text; where pairs are trained, of the chosen answers."""
        nats = self.loss_sum if self.pairs is None else self.pairs[2]
        return nats / math.log(2) / max(1, self.num_bytes)

    @property
    def ranking(self) -> dict[str, float]:
        """Mean margin, and share of the pairs that are ranked right, where pairs are trained."""
        if self.pairs is None:
            return {}
        return ranking(self.pairs, self.num_tokens)

    def figures(self) -> dict[str, object]:
        """What a manifest keeps."""
        return {"loss": self.loss, "bits_per_byte": self.bits_per_byte, **self.ranking}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Score:
        parts = {name: cls.from_json(part) for name, part in value["by_source"].items()}
        pairs = None if value["pairs"] is None else tuple(value["pairs"])
        return cls(**{**value, "by_source": parts, "pairs": pairs})


def ranking(pairs: Sequence[float], count: int) -> dict[str, float]:
    """What ``LossOutput.pairs`` of ``count`` pairs says."""
    return {"reward_margin": pairs[0] / max(1, count), "accuracy": pairs[1] / max(1, count)}


def join(scores: Iterable[Score]) -> Score:
    """The score of all that the scores are of."""
    each = list(scores)
    names = dict.fromkeys(name for score in each for name in score.by_source)
    parts = {name: join(score.by_source[name] for score in each if name in score.by_source) for name in names}
    loss_sum, num_tokens, num_bytes = (
        sum(getattr(score, name) for score in each) for name in ("loss_sum", "num_tokens", "num_bytes")
    )
    pairs = [score.pairs for score in each if score.pairs is not None]
    summed = tuple(map(sum, zip(*pairs, strict=True))) if pairs else None
    return Score(loss_sum, num_tokens, num_bytes, parts, cast("tuple[float, float, float] | None", summed))


@torch.no_grad()
def measure(
    model: CyberSLM,
    batches: Iterable[Batch],
    bytes_per_id: Tensor,
    loss: Loss = next_token_loss,
    *,
    name: Callable[[int], str] = str,
) -> Score:
    """Score the batches in evaluation mode; the model's mode and the random state stay as they were.

    ``bytes_per_id`` ``(V,)`` is the UTF-8 length of every id's text, 0 for control ids. Batches that number the sources
    of their targets are scored by source too, under each one's ``name``; one with several takes a pass for each.
    """
    was_training = model.training
    model.eval()
    total, parts = _Sums(), defaultdict[str, _Sums](_Sums)
    try:
        for batch in (found.to(model.device) for found in batches):
            output = loss(model, batch)
            total.add(output, batch, bytes_per_id)
            for source, part in _by_source(batch):
                own = output if part is batch else loss(model, part)
                parts[name(source)].add(own, part, bytes_per_id)
    finally:
        model.train(was_training)
    return total.score({source: sums.score() for source, sums in parts.items()})


@dataclass
class _Sums:
    loss_sum: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    pairs: tuple[float, ...] | None = None

    def add(self, output: LossOutput, batch: Batch, bytes_per_id: Tensor) -> None:
        self.loss_sum += output.loss_sum.item()
        self.num_tokens += int(output.num_tokens)
        counted = batch.targets != IGNORE
        if output.pairs is not None and batch.docs is not None:
            counted &= batch.docs % 2 == 0
            self.pairs = tuple(map(sum, zip(self.pairs or (0.0, 0.0, 0.0), output.pairs.tolist(), strict=True)))
        self.num_bytes += int(bytes_per_id[batch.targets[counted].cpu()].sum())

    def score(self, by_source: Mapping[str, Score] | None = None) -> Score:
        pairs = cast("tuple[float, float, float] | None", self.pairs)
        return Score(self.loss_sum, self.num_tokens, self.num_bytes, by_source or {}, pairs)


def count_targets(batch: Batch) -> int:
    """The trained tokens of a batch."""
    return int((batch.targets != IGNORE).sum())


def _by_source(batch: Batch) -> Iterator[tuple[int, Batch]]:
    """Each source that has targets in the batch, with the batch in which only those count."""
    if batch.sources is None:
        return
    found = batch.sources[batch.targets != IGNORE].unique().tolist()
    for source in found:
        alone = batch._replace(targets=batch.targets.masked_fill(batch.sources != source, IGNORE))
        yield source, batch if len(found) == 1 else alone
