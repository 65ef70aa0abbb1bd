"""One model on several ranks: gradients exchanged (DDP), or weights, gradients and moments cut up as well (FSDP2).

The model and its loss become one module, whose forward pass is the whole of a micro-batch, so that DDP and
`fully_shard` see every use of a weight, tied or not, whatever the loss does with the network. Both take the mean of the
ranks' gradients; the training loop multiplies by the number of ranks, which makes it the sum.

Under FSDP2 each block is a unit: its weights are gathered before it runs and let go afterwards; embedding, last norm
and head are one more. With bf16 the blocks' weights travel as bf16 and gradients are added up in fp32; the last unit
stays fp32, so that the residual stream has the precision that it has under DDP.

What leaves the ranks is whole and plain (`whole_model`, `whole_tensors`), under the names that one process uses. The
weights come through `torch.distributed.checkpoint`'s state-dict helpers, moments one by one: the helper for optimizers
makes a step to fill moments that are missing, and casts those that it loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cyberslm.data.loader import Batch
from cyberslm.model.block import DecoderBlock
from cyberslm.model.model import CyberSLM
from cyberslm.training.distributed import Dist
from cyberslm.training.loss import Loss, LossOutput
from cyberslm.training.shards import cut_like, own_part, whole


def recompute_blocks(model: CyberSLM) -> None:
    """Train with activation checkpointing: a block keeps its input alone and is computed again going backward."""
    for layer in model.layers:
        cast(DecoderBlock, layer).compute_again()


class Shared(NamedTuple):
    """A loss whose gradients are the ranks' mean, but for backward passes made in ``holding()``, which add up here."""

    loss: Loss
    holding: Callable[[], AbstractContextManager]


class _Pass(nn.Module):
    """A model's loss as a module."""

    def __init__(self, model: CyberSLM, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> LossOutput:
        output = self.loss(self.model, batch)
        return LossOutput._make(None if part is None else part.clone() for part in output)  # FSDP2 warns of views


def share(model: CyberSLM, loss: Loss, dist: Dist, *, precision: str) -> Shared:
    """Have ``dist``'s ranks train ``model`` together; make the optimizer afterwards, as FSDP2 replaces parameters."""
    if dist.backend is None:
        return Shared(loss, nullcontext)
    if dist.strategy == "ddp":
        one_pass = _Pass(model, loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for what older ones call so
            replica = DistributedDataParallel(one_pass, broadcast_buffers=False, gradient_as_bucket_view=True)
        return Shared(lambda _, batch: replica(batch), replica.no_sync)
    return cut_up(model, loss, init_device_mesh(dist.device.type, (dist.world,)), precision=precision)


def cut_up(model: CyberSLM, loss: Loss, mesh: DeviceMesh, *, precision: str) -> Shared:
    """The model's weights cut up over the ranks of ``mesh``: a unit for each block and one for the rest."""
    blocks = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=blocks)
    one_pass = _Pass(model, loss)
    sharded = fully_shard(one_pass, mesh=mesh)
    for unit in (*model.layers, sharded):
        unit.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")  # gloo has no mean
    return Shared(lambda _, batch: one_pass(batch), lambda: _holding(sharded))


@contextmanager
def _holding(sharded: FSDPModule) -> Iterator[None]:
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def whole_tensors(tensors: Mapping[str, Tensor], dist: Dist) -> dict[str, Tensor]:
    """Full values on the first rank's CPU, one at a time; empty on the others."""
    full = {}
    for name, tensor in tensors.items():
        value = whole(tensor)
        if dist.first:
            full[name] = value.cpu()
    return full


def whole_model(model: CyberSLM) -> CyberSLM:
    """The model itself, or where its weights are cut up a plain copy with all of them, on every rank."""
    if not isinstance(model.embed_tokens.weight, DTensor):
        return model
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain = CyberSLM(model.config, device="meta")
    plain.load_state_dict(weights, strict=True, assign=True)
    plain.rope.to_empty(device=model.device)
    plain.rope.reset()
    return plain


@torch.no_grad()
def fill(model: CyberSLM, weights: Mapping[str, Tensor]) -> None:
    """Give the model, cut up or not, the full weights of that state dict, which every rank has."""
    for name, parameter in model.named_parameters():
        own_part(parameter).copy_(own_part(cut_like(weights[name].to(parameter.device), parameter)))
