"""Causal attention of whole rows on a CPU by the library in C++ (`cyberslm.native`), forward and backward.

It obeys the same rule as `cyberslm.model.causal`, whose blocks of products it makes in the processor's registers and
first cache, so that scores are neither written to memory nor read. Results of bf16 rows are as exact as its are, those
of fp32 rows are the formula's to the order of sums. Each result is made by one thread: their number changes nothing.

Letters: B batch, H query heads, K key/value heads, T tokens, E head width.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cyberslm.model.sight import Sight, cuts_of
from cyberslm.native.build import library

FEWEST = 32
"""New tokens from which what they look at is worth being laid out anew."""
KINDS = {torch.float32: 0, torch.bfloat16: 1}

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _Heads(ctypes.Structure):
    _fields_ = [("at", _Pointer), ("row", _Int), ("head", _Int), ("token", _Int)]


_SIZES = ("count", "tokens", "heads", "kv_heads", "key_size", "head_size", "window", "kind", "threads", "past")


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv")),
        *((name, _Pointer) for name in ("lse", "runs")),
        *((name, _Int) for name in _SIZES),
        ("scale", ctypes.c_double),
    ]


def takes(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, sight: Sight) -> bool:
    """Whether `native_attention` is for these."""
    if q_BHTE.device.type != "cpu" or not (sight.causal or sight.runs is not None):
        return False
    new, held = q_BHTE.shape[2], k_BKTE.shape[2]
    own = new == held or (sight.runs is None and FEWEST <= new < held and not torch.is_grad_enabled())
    return own and held == v_BKTE.shape[2] and q_BHTE.dtype in KINDS and q_BHTE.dtype == k_BKTE.dtype == v_BKTE.dtype


def native_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, sight: Sight, scale: float) -> Tensor:
    """Each query sees the keys up to its own, within the window and run of ``sight``: ``(B, H, T, Ev)``.

    Queries are of the last keys' tokens, in training of all. Columns in no run get zeros. Raises `BuildError` where the
    library can't be made.
    """
    how = _How(scale, sight.window, sight.runs)
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # neither has to hear of it
        return _forward(q_BHTE, k_BKTE, v_BKTE, *how)[0]
    return _Native.apply(q_BHTE, k_BKTE, v_BKTE, how)


class _How(NamedTuple):
    scale: float
    window: int | None
    runs: Tensor | None


class _Native(torch.autograd.Function):
    """The two operators, which a compiler takes as they are."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _How) -> Tensor:
        out, lse = torch.ops.cyberslm.native_forward(q, k, v, *how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *torch.ops.cyberslm.native_backward(grad, *ctx.saved_tensors, *ctx.how), None


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    how = _How(*options)
    q, k, v = map(_by_vector, (q, k, v))
    out, lse = _forward_shapes(q, k, v)
    if how.runs is not None:
        out.zero_()
    _call(library().attention_forward, how, lse, q=q, k=k, v=v, out=out)
    return out, lse


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, *options = rest
    how, lse = _How(*options), lse.contiguous()
    grad, q, k, v, out = map(_by_vector, (grad.to(q.dtype), q, k, v, out))
    dq, dk, dv = found = _backward_shapes(grad, q, k, v)
    if how.runs is not None:
        for gradient in found:
            gradient.zero_()
    _call(library().attention_backward, how, lse, grad=grad, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv)
    return found


def _call(function: Any, how: _How, lse: Tensor, **tensors: Tensor) -> None:
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    batch, heads, tokens, width = q.shape
    runs = torch.tensor([(row, 0, tokens) for row in range(batch)]) if how.runs is None else cuts_of(how.runs)
    sizes = len(runs), tokens, heads, k.shape[1], width, v.shape[3], how.window or 0, KINDS[q.dtype]
    past = k.shape[2] - tokens
    what = _Attention(
        **{name: _Heads(t.data_ptr(), *t.stride()[:3]) for name, t in tensors.items()},
        **dict(zip(_SIZES, (*sizes, torch.get_num_threads(), past), strict=True)),
        lse=lse.data_ptr(),
        runs=runs.data_ptr(),
        scale=how.scale,
    )
    function(ctypes.addressof(what))


def _by_vector(x: Tensor) -> Tensor:
    """With a vector's numbers one behind the other."""
    return x if x.stride(3) == 1 else x.contiguous()


def _like(x_BHTE: Tensor, width: int) -> Tensor:
    """New heads, of which those of a token lie together, as the next product takes them."""
    batch, heads, tokens, _ = x_BHTE.shape
    return x_BHTE.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _forward_shapes(q: Tensor, _k: Tensor, v: Tensor, *_options: Any) -> tuple[Tensor, Tensor]:
    return _like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q, q.shape[3]), _like(k, k.shape[3]), _like(v, v.shape[3])


_HOW = "float scale, int? window, Tensor? runs"
torch.library.define("cyberslm::native_forward", f"(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)")
torch.library.define(
    "cyberslm::native_backward",
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_HOW}) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("cyberslm::native_forward", "CPU", _forward)
torch.library.impl("cyberslm::native_backward", "CPU", _backward)
torch.library.register_fake("cyberslm::native_forward", _forward_shapes)
torch.library.register_fake("cyberslm::native_backward", _backward_shapes)
