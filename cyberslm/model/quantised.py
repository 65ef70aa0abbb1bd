"""Matrices in few bits: int8 with a scale a row, int4 with a scale for each 32 numbers of a row; symmetric, no offset.

    int8   w = q s     q in -127 .. 127   s = max|row| / 127
    int4   w = q s     q in -7 .. 7       s = max|group| / 7

Only matrices are packed: embedding, projections and head. What computes with int4 widens it first, so that a packed
network is exactly the plain one with the widened weights. What meets int8 is rounded to int8 as well (`rounded`), 64
numbers of a row by a scale: then sums of 64 products are whole numbers, which processors make fast and which are the
same in any order and company; only their sum over a row is rounded. Two int4 numbers share a byte, as q + 8: the first
half of a group in the low four bits, the second half in the high ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.errors import ConfigError
from cyberslm.model import native_products

if TYPE_CHECKING:
    from cyberslm.model.model import CyberSLM

Packing = Literal["int8", "int4"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
PACKED: dict[torch.dtype, Packing] = {torch.int8: "int8", torch.uint8: "int4"}
"""By the type of their numbers."""
Precision = Literal["fp32", "bf16", "int8", "int4"]
"""What matrices are kept in. bf16 networks also compute in bf16, the others in fp32."""
GROUP = 32
"""Numbers of an int4 row that share a scale."""
BLOCK = 64
"""Numbers of a row that share a scale where it meets int8, as in ``bytes.h``."""
SMALLEST = 2.0**-100
"""Blocks of smaller numbers become zeros."""
WIDE = 1 << 17
"""Numbers of a packed matrix that are widened at a time: half a MiB."""


class Packed(NamedTuple):
    """A matrix ``(rows, columns)`` in few bits."""

    weight: Tensor
    """int8 ``(rows, columns)``, or for int4 uint8 ``(rows, columns / 2)``."""
    scales: Tensor
    """fp32 ``(rows,)``, or for int4 ``(rows, columns / 32)``."""


def packed_shapes(packing: Packing, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a `Packed`. Raises `ConfigError` where int4 groups don't divide a row."""
    if packing == "int8":
        return (rows, columns), (rows,)
    if columns % GROUP:
        raise ConfigError(f"int4 needs rows that are a multiple of {GROUP} wide, not {columns}: use int8")
    return (rows, columns // 2), (rows, columns // GROUP)


def _packed_on_meta(packing: Packing, rows: int, columns: int) -> Packed:
    """Its shapes alone; arithmetic on the meta device would import torch's compiler, some 70 MB."""
    weight, scales = packed_shapes(packing, rows, columns)
    (stored,) = (dtype for dtype, name in PACKED.items() if name == packing)
    return Packed(torch.empty(weight, dtype=stored, device="meta"), torch.empty(scales, device="meta"))


def pack(weight: Tensor, packing: Packing) -> Packed:
    """Round a matrix to the nearest numbers that ``packing`` has."""
    packed_shapes(packing, *weight.shape)
    wide = weight.detach().float()
    if packing == "int8":
        scales = _scales(wide, 127)
        return Packed((wide / scales.unsqueeze(-1)).round_().to(torch.int8), scales)
    groups = wide.unflatten(-1, (-1, GROUP))
    scales = _scales(groups, 7)
    low, high = ((groups / scales.unsqueeze(-1)).round_() + 8).to(torch.uint8).chunk(2, dim=-1)
    return Packed((low | high << 4).flatten(-2), scales)


def _scales(numbers: Tensor, steps: int) -> Tensor:
    return (numbers.abs().amax(-1) / steps).clamp(min=torch.finfo(torch.float32).tiny)


def unpack(packed: Packed, rows: Tensor | None = None) -> Tensor:
    """The matrix in fp32; of the given ``rows`` only, in any shape, ``(..., columns)``."""
    weight, scales = packed if rows is None else (packed.weight[rows], packed.scales[rows])
    if weight.dtype == torch.int8:
        return weight.float().mul_(scales.unsqueeze(-1))
    pairs = weight.unflatten(-1, (-1, GROUP // 2))
    groups = torch.cat((pairs & 15, pairs >> 4), dim=-1).float().sub_(8.0)
    return groups.mul_(scales.unsqueeze(-1)).flatten(-2)


def rounded(x: Tensor) -> Tensor:
    """``x`` ``(..., columns)`` as what meets int8 matrices: each `BLOCK` of columns in steps of max|x| / 127.

    Gradients go through as if nothing had been rounded. A number that isn't finite spoils its block.
    """
    columns = x.shape[-1]
    blocks = F.pad(x.detach().float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    per_step = torch.full_like(most, 127).div_(most)  # 127 / most would be 127 times the rounded 1 / most
    steps = (blocks * torch.where(most > SMALLEST, per_step, most * 0)).round_()
    near = steps.mul_(most / 127).flatten(-2)[..., :columns].to(x.dtype)
    return x + (near - x.detach()) if x.requires_grad else near


class _PackedModule(nn.Module):
    native = False
    weight: Tensor
    scales: Tensor

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.register_buffer("weight", packed.weight)
        self.register_buffer("scales", packed.scales)

    @property
    def packed(self) -> Packed:
        return Packed(self.weight, self.scales)

    def matrix(self) -> Tensor:
        """All of it in fp32."""
        return unpack(self.packed)

    def product(self, x: Tensor) -> Tensor:
        """``x`` ``(..., columns)`` times the matrix, ``(..., rows)``; a few rows of it are widened at a time."""
        if self.goes_native(x):
            return native_products.int8_products(x, [self.packed])[0]
        if self.weight.dtype == torch.int8:
            x = rounded(x)
        rows = len(self.weight)
        at_once = max(1, WIDE // x.shape[-1])
        if rows <= at_once:
            return F.linear(x, self.matrix().to(x.dtype))
        out = x.new_empty(*x.shape[:-1], rows)
        for start in range(0, rows, at_once):
            some = slice(start, start + at_once)
            out[..., some] = F.linear(x, unpack(Packed(self.weight[some], self.scales[some])).to(x.dtype))
        return out

    def goes_native(self, x: Tensor) -> bool:
        """Whether ``x`` meets the matrix in C++."""
        return self.native and self.weight.dtype == torch.int8 and native_products.takes(x)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, FBT001, FBT002
        """Moves go through; scales stay fp32 when the module is cast, as what is packed cannot be."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.float32:
            self.scales = scales.to(self.scales.device)
        return self


class PackedLinear(_PackedModule):
    """`nn.Linear` whose matrix is packed."""

    def __init__(self, packed: Packed, bias: nn.Parameter | None) -> None:
        super().__init__(packed)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(self.product(x))

    def shifted(self, product: Tensor) -> Tensor:
        return product if self.bias is None else product + self.bias.to(product.dtype)


class PackedEmbedding(_PackedModule):
    """`nn.Embedding` whose rows are packed."""

    def forward(self, ids: Tensor) -> Tensor:
        return unpack(self.packed, ids)


def products(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Each layer of ``x``; packed ones together, where they meet it in C++."""
    packed = [layer for layer in layers if isinstance(layer, PackedLinear) and layer.goes_native(x)]
    if len(packed) < len(layers):
        return [layer(x) for layer in layers]
    outs = native_products.int8_products(x, [layer.packed for layer in packed])
    return [layer.shifted(out) for layer, out in zip(packed, outs, strict=True)]


def pack_matrices(model: nn.Module, packing: Packing) -> None:
    """Replace every linear layer and embedding in ``model`` by its packed form, in place.

    On the meta device only shapes are made. Raises `ConfigError` where a width doesn't fit, before anything changed.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear | nn.Embedding)
    ]
    for _, _, child in found:
        packed_shapes(packing, *child.weight.shape)
    for parent, name, child in found:
        on_meta = child.weight.is_meta
        packed = _packed_on_meta(packing, *child.weight.shape) if on_meta else pack(child.weight, packing)
        bias = cast("nn.Parameter | None", getattr(child, "bias", None))
        new = PackedLinear(packed, bias) if isinstance(child, nn.Linear) else PackedEmbedding(packed)
        setattr(parent, name, new.train(child.training))


def precision_of(model: CyberSLM) -> Precision:
    """What its matrices are kept in."""
    stored = model.embed_tokens.weight.dtype
    if stored in PACKED:
        return PACKED[stored]
    return "bf16" if stored == torch.bfloat16 else "fp32"


def set_precision(model: CyberSLM, precision: Precision) -> None:
    """Round the matrices to ``precision``, in place. Raises `ConfigError` where they hold fewer bits already."""
    held = precision_of(model)
    if precision == held:
        return
    if held != "fp32":
        raise ConfigError(
            f"the model is kept in {held} and can't be turned to {precision}: open the folder it was made from"
        )
    model.use_step(None)
    if precision == "bf16":
        model.to(torch.bfloat16)
    else:
        pack_matrices(model, cast(Packing, precision))
