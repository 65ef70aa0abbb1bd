from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cyberslm.errors import InputError
from cyberslm.model.cache import FIRST_ROOM, KeyValue, KVCache
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.sizes import cache_bytes_per_token

CONFIG = CyberSLMConfig(
    vocab_size=50, hidden_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, key_dim=6, ffn_hidden_dim=48
)


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def rooms(cache: KVCache) -> set[int]:
    return {t.shape[2] for layer in cache.layers for t in (layer.keys, layer.values)}


@torch.no_grad()
def test_room_doubles_from_small_and_never_exceeds_the_capacity() -> None:
    model = CyberSLM(CONFIG)
    cache = model.new_cache(1, 900)
    assert rooms(cache) == {FIRST_ROOM}
    seen = []
    for part in ids(1, 900).split(90, dim=1):
        model(part, cache=cache)
        seen.append(*rooms(cache))
    assert seen == [256, 256, 512, 512, 512, 900, 900, 900, 900, 900]
    assert rooms(model.new_cache(1, 40)) == {40}
    assert rooms(model.new_cache(1, 1024)) == {FIRST_ROOM}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_formula(dtype: torch.dtype) -> None:
    cache = KVCache(CONFIG, batch_size=2, capacity=100, dtype=dtype)
    per_token = cache_bytes_per_token(CONFIG, bytes_per_number=dtype.itemsize)
    assert per_token == 3 * 2 * (6 + 8) * dtype.itemsize
    assert cache.num_bytes == 2 * 100 * per_token


@torch.no_grad()
def test_bf16_cache_of_an_fp32_model_is_near_it() -> None:
    model = CyberSLM(CONFIG, seed=1).eval()
    cache = model.new_cache(2, 20, dtype=torch.bfloat16)
    got = torch.cat([model(part, cache=cache) for part in ids(2, 20).split(7, dim=1)], dim=1)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    right = model(ids(2, 20))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, right, atol=0.02, rtol=0.02)
    assert not torch.equal(got, right)


def test_each_row_may_have_its_own_capacity() -> None:
    model = CyberSLM(CONFIG)
    cache = model.new_cache(2, [6, 3])
    model(ids(2, 3), cache=cache)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    model(ids(2, 1), mask, cache=cache)
    with pytest.raises(InputError, match=r"row 1 would hold 4 tokens \(3 and 1 new\) and .* room for 3"):
        model(ids(2, 1), cache=cache)
    cache.keep([0])
    assert (cache.capacities, cache.lengths) == ([6], [4])


@pytest.mark.parametrize("capacity", [0, 1025, [5], [5, 0], [5, 1025]])
def test_capacity_out_of_range_is_refused(capacity: int | list[int]) -> None:
    with pytest.raises(InputError, match="for each row a capacity from 1 to max_seq_len 1024"):
        KVCache(CONFIG, batch_size=2, capacity=capacity)


@torch.no_grad()
def test_what_was_cut_off_is_gone_even_if_it_was_nan() -> None:
    model = CyberSLM(CONFIG, seed=1).eval()
    cache = model.new_cache(2, 12)
    model(ids(2, 9), cache=cache)
    for layer in cache.layers:
        layer.keys[1, :, 5:9] = torch.nan
        layer.values[1, :, 5:9] = torch.inf
    cache.truncate([9, 5])
    assert all(t[1, :, 5:].eq(0).all() for layer in cache.layers for t in (layer.keys, layer.values))
    got = model(ids(2, 1), cache=cache)[1]
    assert torch.allclose(got, model(torch.cat((ids(2, 9)[1:, :5], ids(2, 1)[1:]), 1))[0, -1:], atol=1e-5)


@torch.no_grad()
def test_fork_goes_its_own_way() -> None:
    model = CyberSLM(CONFIG, seed=1).eval()
    cache = model.new_cache(1, 12)
    model(ids(1, 4), cache=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    fork = cache.fork()
    assert (fork.lengths, fork.columns, fork.capacities) == (cache.lengths, cache.columns, cache.capacities)
    model(ids(1, 5), cache=fork)
    assert cache.lengths == [4]
    assert all(torch.equal(layer.keys, kept) for layer, kept in zip(cache.layers, before, strict=True))


@torch.no_grad()
def test_pair_grows_in_place_and_earlier_pairs_never_change() -> None:
    def columns(count: int, seed: int) -> torch.Tensor:
        return torch.randn(1, 2, count, 4, generator=torch.Generator().manual_seed(seed))

    first = KeyValue.extended(None, columns(3, 0), columns(3, 1))
    second = KeyValue.extended(first, columns(1, 2), columns(1, 3))
    third = KeyValue.extended(second, columns(1, 4), columns(1, 5))
    assert third[0].data_ptr() == second[0].data_ptr()
    other = KeyValue.extended(second, columns(1, 6), columns(1, 7))
    assert other[0].data_ptr() != second[0].data_ptr()
    k, v = third
    assert torch.equal(k, torch.cat((columns(3, 0), columns(1, 2), columns(1, 4)), 2))
    assert torch.equal(v, torch.cat((columns(3, 1), columns(1, 3), columns(1, 5)), 2))
    assert torch.equal(other[0], torch.cat((columns(3, 0), columns(1, 2), columns(1, 6)), 2))
    rooms_seen = set()
    pair = (columns(1, 0), columns(1, 1))
    for step in range(64):
        pair = KeyValue.extended(pair, columns(1, step), columns(1, step))
        rooms_seen.add(pair._shared.keys.shape[2])
    assert pair[0].shape[2] == 65
    assert rooms_seen == {2, 4, 8, 16, 32, 64, 128}


def test_truncating_nothing_changes_nothing_and_a_cut_forgets_padding() -> None:
    model = CyberSLM(CONFIG)
    cache = model.new_cache(2, 12)
    model(ids(2, 3), torch.tensor([[0, 0, 1], [0, 1, 1]]), cache=cache)
    cache.truncate([1, 2])
    assert cache.columns == 3
    cache.truncate([1, 1])
    assert cache.columns == 1


def test_view_leaves_rows_to_the_whole_cache() -> None:
    """A view that kept one row left the other layers with two."""
    cache = KVCache(CONFIG, batch_size=2, capacity=8)
    for change in (lambda view: view.keep([0]), lambda view: view.truncate([0, 0])):
        with pytest.raises(InputError, match="the view of one layer: keep, append and truncate on the whole"):
            change(cache.view(0))


def test_pass_with_a_cache_records_no_gradients() -> None:
    """A decode loop outside no_grad kept the graph of every earlier step, and backward failed inside torch."""
    model = CyberSLM(CONFIG)
    cache = model.new_cache(1, 8)
    for part in ids(1, 6).split(2, dim=1):
        assert not model(part, cache=cache).requires_grad
    assert not any(layer.keys.requires_grad for layer in cache.layers)
    layer, view = model.layers[0].self_attn, cache.fork().view(0)
    assert not layer(torch.randn(1, 1, 32), kv_cache=view).output.requires_grad
    assert layer(torch.randn(1, 1, 32)).output.requires_grad


def test_pairs_grow_under_gradients_whatever_is_trained() -> None:
    """Backward needs keys and values too when only queries are trained, and they had been written over."""
    layer = CyberSLM(CONFIG, seed=1).layers[0].self_attn
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("q_proj"))
    x = torch.randn(1, 9, 32)
    pair, outputs = None, []
    for part in x.split([5, 1, 1, 2], dim=1):
        result = layer(part, kv_cache=pair, use_cache=True)
        pair = result.present
        outputs.append(result.output)
        with torch.no_grad():
            layer(part, kv_cache=pair, use_cache=True)
    torch.cat(outputs, 1).square().sum().backward()
    split = layer.q_proj.weight.grad.clone()
    layer.zero_grad()
    layer(x).output.square().sum().backward()
    torch.testing.assert_close(split, layer.q_proj.weight.grad, atol=1e-5, rtol=1e-4)


def test_one_pair_extended_by_threads_gives_each_its_own() -> None:
    """Two threads that extended one pair wrote to the same columns."""

    def extend(number: int) -> bool:
        with torch.no_grad():
            column = torch.full((2, 2, 1, 4), float(number))
            k, v = KeyValue.extended(base, column, column)
        return bool(k[:, :, 5:].eq(number).all() and v[:, :, 5:].eq(number).all())

    for _ in range(50):
        with torch.no_grad():
            start = KeyValue.extended(None, torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4, 4))
            base = KeyValue.extended(start, torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(extend, range(1, 9)))


def test_inference_mode_may_be_left_with_a_pair_and_is_named_with_a_cache() -> None:
    model = CyberSLM(CONFIG)
    layer, x = model.layers[0].self_attn, torch.randn(1, 2, 32)
    with torch.inference_mode():
        pair = layer(x, use_cache=True).present
        pair = layer(x, kv_cache=pair, use_cache=True).present
        cache = model.new_cache(1, 8)
    with torch.no_grad():
        assert layer(x, kv_cache=pair, use_cache=True).present[0].shape[2] == 6
        with pytest.raises(InputError, match="made in torch.inference_mode"):
            model(ids(1, 2), cache=cache)
