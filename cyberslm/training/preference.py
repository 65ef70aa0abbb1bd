"""Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) as a loss module.

A row holds pairs of documents, a prompt with its chosen and with its rejected answer, that don't see each other. With
the log-probability l of an answer and that under the model before, r:

    margin = beta ((l - r) of the chosen - (l - r) of the rejected)
    loss   = -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)        s: share of pairs thought to be the wrong way

Losses are summed over pairs and divided once by the number of pairs in the whole optimizer step. The log-probabilities
r come with the batch, worked out once before training (`answer_log_probs`): one model is in memory, not two.

Letters: N trained tokens, B rows, D documents of a row, P pairs of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.errors import ConfigError, InputError
from cyberslm.model.model import CyberSLM
from cyberslm.training.cross_entropy import rows_at_once
from cyberslm.training.loss import LossOutput


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Learning which of two answers is better, by DPO."""

    beta: float = 0.1
    """How closely the model stays to its base: higher is closer."""
    label_smoothing: float = 0.0
    """Share of the pairs, from 0 to below 0.5, that may be labelled the wrong way round."""
    length: Literal["sum", "mean"] = "sum"
    """What an answer's log-probability is: the sum of its tokens', or their mean, which favours no length."""

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1e3:
            raise ConfigError(f"beta must be above 0 and at most 1000, not {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing must be at least 0 and below 0.5, not {self.label_smoothing}")


class Answers(NamedTuple):
    """Summed log-probability and number of trained tokens of each document, (B, D)."""

    log_probs_BD: Tensor
    tokens_BD: Tensor


def preference_loss(model: CyberSLM, batch: Batch, *, config: PreferenceConfig) -> LossOutput:
    """The loss over the pairs of a batch with ``docs`` and ``reference``; one without trained tokens doesn't count."""
    if batch.reference is None:
        raise InputError("a batch to learn preferences from needs the base's log-probabilities (reference)")
    log_probs_BD, tokens_BD = answer_log_probs(model, batch, documents=batch.reference.shape[1])
    gained_BD = log_probs_BD - batch.reference.to(log_probs_BD.dtype)
    if config.length == "mean":
        gained_BD = gained_BD / tokens_BD.clamp(min=1)
    there_BP = (tokens_BD.unflatten(1, (-1, 2)) > 0).all(-1)
    margins = config.beta * (gained_BD[:, ::2] - gained_BD[:, 1::2])[there_BP]
    smooth = config.label_smoothing
    losses = -(1 - smooth) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)
    nats = -log_probs_BD[:, ::2][there_BP].sum()
    seen = torch.stack((margins.sum(), (margins > 0).sum().to(margins.dtype), nats)).detach()
    return LossOutput(losses.sum(), losses.sum().detach(), there_BP.sum(), seen)


def answer_log_probs(model: CyberSLM, batch: Batch, *, documents: int) -> Answers:
    """What the trained tokens of each document of a row get, of at most ``documents``, in fp32."""
    if batch.docs is None:
        raise InputError("pairs of documents need rows in which documents are isolated")
    trained_BT = batch.targets != IGNORE
    features_BTD = model.features(batch.input_ids, docs=batch.docs)
    losses_N = _token_losses(
        features_BTD[trained_BT], model.head_weight, batch.targets[trained_BT], model.config.logit_softcap
    )
    rows = torch.arange(batch.docs.shape[0], device=batch.docs.device).unsqueeze(1)
    place_N = (rows * documents + batch.docs)[trained_BT]
    empty = torch.zeros(batch.docs.shape[0] * documents, dtype=losses_N.dtype, device=losses_N.device)
    sums = empty.index_add(0, place_N, -losses_N).view(-1, documents)
    counts = torch.zeros_like(empty).index_add(0, place_N, torch.ones_like(losses_N)).view(-1, documents)
    return Answers(sums, counts)


def count_pairs(batch: Batch) -> int:
    """Pairs of a batch that have something to learn in both answers."""
    if batch.docs is None:
        return 0
    trained = (batch.targets != IGNORE).nonzero()
    found = {(row, int(batch.docs[row, place])) for row, place in trained.tolist()}
    return sum((row, document + 1) in found for row, document in found if document % 2 == 0)


def _token_losses(features_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None) -> Tensor:
    """Cross-entropy of each row in at least fp32; logits are made chunk by chunk, and again going backward."""
    rows = rows_at_once(weight_VD.shape[0])
    pieces = [
        checkpoint(_chunk_losses, features, weight_VD, targets, softcap, use_reentrant=False)
        for features, targets in zip(features_ND.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat(pieces)


def _chunk_losses(features_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None) -> Tensor:
    logits_NV = F.linear(features_ND, weight_VD)
    logits_NV = logits_NV.float() if logits_NV.dtype != torch.float64 else logits_NV
    if softcap is not None:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    return F.cross_entropy(logits_NV, targets_N, reduction="none")
