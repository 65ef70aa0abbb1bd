"""A tensor that may be cut up over ranks (FSDP2's DTensor): its full value, this rank's part, and another cut alike.

A plain tensor is its own full value and its own part, so that callers have one code for both. torch's module of
DTensors takes half a second to load, so it is loaded where a tensor is first asked about.
"""

from __future__ import annotations

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """The full value; every rank has to ask."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it: the same memory, without gradient."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """The full ``value``, which every rank has, cut as ``like`` is; nothing is sent, and the rest of it isn't kept."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
