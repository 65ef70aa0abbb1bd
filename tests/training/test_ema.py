from __future__ import annotations

import pytest
import torch
from torch import nn

from cyberslm.errors import IntegrityError
from cyberslm.training.ema import WeightMean


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_mean_follows_the_weights_by_its_decay() -> None:
    """The recursion in float64, with its early decay of (1 + n) / (10 + n)."""
    module = model()
    mean = WeightMean(module, 0.9)
    expected = [weight.double() for weight in weights(module)]
    for update in range(1, 200):
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        mean.update(update)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = [decay * e + (1 - decay) * p.double() for e, p in zip(expected, weights(module), strict=True)]
    with mean.applied():
        for found, right in zip(weights(module), expected, strict=True):
            torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


def test_applied_gives_the_trained_weights_back_bit_for_bit_whatever_happens() -> None:
    module = model()
    mean = WeightMean(module, 0.9)
    for parameter in module.parameters():
        parameter.data.normal_()
    mean.update(5)
    before = weights(module)

    def fail() -> None:
        with mean.applied() as trained:
            assert not torch.equal(module.weight, before[0])
            assert torch.equal(trained["trained/weight"], before[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))
    with mean.applied():
        first = weights(module)
    with mean.applied():
        assert all(torch.equal(a, b) for a, b in zip(first, weights(module), strict=True))


def test_loaded_mean_goes_on_as_the_saved_one() -> None:
    one, other = model(), model()
    means = [WeightMean(module, 0.9) for module in (one, other)]
    one.weight.data.normal_()
    means[0].update(3)
    with means[0].applied() as trained:
        other.load_state_dict(one.state_dict())
        means[1].load({name: tensor.clone() for name, tensor in trained.items()})
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    for mean in means:
        mean.update(4)
    with means[0].applied(), means[1].applied():
        assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "trained/weight is missing"),
        ({"trained/weight": torch.zeros(2, 2)}, r"trained/weight is torch.float32 \(2, 2\)"),
        ({"trained/weight": torch.zeros(2, 3).bfloat16()}, "trained/weight is torch.bfloat16"),
    ],
)
def test_trained_weights_that_do_not_fit_are_refused(tensors: dict, words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        WeightMean(model(), 0.9).load(tensors)
