from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.draft import LENGTHS, LONGEST, SHORTEST, DraftModel, Pace, PromptLookup, Speculation
from cyberslm.errors import GenerationError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=16, num_layers=1, num_heads=2, ffn_hidden_dim=24, max_seq_len=48)


def looked_up(ids: list[int], most: int) -> list[int]:
    """Search the whole row anew: the latest earlier place of the longest ending, and what followed."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if len(ids) > size and ids[end - size : end] == ids[-size:]:
                row = list(ids)
                while len(row) < len(ids) + most:
                    row.append(row[end + len(row) - len(ids)])
                return row[len(ids) :]
    return []


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=16), max_size=6), st.integers(1, LENGTHS[-1]))
def test_lookup_finds_what_a_search_of_the_row_finds(parts: list[list[int]], most: int) -> None:
    lookup, row = PromptLookup(), []
    for part in parts:
        lookup.follow(part)
        row += part
        assert lookup.guess(most) == looked_up(row, most)


def test_loop_of_text_goes_on_beyond_the_end_of_the_row() -> None:
    lookup = PromptLookup()
    lookup.follow([7, 8, 9, 7, 8, 9])
    assert lookup.guess(7) == [7, 8, 9, 7, 8, 9, 7]


def test_text_without_repetition_is_not_guessed() -> None:
    lookup = PromptLookup()
    lookup.follow(list(range(50)))
    assert lookup.guess(8) == []


@torch.no_grad()
def greedy(model: CyberSLM, ids: list[int], most: int) -> list[int]:
    row = list(ids)
    for _ in range(most):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(ids) :]


def test_draft_model_guesses_its_greedy_continuation_whatever_was_taken_of_earlier_guesses() -> None:
    model, row = CyberSLM(CONFIG, seed=4).eval(), []
    draft = DraftModel(model, capacity=48)
    for tokens in ([3, 5, 8], [1], [1, 2, 9, 4], [30, 31]):
        draft.follow(tokens)
        row += tokens
        assert draft.guess(5) == greedy(model, row, 5)
        assert draft.guess(2) == greedy(model, row, 2)
    draft.follow(guess := draft.guess(4))  # all of it taken
    assert draft.guess(3) == greedy(model, row + guess, 3)


def test_draft_model_stops_guessing_where_its_context_ends() -> None:
    draft = DraftModel(CyberSLM(CONFIG, seed=4).eval(), capacity=1000)
    draft.follow([1] * 46)
    assert len(draft.guess(8)) == 2
    draft.follow([1, 2, 3])
    assert draft.guess(8) == []


def test_pace_grows_with_luck_and_waits_longer_after_each_miss() -> None:
    pace, taken = Pace(), []
    for _ in range(4):
        taken.append(pace.allowance())
        pace.record(taken[-1], taken[-1])
    assert taken == [3, 7, 15, 15]
    pace.record(15, 4)
    assert pace.allowance() == 3
    waits = []
    for _ in range(7):
        pace.record(3, 0)
        waits.append(0)
        while not pace.allowance():
            waits[-1] += 1
    assert waits == [4, 8, 16, 32, 64, 64, 64]
    pace.record(3, 1)
    assert pace.misses == 0
    assert pace.allowance() == 3


@pytest.mark.parametrize("wrong", [{}, {"lookup": True, "model": object()}])
def test_speculation_that_means_nothing_is_refused(wrong: dict) -> None:
    with pytest.raises(GenerationError):
        Speculation(**wrong)
