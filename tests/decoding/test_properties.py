"""One greedy answer, whatever the way to it: cached, uncached, in chunks, in a batch, joined late, over all variants.

The same property runs on few cases here and on thousands with ``-m slow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from networks import VOCABULARY, variants, weighted

from cyberslm.decoding.loop import Batch
from cyberslm.decoding.request import Request, Step
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

CLEAR = 1e-4
"""A smaller margin between the two largest logits may be decided by rounding."""


class Guest(NamedTuple):
    prompt: list[int]
    after: int
    """Steps of the others before it joins."""
    params: SamplingParams


@st.composite
def guests(draw: st.DrawFn) -> list[Guest]:
    ids = st.integers(0, VOCABULARY - 1)
    found = []
    for number in range(draw(st.integers(1, 4))):
        drawn = draw(st.booleans())
        params = SamplingParams(
            max_new_tokens=draw(st.integers(1, 5)),
            temperature=1.0 if drawn else 0.0,
            top_k=draw(st.sampled_from([0, 5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            seed=number,
            n=draw(st.sampled_from([1, 1, 2])) if drawn else 1,
        )
        found.append(Guest(draw(st.lists(ids, min_size=1, max_size=9)), draw(st.integers(0, 3)), params))
    return found


def in_company(model: CyberSLM, parties: Sequence[Guest], *, chunk: int) -> dict[tuple[int, int], list[int]]:
    """All in one batch, each joining when it is time; ids by row and sample."""
    batch, steps = Batch(model, stop_ids=frozenset({3}), chunk=chunk), []
    for party in parties:
        for _ in range(party.after):
            steps += batch.step()
        batch.join(Request(party.prompt, party.params))
    while len(batch):
        steps += batch.step()
    return by_row(steps)


def by_row(steps: Sequence[Step]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        found.setdefault((step.row, step.sample), []).append(step.token)
    return found


def agree(model: CyberSLM, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Equal, or parted where the two largest logits tie but for rounding."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            logits = model(torch.tensor([[*prompt, *one[:place]]]))[0, -1]
            return abs(float(logits[a] - logits[b])) < CLEAR
    return len(one) == len(other)


def every_way_says_the_same(
    config: CyberSLMConfig, parties: list[Guest], chunk: int, number: int, *, exact: bool
) -> None:
    """In fp32 greedy ids where the margin is clear; in fp64, where rounding decides nothing, drawn ones too."""
    with torch.no_grad():
        model = weighted(config, number).to(torch.float64 if exact else torch.float32)
        together = in_company(model, parties, chunk=chunk)
        for row, party in enumerate(parties):
            alone = in_company(model, [party._replace(after=0)], chunk=100)
            for sample in range(party.params.n):
                got, wanted = together[row, sample], alone[0, sample]
                plain = party.params.greedy and party.params.repetition_penalty == 1
                if exact:
                    assert got == wanted
                elif plain:
                    assert agree(model, party.prompt, got, wanted)
            if plain:
                assert agree(model, party.prompt, wanted, uncached(model, party))


def uncached(model: CyberSLM, party: Guest) -> list[int]:
    ids: list[int] = []
    while len(ids) < (party.params.max_new_tokens or 0) and ids[-1:] != [3]:
        ids.append(int(model(torch.tensor([[*party.prompt, *ids]]))[0, -1].argmax()))
    return ids


@st.composite
def controls(draw: st.DrawFn) -> SamplingParams:
    """Settings of every kind at once."""
    ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
    drawn, most = draw(st.booleans()), draw(st.integers(3, 12))
    banned = draw(ids)
    stops = [token for token in draw(ids) if token not in banned]
    forced = [token for token in draw(ids)[:3] if token not in (*banned, *stops, 3)]
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=draw(st.integers(0, most)),
        temperature=draw(st.sampled_from([0.3, 1.0, 3.0])) if drawn else 0.0,
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        typical_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        no_repeat_ngram=draw(st.sampled_from([0, 0, 1, 2])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5), max_size=2)),
        banned_ids=banned,
        stop_ids=stops,
        forced_ids=forced,
        context=draw(st.sampled_from(["error", "slide", "truncate-left"])),
        sinks=draw(st.integers(0, 4)),
        n=draw(st.integers(1, 3)) if drawn else 1,
        seed=draw(st.integers(0, 99)),
    )


def every_answer_keeps_to_its_settings(config: CyberSLMConfig, parties: list, chunk: int, number: int) -> None:
    """All controls in one batch, with contexts that slide: each answer as alone, in fp64, and within its own rules."""
    model = weighted(config, number).double()
    guests = [Guest(*party) for party in parties]
    together = in_company(model, guests, chunk=chunk)
    for row, (prompt, _, params) in enumerate(guests):
        alone = in_company(model, [Guest(prompt, 0, params)], chunk=100)
        for sample in range(params.n):
            ids = together[row, sample]
            assert ids == alone[0, sample]
            if ids[-1:] == [None]:  # no token was left
                ids = ids[:-1]
            ends = {3, *params.stop_ids}
            assert len(ids) <= params.max_new_tokens
            assert not set(ids) & set(params.banned_ids) - ends
            assert tuple(ids[: len(params.forced_ids)]) == params.forced_ids[: len(ids)]
            assert not ends & set(ids[: params.min_new_tokens]) | (ends & set(ids[:-1]))
            if (n := params.no_repeat_ngram) and not params.forced_ids:
                grams = [tuple([*prompt, *ids][i : i + n]) for i in range(len(prompt) + len(ids) - n + 1)]
                made = grams[max(0, len(prompt) - n + 1) :]
                assert len(set(made)) == len(made)
                assert not set(made) & set(grams[: max(0, len(prompt) - n + 1)])


ALL_WAYS = given(
    config=variants(), parties=guests(), chunk=st.integers(1, 10), number=st.integers(0, 999), exact=st.booleans()
)
ALL_CONTROLS = given(
    config=variants(),
    parties=st.lists(
        st.tuples(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), st.integers(0, 3), controls()),
        min_size=1,
        max_size=4,
    ),
    chunk=st.integers(1, 40),
    number=st.integers(0, 999),
)


def parts(few: int, many: int, each: int = 500) -> list:
    """``few`` cases that never change for every run, and ``many`` others in tests that ``-m slow`` can spread out."""
    return [(few, None), *(pytest.param((each, part), marks=pytest.mark.slow) for part in range(many // each))]


def check(property_: Callable[[], None], part: tuple[int, int | None]) -> None:
    """That many examples; the same ones at each run, and others in each part."""
    examples, number = part
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    if number is not None:
        property_ = seed(number)(property_)
    settings(
        max_examples=examples, derandomize=number is None, database=None, deadline=None, suppress_health_check=quiet
    )(property_)()


@pytest.mark.parametrize("part", parts(40, 4_000))
def test_every_answer_keeps_to_its_settings(part: tuple[int, int | None]) -> None:
    check(ALL_CONTROLS(every_answer_keeps_to_its_settings), part)


@pytest.mark.parametrize("part", parts(300, 20_000))
def test_every_way_says_the_same(part: tuple[int, int | None]) -> None:
    check(ALL_WAYS(every_way_says_the_same), part)
