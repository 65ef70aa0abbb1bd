"""One greedy answer, whatever the way to it: cached, uncached, in chunks, in a batch, joined late, over all variants.

The same property runs on few cases here and on thousands with ``-m slow``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
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
    for seed in range(draw(st.integers(1, 4))):
        drawn = draw(st.booleans())
        params = SamplingParams(
            max_new_tokens=draw(st.integers(1, 5)),
            temperature=1.0 if drawn else 0.0,
            top_k=draw(st.sampled_from([0, 5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            seed=seed,
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


@given(config=variants(), parties=guests(), chunk=st.integers(1, 10), seed=st.integers(0, 999), exact=st.booleans())
def every_way_says_the_same(
    config: CyberSLMConfig, parties: list[Guest], chunk: int, seed: int, *, exact: bool
) -> None:
    """In fp32 greedy ids where the margin is clear; in fp64, where rounding decides nothing, drawn ones too."""
    with torch.no_grad():
        model = weighted(config, seed).to(torch.float64 if exact else torch.float32)
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


@pytest.mark.parametrize("examples", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_every_way_says_the_same(examples: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    few = examples == 300
    settings(max_examples=examples, derandomize=few, deadline=None, suppress_health_check=quiet)(
        every_way_says_the_same
    )()
