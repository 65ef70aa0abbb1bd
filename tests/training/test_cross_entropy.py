"""Cross-entropy in chunks against the formula in float64, and against autograd, by torch's operators and in C++."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cyberslm.errors import InputError
from cyberslm.training import cross_entropy
from cyberslm.training import native as in_cpp
from cyberslm.training.cross_entropy import Head, linear_cross_entropy, token_losses

IGNORE = -100


@pytest.fixture(scope="module", params=["torch", "cpp"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param == "cpp":
        request.getfixturevalue("native_cache")
    return request.param == "cpp"


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
    vocabulary=st.sampled_from([1, 7, 11, 16, 32, 49]),
    chunk=st.integers(1, 200),
    piece=st.integers(1, 100),
    softcap=st.sampled_from([None, 2.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_loss_and_gradients_are_those_of_the_formula_with_any_chunks(
    native: bool,
    rows: int,
    vocabulary: int,
    chunk: int,
    piece: int,
    softcap: float | None,
    z_loss: float,
    ignored: float,
) -> None:
    features, weight, targets = made(rows, vocabulary, ignored=ignored)
    head = Head(weight, softcap, z_loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK", chunk)
        patch.setattr(cross_entropy, "PIECE", piece)
        sums = linear_cross_entropy(features, head, targets, ignore=IGNORE, native=native)
    objective, loss = truth(features, head, targets)
    torch.testing.assert_close(sums.objective.double(), objective, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-5, atol=1e-5)
    if (targets != IGNORE).any():
        own, right = (torch.autograd.grad(total * 0.25, (features, weight)) for total in (sums.objective, objective))
        for one, other in zip(own, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_trained_get_zero_gradients(native: bool) -> None:
    features, weight, targets = made(9, 11, ignored=0.5)
    linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE, native=native).objective.backward()
    assert features.grad is not None
    assert features.grad.any(1).tolist() == (targets != IGNORE).tolist()


def test_nothing_trained_gives_zero_loss_and_zero_gradients(native: bool) -> None:
    features, weight, targets = made(6, 11, ignored=1.0)
    sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE, native=native)
    sums.objective.backward()
    assert sums.loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_only_the_objective_can_be_differentiated(native: bool) -> None:
    features, weight, targets = made(6, 11)
    sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE, native=native)
    assert sums.objective.requires_grad
    assert not sums.loss.requires_grad


def test_large_logits_give_a_finite_loss_and_nan_is_not_hidden(native: bool) -> None:
    features, weight, targets = made(4, 11)
    assert linear_cross_entropy(features * 1e4, Head(weight), targets, ignore=IGNORE, native=native).loss.isfinite()
    broken = features.detach().clone()
    broken[2, 1] = torch.nan
    assert linear_cross_entropy(broken, Head(weight), targets, ignore=IGNORE, native=native).loss.isnan()


def test_bf16_loss_is_that_of_its_logits_in_fp32(native: bool) -> None:
    """G41: torch's own chunked function reports 10.375 for 10.4486 here."""
    features, weight, targets = made(64, 500)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE, native=native)
        logits = torch.nn.functional.linear(features, weight)
    right = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum")
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(right.item(), rel=1e-6)
    own = torch.autograd.grad(sums.objective, (features, weight))
    expected = torch.autograd.grad(right, (features, weight))
    for one, other in zip(own, expected, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


def test_logits_are_never_whole(native: bool) -> None:
    features, weight, targets = made(64, 500)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() // 4 for t in (out,) if isinstance(t, Tensor))
            return out

    with pytest.MonkeyPatch.context() as patch, Watch():
        patch.setattr(cross_entropy, "CHUNK", 4000)
        linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE, native=native).objective.backward()
    assert max(sizes) <= 4000


def pass_over(logits: Tensor, targets: Tensor, head: Head, *, native: bool) -> tuple[Tensor, Tensor]:
    """Objective and loss of logits, and the objective's gradient."""
    slopes = logits.clone()
    rows = cross_entropy._Rows(targets, torch.ones_like(targets, dtype=torch.bool))
    return cross_entropy._losses(slopes, rows, head, gain=1.0, native=native), slopes


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("vocabulary", [3, 250, 4000, 32001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("native_cache")
def test_cpp_is_as_exact_as_the_operators(
    dtype: torch.dtype, vocabulary: int, softcap: float | None, z_loss: float
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (5 * torch.randn(9, vocabulary, generator=generator)).to(dtype)
    logits[3] -= 200  # nothing near 0
    logits[4, 1] = 300  # one token has it all
    targets = torch.randint(vocabulary, (9,), generator=generator)
    wide = logits.double().requires_grad_()
    bent = wide if softcap is None else softcap * (wide / softcap).tanh()
    loss = torch.nn.functional.cross_entropy(bent, targets, reduction="sum")
    right = torch.stack((loss + z_loss * bent.logsumexp(1).square().sum(), loss))
    (slopes,) = torch.autograd.grad(right[0], wide)
    head = Head(torch.empty(0), softcap, z_loss)
    off = {}
    for native in (False, True):
        sums, own = pass_over(logits, targets, head, native=native)
        wrong = own.double() - slopes
        off[native] = torch.stack(((sums.double() - right.detach()).abs().max(), wrong.norm(), wrong.abs().max()))
    room = torch.tensor([2e-6 * right[0].item(), 1e-6, 1e-6], dtype=torch.float64)
    assert (off[True] <= 1.1 * off[False] + room).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("native_cache")
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(37, 501, generator=generator).to(dtype)
    targets = torch.randint(501, (37,), generator=generator)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(pass_over(logits, targets, Head(torch.empty(0), 5.0, 0.1), native=True))
    finally:
        torch.set_num_threads(1)
    for sums, slopes in found[1:]:
        assert torch.equal(sums, found[0][0])
        assert torch.equal(slopes, found[0][1])


@pytest.mark.parametrize("place", [0, 20, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.usefixtures("native_cache")
def test_a_nan_of_one_row_reaches_its_loss_and_gradient_alone(
    dtype: torch.dtype, place: int, softcap: float | None
) -> None:
    logits, targets = torch.randn(3, 33).to(dtype), torch.tensor([1, 2, 3])
    logits[1, place] = torch.nan
    sums, slopes = pass_over(logits, targets, Head(torch.empty(0), softcap), native=True)
    assert sums.isnan().all()
    assert slopes.isnan().all(1).tolist() == [False, True, False]
    assert slopes[::2].isfinite().all()


@pytest.mark.usefixtures("native_cache")
def test_logits_of_minus_infinity_have_no_share() -> None:
    logits = torch.randn(4, 21)
    logits[:, ::2] = -torch.inf
    targets = torch.tensor([1, 3, 5, 19])
    sums, slopes = pass_over(logits, targets, Head(torch.empty(0)), native=True)
    right = torch.nn.functional.cross_entropy(logits[:, 1::2], targets // 2, reduction="sum")
    torch.testing.assert_close(sums[1], right)
    assert not slopes[:, ::2].any()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.usefixtures("native_cache")
def test_losses_alone_leave_the_logits(softcap: float | None) -> None:
    logits, targets = torch.randn(4, 21), torch.tensor([1, 3, 5, 20])
    kept = logits.clone()
    found = in_cpp.softmax_loss(logits, targets, softcap=softcap, z_loss=0.1, learns=False)
    assert torch.equal(logits, kept)
    assert found == in_cpp.softmax_loss(logits, targets, softcap=softcap, z_loss=0.1, learns=True)
    assert not torch.equal(logits, kept)


@pytest.mark.parametrize("target", [-1, 21])
@pytest.mark.usefixtures("native_cache")
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    with pytest.raises(InputError, match="targets must be ids from 0 to 20"):
        in_cpp.softmax_loss(torch.randn(2, 21), torch.tensor([1, target]), softcap=None, z_loss=0.0, learns=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float32, torch.bfloat16])
def test_only_fp32_and_bf16_are_for_cpp(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, native_cache: object
) -> None:
    calls = []
    real = in_cpp.softmax_loss
    monkeypatch.setattr(in_cpp, "softmax_loss", lambda *a, **k: calls.append(1) or real(*a, **k))
    features, weight, targets = made(6, 11)
    features = features.detach().to(dtype).requires_grad_()
    off, on = (linear_cross_entropy(features, Head(weight), targets, ignore=IGNORE, native=n) for n in (False, True))
    assert calls == ([1] if dtype in (torch.float32, torch.bfloat16) else [])
    torch.testing.assert_close(off.loss, on.loss)


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
        patch.setattr(cross_entropy, "CHUNK", chunk)
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
