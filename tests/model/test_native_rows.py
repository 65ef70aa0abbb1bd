"""What is done between products in C++ against torch, which does it by the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import bytes_kept
from torch import Tensor, nn
from torch.nn import functional as F

from cyberslm.data.loader import Batch
from cyberslm.model import native_rows
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.ffn import FeedForward
from cyberslm.model.model import CyberSLM
from cyberslm.model.norm import LayerNorm, RMSNorm
from cyberslm.model.rope import RotaryPositionEmbedding, apply_rope
from cyberslm.model.sizes import activation_bytes

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = CyberSLMConfig(
    vocab_size=60, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_dim=48, max_seq_len=48
)
ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu}


pytestmark = pytest.mark.usefixtures("native_cache")


def drawn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, grad: bool = True) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return numbers.to(dtype).requires_grad_(grad)


def with_gradients(work: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor) -> list[Tensor]:
    """Results of ``work`` and gradients of ``given`` for drawn gradients of the results, in the inputs' dtypes."""
    inputs = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in given]
    found = work(*inputs)
    results = found if isinstance(found, tuple) else (found,)
    grads = [drawn(*t.shape, dtype=t.dtype, seed=n + 7, grad=False) for n, t in enumerate(results)]
    torch.autograd.backward(results, grads)
    return [*(t.detach() for t in results), *(t.grad for t in inputs)]


def assert_near(got: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> None:
    """Equal to 1e-6, of the largest where that is above 1, in fp32; to the next number in bf16."""
    assert len(got) == len(right)
    for mine, other in zip(got, right, strict=True):
        scale = max(1.0, float(other.float().abs().max()))
        rtol, atol = (2**-7, 1e-5 * scale) if dtype == BF16 else (1e-6, 1e-6 * scale)
        torch.testing.assert_close(mine.float(), other.float(), rtol=rtol, atol=atol)


def plain_norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, gain.shape, gain, 1e-5)


WIDTHS = [1, 8, 16, 20, 37, 384]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [(1,), (3, 5), (300,)])
@pytest.mark.parametrize(("dtype", "result"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
def test_norm_is_that_of_torch(width: int, rows: tuple[int, ...], dtype: torch.dtype, result: torch.dtype) -> None:
    x, gain = drawn(*rows, width, dtype=dtype), drawn(width)
    got = with_gradients(lambda x, gain: native_rows.rms_norm(x, gain, 1e-5, result), x, gain)
    right = with_gradients(lambda x, gain: plain_norm(x.float(), gain).to(result), x, gain)
    assert [t.dtype for t in got] == [result, dtype, FP32]
    assert_near(got[:2], right[:2], BF16 if BF16 in (dtype, result) else FP32)
    assert_near(got[2:], right[2:], FP32)


@pytest.mark.parametrize("width", [20, 37, 64])
@pytest.mark.parametrize(("dtype", "added"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
def test_sum_and_its_norm_are_those_of_torch(width: int, dtype: torch.dtype, added: torch.dtype) -> None:
    def by_torch(x: Tensor, more: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        total = (x.float() + more.float()).to(dtype)
        return total, plain_norm(total.float(), gain).to(added)

    given = drawn(2, 70, width, dtype=dtype), drawn(2, 70, width, dtype=added, seed=1), drawn(width)
    got = with_gradients(lambda *all_: native_rows.add_rms_norm(*all_, 1e-5), *given)
    right = with_gradients(by_torch, *given)
    assert [t.dtype for t in got] == [dtype, added, dtype, added, FP32]
    assert torch.equal(got[0], right[0])
    loose = BF16 if BF16 in (dtype, added) else FP32
    assert_near(got[1:2], right[1:2], loose)
    if dtype == BF16:  # torch adds the two gradients after it has rounded one of them
        for mine, other in zip(got[2:4], right[2:4], strict=True):
            torch.testing.assert_close(mine.float(), other.float(), rtol=2**-7, atol=2**-7)
    else:
        assert_near(got[2:4], right[2:4], loose)
    assert_near(got[4:], right[4:], FP32)


@pytest.mark.parametrize("shape", [(1,), (37,), (3, 20), (5, 4099)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_product_is_that_of_torch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    act = ACTIVATIONS[name]
    gate, up = (3 * drawn(*shape, seed=n, grad=False).to(dtype) for n in range(2))
    got = with_gradients(lambda g, u: native_rows.gated(g, u, name), gate, up)
    right = with_gradients(lambda g, u: (act(g.float()) * u.float()).to(dtype), gate, up)
    assert [t.dtype for t in got] == [dtype] * 3
    assert_near(got, right, dtype)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_hold_over_all_that_fp32_has(name: str) -> None:
    sizes = torch.logspace(-40, 38, 4001)
    gate = torch.cat((sizes, -sizes, torch.linspace(-20, 20, 4001), torch.zeros(1)))
    ones = torch.ones_like(gate)
    got = with_gradients(lambda g, u: native_rows.gated(g, u, name), gate, ones)
    right = with_gradients(lambda g, u: ACTIVATIONS[name](g.double()).float() * u, gate, ones)
    for mine, other in zip(got, right, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-7, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 20, 34, 64])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("by_row", [False, True])
def test_turn_is_that_of_torch(interleaved: bool, width: int, dtype: torch.dtype, by_row: bool) -> None:
    table = RotaryPositionEmbedding(width, 40, interleaved=interleaved)
    positions = torch.arange(3)[:, None] + torch.arange(9) if by_row else torch.arange(9)
    rotation = table(positions)
    rotation = rotation._replace(cos=rotation.cos * 1.3, sin=rotation.sin * 1.3)  # as yarn has them
    x = drawn(3, 9, 4, width, dtype=dtype).transpose(1, 2)
    got = with_gradients(lambda x: apply_rope(x, rotation, native=True), x)
    right = with_gradients(lambda x: apply_rope(x.float(), rotation).to(dtype), x)
    assert got[0].transpose(1, 2).is_contiguous()
    assert_near(got, right, dtype)


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_any_strides_give_the_numbers_of_copies(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 5)) for _ in range(3)] + [2 * data.draw(st.integers(1, 12))]
    order = data.draw(st.permutations(range(4)))
    step = data.draw(st.sampled_from([1, 2]))
    whole = torch.randn([sizes[i] for i in order[:-1]] + [sizes[order[-1]] * step])
    x = whole[..., ::step].permute([order.index(i) for i in range(4)])
    copy = x.contiguous()
    assert list(x.shape) == sizes
    rotation = RotaryPositionEmbedding(sizes[3], 8)(torch.arange(sizes[2]))
    gain = torch.rand(sizes[3])
    for work in (
        lambda x: native_rows.rms_norm(x, gain, 1e-5, BF16),
        lambda x: native_rows.add_rms_norm(x, x, gain, 1e-5)[0],
        lambda x: native_rows.gated(x, x, "swiglu"),
        lambda x: apply_rope(x, rotation, native=True),
    ):
        for got, right in zip(with_gradients(work, x), with_gradients(work, copy), strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_where_torch_leaves_it(bad: float) -> None:
    x, gain = drawn(3, 20, grad=False), torch.ones(20)
    x[1, 3] = bad
    pairs = [
        (lambda x: native_rows.rms_norm(x, gain, 1e-5, FP32), lambda x: plain_norm(x, gain)),
        (lambda x: native_rows.rms_norm(x, gain, 1e-5, BF16), lambda x: plain_norm(x, gain).to(BF16)),
        (lambda x: native_rows.gated(x, x, "swiglu"), lambda x: F.silu(x) * x),
        (lambda x: native_rows.gated(x, x, "geglu"), lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * x),
    ]
    for mine, other in pairs:
        for got, right in zip(with_gradients(mine, x), with_gradients(other, x), strict=True):
            assert torch.equal(got.isfinite(), right.isfinite())


def test_threads_change_no_bit() -> None:
    x, more, gain = drawn(2, 700, 96), drawn(2, 700, 96, dtype=BF16), drawn(96)
    rotation = RotaryPositionEmbedding(24, 700)(torch.arange(700))

    def work(x: Tensor, more: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        total, normed = native_rows.add_rms_norm(x, more, gain, 1e-5)
        heads = apply_rope(normed.unflatten(-1, (4, 24)).transpose(1, 2), rotation, native=True)
        return native_rows.gated(normed, normed.flip(0), "geglu"), native_rows.rms_norm(total, gain, 1e-5, FP32), heads

    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(with_gradients(work, x, more, gain))
    finally:
        torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def native_layers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts calls of what is done in C++."""
    calls: dict[str, int] = {}
    for name in ("rms_norm", "add_rms_norm", "gated", "turn"):
        work = getattr(native_rows, name)

        def counted(*args: Any, _name: str = name, _work: Any = work, **options: Any) -> Any:
            calls[_name] = calls.get(_name, 0) + 1
            return _work(*args, **options)

        monkeypatch.setattr(native_rows, name, counted)
    return calls


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qk_norm": {"qk_norm": True},
    "geglu, interleaved": {"activation": "geglu", "rope_layout": "interleaved"},
    "layer norm": {"norm": "layer", "bias": True},
    "gelu": {"activation": "gelu"},
    "relu2, wide heads": {"activation": "relu2", "head_dim": 10, "key_dim": 6},
    "odd": {"hidden_dim": 36, "num_heads": 3, "num_kv_heads": 1, "head_dim": 6, "ffn_hidden_dim": 37},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_networks_are_the_same_with_and_without(name: str, bf16: bool) -> None:
    config = replace(SMALL, **VARIANTS[name])
    ids = torch.randint(0, 60, (3, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for native in (False, True):
        model = CyberSLM(config, seed=1)
        model.use_native(on=native)
        with torch.autocast("cpu", dtype=BF16, enabled=bf16):
            logits = model(ids)
        logits.float().square().mean().backward()
        found.append([logits.detach().float(), *(p.grad for p in model.parameters())])
    for mine, other in zip(found[1], found[0], strict=True):
        close = float((mine - other).norm() / other.norm())
        assert close < (2e-2 if bf16 else 2e-6)


def test_layers_take_their_native_form_only_where_they_were_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model, ids = native_layers(monkeypatch), CyberSLM(replace(SMALL, qk_norm=True)), torch.zeros(1, 4).long()
    model(ids)
    assert not calls
    model.use_native()
    model(ids)
    assert calls == {"rms_norm": 2 * 3 + 1, "add_rms_norm": 2, "gated": 2, "turn": 4}
    calls.clear()
    model.double()(ids)
    with torch.autocast("cpu", dtype=torch.float16):
        model.float().norm(torch.randn(2, 32))
    assert not calls


def test_without_gradients_few_tokens_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = native_layers(monkeypatch), CyberSLM(replace(SMALL, hidden_dim=128, ffn_hidden_dim=128))
    model.use_native()
    with torch.no_grad():
        model(torch.zeros(1, 40).long())
        assert not calls
        model(torch.zeros(7, 40).long())
    assert calls == {"rms_norm": 2 + 1, "add_rms_norm": 2, "gated": 2, "turn": 2}


def test_frozen_and_learned_parts_get_gradients_as_they_ask() -> None:
    norm = RMSNorm(20, 1e-5)
    norm.native = True
    norm.weight.requires_grad_(False)
    x = drawn(3, 20)
    norm(x).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is None


def test_angles_that_ask_for_gradients_are_left_to_torch() -> None:
    rotation = RotaryPositionEmbedding(8, 8)(torch.arange(5))
    cos = rotation.cos.clone().requires_grad_()
    apply_rope(drawn(1, 2, 5, 8), rotation._replace(cos=cos), native=True).sum().backward()
    assert cos.grad is not None


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_sum_with_its_norm_is_the_two_steps(kind: type[nn.Module]) -> None:
    norm = kind(20, 1e-5, bias=True) if kind is LayerNorm else kind(20, 1e-5)
    x, added = drawn(3, 20), drawn(3, 20, seed=1)
    total, normed = norm.add(x, added)
    assert torch.equal(total, x + added)
    assert torch.equal(normed, norm(x + added))


def test_bf16_network_works_in_bf16() -> None:
    feed_forward = FeedForward(SMALL).bfloat16()
    x = drawn(3, 32, dtype=BF16, grad=False)
    right = feed_forward(x)
    feed_forward.native = True
    got = feed_forward(x)
    assert got.dtype == BF16
    torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["llama", "qk_norm", "geglu, interleaved", "layer norm", "gelu", "wide"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_activations_are_those_that_torch_keeps(name: str, bf16: bool) -> None:
    config = replace(SMALL, **VARIANTS.get(name, {"hidden_dim": 64, "ffn_hidden_dim": 200, "num_layers": 4}))
    model = CyberSLM(config)
    model.use_native()
    ids, targets = torch.randint(0, 60, (2, 3, 40), generator=torch.Generator().manual_seed(0))
    kept = bytes_kept(model, Batch(ids.clone(), targets.clone()), bf16=bf16)
    assert kept == pytest.approx(activation_bytes(config, 3, 40, bf16=bf16, native=True), rel=0.035 if bf16 else 1e-3)
    if config.norm == "rms" and name != "gelu":
        assert kept < 0.85 * activation_bytes(config, 3, 40, bf16=bf16)


@pytest.mark.slow
def test_compiled_blocks_take_the_operators_as_they_are() -> None:
    ids = torch.randint(0, 60, (3, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for compiled in (False, True):
        model = CyberSLM(replace(SMALL, qk_norm=True), seed=1)
        model.use_native()
        model.compile_blocks(on=compiled)
        logits = model(ids)
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
