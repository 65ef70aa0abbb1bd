"""What lies between the products of a block, on a CPU by the library in C++ (`cyberslm.native`): the norm, the product
with an activated gate, and the turn by positions, each forward and backward in one pass over its rows.

Numbers come in fp32 or bf16, are worked on in fp32 and rounded once. The norm's result is in the dtype that the next
product takes, so autocast copies nothing; for the backward pass it keeps what came in and one number a row, and the
product with a gate keeps its two factors, so that neither result need be kept (`cyberslm.model.remade`). The number of
threads changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cyberslm.model.native import KINDS
from cyberslm.model.remade import Recipe
from cyberslm.native.build import library

ACTS = {"swiglu": 0, "geglu": 1}
LEAST = 1 << 15
"""Numbers from which the work is more than the call: a new token or few are done sooner by torch."""

_Pointer, _Int, _Double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _form(pointers: str, integers: str, *rest: tuple[str, Any]) -> type[ctypes.Structure]:
    fields = [*((name, _Pointer) for name in pointers.split()), *((name, _Int) for name in integers.split()), *rest]
    return type("Form", (ctypes.Structure,), {"_fields_": fields})


_NORM = _form(
    "x added grad grad_total gain total y dx d_added inverse d_gain", "rows width kind y_kind threads", ("eps", _Double)
)
_GATED = _form("gate up grad y d_gate d_up", "count act kind threads")
_TURNED = _form("x y cos sin", "batch tokens heads width row token head table_row interleaved back kind threads")


def takes(*tensors: Tensor) -> bool:
    """Whether these, of one dtype, are what is done here: in training all of them, else where there are enough."""
    first = tensors[0]
    if not torch.is_grad_enabled() and first.numel() < LEAST:
        return False
    return first.dtype in KINDS and all(t.device.type == "cpu" and t.dtype == first.dtype for t in tensors)


def normed_dtype(x: Tensor, *, narrow: bool) -> torch.dtype | None:
    """In which a product takes what a norm makes of ``x``, bf16 if ``narrow``; None where it isn't made here."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    dtype = torch.bfloat16 if narrow else dtype
    return dtype if takes(x) and dtype in KINDS and x.dtype in (torch.float32, dtype) else None


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain`` over the last axis, in ``dtype``: that of ``x``, or bf16.

    ``gain`` is fp32. Raises `BuildError` where the library can't be made, as all do here.
    """
    return _norm(x, gain, eps, dtype)[0] if _at_once() else _RmsNorm.apply(x, gain, eps, dtype)


def add_rms_norm(x: Tensor, added: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + added`` in the dtype of ``x``, and its `rms_norm` in that of ``added``."""
    return _add_norm(x, added, gain, eps)[:2] if _at_once() else _AddRmsNorm.apply(x, added, gain, eps)


def norm_again(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> Recipe | None:
    """What makes ``y``, the `rms_norm` of ``x`` or of the sum ``x``, again; None where ``x`` isn't kept anyway."""
    if not (x.requires_grad or gain.requires_grad):
        return None
    dtype = y.dtype
    return Recipe(lambda x, gain: torch.ops.cyberslm.rms_norm(x, gain, eps, dtype)[0], (x.detach(), gain.detach()))


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of equal shapes, for an activation of `ACTS`."""
    act = ACTS[activation]
    return _gated(gate, up, act) if _at_once() else _GatedProduct.apply(gate, up, act)


def gated_again(gate: Tensor, up: Tensor, activation: str) -> Recipe | None:
    """What makes their `gated` again; None where they aren't kept anyway."""
    if not (gate.requires_grad or up.requires_grad):
        return None
    act = ACTS[activation]
    return Recipe(lambda gate, up: torch.ops.cyberslm.gated(gate, up, act), (gate.detach(), up.detach()))


def turn(x_BHTE: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """``x`` turned by factors ``(T, E)`` or ``(B, T, E)``, fp32, that ask for no gradient; a token's heads together."""
    back = False
    return _turned(x_BHTE, cos, sin, interleaved, back) if _at_once() else _Turn.apply(x_BHTE, cos, sin, interleaved)


def _at_once() -> bool:
    """Whether neither autograd nor a compiler has to hear of it: telling them takes longer than a few rows do."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


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
    y, inverse = found = _norm_shapes(x, gain, eps, dtype)
    _call_norm(library().norm_forward, dtype, {"x": x, "gain": gain, "y": y, "inverse": inverse}, eps)
    return found


def _add_norm(x: Tensor, added: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total, y, inverse = found = _add_norm_shapes(x, added, gain, eps)
    tensors = {"x": x, "added": added, "gain": gain, "total": total, "y": y, "inverse": inverse}
    _call_norm(library().norm_forward, added.dtype, tensors, eps)
    return found


def _norm_backward(grad: Tensor, x: Tensor, gain: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_gain = found = _norm_backward_shapes(grad, x, gain, inverse)
    tensors = {"grad": grad, "x": x, "gain": gain, "inverse": inverse, "dx": dx, "d_gain": d_gain}
    _call_norm(library().norm_backward, grad.dtype, tensors)
    return found


def _add_norm_backward(
    grad_total: Tensor, grad: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_added, d_gain = found = _add_norm_backward_shapes(grad_total, grad, total, gain, inverse)
    tensors = {"grad": grad, "x": total, "gain": gain, "inverse": inverse, "dx": dx, "d_gain": d_gain}
    if d_added.numel():
        tensors["d_added"] = d_added
    _call_norm(library().norm_backward, grad.dtype, tensors | {"grad_total": grad_total})
    return found


def _call_norm(function: Any, y_dtype: torch.dtype, tensors: dict[str, Tensor], eps: float = 0.0) -> None:
    x = tensors["x"]
    width = x.shape[-1]
    sizes = {"rows": x.numel() // width, "width": width, "kind": KINDS[x.dtype], "y_kind": KINDS[y_dtype]}
    _call(function, _NORM, _in_rows(tensors), eps=eps, **sizes)


def _gated(gate: Tensor, up: Tensor, act: int) -> Tensor:
    y = _gated_shapes(gate, up, act)
    _call_gated(act, gate=gate, up=up, y=y)
    return y


def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    d_gate, d_up = found = _gated_backward_shapes(grad, gate, up, act)
    _call_gated(act, grad=grad, gate=gate, up=up, d_gate=d_gate, d_up=d_up)
    return found


def _call_gated(act: int, **tensors: Tensor) -> None:
    gate = tensors["gate"]
    _call(library().gated, _GATED, _in_rows(tensors), count=gate.numel(), act=act, kind=KINDS[gate.dtype])


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:  # noqa: FBT001
    y = _turned_shapes(x, cos, sin, interleaved, back)
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, tokens, width = x.shape
    row, head, token, _ = x.stride()
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "width": width, "row": row, "token": token, "head": head}
    table_row = tokens * width if cos.numel() > tokens * width else 0
    options = {"table_row": table_row, "interleaved": interleaved, "back": back, "kind": KINDS[x.dtype]}
    tensors = {"x": x, "y": y, "cos": cos.contiguous(), "sin": sin.contiguous()}
    _call(library().turned, _TURNED, tensors, **sizes, **options)
    return y


def _call(function: Any, form: type[ctypes.Structure], tensors: dict[str, Tensor], **numbers: float) -> None:
    what = form(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()}, **numbers, threads=torch.get_num_threads()
    )
    function(ctypes.addressof(what))


def _in_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number behind the other, as those that were made here are."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


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


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
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
    _name = "cyberslm::" + _schema.partition("(")[0]
    torch.library.define(_name, _schema[_schema.index("(") :])
    torch.library.impl(_name, "CPU", _work)
    torch.library.register_fake(_name, _shapes)
