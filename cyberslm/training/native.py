"""Softmax, loss and gradient of rows of logits on a CPU by the library in C++ (`cyberslm.native`).

The formula is that of `cyberslm.training.cross_entropy`, which holds for other devices and dtypes. Here a row of
logits is read from memory once and its gradient written once.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cyberslm.errors import InputError
from cyberslm.model.native import KINDS
from cyberslm.native.build import library


class _Logits(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("at", "targets")),
        *((name, ctypes.c_double) for name in ("loss", "penalty", "softcap", "z_loss")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "kind", "learns", "threads")),
    ]


def takes(logits: Tensor) -> bool:
    """Whether `softmax_loss` is for these."""
    return logits.device.type == "cpu" and logits.dtype in KINDS and logits.is_contiguous()


def softmax_loss(
    logits_NV: Tensor, targets_N: Tensor, *, softcap: float | None, z_loss: float, learns: bool
) -> tuple[float, float]:
    """Loss and penalty, summed over the rows; with ``learns``, logits are overwritten by the gradient of both.

    Raises `InputError` for targets outside the vocabulary, `BuildError` where the library can't be made.
    """
    rows, vocabulary = logits_NV.shape
    if rows and not 0 <= int(targets_N.min()) <= int(targets_N.max()) < vocabulary:
        raise InputError(f"targets must be ids from 0 to {vocabulary - 1}, the vocabulary's last")
    targets_N = targets_N.contiguous()
    what = _Logits(
        at=logits_NV.data_ptr(),
        targets=targets_N.data_ptr(),
        softcap=softcap or 0.0,
        z_loss=z_loss,
        rows=rows,
        vocabulary=vocabulary,
        kind=KINDS[logits_NV.dtype],
        learns=learns,
        threads=torch.get_num_threads(),
    )
    library().softmax_loss(ctypes.addressof(what))
    return what.loss, what.penalty
