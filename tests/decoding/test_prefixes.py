from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.loop import Batch
from cyberslm.decoding.prefixes import LEAST, PrefixCache, prefill_new
from cyberslm.decoding.request import Request
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM

CONFIG = CyberSLMConfig(
    vocab_size=30, hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_dim=24, max_seq_len=96
)
MODEL = CyberSLM(CONFIG, seed=1).eval()
SYSTEM = [n % 7 + 1 for n in range(LEAST + 8)]


def fill(prefixes: PrefixCache | None, prompts: list[list[int]]) -> tuple[torch.Tensor, object]:
    with torch.no_grad():
        return prefill_new(MODEL, prompts, [90] * len(prompts), chunk=7, prefixes=prefixes)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, len(SYSTEM)), st.lists(st.integers(0, 29), min_size=1, max_size=20)),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_remembered_prompts_give_the_same_logits_and_keys(rounds: list[list[tuple[int, list[int]]]]) -> None:
    prefixes = PrefixCache(1 << 20)
    for parts in rounds:
        prompts = [SYSTEM[:shared] + rest for shared, rest in parts]
        logits, cache = fill(prefixes, prompts)
        wanted, plain = fill(None, prompts)
        assert cache.lengths == plain.lengths == [len(prompt) for prompt in prompts]
        assert torch.allclose(logits, wanted, atol=1e-5)
        for row, length in enumerate(cache.lengths):
            for mine, its in zip(cache.layers, plain.layers, strict=True):
                assert torch.allclose(mine.keys[row, :, :length], its.keys[row, :, :length], atol=1e-5)


def test_only_what_is_new_is_fed() -> None:
    prefixes = PrefixCache(1 << 20)
    fill(prefixes, [[*SYSTEM, 1]])
    fill(prefixes, [[*SYSTEM, 2, 3], [9] * 20])
    assert prefixes.tokens_saved == len(SYSTEM)
    fill(prefixes, [[*SYSTEM, 2, 3]])  # the last token is fed for its logits
    assert prefixes.tokens_saved == 2 * len(SYSTEM) + 1


def test_oldest_entries_make_room_and_bytes_stay_below_the_limit() -> None:
    one = PrefixCache(1 << 30)
    fill(one, [[1] * 40])
    prefixes = PrefixCache(int(2.5 * one.num_bytes))
    for first in (1, 2, 3):
        fill(prefixes, [[first] * 40])
        assert prefixes.num_bytes <= prefixes.max_bytes
    assert len(prefixes) == 2
    fill(prefixes, [[1] * 41])
    assert prefixes.tokens_saved == 0
    fill(prefixes, [[3] * 41])
    assert prefixes.tokens_saved == 40


def test_a_longer_prompt_replaces_its_beginning_and_a_known_one_is_not_kept_twice() -> None:
    prefixes = PrefixCache(1 << 20)
    fill(prefixes, [SYSTEM])
    fill(prefixes, [[*SYSTEM, 5, 5]])
    fill(prefixes, [SYSTEM])
    assert len(prefixes) == 1


def test_answers_are_those_of_a_batch_without() -> None:
    prefixes, answers = PrefixCache(1 << 20), {}
    for which in (None, prefixes, prefixes):
        batch = Batch(MODEL, prefixes=which)
        for end in (1, 2):
            batch.join(Request([*SYSTEM, end], SamplingParams(max_new_tokens=8, n=2, temperature=0.9, seed=4)))
        made: dict = {}
        while len(batch):
            for step in batch.step():
                made.setdefault((step.row, step.sample), []).append(step.token)
        assert answers.setdefault("first", made) == made
    assert prefixes.tokens_saved >= 2 * len(SYSTEM)


def test_a_model_whose_keys_follow_the_length_is_refused() -> None:
    """`Engine` refused it and `Batch` took it: keys of a shorter text went into a longer one."""
    scaling = RopeScaling(type="dynamic", factor=2.0, original_max_seq_len=16)
    model = CyberSLM(replace(CONFIG, rope_scaling=scaling))
    with pytest.raises(GenerationError, match="rope scaling of type dynamic"):
        Batch(model, prefixes=PrefixCache(1 << 20))


def test_another_model_is_refused() -> None:
    """Keys of one model were given to the other, and nothing said so."""
    prefixes = PrefixCache(1 << 20)
    Batch(MODEL, prefixes=prefixes)
    Batch(MODEL, prefixes=prefixes)
    with pytest.raises(GenerationError, match="another model's keys"):
        Batch(CyberSLM(CONFIG, seed=2), prefixes=prefixes)


def test_a_size_that_holds_nothing_is_refused() -> None:
    with pytest.raises(GenerationError, match="max_bytes of at least 1"):
        PrefixCache(0)


def test_a_prompt_larger_than_the_cache_leaves_the_others_there() -> None:
    """It pushed out all of them, and then itself."""
    prefixes = PrefixCache(1 << 20)
    fill(prefixes, [SYSTEM])
    prefixes.max_bytes = prefixes.num_bytes
    fill(prefixes, [[*SYSTEM, 1, 2, 3], [9] * 60])
    assert len(prefixes) == 1
    fill(prefixes, [[*SYSTEM, 5]])
    assert prefixes.tokens_saved == 2 * len(SYSTEM)


def test_windows_of_rows_that_slide_push_no_prompt_out() -> None:
    """Each window was kept as if it were a prompt, until nothing else was left."""
    prefixes = PrefixCache(1 << 20)
    batch = Batch(MODEL, prefixes=prefixes)
    batch.join(Request(SYSTEM, SamplingParams(max_new_tokens=200, context="slide")))
    while len(batch):
        batch.step()
    assert len(prefixes) == 1
