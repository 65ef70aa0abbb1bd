"""Where a network's matrices lie on the CPU: in one stretch of huge pages, in the order in which a step reads them.

Reading weights is nearly all of a decoding step's time, and twice as fast there as from pages of 4 KiB. Weights that
are read from a file go straight into it (`empty_tensors`), so that they are never held twice; those of a network that
was made otherwise are moved (`gather`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cyberslm.model.model import CyberSLM

HUGE_PAGE = 2 << 20
ALIGNED = 64


def matrices(model: CyberSLM) -> Iterator[Any]:
    """The modules that hold them, in the order in which a step reads them."""
    block: Any
    for block in model.layers:
        yield from block.self_attn.projections()
        yield from (m for m in (block.mlp.up_proj, block.mlp.gate_proj, block.mlp.down_proj) if m is not None)
    yield model.embed_tokens
    if model.lm_head is not None:
        yield model.lm_head


def empty_tensors(model: CyberSLM, device: torch.device | str) -> dict[str, Tensor]:
    """Memory on ``device`` for all that the ``state_dict`` of a network on the meta device names, not yet filled."""
    kept = model.state_dict(keep_vars=True)
    places: dict[int, Tensor] = {}
    if torch.device(device).type == "cpu":
        weights = [module.weight for module in matrices(model)]
        places = {id(weight): room for weight, room in zip(weights, _stretch(weights), strict=True)}
    return {
        name: places[id(tensor)]
        if id(tensor) in places
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in kept.items()
    }


def gather(model: CyberSLM) -> None:
    """Move the matrices of a network on the CPU into one stretch, unless they lie in one."""
    if _lies_in_one(model):
        return
    for module, room in zip(matrices(model), _stretch([m.weight for m in matrices(model)]), strict=True):
        room.copy_(module.weight.detach())
        if isinstance(module.weight, nn.Parameter):
            module.weight.data = room
        else:
            module.weight = room


def _size(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _stretch(like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of these types and shapes, one behind the other."""
    size = sum(map(_size, like))
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(pages, dtype=torch.uint8)
    at = -room.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_PAGE:
        pages.madvise(mmap.MADV_HUGEPAGE, at, size // HUGE_PAGE * HUGE_PAGE)  # of a page begun all would be taken
    for tensor in like:
        yield room[at : at + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        at += _size(tensor)


def _lies_in_one(model: CyberSLM) -> bool:
    weights = [module.weight for module in matrices(model)]
    first = weights[0].data_ptr()
    follow = all(after.data_ptr() == before.data_ptr() + _size(before) for before, after in pairwise(weights))
    return follow and first % HUGE_PAGE == 0
