"""Records with all their fields, from every format; bad ones refused by line or counted."""

from __future__ import annotations

import bz2
import gzip
import io
import sys
from pathlib import Path

import pytest

from cyberslm.data.counts import Counts
from cyberslm.data.records import Record, RecordFile
from cyberslm.errors import ConfigError, DataError

LINES = b"one\ntwo\n\n  \nthree"
CSV = b'id,body\n1,"one, two"\n2,"three\nfour"\n'
JSONL = b'{"a": {"b": "one"}, "n": 1}\n\n{"a.b": "two"}\n'


def read(path: Path | None, **settings: object) -> tuple[list[Record], Counts]:
    counts = Counts()
    with RecordFile(path=path, **settings).opened(counts) as opened:
        return list(opened.records), counts


def test_lines_are_records_of_one_field_and_blank_ones_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(LINES)
    records, counts = read(tmp_path / "a.log")
    assert records == [
        Record(1, {"text": "one"}, "one"),
        Record(2, {"text": "two"}, "two"),
        Record(5, {"text": "three"}, "three"),
    ]
    assert counts.skipped == {"blank line": 2}


def test_csv_rows_keep_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CSV)
    records, _ = read(tmp_path / "a.csv", field="body")
    assert records == [
        Record(2, {"id": "1", "body": "one, two"}, "one, two"),
        Record(3, {"id": "2", "body": "three\nfour"}, "three\nfour"),
    ]
    (tmp_path / "a.tsv").write_bytes(b"x\ty,z\na\tb\n")
    assert read(tmp_path / "a.tsv", field="y,z")[0] == [Record(2, {"x": "a", "y,z": "b"}, "b")]


def test_json_fields_go_by_name_or_else_by_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    records, counts = read(tmp_path / "a.jsonl", field="a.b")
    assert [(record.line, record.text) for record in records] == [(1, "one"), (3, "two")]
    assert records[0].fields == {"a": {"b": "one"}, "n": 1}
    assert counts.skipped == {"blank line": 1}


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_compressed_files_are_read_and_their_position_is_that_on_disk(tmp_path: Path, pack: object) -> None:
    (tmp_path / "a.log.gz").write_bytes(pack(LINES * 1000))
    with RecordFile(path=tmp_path / "a.log.gz").opened(Counts()) as opened:
        assert len(list(opened.records)) == 2001
        assert opened.position() == opened.size == (tmp_path / "a.log.gz").stat().st_size


def test_standard_input_is_text_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    assert [record.text for record in read(None)[0]] == ["one", "two", "three"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CSV)))
    assert [record.text for record in read(None, form="csv", field="id")[0]] == ["1", "2"]
    assert not sys.stdin.buffer.closed
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input, which is closed"):
        read(None)


BAD = [
    ("a.log", b"one\n\xff\xfe\xfa\nthree\n", None, 2),
    ("a.csv", b"id,body\n1,one\n2\n3,three\n", "body", 3),
    ("a.csv", b"id,body\n1,one\n2,\n3,three\n", "body", 3),
    ("a.jsonl", b'{"t": "one"}\n{"t": \n{"t": "three"}\n', "t", 2),
    ("a.jsonl", b'{"t": "one"}\n{"u": "two"}\n{"t": "three"}\n', "t", 2),
    ("a.jsonl", b'{"t": "one"}\n{"t": 2}\n{"t": "three"}\n', "t", 2),
    ("a.jsonl", b'{"t": "one"}\n["t"]\n{"t": "three"}\n', "t", 2),
]


@pytest.mark.parametrize(("name", "content", "field", "line"), BAD)
def test_a_bad_record_is_refused_by_its_line_or_counted_and_never_quoted(
    tmp_path: Path, name: str, content: bytes, field: str | None, line: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}:{line}: .*--on-bad-input skip") as told:
        read(tmp_path / name, field=field)
    assert "two" not in str(told.value)
    records, counts = read(tmp_path / name, field=field, on_bad_input="skip")
    assert [record.text for record in records] == ["one", "three"]
    assert sum(counts.skipped.values()) == 1
    assert next(iter(counts.first.values())).endswith(f"{name}:{line}")


def test_other_encodings_are_tried_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes("naïve\n".encode("cp1252"))
    with pytest.raises(DataError, match="--encoding"):
        read(tmp_path / "a.log")
    assert read(tmp_path / "a.log", encodings=("cp1252",))[0][0].text == "naïve"


def test_damage_ends_the_reading_after_the_records_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(LINES * 1000)[:-20])
    with pytest.raises(DataError, match=r"a.log.gz:\d+: the gzip data end in the middle"):
        read(tmp_path / "a.log.gz")
    _, counts = read(tmp_path / "a.log.gz", on_bad_input="skip")
    assert counts.skipped["damaged or cut short"] == 1


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(LINES)

    def read_and_change() -> None:
        with RecordFile(path=path).opened(Counts()) as opened:
            next(opened.records)
            path.write_bytes(LINES + b"\nmore")

    with pytest.raises(DataError, match="changed while"):
        read_and_change()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("absent.log", {}, "does not exist"),
        ("", {}, "is not a file"),
        ("a.csv", {}, "name the column or key"),
        ("a.log", {"field": "x"}, "has no field 'x'"),
        ("a.log", {"form": "xml"}, "one of text, csv, tsv, jsonl"),
        ("a.log", {"on_bad_input": "ignore"}, "must be error or skip"),
        ("a.log", {"encodings": ("utf-16",)}, "encodings has 'utf-16'"),
        ("a.parquet", {"field": "x"}, "is parquet"),
        ("a.json", {"field": "x"}, "is json"),
    ],
)
def test_settings_that_dont_fit_are_refused_before_reading(
    tmp_path: Path, name: str, settings: dict[str, object], words: str
) -> None:
    for file in ("a.csv", "a.log", "a.parquet", "a.json"):
        (tmp_path / file).write_bytes(CSV)
    with pytest.raises(ConfigError, match=words):
        RecordFile(path=tmp_path / name, **settings)
