from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.generation.stops import StopStrings


def run(stops: list[str], parts: list[str]) -> tuple[list[str], bool]:
    """What is let out, part by part and at the end, and whether a stop string ended it."""
    watch, out = StopStrings(stops), []
    for part in parts:
        text, stopped = watch.push(part)
        out.append(text)
        if stopped:
            return out, True
    return [*out, watch.finish()], False


def slow(stops: list[str], text: str) -> tuple[str, bool]:
    """The text up to the first stop string to be complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
def test_stop_string_across_parts_lets_no_part_of_it_out(size: int) -> None:
    """G13 (vllm#3574): a stop string that spans tokens was missed, or its beginning had been sent."""
    text = "ABCDEFGHIJK"
    out, stopped = run(["DEFGHIJ"], [text[i : i + size] for i in range(0, len(text), size)])
    assert ("".join(out), stopped) == ("ABC", True)


def test_held_text_is_released_when_the_match_fails() -> None:
    assert run(["DEFX"], ["ABCD", "EF", "G"]) == (["ABC", "", "DEFG", ""], False)
    assert run(["DEFX"], ["ABCDEF"]) == (["ABC", "DEF"], False)


def test_overlapping_beginnings() -> None:
    assert run(["aab"], list("aaab")) == (["", "", "a", ""], True)
    assert run(["bcd", "abcde"], ["xabcde"]) == (["xa"], True)
    assert run(["cd", "abcd"], ["xabcde"]) == (["x"], True)
    assert run([], ["anything", ""]) == (["anything", "", ""], False)


@settings(deadline=None, max_examples=500, derandomize=True)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    parts=st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_equals_the_search_in_the_whole_text(stops: list[str], parts: list[str]) -> None:
    out, stopped = run(stops, parts)
    assert ("".join(out), stopped) == slow(stops, "".join(parts))
    for place in range(len(out) - 1):  # no more is held than could still become a stop string
        seen = "".join(parts[: place + 1])
        if not slow(stops, seen)[1]:
            held = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
            assert "".join(out[: place + 1]) == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("", "stop must be texts of 1 to 1,024 characters, not of 0"),
        (["ok", ""], "not of 0"),
        ("x" * 1_000_000, "not of 1,000,000"),
        (["a"] * 65, "stop must be at most 64 texts, not 65"),
        (3, "stop must be a text or a list of texts, not 3"),
        ([b"x"], "stop must be a text"),
    ],
)
def test_stop_string_out_of_range_is_refused(stop: object, words: str) -> None:
    with pytest.raises(GenerationError, match=words):
        SamplingParams(stop=stop)
