from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cyberslm.training.muon import Muon, orthogonal, step_size

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
SHAPES = [(16, 16), (24, 8), (8, 24)]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def ours(parameters: list[nn.Parameter], rest: list[nn.Parameter], **settings: object) -> Muon:
    groups = [
        {"name": "hidden", "params": parameters, "muon": True, "lr": 0.02, "weight_decay": 0.1},
        {"name": "gains", "params": rest, "lr": 1e-3, "weight_decay": 0.0},
    ]
    given = {"momentum": 0.95, "adjustment": "original", "products": torch.bfloat16} | settings
    return Muon(groups, **given, adamw=ADAMW)


@pytest.mark.parametrize("adjustment", ["original", "match_rms_adamw"])
def test_bf16_steps_are_those_of_torch_bit_for_bit(adjustment: str) -> None:
    """With AdamW beside it, `torch.optim.Muon` is the slow truth."""
    mine, theirs = matrices(), matrices()
    gain, other_gain = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = ours(mine, [gain], adjustment=adjustment)
    muon = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjustment)
    adamw = torch.optim.AdamW([other_gain], **ADAMW, fused=True)
    for seed in range(4):
        give_gradients([*mine, gain], seed)
        give_gradients([*theirs, other_gain], seed)
        optimizer.step()
        muon.step()
        adamw.step()
    for one, other in zip([*mine, gain], [*theirs, other_gain], strict=True):
        assert torch.equal(one, other)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 9), scale=st.sampled_from([1e-6, 1, 1e6])
)
def test_orthogonal_keeps_directions_and_evens_out_the_singular_values(
    rows: int, columns: int, seed: int, scale: float
) -> None:
    matrix = scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    inside = u.T @ orthogonal(matrix, torch.float32).double() @ v.T
    kept = s > 0.02 * s.norm()
    values = inside.diagonal()[kept]
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert (inside - torch.diag(inside.diagonal())).abs().max() < 2e-2


def test_products_in_fp32_and_bf16_agree() -> None:
    (matrix, *_) = matrices()
    one, other = (orthogonal(matrix.detach(), dtype).float() for dtype in (torch.float32, torch.bfloat16))
    assert (one - other).norm() / one.norm() < 0.03


def test_gradient_of_zeros_gives_no_step() -> None:
    assert not orthogonal(torch.zeros(4, 6), torch.float32).any()


def test_matched_step_has_the_size_of_adamw() -> None:
    """An orthogonal (A, B) matrix has root mean square 1 / sqrt(max(A, B)); AdamW's updates have about 0.2."""
    for shape in SHAPES:
        update = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.float32)
        size = update.square().mean().sqrt().item() * step_size(torch.Size(shape), "match_rms_adamw")
        assert size == pytest.approx(0.2, rel=0.35)
    assert step_size(torch.Size((24, 8)), "original") == math.sqrt(3)
    assert step_size(torch.Size((8, 24)), "original") == 1.0


def test_momentum_is_used() -> None:
    results = []
    for momentum in (0.0, 0.95):
        parameters = matrices()
        optimizer = ours(parameters, [nn.Parameter(torch.ones(1))], momentum=momentum)
        for seed in range(3):
            give_gradients(parameters, seed)
            optimizer.step()
        results.append(parameters[0].detach().clone())
    assert not torch.allclose(*results)


def test_parameter_without_a_gradient_is_left_alone() -> None:
    parameters, gain = matrices(), nn.Parameter(torch.ones(2))
    before = parameters[0].detach().clone()
    optimizer = ours(parameters, [gain])
    give_gradients(parameters[1:], 0)
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert set(optimizer.state) == set(parameters[1:])


def test_state_dict_of_torch_restores_the_optimizer() -> None:
    first, second = matrices(), matrices()
    gains = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    one, other = ours(first, gains[:1]), ours(second, gains[1:])
    give_gradients([*first, gains[0]], 0)
    one.step()
    for to, source in zip([*second, gains[1]], [*first, gains[0]], strict=True):
        to.data.copy_(source)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for seed in (1, 2):
        give_gradients([*first, gains[0]], seed)
        give_gradients([*second, gains[1]], seed)
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip([*first, gains[0]], [*second, gains[1]], strict=True))


def test_fp16_keeps_gradients_that_are_below_its_range() -> None:
    gradient = 1e-8 * torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    right = orthogonal(gradient.double(), torch.float64)
    assert (orthogonal(gradient, torch.float16).double() - right).norm() < 0.02 * right.norm()
