from __future__ import annotations

import math

import pytest
import torch

from cyberslm.decoding.choice import Chooser, Ids, choose, likelihood
from cyberslm.decoding.history import History
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError

SIZE = 40


def logits(rows: int, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def chooser(*, sample: int = 0, prompt: tuple[int, ...] = (1, 2), **controls: object) -> Chooser:
    return Chooser(SamplingParams(**controls), History(prompt), sample=sample)


def chi_square(counts: list[int], probs: list[float]) -> float:
    """Pearson's statistic over the cells with an expectation of at least 5, the others as one."""
    total = sum(counts)
    cells = [(count, total * p) for count, p in zip(counts, probs, strict=True) if total * p >= 5]
    rest = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    cells += [rest] if rest[1] >= 5 else []
    degrees = len(cells) - 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return (statistic - degrees) / math.sqrt(2 * degrees) if degrees else 0.0


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    ],
    ids=str,
)
def test_drawn_frequencies_are_the_filtered_distribution(controls: dict) -> None:
    """Chi-square, in standard deviations from what chance gives: a wrong distribution is hundreds away."""
    import oracles

    params = SamplingParams(**{"temperature": 1.0, "seed": 4, **controls})
    one, row = Chooser(params, History((1, 2))), logits(1, 12)
    counts = [0] * 12
    for _ in range(6000):
        (token,) = choose(row, [one])
        counts[token] += 1
    left = oracles.filtered(row[0].tolist(), params, (1, 2), ())
    probs = torch.tensor(left, dtype=torch.float64).softmax(-1).tolist()
    assert all(count == 0 for count, p in zip(counts, probs, strict=True) if p == 0)
    assert abs(chi_square(counts, probs)) < 4


def test_first_draws_of_many_seeds_are_the_distribution_too() -> None:
    """Seeds in a row must not be like each other."""
    row, counts = logits(1, 12), [0] * 12
    for seed in range(6000):
        counts[choose(row, [chooser(temperature=1.0, seed=seed)])[0]] += 1
    assert abs(chi_square(counts, row[0].double().softmax(-1).tolist())) < 4


def test_rows_chosen_together_are_chosen_as_alone_bit_for_bit() -> None:
    mixes: list[dict] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 4},
        {"temperature": 1.5, "top_k": 7, "min_p": 0.02, "seed": 5},
        {"temperature": 1.5, "top_k": 7, "min_p": 0.02, "seed": 6},
        {"temperature": 1.0, "typical_p": 0.8, "seed": 7},
        {"repetition_penalty": 1.7},
        {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 8},
        {"banned_ids": (5, 6)},
        {"forced_ids": (9, 11), "temperature": 1.0, "seed": 9},
    ]
    together = [chooser(**mix) for mix in mixes]
    apart = [chooser(**mix) for mix in mixes]
    for step in range(60):
        row = logits(len(mixes), size=500, seed=step)
        got = choose(row, together)
        assert got == [choose(row[i : i + 1], [one])[0] for i, one in enumerate(apart)]
        for token, *both in zip(got, together, apart, strict=True):
            for one in both:
                one.history.add(token)


def test_draw_hardly_moves_with_rounding() -> None:
    """G15: batches of other sizes round otherwise; drawing by cumulative sums then changed one token in hundreds."""
    row = logits(1, 30_000) * 0.1
    noise = torch.randn(row.shape, generator=torch.Generator().manual_seed(9)) * 1e-6
    one, other = (chooser(temperature=1.0, seed=5) for _ in range(2))
    assert [choose(row, [one]) for _ in range(300)] == [choose(row + noise, [other]) for _ in range(300)]


def test_samples_of_one_seed_differ_and_the_first_is_that_of_the_seed() -> None:
    def ids(sample: int) -> list[int]:
        one = chooser(temperature=1.0, seed=7, sample=sample)
        return [choose(logits(1), [one])[0] for _ in range(20)]

    assert ids(0) == [choose(logits(1), [one])[0] for one in [chooser(temperature=1.0, seed=7)] for _ in range(20)]
    assert len({tuple(ids(sample)) for sample in range(20)}) == 20


def test_choosing_leaves_the_global_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    choose(logits(2), [chooser(temperature=1.0), chooser(temperature=1.0, seed=1)])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_number_of_zero_stops_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in 17 million numbers a fp32 is exactly 0: the only id left would lose against hidden ones."""
    monkeypatch.setattr(torch, "rand", lambda size, *, generator, out: out.zero_())
    assert choose(logits(1), [chooser(temperature=1.0, top_k=1)]) == [int(logits(1).argmax())]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("controls", [{}, {"temperature": 1.0}, {"repetition_penalty": 2.0}], ids=str)
def test_logits_that_are_not_finite_are_an_error_not_a_token(bad: float, controls: dict) -> None:
    row = logits(2)
    row[1, 3] = bad
    with pytest.raises(GenerationError, match="logits are not finite: its weights are damaged"):
        choose(row, [chooser(), chooser(**controls)])
    with pytest.raises(GenerationError, match="not finite"):
        choose(torch.full((1, 4), -math.inf), [chooser(**controls)])


@pytest.mark.parametrize("controls", [{}, {"temperature": 1.0, "seed": 1}], ids=str)
def test_row_without_a_token_left_says_so_and_spares_the_others(controls: dict) -> None:
    barred = chooser(banned_ids=range(SIZE), **controls)
    free = chooser(**controls)
    assert choose(logits(3), [free, barred, free])[1] is None
    again = chooser(no_repeat_ngram=1, prompt=tuple(range(SIZE)), **controls)
    first, second = choose(logits(2), [again, free])
    assert first is None
    assert second is not None


def test_hidden_forced_and_stops_before_the_minimum() -> None:
    row = torch.arange(6.0).unsqueeze(0)
    never = Ids({5, 4})
    assert choose(row, [Chooser(SamplingParams(), History(()), never=never)]) == [3]
    assert choose(row, [Chooser(SamplingParams(), History(()), never=never, stops=frozenset({5}))]) == [5]
    late = Chooser(SamplingParams(min_new_tokens=1, banned_ids=(4,)), History(()), stops=frozenset({5}))
    assert choose(row, [late]) == [3]
    late.history.add(3)
    assert choose(row, [late]) == [5]
    forced = Chooser(SamplingParams(forced_ids=(0, 2)), History(()))
    made = []
    for _ in range(3):
        (token,) = choose(row, [forced])
        forced.history.add(token)
        made.append(token)
    assert made == [0, 2, 5]


class Only:
    """A guide that allows some ids."""

    done = False

    def __init__(self, *ids: int, size: int = 6) -> None:
        self.mask = torch.zeros(size, dtype=torch.bool)
        self.mask[list(ids)] = True

    def allowed(self) -> torch.Tensor:
        return self.mask

    def accept(self, token: int) -> None: ...

    def fork(self) -> Only:
        return self


def test_guide_rules_over_every_filter() -> None:
    row = torch.arange(6.0).unsqueeze(0)

    def pick(guide: Only, **controls: object) -> int | None:
        return choose(row, [Chooser(SamplingParams(**controls), History(()), guide=guide)])[0]

    assert pick(Only(1, 2)) == 2
    assert pick(Only(1, size=3)) == 1
    assert pick(Only(1), temperature=1.0, top_k=1, logit_bias={5: 100.0}) == 1
    assert pick(Only(1), banned_ids=[1]) is None
    assert pick(Only()) is None
    assert pick(Only(1), forced_ids=[2]) is None
    with pytest.raises(GenerationError, match="mask covers 7 ids and the model has 6"):
        pick(Only(1, size=7))


def test_likelihoods_are_those_of_the_model() -> None:
    row = logits(1)[0]
    seen = likelihood(row, 3, 4)
    log = row.double().log_softmax(-1)
    assert seen.logprob == pytest.approx(float(log[3]), abs=1e-5)
    assert [token for token, _ in seen.top] == log.topk(4).indices.tolist()
    assert [value for _, value in seen.top] == pytest.approx(log.topk(4).values.tolist(), abs=1e-5)
    assert seen.entropy == pytest.approx(float(-(log.exp() * log).sum()), abs=1e-4)
    hidden = row.masked_fill(torch.arange(SIZE) == 0, -math.inf)
    assert math.isfinite(likelihood(hidden, 3, 0).entropy)
    assert likelihood(row, 3, 0).top == ()
