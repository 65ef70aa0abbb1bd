from __future__ import annotations

import codecs

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyberslm.data.readers.encodings import is_charset, keeps_ascii
from cyberslm.data.readers.streams import CHUNK
from cyberslm.data.readers.text import pieces
from cyberslm.errors import DataError

REPEATED = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1).filter(str.strip)

# Encodings


@pytest.mark.parametrize("encoding", MARKS)
@given(text=TEXTS)
@REPEATED
def test_a_byte_order_mark_decides_the_encoding_and_is_dropped(read, encoding, text):
    assert read("a.txt", MARKS[encoding] + text.encode(encoding)).texts == [text]


@pytest.mark.parametrize("encoding", MARKS)
def test_line_ends_become_lf_in_every_encoding(read, encoding):
    found = read("a.txt", MARKS[encoding] + "a\r\nb\rc\n\u00e9".encode(encoding), txt_unit="line")
    assert (found.texts, found.lines) == (["a", "b", "c", "\u00e9"], [1, 2, 3, 4])


def test_characters_of_two_units_over_a_read_border_are_whole(read):
    text = "x" * (CHUNK // 2 - 2) + "\U0001f600 \U0001f601"
    assert read("a.txt", codecs.BOM_UTF16_LE + text.encode("utf-16-le")).texts == [text]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (codecs.BOM_UTF16_LE + b"a\0b", r"a\.txt:1: not UTF-16-LE, .*truncated"),
        (codecs.BOM_UTF32_LE + b"a\0\0\0\xff\xff\xff\xff", r"a\.txt:1: not UTF-32-LE"),
        (codecs.BOM_UTF16_LE + b"a\0\n\0\0\0", r"a\.txt:2: a NUL character"),
    ],
)
def test_what_a_mark_promises_and_the_bytes_are_not_is_an_error(read, data, problem):
    with pytest.raises(DataError, match=problem):
        read("a.txt", data)


def test_lone_surrogates_of_utf_16_are_mended_and_counted(read):
    found = read("a.txt", codecs.BOM_UTF16_LE + "a\ud800b\udc00".encode("utf-16-le", "surrogatepass"))
    assert (found.texts, found.counts.mended_surrogates) == (["a\ufffdb\ufffd"], 2)


def test_encodings_are_tried_in_turn_line_by_line_where_utf_8_fails(read):
    data = "\u00e9 utf-8\n".encode() + "\u00e9 cp1252\n".encode("cp1252") + b"\x81 koi8\n"
    assert read("a.txt", data, encodings=("cp1252", "koi8-r")).texts == [
        "\u00e9 utf-8\n\u00e9 cp1252\n" + b"\x81".decode("koi8-r") + " koi8\n"
    ]
    with pytest.raises(DataError, match=r"a\.txt:3: binary or not UTF-8 at byte 18; set data\.encodings"):
        read("a.txt", data, encodings=("cp1252",))


@pytest.mark.parametrize("name", ["cp1252", "latin-1", "Shift_JIS", "gb18030", "koi8-r", "euc-jp", "big5", "cp437"])
def test_encodings_that_extend_ascii_can_be_named(name):
    assert keeps_ascii(name)


@pytest.mark.parametrize(
    "name", ["punycode", "unicode_escape", "raw_unicode_escape", "idna", "zip", "rot13", "utf-7", "undefined", "x" * 99]
)
def test_codecs_that_are_no_character_sets_are_not_used_even_when_a_document_names_them(name):
    assert not keeps_ascii(name)
    assert not is_charset(name)


# Lines


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0\ufeff"), max_size=9), max_size=9),
    ends=st.sampled_from(["\n", "\r\n", "\r"]),
)
@REPEATED
def test_lines_and_their_numbers_do_not_depend_on_line_ends(read, texts, ends):
    found = read("a.txt", ends.join(texts), txt_unit="line")
    expected = [(text, number) for number, text in enumerate(texts, 1) if text.strip()]
    assert list(zip(found.texts, found.lines, strict=True)) == expected


@pytest.mark.parametrize("tail", ["\r\nb", "\rb", "\n\rb", "\r\r\nb"])
def test_line_ends_over_a_read_border_are_those_of_the_whole(read, tail):
    whole = "x" * 5 + tail
    for size in range(CHUNK - 3, CHUNK + 2):
        text = "y" * (size - 1) + "\n" + whole
        expected = [line for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line]
        assert read("a.txt", "y" * size + tail, txt_unit="line").texts[-1] == "b"
        assert read("a.txt", text, txt_unit="line").texts == expected


def test_bad_bytes_cost_their_unit_and_no_other(read):
    data = b"one\ntwo \xff\n\nthree\n\nfour\n\xfe\nfive\n"
    skip = {"on_bad_input": "skip"}
    line, paragraph = read("a.txt", data, txt_unit="line", **skip), read("a.txt", data, txt_unit="paragraph", **skip)
    assert line.texts == ["one", "three", "four", "five"]
    assert line.counts.skipped == {"binary or not UTF-8": 2, "empty": 2}
    assert (paragraph.texts, paragraph.lines) == (["three"], [4])
    assert paragraph.counts.skipped == {"binary or not UTF-8": 2}
    assert read("a.txt", data, **skip).counts.skipped == {"binary or not UTF-8": 1}


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.csv"])
@pytest.mark.parametrize("content", [b"text\nline\nMZ\0\n", b"%PDF-1.7\ntext"])
def test_binaries_are_refused_whole(read, name, content):
    if name != "a.txt" and content.startswith(b"%"):
        content = b"text\0"
    found = read(name, content, txt_unit="line", on_bad_input="skip")
    assert (found.texts, found.counts.skipped) == ([], {"binary or not UTF-8": 1})


# Long ones


@given(text=st.text("ab \n\u00e9\U0001f600", max_size=300), limit=st.integers(4, 60))
@settings(deadline=None, max_examples=100)
def test_pieces_join_to_the_text_and_none_is_too_long(text, limit):
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= limit for part in parts)


def test_pieces_end_at_lines_else_at_spaces():
    assert list(pieces("aaa\nbb b\nccc ccc", 9)) == ["aaa\nbb b\n", "ccc ccc"]
    assert list(pieces("aaa bbb ccc", 9)) == ["aaa bbb ", "ccc"]


@pytest.mark.parametrize("unit", ["file", "paragraph", "line"])
@pytest.mark.parametrize("end", ["", "\n", "\nlast"])
@pytest.mark.parametrize("long", ["x" * 5000, "words and " * 500, "\u20ac" * 1700, "x" * (CHUNK + 3000)])
def test_a_line_beyond_the_limit_comes_in_parts_and_loses_nothing(read, unit, end, long):
    found = read("a.txt", "first\n" + long + end, txt_unit=unit, max_document_bytes=1024)
    assert "".join(found.texts).replace("\n", "") == ("first" + long + end).replace("\n", "")
    assert all(len(text.encode()) <= 1024 for text in found.texts)
    assert found.counts.cuts >= len(long.encode()) // 1024
    assert set(found.lines) <= {1, 2, 3}
    assert found.counts.skipped == {}


def test_a_long_file_is_cut_at_line_borders_with_the_line_of_each_part(read):
    lines = [f"line {number}\n" for number in range(1, 2000)]
    found = read("a.txt", "".join(lines), max_document_bytes=2048)
    assert "".join(found.texts) == "".join(lines)
    assert [text.split("\n")[0] for text in found.texts] == [f"line {line}" for line in found.lines]
    assert found.counts.cuts == len(found.texts) - 1


def test_the_same_long_text_gives_the_same_parts_in_any_compression(read, compress):
    data = b"".join(b"line %d\n" % number for number in range(90_000))
    parts = [read(f"a.txt{kind}", pack(data), max_document_bytes=300_000).texts for kind, pack in compress.items()]
    assert all(part == read("a.txt", data, max_document_bytes=300_000).texts for part in parts)
