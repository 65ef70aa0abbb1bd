from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import weighted

from cyberslm.decoding.beam import beam_search
from cyberslm.decoding.choice import Ids
from cyberslm.decoding.loop import complete, decode
from cyberslm.decoding.request import Request
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

SMALL = CyberSLMConfig(vocab_size=5, hidden_dim=16, num_layers=1, num_heads=2, ffn_hidden_dim=16, max_seq_len=16)
STOP = 4


def logits_of(model: CyberSLM) -> oracles.LogitsOf:
    return torch.no_grad()(lambda ids: model(torch.tensor([ids]))[0, -1])


class Table(CyberSLM):
    """A network whose next-token probabilities depend on the last token alone, as a table gives them."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__(CyberSLMConfig(vocab_size=len(rows), hidden_dim=8, num_layers=1, num_heads=1, max_seq_len=16))
        self.table = torch.tensor(rows).log()

    def features(self, input_ids: torch.Tensor, attention_mask: object = None, **more: object) -> torch.Tensor:
        super().features(input_ids, attention_mask, **more)
        return input_ids.unsqueeze(-1)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.table[features[..., 0]]


def test_beam_finds_the_path_that_greedy_misses() -> None:
    """G06, by hand: 0 -> 1 looks best (0.6) and leads to 0.6 * 0.4 = 0.24; 0 -> 2 leads to 0.4 * 0.9 = 0.36."""
    model = Table([[0.0, 0.6, 0.4, 0.0], [0.3, 0.3, 0.0, 0.4], [0.05, 0.05, 0.0, 0.9], [0.25] * 4])
    params = SamplingParams(max_new_tokens=2, beams=2, n=2, length_penalty=0.0)
    best, second = beam_search(model, Request([0], params), stop_ids=frozenset({3}))
    assert (best.ids, best.finish) == ((2, 3), "stop")
    assert best.score == pytest.approx(torch.tensor(0.36).log().item(), abs=1e-5)
    assert (second.ids, second.finish) == ((1, 3), "stop")
    assert complete(model, [Request([0], SamplingParams(max_new_tokens=2))], stop_ids=frozenset({3})) == [[[1, 3]]]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 999), budget=st.integers(1, 4), penalty=st.sampled_from([-0.5, 0.0, 0.7, 1.0, 2.0]))
def test_wide_search_is_exhaustive(seed: int, budget: int, penalty: float) -> None:
    model = weighted(SMALL, seed)
    params = SamplingParams(max_new_tokens=budget, beams=256, n=6, length_penalty=penalty)
    wanted = oracles.every_answer(logits_of(model), [1, 2], budget, STOP, penalty)[:6]
    found = beam_search(model, Request([1, 2], params), stop_ids=frozenset({STOP}))
    assert [beam.score for beam in found] == pytest.approx([answer.score for answer in wanted], abs=1e-4)
    assert len({beam.ids for beam in found}) == len(found)
    assert found[0].ids == wanted[0].ids or wanted[0].score - wanted[1].score < 1e-4


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 999), width=st.integers(2, 4), penalty=st.sampled_from([0.0, 1.0, 1.5]))
def test_narrow_search_equals_the_uncached_one(seed: int, width: int, penalty: float) -> None:
    """G06: beams that share or don't reorder cache rows give plausible but wrong text."""
    model = weighted(SMALL, seed)
    params = SamplingParams(max_new_tokens=6, beams=width, n=width, length_penalty=penalty)
    wanted = oracles.beams(logits_of(model), [1, 2, 3], 6, STOP, width, penalty)[:width]
    found = beam_search(model, Request([1, 2, 3], params), stop_ids=frozenset({STOP}))
    assert [beam.score for beam in found] == pytest.approx([answer.score for answer in wanted], abs=1e-4)
    assert found[0].ids == wanted[0].ids or wanted[0].score - wanted[1].score < 1e-4


def test_length_penalty_prefers_length() -> None:
    model = Table([[0.4, 0.0, 0.6, 0.0], *[[0.25] * 4] * 3])

    def best(penalty: float) -> tuple[int, ...]:
        params = SamplingParams(max_new_tokens=6, beams=8, length_penalty=penalty)
        return beam_search(model, Request([0], params), stop_ids=frozenset({2}))[0].ids

    assert best(0.0) == (2,)
    assert len(best(3.0)) == 6


def test_rules_for_ids_hold_in_every_beam() -> None:
    model = weighted(SMALL, 3)

    def search(never: tuple[int, ...] = (), **controls: object) -> list[tuple[int, ...]]:
        request = Request([1], SamplingParams(max_new_tokens=4, beams=4, n=4, **controls))
        found = beam_search(model, request, stop_ids=frozenset({STOP}), never=Ids(never))
        return [beam.ids for beam in found]

    assert all(2 not in ids for ids in search(banned_ids=[2]))
    assert all(2 not in ids for ids in search(never=(2,)))
    assert all(ids[:2] == (0, 3) for ids in search(forced_ids=[0, 3]))
    assert all(STOP not in ids[:3] for ids in search(min_new_tokens=3))
    assert all(len(set(ids)) == len(ids) for ids in search(no_repeat_ngram=1))
    assert search() != search(repetition_penalty=3.0)
    assert search(banned_ids=range(5)) == [()]


def test_beam_says_what_it_is_made_of() -> None:
    model = weighted(SMALL, 3)
    params = SamplingParams(max_new_tokens=4, beams=3, n=2, logprobs=2)
    steps = list(decode(model, [Request([1], params)], stop_ids=frozenset({STOP})))
    for sample in range(2):
        own = [step for step in steps if step.sample == sample]
        assert [step.finish is None for step in own] == [True] * (len(own) - 1) + [False]
        total = sum(step.likelihood.logprob for step in own)
        assert own[-1].score == pytest.approx(total / len(own), abs=1e-4)
        assert all(len(step.likelihood.top) == 2 for step in own)


def test_beams_and_rows_in_one_call_keep_their_numbers() -> None:
    model = weighted(SMALL, 3)
    requests = [Request([1], SamplingParams(max_new_tokens=3, beams=2)), Request([2], SamplingParams(max_new_tokens=3))]
    both = complete(model, requests)
    assert both == [complete(model, [request])[0] for request in requests]
    assert both[1] == [oracles.greedy(model, [2], 3)]


class Even:
    """A guide that lets even ids through and is done after three."""

    def __init__(self, made: int = 0) -> None:
        self.made = made

    def allowed(self) -> torch.Tensor:
        return torch.arange(5) % 2 == 0

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        self.made += 1

    @property
    def done(self) -> bool:
        return self.made == 3

    def fork(self) -> Even:
        return Even(self.made)


def test_every_beam_has_its_own_guide() -> None:
    params = SamplingParams(max_new_tokens=6, beams=3, n=3)
    found = beam_search(weighted(SMALL, 3), Request([1], params, Even()))
    assert {beam.finish for beam in found} == {"stop"}
    assert all(len(beam.ids) == 3 and all(token % 2 == 0 for token in beam.ids) for beam in found)


def test_prompt_and_ids_are_checked_before_the_search() -> None:
    with pytest.raises(GenerationError, match="do not fit the model's context of 16"):
        decode(weighted(SMALL, 3), [Request([1], SamplingParams(max_new_tokens=16, beams=2))])
    with pytest.raises(GenerationError, match="forced_ids must be ids that can be made"):
        beam_search(weighted(SMALL, 3), Request([1], SamplingParams(forced_ids=[2], beams=2)), never=Ids([2]))
