"""Products of int8 matrices with rows rounded to int8, by the library in C++ (`cyberslm.native`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from cyberslm.model.native import KINDS
from cyberslm.native.build import library, multiplies_bytes

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    _fields_ = [*((name, _Pointer) for name in ("weight", "scales", "y")), ("features", _Int)]


class _Products(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("x", "products")),
        *((name, _Int) for name in ("count", "rows", "columns", "kind", "threads")),
    ]


def takes(x: Tensor) -> bool:
    """Whether `int8_products` is for these rows, on this processor. Raises `BuildError` where there is no library."""
    plain = x.device.type == "cpu" and x.dtype in KINDS and x.numel() > 0
    return plain and not (torch.is_grad_enabled() and x.requires_grad) and multiplies_bytes()


def int8_products(x: Tensor, matrices: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """``rounded(x) @ (weight * scales).T`` of each pair, ``(..., features)`` in the dtype of ``x`` ``(..., columns)``.

    `cyberslm.model.quantised` says what ``rounded`` is; ``x`` is fp32 or bf16, ``weight`` int8 ``(features, columns)``
    and ``scales`` fp32 ``(features,)``. Each result is made by one thread, from whole numbers but for the sum over
    blocks: neither their number nor other rows change anything.
    """
    x = x.contiguous()
    columns = x.shape[-1]
    outs = [x.new_empty(*x.shape[:-1], len(weight)) for weight, _ in matrices]
    products = (_Product * len(matrices))(
        *(
            _Product(weight.data_ptr(), scales.data_ptr(), y.data_ptr(), len(weight))
            for (weight, scales), y in zip(matrices, outs, strict=True)
        )
    )
    sizes = len(matrices), x.numel() // columns, columns, KINDS[x.dtype], torch.get_num_threads()
    what = _Products(x.data_ptr(), ctypes.addressof(products), *sizes)
    library().int8_products(ctypes.addressof(what))
    return outs
