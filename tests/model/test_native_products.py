"""Products of int8 matrices in C++ against the definition in fp64, where the processor has what they need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.model.native_products import int8_products, takes
from cyberslm.model.quantised import pack, rounded, unpack
from cyberslm.native.build import multiplies_bytes


@pytest.fixture(autouse=True)
def able(native_cache: object) -> None:  # noqa: ARG001 (made first)
    if not multiplies_bytes():
        pytest.skip("this processor adds up no products of bytes")


def matrix(features: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pack(torch.randn(features, columns, generator=torch.Generator().manual_seed(seed)), "int8")


def rows(count: int, columns: int, seed: int) -> torch.Tensor:
    """Of sizes far apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=generator) * torch.randn(count, 1, generator=generator).exp()


@settings(deadline=None, max_examples=60)
@given(
    count=st.sampled_from([1, 2, 3, 4, 5, 16, 17, 31, 33, 70]),
    columns=st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 256])),
    features=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    narrow=st.booleans(),
)
def test_equals_the_definition(count: int, columns: int, features: list[int], seed: int, *, narrow: bool) -> None:
    x = rows(count, columns, seed).to(torch.bfloat16 if narrow else torch.float32)
    matrices = [matrix(size, columns, seed + i) for i, size in enumerate(features)]
    for out, packed in zip(int8_products(x, matrices), matrices, strict=True):
        near, weight = rounded(x.float()).double(), unpack(packed).double()
        wanted = near @ weight.T
        off = 1e-6 * (near.abs() @ weight.abs().T) + (2**-8 * wanted.abs() if narrow else 0)
        assert out.dtype == x.dtype
        assert ((out.double() - wanted).abs() <= off).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("columns", [64, 130])
def test_other_rows_and_threads_change_no_bit(columns: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, packed = rows(70, columns, 0), matrix(100, columns, 1)
        (whole,) = int8_products(x, [packed])
        for count in (1, 2, 4, 5, 33):
            assert torch.equal(int8_products(x[:count], [packed])[0], whole[:count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_row_alone(count: int, value: float) -> None:
    """A damaged model must be seen: whole numbers have no NaN."""
    x = rows(count, 130, 0)
    x[1, 129] = value
    (out,) = int8_products(x, [matrix(50, 130, 1)])
    assert not out[1].isfinite().any()
    assert out[torch.arange(count) != 1].isfinite().all()


def test_zeros_and_next_to_nothing_give_zeros() -> None:
    x = torch.zeros(6, 64)
    x[1] = 1e-38
    assert not int8_products(x, [matrix(20, 64, 0)])[0].any()


def test_takes_no_rows_that_ask_for_gradients() -> None:
    x = torch.ones(1, 4, requires_grad=True)
    assert not takes(x)
    assert not takes(torch.ones(1, 4, dtype=torch.float64))
    with torch.no_grad():
        assert takes(x)
