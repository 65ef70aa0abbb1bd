"""Schema-bound fields from records, by a model that never saw the task: always valid, never invented, resumable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from work_material import log

from cyberslm.data.records import RecordFile
from cyberslm.errors import ConfigError, GenerationError
from cyberslm.recipes import extract as module
from cyberslm.recipes.extract import Extracted, ExtractSettings, extract, read_allowed, read_schema
from cyberslm.recipes.work import Task
from cyberslm.training.trackers import Screen

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "host": {"type": "string", "maxLength": 8},
        "address": {"type": ["string", "null"], "maxLength": 15},
        "verdict": {"enum": ["benign", "suspicious"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["host", "address", "verdict", "count"],
    "additionalProperties": False,
}
LINES = log(16, seed=12, every=6)[0]
ADDRESS = re.compile(r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}")

Run = Callable[..., Extracted]


@pytest.fixture
def run(log_model: Path, tmp_path: Path) -> Run:
    (tmp_path / "in.log").write_text("\n".join(LINES) + "\n", encoding="utf-8")

    def go(out: str, *, schema: object = SCHEMA, source: Path | None = None, **given: object) -> Extracted:
        task = Task(
            source=RecordFile(path=source or tmp_path / "in.log"),
            out=tmp_path / out,
            prefix=str(given.pop("prefix", "")),
            block_records=6,
        )
        settings = ExtractSettings(**{"schema": json.dumps(schema), "max_new_tokens": 70, **given})
        return extract(log_model, task, settings, screen=Screen(quiet=True), device="cpu")

    return go


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def keeps_to_schema(row: dict) -> bool:
    """`SCHEMA`, by hand."""
    host, address = row["host"], row["address"]
    return (
        isinstance(host, str)
        and len(host) <= 8
        and (address is None or (isinstance(address, str) and len(address) <= 15))
        and row["verdict"] in ("benign", "suspicious")
        and type(row["count"]) is int
        and 0 <= row["count"] <= 9
    )


def test_every_record_gets_values_that_keep_to_the_schema(run: Run, tmp_path: Path) -> None:
    found = run("out.jsonl")
    made = rows(tmp_path / "out.jsonl")
    assert [row["text"] for row in made] == LINES
    assert [row["line"] for row in made] == list(range(1, len(LINES) + 1))
    assert found.statuses == {"ok": len(LINES)}
    assert all(row["status"] == "ok" and keeps_to_schema(row) for row in made)
    assert list(made[0]) == ["text", "line", "host", "address", "verdict", "count", "status", "cut"]


def test_identifiers_are_copied_unless_grounding_is_off(run: Run, tmp_path: Path) -> None:
    """Without grounding this model makes addresses up, so that the test can fail."""
    address = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[0-9.]{7,12}$"}},
        "required": ["a"],
    }
    run("free.jsonl", schema=address, ground=False, template="{text}; address: ")
    invented = [
        row for row in rows(tmp_path / "free.jsonl") if ADDRESS.search(row["a"] or "") and row["a"] not in row["text"]
    ]
    run("grounded.jsonl", schema=address, template="{text}; address: ")
    for row in rows(tmp_path / "grounded.jsonl"):
        assert all(found in row["text"] for found in ADDRESS.findall(row["a"] or ""))
    assert invented or not any(ADDRESS.search(row["a"] or "") for row in rows(tmp_path / "free.jsonl"))


def test_the_schema_and_the_allow_list_may_be_written(run: Run, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"src.example.com": {"enum": ["CVE-2024-1234"]}},
        "required": ["src.example.com"],
    }
    run("schema.jsonl", schema=schema)
    assert {row["src.example.com"] for row in rows(tmp_path / "schema.jsonl")} == {"CVE-2024-1234"}
    pattern = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": r"^192\.0\.2\.1$"}},
        "required": ["a"],
    }
    assert run("not.jsonl", schema=pattern).statuses == {"blocked": len(LINES)}
    assert run("allowed.jsonl", schema=pattern, allow=("192.0.2.1",)).statuses == {"ok": len(LINES)}


def test_a_format_becomes_a_choice_among_the_identifiers_of_the_record(run: Run, tmp_path: Path) -> None:
    """Greedy writing of a grounded address would run into a dead end such as 0.0."""
    two = "one from 192.0.2.7 and 198.51.100.9, mail to a@example.com"
    (tmp_path / "some.log").write_text(f"{two}\nonly 192[.]0[.]2[.]8 here\nnothing here\n")
    part = {"type": "object", "properties": {"a": {"type": "string", "format": "ipv4"}}, "required": ["a"]}
    summary = run("must.jsonl", schema=part, source=tmp_path / "some.log")
    found = [(row["a"], row["status"]) for row in rows(tmp_path / "must.jsonl")]
    assert found[0][0] in ("192.0.2.7", "198.51.100.9")
    assert found[1:] == [("192.0.2.8", "ok"), (None, "blocked")]
    assert summary.statuses == {"ok": 2, "blocked": 1}
    part["properties"] = {"a": {"type": ["string", "null"], "format": "email"}}
    assert run("may.jsonl", schema=part, source=tmp_path / "some.log").statuses == {"ok": 3}
    found = [row["a"] for row in rows(tmp_path / "may.jsonl")]
    assert found[0] in ("a@example.com", None)
    assert found[1:] == [None, None]


def test_an_answer_that_is_not_finished_leaves_no_half_value(run: Run, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": r"^192\.0\.2\.1$"}, "b": {"const": 1}},
        "required": ["b", "a"],
    }
    summary = run("out.jsonl", schema=schema)
    for row in rows(tmp_path / "out.jsonl"):
        assert (row["a"], row["b"], row["status"]) == (None, None, "blocked")
    said = "\n".join(summary.lines(tmp_path / "out.jsonl"))
    assert f"{len(LINES)} without fields: nothing that schema and grounding both allow (status blocked)" in said


def test_a_budget_in_which_no_answer_fits_is_refused_before_any_row(run: Run, tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="max_new_tokens 4 is too small|in 4 tokens"):
        run("out.jsonl", max_new_tokens=4, ground=False)
    assert not (tmp_path / "out.jsonl").exists()


def test_long_texts_are_read_from_their_beginnings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "long.log").write_text(LINES[0] + " again" * 3000 + "\n" + LINES[1] + "\n")
    summary = run("out.jsonl", source=tmp_path / "long.log")
    first, second = rows(tmp_path / "out.jsonl")
    assert first["cut"] > 17_000
    assert second["cut"] == 0
    assert summary.shortened == 1
    assert "1 text longer than" in "\n".join(summary.lines(tmp_path / "out.jsonl"))


class Killed(BaseException):
    pass


def test_stopped_anywhere_it_ends_with_the_bytes_of_a_straight_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("straight.csv")
    original, blocks, limit = module._rows, [], 1

    def counted(engine: object, records: Sequence[object], *rest: object) -> object:
        blocks.append(1)
        if len(blocks) == limit:
            raise Killed
        return original(engine, records, *rest)

    monkeypatch.setattr(module, "_rows", counted)
    while not (tmp_path / "out.csv").exists():
        limit = len(blocks) + 2
        with suppress(Killed):
            run("out.csv")
    assert len(blocks) == 5
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "straight.csv").read_bytes()


def test_the_template_and_the_rows_of_a_batch_are_obeyed(run: Run, tmp_path: Path) -> None:
    run("one.jsonl", batch_rows=1)
    run("many.jsonl", batch_rows=8)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "many.jsonl").read_bytes()
    run("other.jsonl", template="Fields of {text} as JSON: ", prefix="x_")
    assert all("x_host" in row for row in rows(tmp_path / "other.jsonl"))
    assert [row["x_count"] for row in rows(tmp_path / "other.jsonl")] != [
        row["count"] for row in rows(tmp_path / "one.jsonl")
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"schema": "{"}, "schema is not JSON"),
        ({"schema": '{"type": "string"}'}, "type object"),
        ({"schema": '{"type": "object", "properties": {"line": {}}}'}, "property 'line'"),
        ({"template": "x"}, "{text} once"),
        ({"max_new_tokens": 0}, r"max_new_tokens \(0\)"),
        ({"batch_rows": 0}, r"batch_rows \(0\)"),
        ({"allow": ("192.0.2.1",), "ground": False}, "only with grounding"),
    ],
)
def test_settings_that_dont_fit_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExtractSettings(**({"schema": json.dumps(SCHEMA)} | wrong))


def test_schemas_that_cant_be_used_are_refused_by_what_is_wrong() -> None:
    with pytest.raises(GenerationError, match="maxLenght"):
        ExtractSettings(schema=json.dumps({"type": "object", "properties": {"a": {"type": "string", "maxLenght": 3}}}))


def test_files_of_schemas_and_allow_lists_are_read(tmp_path: Path) -> None:
    (tmp_path / "allow.txt").write_text("192.0.2.1\n\n example.com \n")
    assert read_allowed(tmp_path / "allow.txt") == ("192.0.2.1", "example.com")
    (tmp_path / "bad").write_bytes(b"\xff")
    for path, words in ((tmp_path / "bad", "not UTF-8"), (tmp_path / "absent", "can't be read")):
        with pytest.raises(ConfigError, match=words):
            read_schema(path)
