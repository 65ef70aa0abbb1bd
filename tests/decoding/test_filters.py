"""Every filter against words turned into Python, against transformers, and alone against in company."""

from __future__ import annotations

import math
import os

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.filters import FILTERS, filters_of
from cyberslm.decoding.history import History
from cyberslm.decoding.sampling import SamplingParams

SIZE = 12
CONTROLS: dict[str, st.SearchStrategy] = {
    "logit_bias": st.dictionaries(st.integers(0, SIZE - 1), st.floats(-4, 4), max_size=3),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "no_repeat_ngram": st.integers(1, 4),
    "top_k": st.integers(1, SIZE + 2),
    "top_p": st.floats(0.05, 0.99),
    "min_p": st.floats(0.01, 0.5),
    "typical_p": st.floats(0.05, 0.99),
}


def apply(logits_V: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """All filters, the history told token by token."""
    history, logits = History(prompt), logits_V.unsqueeze(0)
    for each in filters_of(params):
        each.apply(logits, params, history)  # so that what it counts is there and has to be kept up to date
    for token in answer:
        history.add(token)
    for each in filters_of(params):
        logits = each.apply(logits, params, history)
    return logits[0]


def normed(values: torch.Tensor) -> torch.Tensor:
    return values.double().log_softmax(-1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[SamplingParams, torch.Tensor, list[int], list[int]]:
    used = draw(st.sets(st.sampled_from(sorted(CONTROLS))))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])), **{name: draw(CONTROLS[name]) for name in used}
    )
    logits = torch.randn(SIZE, generator=torch.Generator().manual_seed(draw(st.integers(0, 10_000)))) * 3
    tokens = st.lists(st.integers(0, draw(st.integers(0, SIZE - 1))), max_size=9)
    return params, logits, draw(tokens), draw(tokens)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(case=cases())
def test_filters_equal_their_words(case: tuple) -> None:
    params, logits, prompt, answer = case
    wanted = torch.tensor(oracles.filtered(logits.tolist(), params, prompt, answer), dtype=torch.float64)
    got = apply(logits, params, prompt, answer)
    assert torch.equal(got.isfinite(), wanted.isfinite())
    if wanted.isfinite().any():
        torch.testing.assert_close(normed(got), normed(wanted), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "controls",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "typical_p": 0.7},
        {"temperature": 1.0, "repetition_penalty": 1.4},
        {"temperature": 1.0, "no_repeat_ngram": 2},
        {"temperature": 1.0, "logit_bias": {2: 3.0, 5: -2.5}},
        {
            "temperature": 0.9,
            "top_k": 9,
            "top_p": 0.95,
            "min_p": 0.02,
            "typical_p": 0.9,
            "repetition_penalty": 1.2,
            "no_repeat_ngram": 3,
            "logit_bias": {1: 1.0},
        },
    ],
    ids=lambda controls: "+".join(sorted(set(controls) - {"temperature"})) or "temperature",
)
def test_filters_equal_those_of_transformers(controls: dict) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GenerationConfig
    from transformers.generation import logits_process as theirs

    names = GenerationConfig().to_dict()
    assert "typical_p" in names
    chain = theirs.LogitsProcessorList()
    make = {
        "logit_bias": lambda v: theirs.SequenceBiasLogitsProcessor({(token,): bias for token, bias in v.items()}),
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram": theirs.NoRepeatNGramLogitsProcessor,
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
        "typical_p": theirs.TypicalLogitsWarper,
    }
    for name, one in make.items():
        if name in controls:
            chain.append(one(controls[name]))
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(SIZE, generator=generator) * 3
        tokens = torch.randint(0, SIZE, (11,), generator=generator).tolist()
        wanted = chain(torch.tensor([tokens]), logits.unsqueeze(0).clone())[0]
        got = apply(logits, SamplingParams(**controls), tokens[:6], tokens[6:])
        assert torch.equal(got.isfinite(), wanted.isfinite())
        torch.testing.assert_close(normed(got), normed(wanted), atol=1e-5, rtol=1e-5)


def test_repetition_counts_prompt_and_answer_and_the_others_the_answer_alone() -> None:
    logits = torch.full((4,), 2.0)
    assert apply(logits, SamplingParams(repetition_penalty=2.0), [0], [1]).tolist() == [1.0, 1.0, 2.0, 2.0]
    got = apply(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 0], [1, 1, 2])
    assert got.tolist() == [2.0, 1.0, 1.25, 2.0]


def test_control_at_its_default_runs_nothing() -> None:
    """G14: a penalty of 1 is bit-identical to none."""
    assert filters_of(SamplingParams(repetition_penalty=1.0, presence_penalty=0.0, top_p=0.5)) == ()
    names = [each.apply.__name__ for each in filters_of(SamplingParams(temperature=0.5, repetition_penalty=1.0))]
    assert names == ["scale"]


@pytest.mark.parametrize("size", [20, 3000])
def test_top_p_looks_no_further_than_it_must_with_the_same_outcome(size: int) -> None:
    """Only the likeliest are sorted where they suffice; a flat distribution needs all."""
    for spread, share in ((0.01, 0.9), (8.0, 0.9), (1.0, 1 - 1e-6)):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(3)) * spread
        (each,) = [each for each in FILTERS if each.apply.__name__ == "top_p"]
        got = each.apply(logits, SamplingParams(temperature=1.0, top_p=share), History([]))[0].isfinite()
        order = logits[0].double().softmax(-1).sort(descending=True)
        needed = int((order.values.cumsum(0) < share).sum()) + 1
        assert abs(int(got.sum()) - needed) <= max(1, needed // 2000)
        assert got[order.indices[: max(0, needed - 2)]].all()


def test_tokens_that_tie_at_the_border_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, -2.0]])
    for controls in ({"top_k": 2}, {"top_p": 0.8}):
        (each,) = [each for each in FILTERS if each.settings == tuple(controls)]
        got = each.apply(logits, SamplingParams(temperature=1.0, **controls), History([]))
        assert got.isfinite().tolist() == [[True, True, True, True, False]]


def test_penalty_leaves_what_is_hidden_hidden() -> None:
    logits = torch.tensor([-math.inf, 1.0, -1.0])
    got = apply(logits, SamplingParams(repetition_penalty=0.5, frequency_penalty=-1.0), [0, 1], [0])
    assert got.tolist() == [-math.inf, 2.0, -1.0]
