from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.text.codec import ESCAPE, StreamDecoder, cut, decode_bytes, escape, mend, unescape

marks = st.text(alphabet="\u2581\ufdd001a ", max_size=20)


@given(st.one_of(marks, st.text()))
@settings(deadline=None)
def test_escape_is_undone_and_leaves_no_space_mark(text: str) -> None:
    assert "\u2581" not in escape(text)
    assert unescape(escape(text)) == text


def test_escape_mark_that_begins_no_escape_is_kept() -> None:
    assert unescape(f"{ESCAPE}{ESCAPE}1x{ESCAPE}") == f"{ESCAPE}\u2581x{ESCAPE}"


@given(st.lists(st.binary(max_size=4) | marks.map(str.encode), max_size=12))
@settings(deadline=None, max_examples=300)
def test_stream_equals_decoding_at_once_for_any_bytes(tokens: list[bytes]) -> None:
    stream = StreamDecoder(tokens.__getitem__)
    streamed = "".join(stream.push(index) for index in range(len(tokens))) + stream.finish()
    assert streamed == decode_bytes(b"".join(tokens))


def test_stream_gives_no_half_character_and_can_be_used_again() -> None:
    stream = StreamDecoder([bytes([byte]) for byte in range(256)].__getitem__)
    family = "\U0001f468\u200d\u2581"
    chunks = [stream.push(byte) for byte in escape(family).encode()]
    assert [chunk for chunk in chunks if chunk] == list(family)
    assert [stream.push(0xF0), stream.push(0x9F), stream.finish()] == ["", "", "\ufffd"]
    assert stream.push(ord("a")) + stream.finish() == "a"


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("a\ud800b", ("a\ufffdb", 0, 1)),
        ("\udbc0", ("\ufffd", 0, 1)),
        ("\udc00\ud800", ("\ufffd\ufffd", 0, 2)),
        (json.loads('"\\ud83d\\ude00"') + "\ud83d" + "\ude00", ("\U0001f600\U0001f600", 1, 0)),
        ("plain \U0001f600", ("plain \U0001f600", 0, 0)),
    ],
)
def test_mend_joins_pairs_and_replaces_lone_surrogates(text: str, mended: tuple[str, int, int]) -> None:
    assert mend(text) == mended


@given(st.text(alphabet="ab ", max_size=60), st.integers(1, 7))
@settings(deadline=None)
def test_cut_keeps_the_text_and_never_parts_joined_characters(text: str, size: int) -> None:
    joined = frozenset({"ab", " a", "aa"})
    parts = cut(text, joined, size)
    assert "".join(parts) == text
    assert all(left[-1] + right[0] not in joined for left, right in zip(parts, parts[1:], strict=False) if right)
    assert all(len(part) >= size for part in parts[:-1])
