"""What lies between the products of a block, on a CPU by the library in C++ (`cyberslm.native`): the norm, the product
with an activated gate, and the turn by positions, each forward and backward in one pass over its rows.

Numbers come in fp32 or bf16, are worked on in fp32 and rounded once. The norm's result is in the dtype that the next
product takes, so autocast copies nothing; for the backward pass it keeps what came in and one number a row, and the
product with a gate keeps its two factors. The number of threads changes nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from cyberslm.native.build import library

KINDS = {torch.float32: 0, torch.bfloat16: 1}
ACTS = {"swiglu": 0, "geglu": 1}

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64

_NORM = ("x", "added", "grad", "grad_total", "gain", "total", "y", "dx", "d_added", "inverse", "d_gain")
_NORM_SIZES = ("rows", "width", "kind", "y_kind", "threads")
_GATED, _GATED_SIZES = ("gate", "up", "grad", "y", "d_gate", "d_up"), ("count", "act", "kind", "threads")
_TURNED = ("x", "y", "cos", "sin")
_TURNED_SIZES = ("batch", "tokens", "heads", "width", "row", "token", "head", "table_row", "interleaved", "back", "kind")


class _Norm(ctypes.Structure):
    _fields_ = [*((n, _Pointer) for n in _NORM), *((n, _Int) for n in _NORM_SIZES), ("eps", ctypes.c_double)]


class _Gated(ctypes.Structure):
    _fields_ = [*((n, _Pointer) for n in _GATED), *((n, _Int) for n in _GATED_SIZES)]


class _Turned(ctypes.Structure):
    _fields_ = [*((n, _Pointer) for n in _TURNED), *((n, _Int) for n in (*_TURNED_SIZES, "threads"))]


def takes(*tensors: Tensor) -> bool:
    """Whether these, of one dtype, are what is done here."""
    first = tensors[0].dtype
    return first in KINDS and all(t.device.type == "cpu" and t.dtype == first for t in tensors)


def product_dtype(x: Tensor) -> torch.dtype | None:
    """In which a product takes ``x``, None where the norm isn't for it."""
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
    return dtype if dtype in KINDS and (x.dtype == torch.float32 or x.dtype == dtype) else None


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain`` over the last axis, in ``dtype``: that of ``x``, or bf16.

    ``gain`` is fp32. Raises `BuildError` where the library can't be made, as all do here.
    """
    return _RmsNorm.apply(x, gain, eps, dtype)


def add_rms_norm(x: Tensor, added: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + added`` in the dtype of ``x``, and its `rms_norm` in that of ``added``."""
    return _AddRmsNorm.apply(x, added, gain, eps)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of equal shapes, for an activation of `ACTS`."""
    return _GatedProduct.apply(gate, up, ACTS[activation])


def turn(x_BHTE: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """``x`` turned by factors ``(T, E)`` or ``(B, T, E)``, fp32, that ask for no gradient; a token's heads together."""
    return _Turn.apply(x_BHTE, cos, sin, interleaved)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, inverse = torch.ops.cyberslm.rms_norm(x, gain, eps, dtype)
        ctx.save_for_backward(x, gain, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, d_gain = torch.ops.cyberslm.rms_norm_backward(grad, *ctx.saved_tensors)
        return dx, d_gain, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, inverse = torch.ops.cyberslm.add_rms_norm(x, added, gain, eps)
        ctx.save_for_backward(total, gain, inverse)
        return total, y

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dx, d_added, d_gain = torch.ops.cyberslm.add_rms_norm_backward(grad_total, grad, *ctx.saved_tensors)
        return dx, d_added if d_added.numel() else dx, d_gain, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return torch.ops.cyberslm.gated(gate, up, act)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.ops.cyberslm.gated_backward(grad, *ctx.saved_tensors, ctx.act), None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return torch.ops.cyberslm.turned(x, cos, sin, interleaved, False)  # noqa: FBT003

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.cyberslm.turned(grad, *ctx.saved_tensors, ctx.interleaved, True), None, None, None  # noqa: FBT003


def _norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, inverse = found = _norm_shapes(x, gain, eps, dtype)
    _call_norm(library().norm_forward, x=x, gain=gain.contiguous(), y=y, inverse=inverse, eps=eps)
    return found


def _add_norm(x: Tensor, added: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, added = x.contiguous(), added.contiguous()
    total, y, inverse = found = _add_norm_shapes(x, added, gain, eps)
    tensors = {"x": x, "added": added, "gain": gain.contiguous(), "total": total, "y": y, "inverse": inverse}
    _call_norm(library().norm_forward, **tensors, eps=eps)
    return found


def _norm_backward(grad: Tensor, x: Tensor, gain: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    dx, d_gain = found = _norm_backward_shapes(grad, x, gain, inverse)
    tensors = {"grad": grad, "x": x, "gain": gain.contiguous(), "inverse": inverse, "dx": dx, "d_gain": d_gain}
    _call_norm(library().norm_backward, **tensors)
    return found


def _add_norm_backward(
    grad_total: Tensor, grad: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_total, grad = grad_total.contiguous(), grad.contiguous()
    dx, d_added, d_gain = found = _add_norm_backward_shapes(grad_total, grad, total, gain, inverse)
    tensors = {"grad": grad, "x": total, "gain": gain.contiguous(), "inverse": inverse, "dx": dx, "d_gain": d_gain}
    if d_added.numel():
        tensors["d_added"] = d_added
    _call_norm(library().norm_backward, grad_total=grad_total, **tensors)
    return found


def _call_norm(function: Any, *, eps: float = 0.0, **tensors: Tensor) -> None:
    x, y = tensors["x"], tensors["y"] if "y" in tensors else tensors["grad"]
    width = x.shape[-1]
    sizes = x.numel() // width, width, KINDS[x.dtype], KINDS[y.dtype], torch.get_num_threads()
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    what = _Norm(**pointers, **dict(zip(_NORM_SIZES, sizes, strict=True)), eps=eps)
    function(ctypes.addressof(what))


def _gated(gate: Tensor, up: Tensor, act: int) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = _gated_shapes(gate, up, act)
    _call_gated(act, gate=gate, up=up, y=y)
    return y


def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = found = _gated_backward_shapes(grad, gate, up, act)
    _call_gated(act, grad=grad, gate=gate, up=up, d_gate=d_gate, d_up=d_up)
    return found


def _call_gated(act: int, **tensors: Tensor) -> None:
    gate = tensors["gate"]
    sizes = gate.numel(), act, KINDS[gate.dtype], torch.get_num_threads()
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    what = _Gated(**pointers, **dict(zip(_GATED_SIZES, sizes, strict=True)))
    library().gated(ctypes.addressof(what))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:  # noqa: FBT001
    x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    y = _turned_shapes(x, cos, sin, interleaved, back)
    batch, heads, tokens, width = x.shape
    row, head, token, _ = x.stride()
    table_row = tokens * width if cos.ndim == 3 and cos.shape[0] > 1 else 0
    sizes = batch, tokens, heads, width, row, token, head, table_row, interleaved, back, KINDS[x.dtype]
    what = _Turned(
        **{"x": x.data_ptr(), "y": y.data_ptr(), "cos": cos.data_ptr(), "sin": sin.data_ptr()},
        **dict(zip(_TURNED_SIZES, sizes, strict=True)),
        threads=torch.get_num_threads(),
    )
    library().turned(ctypes.addressof(what))
    return y


def _new(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(like.shape, dtype=dtype or like.dtype)


def _norm_shapes(x: Tensor, _gain: Tensor, _eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _new(x, dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _add_norm_shapes(x: Tensor, added: Tensor, _gain: Tensor, _eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _new(x), _new(added), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _norm_backward_shapes(_grad: Tensor, x: Tensor, gain: Tensor, _inverse: Tensor) -> tuple[Tensor, Tensor]:
    return _new(x), _new(gain)


def _add_norm_backward_shapes(
    _grad_total: Tensor, grad: Tensor, total: Tensor, gain: Tensor, _inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The second is empty where it would be the first."""
    return _new(total), grad.new_empty(0) if grad.dtype == total.dtype else _new(grad), _new(gain)


def _gated_shapes(gate: Tensor, _up: Tensor, _act: int) -> Tensor:
    return _new(gate)


def _gated_backward_shapes(_grad: Tensor, gate: Tensor, up: Tensor, _act: int) -> tuple[Tensor, Tensor]:
    return _new(gate), _new(up)


def _turned_shapes(x: Tensor, _cos: Tensor, _sin: Tensor, _interleaved: bool, _back: bool) -> Tensor:  # noqa: FBT001
    batch, heads, tokens, width = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


_OPERATORS = {
    "rms_norm(Tensor x, Tensor gain, float eps, ScalarType dtype) -> (Tensor, Tensor)": (_norm, _norm_shapes),
    "rms_norm_backward(Tensor grad, Tensor x, Tensor gain, Tensor inverse) -> (Tensor, Tensor)": (
        _norm_backward,
        _norm_backward_shapes,
    ),
    "add_rms_norm(Tensor x, Tensor added, Tensor gain, float eps) -> (Tensor, Tensor, Tensor)": (
        _add_norm,
        _add_norm_shapes,
    ),
    "add_rms_norm_backward(Tensor grad_total, Tensor grad, Tensor total, Tensor gain, Tensor inverse)"
    " -> (Tensor, Tensor, Tensor)": (_add_norm_backward, _add_norm_backward_shapes),
    "gated(Tensor gate, Tensor up, int act) -> Tensor": (_gated, _gated_shapes),
    "gated_backward(Tensor grad, Tensor gate, Tensor up, int act) -> (Tensor, Tensor)": (
        _gated_backward,
        _gated_backward_shapes,
    ),
    "turned(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor": (_turned, _turned_shapes),
}
for _schema, (_work, _shapes) in _OPERATORS.items():
    _name, _, _form = _schema.partition("(")
    torch.library.define(f"cyberslm::{_name}", f"({_form}")
    torch.library.impl(f"cyberslm::{_name}", "CPU", _work)
    torch.library.register_fake(f"cyberslm::{_name}", _shapes)
