from __future__ import annotations

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
    got = model(ids(2, 1), cache=cache)[1]
    assert torch.allclose(got, model(torch.cat((ids(2, 9)[1:, :5], ids(2, 1)[1:]), 1))[0, -1:], atol=1e-5)


@torch.no_grad()
def test_fork_goes_its_own_way() -> None:
    model = CyberSLM(CONFIG, seed=1).eval()
    cache = model.new_cache(1, 12)
    model(ids(1, 4), cache=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    model(ids(1, 5), cache=cache.fork())
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
