"""Anomaly ranking of log lines, in files: what is planted is found, and stopped work ends as straight work."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from work_material import area_under_curve, log

from cyberslm.data.records import Record, RecordFile
from cyberslm.errors import ConfigError, DataError, IntegrityError
from cyberslm.evaluation.scoring import score_texts
from cyberslm.recipes import score as module
from cyberslm.recipes import work
from cyberslm.recipes.score import Scored, ScoreSettings, score
from cyberslm.recipes.use import load
from cyberslm.recipes.work import Task
from cyberslm.training.trackers import Screen

LINES, ODD = log(300, seed=9, every=20)
NORMAL, _ = log(300, seed=10)

Run = Callable[..., Scored]


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run(log_model: Path, tmp_path: Path) -> Run:
    def go(
        out: str, *, source: RecordFile | None = None, prefix: str = "", replace: bool = False, **given: object
    ) -> Scored:
        found = source or RecordFile(
            path=write(tmp_path / "in.log", LINES) if not (tmp_path / "in.log").exists() else tmp_path / "in.log"
        )
        task = Task(source=found, out=tmp_path / out, prefix=prefix, replace=replace)
        return score(log_model, task, ScoreSettings(**given), screen=Screen(quiet=True), device="cpu")

    return go


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_planted_anomalies_rank_on_top_and_length_alone_does_not_find_them(run: Run, tmp_path: Path) -> None:
    run("out.jsonl")
    found = rows(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == LINES
    assert area_under_curve([len(line) for line in LINES], ODD) < 0.6
    assert area_under_curve([row["bits_per_byte"] for row in found], ODD) > 0.97
    assert area_under_curve([row["max_bits"] for row in found], ODD) > 0.97


def test_rows_hold_the_models_figures(run: Run, log_model: Path, tmp_path: Path) -> None:
    summary = run("out.jsonl", surprises=2)
    engine = load(log_model, device="cpu")
    truth = score_texts(engine.model, engine.tokenizer, LINES)
    for number, (row, one) in enumerate(zip(rows(tmp_path / "out.jsonl"), truth, strict=True), 1):
        assert (row["line"], row["tokens"], row["bytes"]) == (number, one.num_tokens, one.num_bytes)
        for name in ("bits", "bits_per_byte", "bits_per_token", "max_bits"):
            assert row[name] == pytest.approx(getattr(one, name), abs=1e-4)
        assert len(row["surprising"]) == 2
        for surprise in row["surprising"]:
            assert surprise["text"] == row["text"][surprise["start"] : surprise["end"]]
        assert row["surprising"][0]["bits"] == pytest.approx(row["max_bits"], abs=1e-3)
    bits, size = sum(one.bits for one in truth), sum(one.num_bytes for one in truth)
    assert summary.figures()["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)


def test_the_word_that_is_odd_is_among_the_surprises(run: Run, tmp_path: Path) -> None:
    line = "10:11:12 web01 sshd: Accepted publickey for xq7zk from 10.0.1.7 port 41234"
    run("out.jsonl", source=RecordFile(path=write(tmp_path / "one.log", [line])))
    (row,) = rows(tmp_path / "out.jsonl")
    at = line.index("xq7zk")
    assert any(at <= found["start"] < at + 5 for found in row["surprising"])


def test_top_sort_and_threshold_pick_by_the_figure_that_is_named(run: Run, tmp_path: Path) -> None:
    run("all.jsonl")
    everything = rows(tmp_path / "all.jsonl")
    for by in ("bits_per_byte", "bits", "bits_per_token", "max_bits"):
        ordered = sorted(everything, key=lambda row: -row[by])
        limit = ordered[30][by]
        run("sorted.jsonl", by=by, sort=True, replace=True)
        assert rows(tmp_path / "sorted.jsonl") == ordered
        run("top.jsonl", by=by, top=7, replace=True)
        assert rows(tmp_path / "top.jsonl") == ordered[:7]
        run("above.jsonl", by=by, threshold=limit, replace=True)
        assert rows(tmp_path / "above.jsonl") == [row for row in everything if row[by] > limit]


def test_baseline_gives_percentiles_and_a_threshold_with_a_stated_rate(run: Run, tmp_path: Path) -> None:
    normal = write(tmp_path / "normal.log", NORMAL)
    run("normal.jsonl", source=RecordFile(path=normal))
    usual = [row["bits_per_byte"] for row in rows(tmp_path / "normal.jsonl")]
    run("all.jsonl", baseline=normal)
    for row in rows(tmp_path / "all.jsonl"):
        below = sum(value < row["bits_per_byte"] for value in usual)
        assert row["percentile"] == pytest.approx(100 * below / len(usual), abs=1e-3)
    summary = run("flagged.jsonl", baseline=normal, fpr=0.02)
    flagged = rows(tmp_path / "flagged.jsonl")
    assert summary.threshold == sorted(usual)[-6]
    assert all(row["bits_per_byte"] > summary.threshold for row in flagged)
    odd = {line for line, is_odd in zip(LINES, ODD, strict=True) if is_odd}
    assert len(odd & {row["text"] for row in flagged}) >= 0.9 * len(odd)
    assert len([row for row in flagged if row["text"] not in odd]) <= 0.06 * len(LINES)
    said = "\n".join(summary.lines(tmp_path / "flagged.jsonl"))
    assert "false positive rate at most 0.02 by 300 normal records" in said
    with pytest.raises(ConfigError, match="needs a baseline of at least 999 lines"):
        run("x.jsonl", baseline=normal, fpr=0.001)


def test_without_the_end_a_text_has_one_token_less(run: Run, tmp_path: Path) -> None:
    run("with.jsonl")
    run("without.jsonl", with_end=False)
    for row, other in zip(rows(tmp_path / "with.jsonl"), rows(tmp_path / "without.jsonl"), strict=True):
        assert row["tokens"] == other["tokens"] + 1
        assert row["bits"] > other["bits"]


def test_csv_and_json_fields_come_first_and_unchanged(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(
            [["id", "message", "note"], *([n, line, 'a "b"\n=c,'] for n, line in enumerate(LINES[:9]))]
        )
    source = RecordFile(path=tmp_path / "in.csv", field="message")
    run("out.csv", source=source)
    run("out.jsonl", source=source)
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    same = rows(tmp_path / "out.jsonl")
    assert list(found[0])[:4] == ["id", "message", "note", "line"]
    for n, (row, other) in enumerate(zip(found, same, strict=True)):
        assert (row["id"], row["message"], row["note"]) == (str(n), LINES[n], 'a "b"\n=c,')
        assert float(row["bits"]) == other["bits"]
        assert json.loads(row["surprising"]) == other["surprising"]
    nested = {"id": [1, {"x": None}], "m": {"t": LINES[0]}, "s": "\ud800 é"}
    (tmp_path / "in.jsonl").write_text(json.dumps(nested) + "\n")
    run("nested.jsonl", source=RecordFile(path=tmp_path / "in.jsonl", field="m.t"))
    (row,) = rows(tmp_path / "nested.jsonl")
    assert {name: row[name] for name in nested} == nested


def test_fields_that_are_there_already_need_a_prefix(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a", "bits": 3}) + "\n")
    source = RecordFile(path=tmp_path / "in.jsonl", field="text")
    with pytest.raises(DataError, match="line 1: the input has a field 'bits' already; give --prefix"):
        run("out.jsonl", source=source)
    run("out.jsonl", source=source, prefix="lm_")
    (row,) = rows(tmp_path / "out.jsonl")
    assert row["bits"] == 3
    assert row["lm_bits"] > 0


class Killed(BaseException):
    pass


@pytest.mark.parametrize("given", [{}, {"sort": True}, {"top": 5}, {"baseline": True, "fpr": 0.05}])
def test_stopped_anywhere_it_ends_with_the_bytes_of_a_straight_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object]
) -> None:
    monkeypatch.setattr(work, "BLOCK_RECORDS", 64)
    if "baseline" in given:
        given = given | {"baseline": write(tmp_path / "normal.log", NORMAL[:99])}
    run("straight.csv", **given)
    blocks: list[int] = []
    limit = 1
    original = module._rows

    def counted(engine: object, records: Sequence[Record], *rest: object) -> object:
        blocks.append(records[0].line)
        if len(blocks) == limit:
            raise Killed
        return original(engine, records, *rest)

    monkeypatch.setattr(module, "_rows", counted)
    for _ in range(9):
        limit = len(blocks) + 2
        try:
            run("out.csv", **given)
        except Killed:
            assert not (tmp_path / "out.csv").exists()
        else:
            break
    assert sorted(set(blocks)) == [1, 65, 129, 193, 257]
    assert len(blocks) == 9
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "straight.csv").read_bytes()


def test_another_input_or_setting_begins_anew_and_another_pick_does_not(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "BLOCK_RECORDS", 64)
    original, seen, broken = module._rows, [], True

    def second_fails(engine: object, records: Sequence[Record], *rest: object) -> object:
        seen.append(records[0].line)
        if records[0].line == 65 and broken:
            raise Killed
        return original(engine, records, *rest)

    monkeypatch.setattr(module, "_rows", second_fails)
    with pytest.raises(Killed):
        run("out.jsonl", top=3)
    with pytest.raises(Killed):
        run("out.jsonl", with_end=False)
    assert seen == [1, 65, 1, 65]
    broken = False
    run("out.jsonl", with_end=False, sort=True)
    assert seen[4:] == [65, 129, 193, 257]


def test_bad_rows_are_counted_or_refused_by_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.log").write_bytes(b"one\n\xff\xff\xff\n\nthree\n")
    with pytest.raises(DataError, match="bad.log:2"):
        run("out.jsonl", source=RecordFile(path=tmp_path / "bad.log"))
    assert not (tmp_path / "out.jsonl").exists()
    summary = run("out.jsonl", source=RecordFile(path=tmp_path / "bad.log", on_bad_input="skip"))
    assert [row["line"] for row in rows(tmp_path / "out.jsonl")] == [1, 4]
    figures = summary.figures()
    assert figures["skipped"] == {"binary or not UTF-8": 1, "blank line": 1}
    assert figures["records"] == figures["written"] == 2


def test_an_input_without_records_gives_an_empty_result(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_bytes(b"")
    summary = run("out.jsonl", source=RecordFile(path=tmp_path / "empty.log"))
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert summary.figures()["records"] == 0
    assert summary.figures()["bits_per_byte"] is None
    assert next(summary.lines(tmp_path)) == "no text to score, so no bits per byte"  # it said 0.0000, the best there is


def test_batch_size_changes_nothing_but_rounding(run: Run, tmp_path: Path) -> None:
    run("one.jsonl", batch_tokens=1)
    run("many.jsonl", batch_tokens=100_000)
    for row, other in zip(rows(tmp_path / "one.jsonl"), rows(tmp_path / "many.jsonl"), strict=True):
        assert row["bits"] == pytest.approx(other["bits"], abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"by": "length"}, "by is 'length'"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"fpr": 0.1}, "give --baseline"),
        ({"fpr": 0.1, "baseline": Path("x"), "threshold": 1.0}, "no --threshold"),
        ({"top": 0}, "top is 0"),
        ({"top": 1, "sort": True}, "top and sort"),
        ({"surprises": 101}, "surprises is 101"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScoreSettings(**wrong)


@pytest.mark.parametrize(
    ("out", "words"), [("out.txt", "must end with .csv or .jsonl"), ("no/out.csv", "does not exist")]
)
def test_results_need_a_name_that_says_their_format(tmp_path: Path, out: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Task(source=RecordFile(path=write(tmp_path / "in.log", ["a"])), out=tmp_path / out)


def test_a_damaged_model_is_named_not_scored(
    run: Run, log_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(log_model, device="cpu")
    engine.model.norm.weight.data[0] = float("nan")
    monkeypatch.setattr(module, "load", lambda *_, **__: engine)
    with pytest.raises(IntegrityError, match="not finite"):
        run("out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.log"]
