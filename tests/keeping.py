"""What torch keeps for a backward pass."""

from __future__ import annotations

from unittest.mock import patch

import torch

from cyberslm.data.loader import Batch
from cyberslm.model.model import CyberSLM
from cyberslm.model.remade import Remade
from cyberslm.training.loss import next_token_loss


def bytes_kept(model: CyberSLM, batch: Batch, *, bf16: bool) -> int:
    """Bytes of all tensors, each once, that a loss keeps besides the model's own."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    pack = Remade.pack

    def inside(self: Remade, tensor: torch.Tensor) -> object:
        packed = pack(self, tensor)
        if hasattr(packed, "tensor"):
            keep(packed.tensor)
        return packed

    with (
        patch.object(Remade, "pack", inside),  # its hooks hide those here
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        loss = next_token_loss(model, batch).objective
    assert loss.requires_grad
    return sum(kept.values())
