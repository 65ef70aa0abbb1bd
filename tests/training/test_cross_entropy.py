"""Cross-entropy in chunks against the formula in float64, and against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cyberslm.training import cross_entropy
from cyberslm.training.cross_entropy import Head, linear_cross_entropy, token_losses

IGNORE = -100


def truth(features: Tensor, head: Head, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Objective and loss, row by row."""
    logits = features.double() @ head.weight_VD.double().mT
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    objective, loss = torch.zeros(2, dtype=torch.float64)
    for row, target in zip(logits, targets.tolist(), strict=True):
        if target != IGNORE:
            own = row.logsumexp(0) - row[target]
            loss = loss + own
            objective = objective + own + head.z_loss * row.logsumexp(0) ** 2
    return objective, loss


def made(rows: int, vocabulary: int, *, ignored: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, 5, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 5, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    return features, weight, targets.masked_fill(torch.rand(rows, generator=generator) < ignored, IGNORE)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 23),
    chunk=st.integers(1, 200),
    piece=st.integers(1, 100),
    softcap=st.sampled_from([None, 2.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_loss_and_gradients_are_those_of_the_formula_with_any_chunks(
    rows: int, chunk: int, piece: int, softcap: float | None, z_loss: float, ignored: float
) -> None:
    features, weight, targets = made(rows, 11, ignored=ignored)
    head = Head(weight, softcap, z_loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CPU_CHUNK", chunk)
        patch.setattr(cross_entropy, "PIECE", piece)
        sums = linear_cross_entropy(features, head, targets, ignore=IGNORE)
    objective, loss = truth(features, head, targets)
    torch.testing.assert_close(sums.objective.double(), objective, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-5, atol=1e-5)
    if ignored < 1:
        own, right = (torch.autograd.grad(total * 0.25, (features, weight)) for total in (sums.objective, objective))
        for one, other in zip(own, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_trained_get_zero_gradients() -> None:
    features, weight, targets = made(9, 11, ignored=0.5)
    linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE).objective.backward()
    assert features.grad is not None
    assert features.grad.any(1).tolist() == (targets != IGNORE).tolist()


def test_nothing_trained_gives_zero_loss_and_zero_gradients() -> None:
    features, weight, targets = made(6, 11, ignored=1.0)
    sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE)
    sums.objective.backward()
    assert sums.loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_only_the_objective_can_be_differentiated() -> None:
    features, weight, targets = made(6, 11)
    sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE)
    assert sums.objective.requires_grad
    assert not sums.loss.requires_grad


def test_large_logits_give_a_finite_loss_and_nan_is_not_hidden() -> None:
    features, weight, targets = made(4, 11)
    assert linear_cross_entropy(features * 1e4, Head(weight), targets, ignore=IGNORE).loss.isfinite()
    broken = features.detach().clone()
    broken[2, 1] = torch.nan
    assert linear_cross_entropy(broken, Head(weight), targets, ignore=IGNORE).loss.isnan()


def test_bf16_loss_is_that_of_its_logits_in_fp32() -> None:
    """G41: torch's own chunked function reports 10.375 for 10.4486 here."""
    features, weight, targets = made(64, 500)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE)
        logits = torch.nn.functional.linear(features, weight)
    right = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum")
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(right.item(), rel=1e-6)
    own = torch.autograd.grad(sums.objective, (features, weight))
    expected = torch.autograd.grad(right, (features, weight))
    for one, other in zip(own, expected, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


def test_logits_are_never_whole() -> None:
    features, weight, targets = made(64, 500)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() // 4 for t in (out,) if isinstance(t, Tensor))
            return out

    with pytest.MonkeyPatch.context() as patch, Watch():
        patch.setattr(cross_entropy, "CPU_CHUNK", 4000)
        linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE).objective.backward()
    assert max(sizes) <= 4000


@pytest.mark.parametrize(("rows", "vocabulary"), [(600, 8000), (6000, 300), (3, 32000)])
@pytest.mark.parametrize("objective_scale", [1.0, 64.0])
def test_fp16_gradients_are_those_of_the_formula_to_one_per_cent(
    rows: int, vocabulary: int, objective_scale: float
) -> None:
    """Of a softmax over thousands of tokens most is below 6e-5, where fp16 loses digits, or 6e-8, where it ends."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rows, 16, generator=generator)
    weight = 0.5 * torch.randn(vocabulary, 16, generator=generator)
    targets = torch.randint(vocabulary // 4, (rows,), generator=generator)  # most tokens are never a target
    features, weight = (t.half().float().requires_grad_() for t in (features, weight))
    with torch.autocast("cpu", dtype=torch.float16):
        sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE)
    own = torch.autograd.grad(sums.objective * objective_scale, (features, weight))
    wide = [t.detach().double().requires_grad_() for t in (features, weight)]
    total = torch.nn.functional.cross_entropy(wide[0] @ wide[1].mT, targets, reduction="sum")
    right = torch.autograd.grad(total * objective_scale, wide)
    for one, other in zip(own, right, strict=True):
        assert ((one - other).norm(dim=1) <= 0.01 * other.norm(dim=1)).all()
    assert sums.loss.item() == pytest.approx(total.item(), rel=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 23),
    ids=st.integers(1, 4),
    chunk=st.integers(1, 200),
    piece=st.integers(1, 100),
    softcap=st.sampled_from([None, 2.0]),
)
def test_losses_of_tokens_are_those_of_the_formula_with_any_chunks(
    rows: int, ids: int, chunk: int, piece: int, softcap: float | None
) -> None:
    features, weight, _ = made(rows, 11)
    head = Head(weight, softcap)
    asked = torch.randint(11, (rows, ids), generator=torch.Generator().manual_seed(ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CPU_CHUNK", chunk)
        patch.setattr(cross_entropy, "PIECE", piece)
        found = token_losses(features, head, asked)
    assert not found.requires_grad
    for row in range(rows):
        for at in range(ids):
            loss = truth(features[row : row + 1], head, asked[row, at : at + 1])[1]
            torch.testing.assert_close(found[row, at].double(), loss, rtol=1e-5, atol=1e-5)


def test_losses_of_tokens_are_fp32_for_bf16_features() -> None:
    features, weight, targets = made(40, 11)
    low = token_losses(features.bfloat16(), Head(weight), targets.unsqueeze(1))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, token_losses(features, Head(weight), targets.unsqueeze(1)), rtol=0.05, atol=0.05)
