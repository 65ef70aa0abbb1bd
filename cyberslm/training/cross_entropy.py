"""Cross-entropy of a linear head that never holds the logits of more than a few rows, nor any in fp32.

Rows go through head, softmax and gradient one chunk after the other. Gradients that will be asked for, of features,
weight or both, are worked out at once, in the place of the chunk's own logits, so that nothing is computed twice (Hsu
et al. 2024, https://arxiv.org/abs/2410.10989). With logits z, their log normaliser s and the target y of a row:

    loss = s - z_y    penalty = w s^2    d(loss + penalty)/dz = (1 + 2 w s) softmax(z) - onehot(y)

Products are in the dtype that autocast asks for, else in that of the features; softmax, losses and the sum of the
weight's gradient over chunks are at least fp32.

Letters: N rows, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cyberslm.model.norm import at_least_fp32

CHUNK = 1 << 25
"""Logits held at once."""
PIECE = 1 << 20
"""Logits whose softmax a CPU works on at once: they stay in its caches."""


class Head(NamedTuple):
    """What turns features into logits, and what is asked of them."""

    weight_VD: Tensor
    softcap: float | None = None
    """Logits are ``softcap * tanh(z / softcap)``."""
    z_loss: float = 0.0


class Sums(NamedTuple):
    """``objective``, loss plus penalty, can be differentiated; ``loss``, in nats, is for reports."""

    objective: Tensor
    loss: Tensor


def linear_cross_entropy(features_ND: Tensor, head: Head, targets_N: Tensor, *, ignore: int) -> Sums:
    """Sums over the rows whose int64 target isn't ``ignore``."""
    device = features_ND.device.type
    if torch.is_autocast_enabled(device):
        features_ND = features_ND.to(torch.get_autocast_dtype(device))
    trained_N = targets_N != ignore
    if device == "cpu" and not trained_N.all():  # elsewhere the host would wait for the device
        features_ND, targets_N, trained_N = (t[trained_N] for t in (features_ND, targets_N, trained_N))
    return Sums(*_Loss.apply(features_ND, head.weight_VD, targets_N.clamp(min=0), trained_N, head))


@torch.no_grad()
def token_losses(features_ND: Tensor, head: Head, ids_NK: Tensor) -> Tensor:
    """The loss ``(N, K)`` in nats of each of the K ids that may follow a row, at least fp32 and without a gradient."""
    wide, cast = at_least_fp32(features_ND.dtype), head.weight_VD.to(features_ND.dtype)
    losses = torch.empty(ids_NK.shape, dtype=wide, device=features_ND.device)
    size, rows = (max(1, limit // cast.shape[0]) for limit in (PIECE, CHUNK))
    for features, ids, found in zip(*(t.split(rows) for t in (features_ND, ids_NK, losses)), strict=True):
        logits = features @ cast.mT
        for part, own, out in zip(*(t.split(size) for t in (logits, ids, found)), strict=True):
            bent = part.to(wide)
            if head.softcap is not None:
                bent = head.softcap * (bent / head.softcap).tanh_()
            out.copy_(_normaliser(bent, bent.softmax(-1)).unsqueeze(1) - bent.gather(1, own))
    return losses


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, trained: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        wide, cast = at_least_fp32(features.dtype), weight.to(features.dtype)
        learns = any(ctx.needs_input_grad)
        d_features = torch.empty_like(features) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        sums = torch.zeros(2, dtype=wide, device=features.device)
        rows = max(1, CHUNK // weight.shape[0])
        size = rows if features.device.type != "cpu" else max(1, PIECE // weight.shape[0])
        for chunk in (slice(first, first + rows) for first in range(0, features.shape[0], rows)):
            logits = features[chunk] @ cast.mT
            pieces = (t.split(size) for t in (logits, targets[chunk], trained[chunk]))
            for piece, ids, known in zip(*pieces, strict=True):
                sums += _piece(piece, ids, known, head, learns=learns)
            if d_features is not None:
                d_features[chunk] = logits @ cast
            if d_weight is not None:
                d_weight += logits.mT @ features[chunk]
        ctx.save_for_backward(d_features, d_weight)
        objective, loss = sums.unbind()
        ctx.mark_non_differentiable(loss)
        return objective, loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_features, d_weight = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return d_features, d_weight, None, None, None


def _normaliser(logits: Tensor, softmax: Tensor) -> Tensor:
    """The log of each row's sum of exponentials, by its likeliest id, whose share is at least 1 / V."""
    return logits.amax(-1) - softmax.amax(-1).log()


def _piece(logits: Tensor, ids: Tensor, trained: Tensor, head: Head, *, learns: bool) -> Tensor:
    """Objective and loss of the rows; if it ``learns`` the logits are overwritten by the objective's gradient."""
    wide = logits.to(at_least_fp32(logits.dtype))
    bent = None if head.softcap is None else (wide / head.softcap).tanh_()
    if bent is not None and head.softcap is not None:
        wide = bent * head.softcap
    targets, softmax = ids.unsqueeze(1), wide.softmax(-1)
    normaliser = _normaliser(wide, softmax)
    loss = ((normaliser - wide.gather(1, targets).squeeze(1)) * trained).sum()
    penalty = head.z_loss * (normaliser.square() * trained).sum()
    if learns:
        if head.z_loss:
            softmax *= (1 + 2 * head.z_loss * normaliser).unsqueeze(1)
        softmax.scatter_(1, targets, softmax.gather(1, targets) - 1)
        if bent is not None:
            softmax *= 1 - bent.square()
        logits.copy_(softmax)
        if logits.device.type != "cpu":
            logits *= trained.unsqueeze(1)
    return torch.stack((loss + penalty, loss))
