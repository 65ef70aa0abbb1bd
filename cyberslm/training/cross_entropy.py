"""Cross-entropy of a linear head that never holds the logits of more than a few rows, nor any in fp32.

Rows go through head, softmax and gradient one chunk after the other. Gradients that will be asked for, of features,
weight or both, are worked out at once, in the place of the chunk's own logits, so that nothing is computed twice (Hsu
et al. 2024, https://arxiv.org/abs/2410.10989). With logits z, their log normaliser s and the target y of a row:

    loss = s - z_y    penalty = w s^2    d(loss + penalty)/dz = (1 + 2 w s) softmax(z) - onehot(y)

Products are in the dtype that autocast asks for, else in that of the features; softmax, losses and the sum of the
weight's gradient over chunks are at least fp32. In fp16 most of a softmax's gradient would be 0: there it is held times
`GAIN`, which is taken back where sums are fp32 and on the way back; features are made smaller by the number of rows
that are summed over, so that their sum stays in range.

Letters: N rows, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cyberslm.model.norm import at_least_fp32
from cyberslm.training import native as in_cpp

CHUNK = 1 << 25
"""Most logits held at once."""
PIECE = 1 << 20
"""Numbers that a CPU works on at once in torch's operators: they stay in its inner caches."""


GAIN = 2.0**10
"""What gradients of logits are multiplied by in fp16: 1e-10 is not yet 0, and 1 is far below the largest number."""
FP16_ROWS = 1 << 12
"""Most rows to sum over in fp16, which ends at 65,504: the smaller features have digits left."""


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


def linear_cross_entropy(
    features_ND: Tensor, head: Head, targets_N: Tensor, *, ignore: int, native: bool = False
) -> Sums:
    """Sums over the rows whose int64 target isn't ``ignore``; ``native``: by the library in C++ where it fits."""
    device = features_ND.device.type
    if torch.is_autocast_enabled(device):
        features_ND = features_ND.to(torch.get_autocast_dtype(device))
    trained_N = targets_N != ignore
    if device == "cpu" and not trained_N.all():  # elsewhere the host would wait for the device
        features_ND, targets_N, trained_N = (t[trained_N] for t in (features_ND, targets_N, trained_N))
    rows = _Rows(targets_N.clamp(min=0), trained_N)
    return Sums(*_Loss.apply(features_ND, head.weight_VD, rows, head, native))


def rows_at_once(vocabulary: int) -> int:
    """Rows whose logits are held at once: a power of two, as others make a CPU's products up to a third slower."""
    return 1 << max(1, CHUNK // vocabulary).bit_length() - 1


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


class _Rows(NamedTuple):
    targets: Tensor
    trained: Tensor
    """On a CPU, all of them."""

    def part(self, which: slice) -> _Rows:
        return _Rows(self.targets[which], self.trained[which])


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        rows: _Rows,
        head: Head,
        native: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor]:
        wide, cast = at_least_fp32(features.dtype), weight.to(features.dtype)
        d_features = torch.empty_like(features) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        sums = torch.zeros(2, dtype=wide, device=features.device)
        ctx.gain = GAIN if features.dtype == torch.float16 else 1.0
        gain = ctx.gain if any(ctx.needs_input_grad) else None
        size = rows_at_once(len(weight))
        size = size if ctx.gain == 1.0 else min(size, FP16_ROWS)
        room = features.new_empty(min(size, len(features)), len(weight))
        for chunk in (slice(first, first + size) for first in range(0, len(features), size)):
            own = features[chunk]
            logits = torch.mm(own, cast.mT, out=room[: len(own)])
            sums += _losses(logits, rows.part(chunk), head, gain=gain, native=native)
            if d_features is not None:
                torch.mm(logits, cast, out=d_features[chunk])
            if d_weight is not None:
                _add_product(d_weight, logits, own, ctx.gain)
        ctx.save_for_backward(d_features, d_weight)
        objective, loss = sums.unbind()
        ctx.mark_non_differentiable(loss)
        return objective, loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_features, d_weight = ctx.saved_tensors  # multiplied in place: a second pass over one loss is torch's error
        return (
            None if d_features is None else d_features.mul_(grads[0] / ctx.gain),
            None if d_weight is None else d_weight.mul_(grads[0]),
            None,
            None,
            None,
        )


def _add_product(d_weight: Tensor, slopes: Tensor, features: Tensor, gain: float) -> None:
    """Add what a chunk teaches the weight; on a CPU part by part, so that products are added while in its caches."""
    small = 1.0 if gain == 1.0 else 4 / (1 << len(features).bit_length())
    features = features if small == 1.0 else features * small
    size = len(d_weight) if features.device.type != "cpu" else max(1, PIECE // features.shape[1])
    for own, part in zip(d_weight.split(size), slopes.split(size, dim=1), strict=True):
        own.add_(part.mT @ features, alpha=1 / (gain * small))


def _losses(logits: Tensor, rows: _Rows, head: Head, *, gain: float | None, native: bool) -> Tensor:
    """Objective and loss of the rows; with a ``gain``, logits are overwritten by the objective's gradient times it."""
    if native and in_cpp.takes(logits):
        learns, (_, softcap, z_loss) = gain is not None, head
        loss, penalty = in_cpp.softmax_loss(logits, rows.targets, softcap=softcap, z_loss=z_loss, learns=learns)
        return torch.tensor((loss + penalty, loss), dtype=torch.float32)
    size = len(logits) if logits.device.type != "cpu" else max(1, PIECE // logits.shape[1])
    parts = zip(logits.split(size), rows.targets.split(size), rows.trained.split(size), strict=True)
    return torch.stack([_piece(part, ids, trained, head, gain=gain) for part, ids, trained in parts]).sum(0)


def _normaliser(logits: Tensor, softmax: Tensor) -> Tensor:
    """The log of each row's sum of exponentials, by its likeliest id, whose share is at least 1 / V."""
    return logits.amax(-1) - softmax.amax(-1).log()


def _piece(logits: Tensor, ids: Tensor, trained: Tensor, head: Head, *, gain: float | None) -> Tensor:
    """Objective and loss of the rows; with a ``gain``, logits are overwritten by the objective's gradient times it."""
    wide = logits.to(at_least_fp32(logits.dtype))
    bent = None if head.softcap is None else (wide / head.softcap).tanh_()
    if bent is not None and head.softcap is not None:
        wide = bent * head.softcap
    targets, softmax = ids.unsqueeze(1), wide.softmax(-1)
    normaliser = _normaliser(wide, softmax)
    loss = ((normaliser - wide.gather(1, targets).squeeze(1)) * trained).sum()
    penalty = head.z_loss * (normaliser.square() * trained).sum()
    if gain is not None:
        if head.z_loss:
            softmax *= (1 + 2 * head.z_loss * normaliser).unsqueeze(1)
        softmax.scatter_(1, targets, softmax.gather(1, targets) - 1)
        if bent is not None:
            softmax *= 1 - bent.square()
        logits.copy_(softmax if gain == 1.0 else softmax.mul_(gain))
        if logits.device.type != "cpu":
            logits *= trained.unsqueeze(1)
    return torch.stack((loss + penalty, loss))
