"""Picking and ordering rows of a file, against Python's own sort."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyberslm.errors import ConfigError
from cyberslm.recipes import ranking
from cyberslm.recipes.ranking import Pick, picked

RANKS = st.lists(st.integers(-5, 5).map(lambda number: number / 2), max_size=60)


def rows(ranks: list[float]) -> list[bytes]:
    return [json.dumps([value, {"n": number}]).encode() + b"\n" for number, value in enumerate(ranks)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=RANKS, above=st.none() | st.integers(-3, 3), top=st.none() | st.integers(1, 9), run=st.integers(1, 200))
def test_picked_rows_are_those_of_a_stable_sort_in_memory(
    tmp_path: Path, ranks: list[float], above: int | None, top: int | None, run: int
) -> None:
    made = rows(ranks)
    kept = [(rank, row) for rank, row in zip(ranks, made, strict=True) if above is None or rank > above]
    ordered = [row for _, row in sorted(kept, key=lambda pair: -pair[0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "RUN_BYTES", run)
        patch.setattr(ranking, "FAN_IN", 3)
        assert list(picked(made, Pick(above=above), tmp_path)) == [row for _, row in kept]
        assert list(picked(made, Pick(above=above, ordered=True), tmp_path)) == ordered
        if top is not None:
            assert list(picked(made, Pick(above=above, top=top), tmp_path)) == ordered[:top]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"top": 0}, {"top": 1_000_001}, {"top": 3, "ordered": True}])
def test_settings_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="top"):
        Pick(**wrong)
