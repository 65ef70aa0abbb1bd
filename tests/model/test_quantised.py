"""Packed matrices against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import ConfigError
from cyberslm.model import quantised
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import (
    BLOCK,
    GROUP,
    PackedLinear,
    pack,
    pack_matrices,
    precision_of,
    rounded,
    set_precision,
    unpack,
)

CONFIG = CyberSLMConfig(
    vocab_size=50, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=64, max_seq_len=16, tie_weights=False
)


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 1000), size=st.floats(1e-6, 1e6))
@pytest.mark.parametrize(("packing", "steps"), [("int8", 127), ("int4", 7)])
def test_each_number_is_within_half_a_step(
    packing: str, steps: int, rows: int, groups: int, seed: int, size: float
) -> None:
    weight = torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed)) * size
    packed = pack(weight, packing)
    blocks = weight if packing == "int8" else weight.unflatten(-1, (-1, GROUP))
    step = blocks.abs().amax(-1, keepdim=True) / steps
    assert torch.allclose(packed.scales, step.squeeze(-1))
    assert ((unpack(packed).view_as(blocks) - blocks).abs() <= step * 0.5001).all()
    assert torch.equal(unpack(packed, torch.tensor([rows - 1])), unpack(packed)[-1:])


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_rows_of_zeros_stay_zeros(packing: str) -> None:
    assert torch.equal(unpack(pack(torch.zeros(2, 64), packing)), torch.zeros(2, 64))


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_a_packed_network_is_the_plain_one_with_the_rounded_weights(packing: str) -> None:
    """And with rounded rows, where they meet int8."""
    packed, plain = CyberSLM(CONFIG).eval(), CyberSLM(CONFIG).eval()
    pack_matrices(packed, packing)
    for parameter in plain.parameters():
        if parameter.ndim == 2:
            parameter.data = unpack(pack(parameter, packing))
    if packing == "int8":
        for module in plain.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: rounded(*inputs))
        plain.norm.register_forward_hook(lambda _, __, out: rounded(out))  # what the head takes
    ids = torch.arange(12).view(2, 6)
    assert torch.allclose(packed(ids), plain(ids), atol=1e-6)
    assert precision_of(packed) == packing
    assert packed.dtype == torch.float32
    assert packed.bfloat16()(ids).dtype == torch.bfloat16


@pytest.mark.parametrize("wide", [1, 100, 1 << 18])
@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_product_by_rows_is_that_of_the_whole(packing: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head was widened whole for every prompt: 49 MB beside 34 of weights."""
    monkeypatch.setattr(quantised, "WIDE", wide)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(50, 64, generator=generator), torch.randn(2, 3, 64, generator=generator)
    bias = torch.nn.Parameter(torch.randn(50, generator=generator))
    packed = pack(weight, packing)
    wanted = torch.nn.functional.linear(rounded(x) if packing == "int8" else x, unpack(packed), bias)
    assert torch.allclose(PackedLinear(packed, bias)(x), wanted, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(columns=st.integers(1, 200), seed=st.integers(0, 1000), size=st.floats(1e-6, 1e6))
def test_each_number_of_a_row_is_rounded_within_its_block(columns: int, seed: int, size: float) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(seed)) * size
    found = rounded(x)
    for row in range(3):
        for start in range(0, columns, BLOCK):
            block, near = x[row, start : start + BLOCK].double(), found[row, start : start + BLOCK].double()
            step = block.abs().max() / 127
            assert ((near - block).abs() <= step * 0.5001).all()
            assert torch.allclose(near, (near / step).round() * step, rtol=1e-5, atol=0)


def test_what_is_not_finite_spoils_its_block_alone() -> None:
    x = torch.ones(3, 2 * BLOCK)
    x[0, 3], x[1, BLOCK] = torch.nan, torch.inf
    finite = rounded(x).isfinite()
    assert finite.all(1).tolist() == [False, False, True]
    assert finite[0, BLOCK:].all()
    assert finite[1, :BLOCK].all()


def test_rows_of_zeros_and_of_next_to_nothing_become_zeros() -> None:
    assert not rounded(torch.tensor([[0.0, 0.0], [1e-38, -1e-40]])).any()


def test_gradients_go_through_what_is_rounded() -> None:
    x = torch.randn(2, 70, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = rounded(x)
    assert torch.allclose(out, rounded(x.detach()), atol=1e-6)
    out.square().sum().backward()
    assert torch.allclose(x.grad, 2 * out.detach())


def test_int4_groups_must_divide_a_row() -> None:
    model = CyberSLM(CyberSLMConfig(vocab_size=50, hidden_dim=48, num_layers=1, num_heads=2, ffn_hidden_dim=64))
    with pytest.raises(ConfigError, match="multiple of 32 wide, not 48: use int8"):
        set_precision(model, "int4")
    assert precision_of(model) == "fp32"


def test_bits_do_not_come_back() -> None:
    model = CyberSLM(CONFIG)
    set_precision(model, "int8")
    with pytest.raises(ConfigError, match="kept in int8 and can't be turned to fp32"):
        set_precision(model, "fp32")


def test_keys_and_values_of_int8_networks_are_bf16() -> None:
    model = CyberSLM(CONFIG)
    assert model.new_cache(1, 4).layers[0].keys.dtype == torch.float32
    set_precision(model, "int8")
    assert model.new_cache(1, 4).layers[0].keys.dtype == torch.bfloat16
    assert model.new_cache(1, 4, dtype=torch.float32).layers[0].keys.dtype == torch.float32
