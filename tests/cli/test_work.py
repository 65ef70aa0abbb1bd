"""score and classify as people call them: summaries, exit codes, quiet and JSON, and a kill that nothing can catch."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from calling import Cli
from work_material import PROMPT, alerts, log


@pytest.fixture
def material(tmp_path: Path) -> Path:
    (tmp_path / "in.log").write_text("\n".join(log(120, seed=9, every=20)[0]) + "\n")
    (tmp_path / "normal.log").write_text("\n".join(log(120, seed=10)[0]) + "\n")
    for name, number in (("todo.csv", 40), ("cal.csv", 60)):
        with (tmp_path / name).open("w", newline="") as stream:
            csv.writer(stream).writerows([("text", "label"), *alerts(number, seed=number)])
    (tmp_path / "labels.yaml").write_text(
        json.dumps({"template": PROMPT, "labels": {name: name for name in ("phishing", "malware", "scan")}})
    )
    return tmp_path


def test_score_says_what_it_found_and_writes_it(call: Cli, log_model: Path, material: Path) -> None:
    out = material / "out.csv"
    said = call(
        "score",
        log_model,
        material / "in.log",
        "--out",
        out,
        "--baseline",
        material / "normal.log",
        "--fpr",
        "0.05",
        "--device",
        "cpu",
    )
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert re.fullmatch(r"\d\.\d{4} bits per byte, \d\.\d{3} per token", lines[0])
    assert lines[1].startswith("threshold: bits_per_byte above ")
    assert lines[-1].startswith("120 records, ")
    assert lines[-1].endswith(f" written to {out}")
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert f"120 records, {len(rows)} written" in lines[-1]
    assert set(rows[0]) >= {"text", "line", "bits_per_byte", "percentile", "surprising"}


def test_json_is_one_object_and_quiet_is_nothing(call: Cli, log_model: Path, material: Path) -> None:
    said = call("score", log_model, material / "in.log", "--out", material / "a.jsonl", "--top", 3, "--json")
    found = json.loads(said.out)
    assert (said.code, found["records"], found["written"]) == (0, 120, 3)
    assert found["out"] == str(material / "a.jsonl")
    said = call("score", log_model, material / "in.log", "--out", material / "b.jsonl", "--sort", "--quiet")
    assert (said.code, said.out, said.err) == (0, "", "")
    top, everything = ((material / name).read_text().splitlines() for name in ("a.jsonl", "b.jsonl"))
    assert top == everything[:3]


def test_score_reads_standard_input(call: Cli, log_model: Path, material: Path) -> None:
    call("score", log_model, material / "in.log", "--out", material / "a.jsonl")
    stdin = (material / "in.log").read_bytes()
    assert call("score", log_model, "-", "--out", material / "b.jsonl", stdin=stdin).code == 0
    assert (material / "a.jsonl").read_bytes() == (material / "b.jsonl").read_bytes()


def test_options_reach_the_work(call: Cli, log_model: Path, material: Path) -> None:
    (material / "bad.csv").write_bytes("m;n\nna\xefve;1\n\xff;2;3\nok;4\n".encode("latin-1"))
    arguments = ("score", log_model, material / "bad.csv", "--field", "m", "--out", material / "a.jsonl")
    assert call(*arguments).code == 2
    more = (
        "--on-bad-input",
        "skip",
        "--encoding",
        "cp1252",
        "--prefix",
        "x_",
        "--surprises",
        0,
        "--no-end",
        "--by",
        "bits",
    )
    said = call(*arguments, *more, "--batch-tokens", 8, "--threshold", 0.5)
    assert said.code == 0
    assert "skipped 1 record: bad record, first at " in said.out
    rows = [json.loads(line) for line in (material / "a.jsonl").read_text().splitlines()]
    assert [row["m"] for row in rows] == ["na\xefve", "ok"]
    assert set(rows[0]) == {"m", "n"} | {
        f"x_{name}" for name in ("line", "tokens", "bytes", "bits", "bits_per_byte", "bits_per_token", "max_bits")
    }
    said = call(
        "score",
        log_model,
        material / "bad.csv",
        "--format",
        "text",
        "--encoding",
        "latin-1",
        "--out",
        material / "b.jsonl",
        "--json",
    )
    assert json.loads(said.out)["records"] == 4


def test_classify_calibrates_saves_and_uses(call: Cli, log_model: Path, material: Path) -> None:
    labels = ("--labels", material / "labels.yaml", "--field", "text")
    cal = material / "cal.json"
    said = call("classify", log_model, *labels, "--calibrate", material / "cal.csv", "--calibration", cal)
    assert said.code == 0
    assert re.match(r"as it is: accuracy 0\.\d{3} \(95 % interval 0\.\d{3} to \d\.\d{3}\), calibration error", said.out)
    assert "abstain below  answered  accuracy" in said.out
    out = material / "out.csv"
    said = call(
        "classify",
        log_model,
        material / "todo.csv",
        *labels,
        "--calibration",
        cal,
        "--abstain-below",
        0.7,
        "--out",
        out,
    )
    assert said.code == 0
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert said.out.splitlines()[-1] == f"40 records, 40 written to {out}"
    assert {row["predicted"] for row in rows} <= {"phishing", "malware", "scan", "abstain"}
    assert all((row["predicted"] == "abstain") == (float(row["confidence"]) < 0.7) for row in rows)
    fitted = (*labels, "--calibrate", material / "cal.csv", "--abstain-below", 0.7)
    at_once = call("classify", log_model, material / "todo.csv", *fitted, "--out", material / "again.csv", "--json")
    found = json.loads(at_once.out)
    assert found["calibration"]["fitted"]["examples"] == 60
    assert sum(found["labels"].values()) == 40
    assert (material / "again.csv").read_bytes() == out.read_bytes()


def test_classify_options_change_what_is_compared(call: Cli, log_model: Path, material: Path) -> None:
    seen = set()
    for number, more in enumerate([(), ("--method", "sum"), ("--method", "mean"), ("--template", "{text} is {label}")]):
        out = material / f"{number}.csv"
        call(
            "classify",
            log_model,
            material / "todo.csv",
            "--labels",
            material / "labels.yaml",
            "--field",
            "text",
            "--out",
            out,
            *more,
        )
        seen.add(out.read_bytes())
    assert len(seen) == 4
    said = call(
        "classify",
        log_model,
        "--labels",
        material / "labels.yaml",
        "--field",
        "text",
        "--calibrate",
        material / "cal.csv",
        "--label-field",
        "kind",
    )
    assert "field 'kind' is missing; name the one that holds the label with --label-field" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("score", "MODEL", "absent.log", "--out", "o.csv"), "absent.log does not exist"),
        (("score", "MODEL", "in.log", "--out", "o.txt"), "must end with .csv or .jsonl"),
        (("score", "MODEL", "in.log", "--out", "in.log"), "is the input"),
        (("score", "MODEL", "in.log", "--out", "there.csv"), "exists: name another file with --out"),
        (("score", "MODEL", "in.log", "--out", "o.csv", "--fpr", "0.1"), "give --baseline"),
        (("score", "MODEL", "in.log", "--out", "o.csv", "--by", "length"), "Invalid value for '--by'"),
        (("score", "nothing", "in.log", "--out", "o.csv"), "nothing is not a folder"),
        (("classify", "MODEL", "--labels", "labels.yaml"), "INPUT and --out, or labelled ones"),
        (("classify", "MODEL", "todo.csv", "--labels", "labels.yaml"), "INPUT and --out together"),
        (("classify", "MODEL", "--labels", "no.yaml", "--calibrate", "cal.csv"), "no such file"),
        (("classify", "MODEL", "--labels", "labels.yaml", "--calibrate", "cal.csv"), "its text with --field"),
        (("score", "MODEL", "todo.csv", "--field", "no", "--out", "o.csv"), "holds the text with --field"),
        (("score", "MODEL", "in.log", "--field", "no", "--out", "o.csv"), "has no field 'no': leave --field out"),
        (
            ("classify", "MODEL", "--labels", "labels.yaml", "--calibrate", "cal.csv", "--calibration", "there.csv"),
            "there.csv exists: name another --calibration",
        ),
    ],
)
def test_what_cant_be_done_is_said_in_one_line_before_any_work(
    call: Cli,
    log_model: Path,
    material: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(material)
    (material / "there.csv").write_text("mine")
    before = sorted(material.rglob("*"))
    said = call(*(log_model if word == "MODEL" else word for word in arguments))
    assert said.code == 2
    assert words in said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    assert sorted(material.rglob("*")) == before
    assert (material / "there.csv").read_text() == "mine"


def test_force_replaces(call: Cli, log_model: Path, material: Path) -> None:
    (material / "o.csv").write_text("old")
    assert call("score", log_model, material / "in.log", "--out", material / "o.csv", "--force").code == 0
    assert (material / "o.csv").read_text().startswith("text,line,")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_command_goes_on_and_ends_with_the_same_bytes(
    log_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "in.log").write_text("\n".join(log(1400, seed=3)[0]) + "\n")
    command = [sys.executable, "-m", "cyberslm", "score", log_model, "in.log", "--device", "cpu", "--sort", "--out"]
    straight = subprocess.run([*command, "straight.csv"], cwd=tmp_path, check=True, capture_output=True, text=True)
    work = tmp_path / ".out.csv.cyberslm-work"
    state = work / "state.json"
    with subprocess.Popen([*command, "out.csv"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not re.search(
            rb'"taken": [1-9]', state.read_bytes() if state.exists() else b""
        ):
            time.sleep(0.005)
        process.send_signal(how)
        _, err = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM)
    assert ("the same command goes on from there" in err) == (how == signal.SIGTERM)
    assert not (tmp_path / "out.csv").exists()
    again = subprocess.run([*command, "out.csv"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert re.search(r"goes on after [1-9][\d,]* records", again.stderr)
    assert again.stdout.splitlines()[0] == straight.stdout.splitlines()[0]
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "straight.csv").read_bytes()
    assert not work.exists()


def test_off_a_terminal_there_are_lines_and_no_bar(
    log_model: Path, material: Path, monkeypatch: pytest.MonkeyPatch, call: Cli
) -> None:
    from cyberslm.recipes import work

    monkeypatch.setattr(work, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(work, "BLOCK_RECORDS", 50)
    said = call("score", log_model, material / "in.log", "--out", material / "o.csv")
    lines = said.err.splitlines()
    assert [re.sub(r"[\d,.]+ records/s", "N records/s", line) for line in lines] == [
        "record 50 | N records/s", "record 100 | N records/s", "record 120 | N records/s",
    ]  # fmt: skip
    assert "\r" not in said.err


def test_a_bar_is_shown_on_a_terminal(log_model: Path, material: Path) -> None:
    reader, writer = os.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    command = [sys.executable, "-m", "cyberslm", "score", log_model, "in.log", "--out", "o.csv", "--device", "cpu"]
    with subprocess.Popen(command, cwd=material, stderr=writer, stdout=subprocess.DEVNULL) as process:
        os.close(writer)
        shown = b""
        while True:
            try:
                part = os.read(reader, 4096)
            except OSError:
                break
            if not part:
                break
            shown += part
    os.close(reader)
    assert process.returncode == 0
    assert b"%|" in shown
