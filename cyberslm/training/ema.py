"""A running mean of the weights, which is often better than the last weights while the rate is high.

After update n the mean moves by 1 - min(decay, (1 + n) / (10 + n)): at first it follows the weights closely, so that it
isn't held back by the initial ones. It is kept in fp32, and cut up over ranks as the weights are. `applied` puts it
into the model for validation, samples and checkpoints, and the trained weights back afterwards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cyberslm.errors import IntegrityError
from cyberslm.training.shards import cut_like, own_part

TRAINED = "trained"
"""Kind of the trained weights among a checkpoint's training tensors, whose model file holds the mean."""


class WeightMean:
    """The mean of the parameters of ``model`` that are trained, beginning with those it has now."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._decay = decay
        self._mean: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew with the weights as they are."""
        self._mean = {name: p.detach().clone().float() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the weights after update number ``updates``, counted from 1."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        for name, parameter in self._parameters.items():
            own_part(self._mean[name]).lerp_(own_part(parameter), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[Mapping[str, Tensor]]:
        """The model holds the mean inside; what is yielded are the trained weights by ``trained/NAME``."""
        self._swap()
        try:
            yield {f"{TRAINED}/{name}": tensor for name, tensor in self._mean.items()}
        finally:
            self._swap()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """With the mean in the model, as a checkpoint is opened: take it from there and put the trained weights in.

        Raises `IntegrityError` naming a tensor that is missing or of another shape or type.
        """
        self.reset()
        for name, parameter in self._parameters.items():
            found = tensors.get(f"{TRAINED}/{name}")
            if found is None or found.shape != parameter.shape or found.dtype != torch.float32:
                wrong = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise IntegrityError(f"{TRAINED}/{name} is {wrong}, not float32 {tuple(parameter.shape)}")
            own_part(parameter).copy_(own_part(cut_like(found.to(parameter.device), parameter)))

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            weight, mean = own_part(parameter), own_part(self._mean[name])
            trained = weight.clone()
            weight.copy_(mean)
            mean.copy_(trained)
