from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cyberslm.data.mixture import BLOCK, Mixture, laps, shares
from cyberslm.errors import DataError

SOURCES = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.7])), min_size=1, max_size=5
)


def epoch_edges(mixture: Mixture, epochs: int) -> list[int]:
    return [sum(floor(epoch * quota) for quota in mixture.quotas) for epoch in range(epochs + 1)]


@given(SOURCES, st.sampled_from([shares, laps]), st.integers(0, 2**62))
@settings(deadline=None, max_examples=80)
def test_each_source_gives_its_quota_to_within_one_row_in_every_epoch_and_over_all(sources, unit, seed):
    num_rows, amounts = zip(*sources, strict=True)
    assume(any(amounts))
    quotas = unit(num_rows, amounts)
    assume(sum(quotas) >= 1)
    mixture = Mixture(num_rows, quotas, seed=seed)
    edges = epoch_edges(mixture, 4)
    order = mixture.rows(0, edges[-1])
    for epoch in range(4):
        used = Counter(source for source, _ in order[edges[epoch] : edges[epoch + 1]])
        assert all(abs(used[source] - quota) < 1 for source, quota in enumerate(quotas))
    used = Counter(source for source, _ in order)
    assert all(abs(used[source] - 4 * quota) < 1 for source, quota in enumerate(quotas))


@given(SOURCES, st.integers(0, 2**62))
@settings(deadline=None, max_examples=60)
def test_every_row_of_a_source_is_used_once_before_any_is_used_twice(sources, seed):
    num_rows, weights = zip(*sources, strict=True)
    assume(any(weights))
    mixture = Mixture(num_rows, shares(num_rows, weights), seed=seed)
    counts = [[0] * rows for rows in num_rows]
    for source, row in mixture.rows(0, 6 * mixture.rows_per_epoch):
        counts[source][row] += 1
        assert max(counts[source]) - min(counts[source]) <= 1


@given(SOURCES, st.integers(0, 300), st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_the_row_at_a_place_does_not_depend_on_what_is_asked_with_it(sources, first, size, cut):
    num_rows, weights = zip(*sources, strict=True)
    assume(any(weights))
    mixture = Mixture(num_rows, shares(num_rows, weights), seed=3)
    middle = first + min(cut, size)
    whole = mixture.rows(first, first + size)
    assert mixture.rows(first, middle) + mixture.rows(middle, first + size) == whole
    assert whole == mixture.rows(0, first + size)[first:]


def test_a_small_source_repeats_while_a_large_one_is_read_once():
    mixture = Mixture((4, 100), laps((4, 100), (3, 1)), seed=1)
    assert mixture.rows_per_epoch == 112
    assert Counter(source for source, _ in mixture.rows(0, 112)) == {0: 12, 1: 100}
    assert Counter(row for source, row in mixture.rows(0, 112) if source == 0) == dict.fromkeys(range(4), 3)


def test_shares_hold_in_every_block_of_a_long_epoch():
    mixture = Mixture((9000, 1001), shares((9000, 1001), (2, 1)), seed=1)
    firsts = [sum(mixture._used(block)) for block in range(21)]
    order = mixture.rows(0, firsts[-1])
    for first, end in pairwise(firsts):
        assert 900 < end - first < BLOCK + 2
        assert abs(sum(source for source, _ in order[first:end]) - (end - first) / 3) < 2
    assert order[5000:5010] == mixture.rows(5000, 5010)


def test_sources_and_laps_have_orders_of_their_own():
    mixture = Mixture((20, 20), laps((20, 20), (3, 3)), seed=1)
    orders = [[row for source, row in mixture.rows(0, 120) if source == which] for which in (0, 1)]
    assert orders[0] != orders[1]
    assert mixture.rows(0, 120) != mixture.rows(120, 240)
    assert mixture.rows(0, 120) != Mixture((20, 20), mixture.quotas, seed=2).rows(0, 120)


def test_the_order_is_fixed_for_ever():
    """A change here would break the exact resumption of every earlier mixed run."""
    mixture = Mixture((3, 5), shares((3, 5), (1, 1)), seed=7)
    assert mixture.rows(0, 10) == [(1, 0), (0, 1), (0, 0), (0, 2), (1, 1), (1, 2), (1, 4), (0, 2), (0, 1), (1, 3)]


def test_an_epoch_of_no_row_is_refused():
    with pytest.raises(DataError, match="less than one row an epoch"):
        Mixture((5,), (Fraction(1, 2),), seed=0)
