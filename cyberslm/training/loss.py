"""Loss modules: a model and a batch in, a *sum* over trained tokens and their number out.

Sums travel, means don't: they are divided once, by the number of trained tokens of the whole optimizer step. The loss
is cross-entropy in fp32 whatever the dtype of the logits. `measure` runs a loss over a validation split and adds the
UTF-8 bytes of the targets, which turn the sum into bits per byte, a figure that doesn't depend on the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.model.model import CyberSLM


class LossOutput(NamedTuple):
    """Sums over ``num_tokens`` trained tokens: the loss, in nats, and a penalty that is trained but not reported."""

    loss_sum: Tensor
    num_tokens: Tensor
    penalty_sum: Tensor | float = 0.0


Loss = Callable[[CyberSLM, Batch], LossOutput]


def next_token_loss(model: CyberSLM, batch: Batch, *, z_loss: float = 0.0) -> LossOutput:
    """Cross-entropy of each row's next tokens; targets `IGNORE` don't count.

    The penalty is ``z_loss`` times the square of each softmax's log normaliser, which keeps logits from drifting
    (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5).
    """
    logits_NV, targets_N = model(batch.input_ids).float().flatten(0, 1), batch.targets.flatten()
    loss = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
    trained_N = targets_N != IGNORE
    if not z_loss:
        return LossOutput(loss, trained_N.sum())
    return LossOutput(loss, trained_N.sum(), z_loss * logits_NV.logsumexp(-1)[trained_N].square().sum())


@dataclass(frozen=True)
class Score:
    """A loss summed over ``num_tokens`` targets that spell ``num_bytes`` bytes of text."""

    loss_sum: float
    num_tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / max(1, self.num_tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.loss_sum / math.log(2) / max(1, self.num_bytes)


@torch.no_grad()
def measure(model: CyberSLM, batches: Iterable[Batch], bytes_per_id: Tensor, loss: Loss = next_token_loss) -> Score:
    """Score the batches in evaluation mode; the model's mode and the random state stay as they were.

    ``bytes_per_id`` ``(V,)`` is the UTF-8 length of every id's text, 0 for control ids.
    """
    was_training = model.training
    model.eval()
    loss_sum, num_tokens, num_bytes = 0.0, 0, 0
    try:
        for batch in batches:
            output = loss(model, batch)
            loss_sum += output.loss_sum.item()
            num_tokens += int(output.num_tokens)
            num_bytes += int(bytes_per_id[batch.targets[batch.targets != IGNORE].cpu()].sum())
    finally:
        model.train(was_training)
    return Score(loss_sum, num_tokens, num_bytes)
