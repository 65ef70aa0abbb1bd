from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import LoraConfig
from cyberslm.training.memory import Batch, Frozen, fitting, gathered_bytes, kept_bytes, needed

CONFIG = CyberSLMConfig(max_seq_len=512)
MOMENTS = 8 * CONFIG.num_parameters
MiB = 1 << 20


def need(rows: int = 4, several: bool = False, bf16: bool = False, config: CyberSLMConfig = CONFIG) -> int:
    return needed(config, Batch(rows, several), optimizer=8 * config.num_parameters, bf16=bf16).total


def test_weights_and_moments_are_what_the_parameters_take() -> None:
    found = needed(CONFIG, Batch(1, several=False), optimizer=MOMENTS, bf16=False)
    assert (found.weights, found.optimizer) == (4 * 33_531_264, 8 * 33_531_264)
    assert found.certain == 12 * 33_531_264
    assert found.total == sum(found)


def test_more_rows_longer_rows_accumulation_and_larger_models_need_more() -> None:
    assert need(4) < need(8)
    assert need(4) < need(4, config=replace(CONFIG, max_seq_len=1024))
    assert need(4) < need(4, several=True)
    assert need(4) < need(4, config=replace(CONFIG, num_layers=13))
    assert need(4, bf16=True) < need(4)


def test_gradients_are_counted_where_little_else_is_held_at_the_end() -> None:
    """A large model on one short row: at the end of the backward pass gradients are all that is left of the step."""
    config = replace(CONFIG, vocab_size=1000)
    found = needed(config, Batch(1, several=False), optimizer=8 * config.num_parameters, bf16=False, tokens=16)
    assert found.gradients + found.activations + found.loss == pytest.approx(found.weights, rel=1e-6)


def test_smaller_sizes_that_fit_are_the_largest_that_do() -> None:
    def fit(available: int):
        return fitting(
            CONFIG, Batch(8, several=False), optimizer=MOMENTS, bf16=False, device="cpu", available=available
        )

    found = fit(need(4, several=True))
    assert (found.rows, found.tokens, found.total) == (4, 512, need(4, several=True))
    assert fit(need(4, several=True) - 1).rows == 2
    shorter = replace(CONFIG, max_seq_len=256)
    assert fit(need(1, several=True, config=shorter))[:2] == (1, 256)
    assert fit(100 * MiB) is None


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 64), st.integers(400, 6000))
def test_what_is_advised_needs_what_it_says_and_fits(rows: int, available: int) -> None:
    room = available * MiB
    found = fitting(CONFIG, Batch(rows, several=True), optimizer=MOMENTS, bf16=True, device="cpu", available=room)
    if found is not None:
        shape = replace(CONFIG, max_seq_len=found.tokens)
        assert found.total == need(found.rows, several=True, bf16=True, config=shape) <= room


@pytest.mark.parametrize("bf16", [False, True])
def test_blocks_computed_again_need_one_block_and_the_inputs_of_the_others(bf16: bool) -> None:
    def kept(layers: int, *, recompute: bool) -> int:
        return kept_bytes(replace(CONFIG, num_layers=layers), 2, 64, bf16=bf16, recompute=recompute)

    inputs, casts = 4 * 2 * 64 * CONFIG.hidden_dim, 0
    if bf16:
        casts = 2 * (CONFIG.num_parameters - replace(CONFIG, num_layers=11).num_parameters)
    assert kept(12, recompute=True) - kept(11, recompute=True) == inputs + casts
    assert kept(1, recompute=True) == kept(1, recompute=False) + inputs
    assert kept(12, recompute=True) < kept(12, recompute=False)
    plain, again = Batch(4, several=True), Batch(4, several=True, recompute=True)
    assert (
        needed(CONFIG, again, optimizer=MOMENTS, bf16=bf16).total
        < needed(CONFIG, plain, optimizer=MOMENTS, bf16=bf16).total
    )


@pytest.mark.parametrize("bf16", [False, True])
def test_of_a_frozen_head_only_what_is_made_of_it_is_counted(bf16: bool) -> None:
    """A copy was counted of a head that is kept in the dtype of the products."""
    taken, cast, learned = (
        needed(
            CONFIG,
            Batch(4, several=True),
            optimizer=0,
            bf16=bf16,
            frozen=Frozen(1 << 20, 10 * MiB, LoraConfig(), head),
        )
        for head in ("taken", "cast", "learned")
    )
    head = CONFIG.vocab_size * CONFIG.hidden_dim
    assert cast.loss - taken.loss == (2 if bf16 else 4) * head
    assert (learned.loss, learned.activations) == (cast.loss, cast.activations + 4 * head)


@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_alone_keep_less_than_blocks_that_learn(recompute: bool) -> None:
    alone, all_of_them = (
        needed(
            CONFIG,
            Batch(4, several=False, recompute=recompute),
            optimizer=0,
            bf16=True,
            frozen=Frozen(1 << 20, 10 * MiB, adapters, "taken"),
        ).activations
        for adapters in (LoraConfig(), None)
    )
    few = LoraConfig(targets=("q_proj", "v_proj"))
    assert alone < all_of_them
    assert kept_bytes(CONFIG, 4, 512, recompute=recompute, adapters=few) < kept_bytes(
        CONFIG, 4, 512, recompute=recompute, adapters=LoraConfig()
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_in_cpp_need_less(recompute: bool) -> None:
    plain = Batch(8, several=True, recompute=recompute)
    totals = [
        needed(CONFIG, batch, optimizer=MOMENTS, bf16=True).activations
        for batch in (plain, plain._replace(native=True))
    ]
    assert totals[1] < totals[0]
    assert fitting_rows(plain._replace(native=True)) >= fitting_rows(plain)


def fitting_rows(batch: Batch) -> int:
    """Rows of 512 that are advised where 2 GiB are there."""
    found = fitting(CONFIG, batch._replace(rows=64), optimizer=MOMENTS, bf16=True, device="cpu", available=2048 * MiB)
    assert found is not None
    return found.rows


def test_shares_of_ranks_are_rounded_up_and_what_is_gathered_is_on_top() -> None:
    found = needed(CONFIG, Batch(4, several=True, shards=7), optimizer=MOMENTS, bf16=False)
    whole = needed(CONFIG, Batch(4, several=True), optimizer=MOMENTS, bf16=False)
    assert 0 <= 7 * found.weights - whole.weights < 7
    assert found.gradients == found.weights
    assert found.gathered == gathered_bytes(CONFIG) == 8 * replace(CONFIG, num_layers=2).num_parameters
    assert whole.gathered == 0
    less = fitting(
        CONFIG, Batch(4, several=True, shards=7), optimizer=MOMENTS, bf16=False, device="cpu", available=found.total - 1
    )
    assert less is not None
    assert less.total < found.total
