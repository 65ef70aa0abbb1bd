from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data.clean.duplicates import is_held_out
from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import find_inputs, hash_file
from cyberslm.data.readers.streams import CHUNK
from cyberslm.data.sources import Document, copy_digest, read_documents
from cyberslm.errors import ConfigError, DataError


def names(*sources: str | Path) -> list[str]:
    return [file.name for file in find_inputs([str(source) for source in sources], key="data.sources").files]


def passed_over(*sources: str | Path) -> dict[str, int]:
    return dict(find_inputs([str(source) for source in sources], key="data.sources").passed_over["data.sources[0]"])


def read(*sources: str | Path, **options: object) -> tuple[list[Document], Counts]:
    config = DataConfig(sources=tuple(map(str, sources)), **options)  # type: ignore[arg-type]
    counts = Counts()
    files = find_inputs(config.sources, key="data.sources").files
    return [doc for file in files for doc in read_documents(file, config, counts)], counts


def texts(*sources: str | Path, **options: object) -> list[str]:
    return [document.text for document in read(*sources, **options)[0]]


# Which files


def test_a_folder_is_walked_in_path_order_whatever_order_files_were_made_in(tmp_path, write):
    for name in ["z.txt", "b/a.md", "a.txt", "b.log", "B.jsonl", "b/Z.rst"]:
        write(f"in/{name}", "x")
    assert names(tmp_path / "in") == ["B.jsonl", "a.txt", "b.log", "b/Z.rst", "b/a.md", "z.txt"]


def test_what_a_folder_holds_but_is_not_read_is_counted_by_reason(tmp_path, write):
    for name in ["a.txt", "b.PNG", "c.png", "Makefile", ".env", ".git/config.txt", "d/.x.txt"]:
        write(f"in/{name}", "x")
    os.mkfifo(tmp_path / "in/pipe.txt")
    assert names(tmp_path / "in") == ["a.txt"]
    assert passed_over(tmp_path / "in") == {
        "extension .png": 2,
        "no extension": 1,
        "hidden": 3,
        "not a regular file": 1,
    }


def test_links_out_of_a_folder_are_not_followed_and_links_within_read_a_file_once(tmp_path, write):
    write("secret.txt", "outside")
    write("in/a.txt", "inside")
    (tmp_path / "in/out.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "in/b.txt").symlink_to("a.txt")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/broken.txt").symlink_to("nowhere.txt")
    assert texts(tmp_path / "in") == ["inside"]
    assert passed_over(tmp_path / "in") == {
        "link out of the folder": 1,
        "the same file again": 1,
        "link to a folder": 1,
        "not a regular file": 1,
    }


def test_a_folder_reached_through_a_link_is_read(tmp_path, write):
    write("real/a.txt", "text")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert texts(tmp_path / "link") == ["text"]


def test_a_named_file_is_read_whatever_its_extension_and_files_listed_twice_once(tmp_path, write):
    conf = write("in/rules.conf", "rule")
    write("in/a.txt", "text")
    assert names(conf, tmp_path / "in", tmp_path / "in/a.txt") == ["rules.conf", "a.txt"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.md", ["d/c.md", "d/e/f.md"]),
        ("d*", ["d/c.md", "d/e/f.md"]),
        ("[b].txt", ["b.txt"]),
        ("d/*.bin", ["x.bin"]),
        ("**", ["a.txt", "b.txt", "d/c.md", "d/e/f.md"]),
        (".h*", [".hidden.txt"]),
    ],
)
def test_globs_match_files_and_globs_of_folders_mean_those_folders(tmp_path, write, pattern, expected):
    for name in ["a.txt", "b.txt", ".hidden.txt", "d/c.md", "d/e/f.md", "d/x.bin"]:
        write(f"in/{name}", "x")
    assert names(tmp_path / "in" / pattern) == expected


def test_what_a_glob_passes_over_is_counted(tmp_path, write):
    for name in ["a.txt", ".b.txt", "d/c.txt"]:
        write(f"in/{name}", "x")
    assert names(tmp_path / "in/*") == ["a.txt"]
    assert passed_over(tmp_path / "in/*") == {"hidden": 1, "folder beside the files of a glob": 1}


def test_a_file_whose_name_has_glob_characters_is_taken_literally(write):
    assert names(write("notes[1].txt", "x")) == ["notes[1].txt"]


@pytest.mark.parametrize("name", ["none.txt", "none*.txt", "nowhere/*.txt", "**x/*.txt"])
def test_an_absent_source_is_an_error_that_names_the_key_and_the_path(tmp_path, name):
    with pytest.raises(DataError, match=r"data\.sources\[0\].*" + name.replace("*", r"\*")):
        names(tmp_path / name)


def test_non_ascii_and_undecodable_file_names_are_read_and_printable(tmp_path, write):
    write("in/d\u00e9j\u00e0 \u96ea.txt", "one")
    Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/\xff.txt")).write_text("two")
    documents, _ = read(tmp_path / "in")
    assert [document.text for document in documents] == ["one", "two"]
    assert [Path(document.source).name.encode() for document in documents] == [
        "d\u00e9j\u00e0 \u96ea.txt".encode(),
        rb"\xff.txt",
    ]


# Plain text


def test_line_ends_become_lf_and_only_a_leading_byte_order_mark_is_dropped(write):
    mixed = b"\xef\xbb\xbfa\r\nb\rc\n\r\nd\xef\xbb\xbf\r"
    assert texts(write("a.txt", mixed)) == ["a\nb\nc\n\nd\ufeff\n"]


@pytest.mark.parametrize("unit", ["file", "paragraph", "line"])
def test_windows_and_unix_copies_give_the_same_documents(write, unit):
    text = "one\ntwo\n\n\nthree\n   \nfour"
    unix = texts(write("unix.txt", text), txt_unit=unit)
    assert texts(write("dos.txt", text.replace("\n", "\r\n")), txt_unit=unit) == unix
    assert texts(write("mac.txt", text.replace("\n", "\r")), txt_unit=unit) == unix


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("file", [("\n a\nb \n\n \n\u2028c\x0cd\n\ne", 1)]),
        ("paragraph", [(" a\nb ", 2), ("\u2028c\x0cd", 6), ("e", 8)]),
        ("line", [(" a", 2), ("b ", 3), ("\u2028c\x0cd", 6), ("e", 8)]),
    ],
)
def test_units_of_plain_text_begin_on_the_line_that_is_told(write, unit, expected):
    documents, _ = read(write("a.txt", "\n a\nb \n\n \n\u2028c\x0cd\n\ne"), txt_unit=unit)
    assert [(document.text, document.line) for document in documents] == expected


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\0\ufeff"), max_size=12), max_size=12))
@settings(deadline=None, max_examples=60)
def test_lines_in_equal_lines_out_apart_from_blank_ones(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("\n".join(lines).encode())
    whole = [line for line in "\n".join(lines).split("\n") if line.strip()]
    assert texts(path, txt_unit="line") == whole


def test_empty_documents_are_counted_and_skipped(write):
    documents, counts = read(write("a.txt", ""), write("b.txt", " \n\t\u3000"), write("c.txt", "\ufeff"))
    assert documents == []
    assert counts.skipped == {"empty": 3}
    assert counts.first["empty"].endswith("a.txt:1")


@pytest.mark.parametrize(
    ("content", "line", "offset", "before"),
    [
        (b"ok\nab\xffc", 2, 5, ["ok"]),
        (b"ok\n\0", 2, 3, []),
        (b"\0\xff", 1, 0, []),
        (b"caf\xc3", 1, 3, []),
        (b"\xed\xa0\x80", 1, 0, []),
        (b"x" * (CHUNK - 1) + b"\xe2\x82", 1, CHUNK - 1, []),
        (b"\n" * (CHUNK - 1) + b"\xe2\n\n", CHUNK, CHUNK - 1, []),
        (b"\n" * CHUNK + b"ab\0", CHUNK + 1, CHUNK + 2, []),
    ],
)
def test_bad_bytes_are_an_error_with_line_and_byte_or_cost_their_line(write, content, line, offset, before):
    path = write("a.log", content)
    with pytest.raises(DataError, match=rf"a\.log:{line}: binary or not UTF-8 at byte {offset}; .*on_bad_input: skip"):
        read(path, txt_unit="line")
    documents, counts = read(path, txt_unit="line", on_bad_input="skip")
    assert [document.text for document in documents] == before
    assert counts.skipped["binary or not UTF-8"] == 1


def test_characters_over_a_read_border_are_text(write):
    text = "x" * (CHUNK - 1) + "\u20ac\U0001f600"
    assert texts(write("a.txt", text)) == [text]


def test_a_file_that_changes_between_inspection_and_reading_is_an_error(write):
    path = write("a.txt", "before")
    config = DataConfig(sources=(path,))
    (file,) = find_inputs(config.sources, key="data.sources").files
    write("a.txt", "before and after")
    with pytest.raises(DataError, match=r"a\.txt changed while it was being read"):
        list(read_documents(file, config, Counts()))


def test_a_file_that_disappears_is_an_error_with_its_name(write):
    path = write("a.txt", "x")
    (file,) = find_inputs([path], key="data.sources").files
    Path(path).unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: No such file"):
        hash_file(file)


# JSON lines


def test_json_records_give_their_field_with_lf_ends_and_their_line(write):
    lines = ['{"text": "one\\r\\ntwo\\rthree", "id": 1}', "", '{"text": "a", "text": "\\u0000b"}', '{"text": "  "}']
    documents, counts = read(write("a.jsonl", "\ufeff" + "\r\n".join(lines)))
    assert [(document.text, document.line) for document in documents] == [("one\ntwo\nthree", 1), ("\0b", 3)]
    assert counts.skipped == {"blank line": 1, "empty": 1}


BAD_RECORDS = {
    "no JSON": (b"{text", "not JSON"),
    "a list": (b'["text"]', "a JSON list where an object"),
    "a number": (b"3", "a JSON int where an object"),
    "no field": (b'{"body": "x"}', r"not the fields of any record_shape; the record has 'body'; data.text_field"),
    "null": (b'{"text": null}', "field 'text' is not a string"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8"),
    "raw NUL": (b'{"text": "\0"}', "binary or not UTF-8 at byte 29"),
    "deep": (b'{"text":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nesting too deep"),
    "huge number": (b'{"n": ' + b"9" * 10_000 + b', "text": "x"}', "a number too long"),
    "two records": (b'{"text": "a"} {"text": "b"}', "not JSON"),
    "odd names": (b'{"\\ud800\\u001b": 1}', r"'\\ud800\\x1b'"),
}


@pytest.mark.parametrize("kind", BAD_RECORDS)
def test_a_bad_record_is_an_error_with_file_and_line_or_is_skipped_and_counted(write, kind):
    line, problem = BAD_RECORDS[kind]
    path = write("a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{problem}.*on_bad_input: skip"):
        read(path)
    documents, counts = read(path, on_bad_input="skip")
    assert [document.text for document in documents] == ["before", "after"]
    assert counts.skipped == {"bad record": 1}
    assert counts.first["bad record"].endswith("a.jsonl:2")


def test_an_error_about_a_record_does_not_quote_its_text(write):
    with pytest.raises(DataError) as caught:
        read(write("a.jsonl", '{"text": "hunter2-secret'))
    assert "hunter2" not in str(caught.value)


def test_lone_surrogates_are_mended_and_counted_and_pairs_are_joined(write):
    documents, counts = read(write("a.jsonl", '{"text": "a\\ud800b \\ud83d\\ude00 \\udc00"}'))
    assert [document.text for document in documents] == ["a\ufffdb \U0001f600 \ufffd"]
    assert counts.mended_surrogates == 2


def test_text_field_chooses_the_field(write):
    assert texts(write("a.ndjson", '{"text": "a", "body": "b"}'), text_field="body") == ["b"]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1), max_size=8))
@settings(deadline=None, max_examples=60)
def test_any_text_survives_json_lines(tmp_path_factory, strings):
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in strings))
    assert texts(path) == [text for text in strings if text.strip()]


# Split


def test_copies_that_differ_in_line_ends_or_outer_blanks_fall_on_one_side():
    texts_ = [f"document {i}\nbody {i}" for i in range(300)]
    for text in texts_:
        sides = {
            is_held_out(copy_digest(copy), 0.3)
            for copy in (text, text + " \n", "\t" + text, text.replace("\n", "\r\n"))
        }
        assert len(sides) == 1


def test_the_share_held_out_is_near_the_fraction_and_grows_with_it():
    texts_ = [f"document {i}" for i in range(4000)]
    held = [
        {text for text in texts_ if is_held_out(copy_digest(text), fraction)} for fraction in (0.0, 0.05, 0.5, 0.999999)
    ]
    assert held[0] == set()
    assert 140 <= len(held[1]) <= 260
    assert 1850 <= len(held[2]) <= 2150
    assert held[1] < held[2] < held[3]


def test_the_split_of_a_text_never_changes():
    """A change here would move documents between the splits of every earlier run."""
    assert [i for i in range(60) if is_held_out(copy_digest(f"document {i}"), 0.1)] == [21, 22, 51, 55, 59]


# Settings


@pytest.mark.parametrize(
    "options",
    [
        {"validation_fraction": 1.0},
        {"validation_fraction": -0.1},
        {"validation_fraction": float("nan")},
        {"text_field": ""},
        {"threads": -1},
        {"shard_tokens": 0},
    ],
)
def test_settings_out_of_range_name_their_key(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        DataConfig(**options)
