"""Labels by likelihood: by hand, calibrated, bound, and stopped anywhere."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from work_material import ALERTS, PROMPT, alerts

from cyberslm.data.records import RecordFile
from cyberslm.errors import ConfigError, DataError
from cyberslm.evaluation.calibration import Calibration
from cyberslm.recipes import work
from cyberslm.recipes.classify import NEUTRAL, Classifier, ClassifySettings, classify
from cyberslm.recipes.labels import DEFAULT_TEMPLATE, LabelSet, alternatives, read_labels
from cyberslm.recipes.work import Task
from cyberslm.training.trackers import Screen

LABELS = LabelSet(labels={name: name for name in ALERTS}, template=PROMPT)
QUIET = Screen(quiet=True)

Make = Callable[..., Classifier]


def table(path: Path, rows: Sequence[tuple[str, str]]) -> RecordFile:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("text", "label"), *rows])
    return RecordFile(path=path, field="text")


@pytest.fixture
def make(log_model: Path) -> Make:
    def classifier(labels: LabelSet = LABELS, **given: object) -> Classifier:
        return Classifier(log_model, ClassifySettings(labels=labels, **given), device="cpu")

    return classifier


@torch.no_grad()
def label_cost(classifier: Classifier, text: str, words: str) -> tuple[float, int]:
    """Nats of the label's tokens behind the ids that all labels begin with, one pass for the whole sentence."""
    model, tokenizer = classifier.engine.model, classifier.engine.tokenizer
    wholes = {
        other: [
            tokenizer.bos_id,
            *tokenizer.encode(PROMPT.replace("{text}", text).replace("{label}", other), add_special_tokens=False),
        ]
        for other in LABELS.labels.values()
    }
    shared = 0
    while len({tuple(ids[: shared + 1]) for ids in wholes.values()}) == 1:
        shared += 1
    ids = wholes[words]
    losses = -model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(float(losses[at - 1, ids[at]]) for at in range(shared, len(ids))), len(ids) - shared


TEXTS = [text for text, _ in alerts(12, seed=8)]


def test_scores_are_those_of_whole_sentences_one_by_one(make: Make) -> None:
    found = {method: make(method=method).scores(TEXTS).scores for method in ("sum", "mean", "prior")}
    classifier = make(method="sum")
    for row, text in enumerate(TEXTS):
        for column, words in enumerate(LABELS.labels.values()):
            cost, tokens = label_cost(classifier, text, words)
            neutral = [math.exp(-label_cost(classifier, other, words)[0]) for other in NEUTRAL]
            prior = math.log(sum(neutral) / len(neutral))
            assert float(found["sum"][row, column]) == pytest.approx(-cost, abs=1e-4)
            assert float(found["mean"][row, column]) == pytest.approx(-cost / tokens, abs=1e-4)
            assert float(found["prior"][row, column]) == pytest.approx(-cost - prior, abs=2e-4)


def test_calibrated_labels_are_right_on_other_records(make: Make, tmp_path: Path) -> None:
    classifier = make(method="mean")
    report = classifier.calibrate(table(tmp_path / "cal.csv", alerts(150, seed=5)), "label", QUIET)
    low, high = report.fitted.interval
    assert low <= report.fitted.accuracy <= high
    assert report.fitted.accuracy > max(0.9, report.raw.commonest)
    assert report.fitted.accuracy >= report.raw.accuracy
    assert report.fitted.calibration_error < report.raw.calibration_error
    todo = alerts(200, seed=6)
    task = Task(source=table(tmp_path / "todo.csv", todo), out=tmp_path / "out.jsonl")
    found = classify(classifier, task, screen=QUIET)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sum(row["predicted"] == row["label"] for row in rows) > 0.9 * len(rows)
    assert found.labels == {name: sum(row["predicted"] == name for row in rows) for name in found.labels}
    for row in rows:
        assert row["confidence"] == max(row["probabilities"].values())
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_answers_of_little_confidence_are_withheld(make: Make, tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", alerts(80, seed=6))
    classify(make(), Task(source=source, out=tmp_path / "all.jsonl"), screen=QUIET)
    every = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    limit = sorted(row["confidence"] for row in every)[40]
    classify(make(abstain_below=limit), Task(source=source, out=tmp_path / "some.jsonl"), screen=QUIET)
    some = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    for row, other in zip(every, some, strict=True):
        assert other == row | {"predicted": row["predicted"] if row["confidence"] >= limit else "abstain"}
    assert 30 < sum(row["predicted"] == "abstain" for row in some) < 50


def test_a_saved_calibration_gives_the_same_answers(make: Make, tmp_path: Path) -> None:
    first, second = make(), make()
    first.calibrate(table(tmp_path / "cal.csv", alerts(60, seed=5)), "label", QUIET).save(tmp_path / "cal.json")
    second.take(tmp_path / "cal.json")
    assert first.calibration == second.calibration != Calibration()
    assert json.loads((tmp_path / "cal.json").read_text())["fitted"]["examples"] == 60


def test_a_calibration_of_something_else_is_refused(make: Make, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "cal.json"
    make().calibrate(table(tmp_path / "cal.csv", alerts(60, seed=5)), "label", QUIET).save(path)
    with pytest.raises(ConfigError, match="for another method"):
        make(method="sum").take(path)
    with pytest.raises(ConfigError, match="for another labels"):
        make(LabelSet(labels=LABELS.labels | {"scan": "sweep"}, template=PROMPT)).take(path)
    with pytest.raises(ConfigError, match="for another labels"):
        make(LabelSet(labels=LABELS.labels)).take(path)
    other = Classifier(trained / "run", ClassifySettings(labels=LABELS), device="cpu")
    with pytest.raises(ConfigError, match="for another model"):
        other.take(path)


def test_a_damaged_calibration_is_refused(make: Make, tmp_path: Path) -> None:
    path, classifier = tmp_path / "cal.json", make()
    classifier.calibrate(table(tmp_path / "cal.csv", alerts(60, seed=5)), "label", QUIET).save(path)
    sound = json.loads(path.read_text())
    for wrong in ({"temperature": 0}, {"temperature": "x"}, {"bias": [0.0]}, {"bias": [0.0, 0.0, None]}, {"bias": 3}):
        path.write_text(json.dumps(sound | {"calibration": sound["calibration"] | wrong}))
        with pytest.raises(ConfigError, match="is damaged"):
            classifier.take(path)
    for content in (b"", b"[]", b"{", b'{"kind": "cyberslm-calibration"}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is no calibration"):
            classifier.take(path)
    with pytest.raises(ConfigError, match="can't be read"):
        classifier.take(tmp_path / "absent.json")


def test_labelled_records_without_a_known_label_are_refused_by_line(make: Make, tmp_path: Path) -> None:
    labelled = table(tmp_path / "cal.csv", [*alerts(30, seed=5), ("some text", "worm")])
    with pytest.raises(DataError, match=r"cal.csv:32: field 'label' is none of the labels; they are phishing, malware"):
        make().calibrate(labelled, "label", QUIET)
    with pytest.raises(DataError, match="field 'kind' is missing"):
        make().calibrate(labelled, "kind", QUIET)
    with pytest.raises(DataError, match="5 labelled records; calibration needs at least 20"):
        make().calibrate(table(tmp_path / "few.csv", alerts(5, seed=5)), "label", QUIET)
    with pytest.raises(DataError, match="no labelled record"):
        make().calibrate(table(tmp_path / "none.csv", []), "label", QUIET)


def test_a_label_without_a_record_is_told(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labelled = table(tmp_path / "cal.csv", [row for row in alerts(60, seed=5) if row[1] != "scan"])
    make().calibrate(labelled, "label", Screen())
    assert "has no record of 'scan'" in capsys.readouterr().err


class Killed(BaseException):
    pass


def test_stopped_anywhere_it_ends_with_the_bytes_of_a_straight_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "BLOCK_RECORDS", 16)
    source = table(tmp_path / "in.csv", alerts(60, seed=6))
    classify(make(), Task(source=source, out=tmp_path / "straight.csv"), screen=QUIET)
    original, blocks, limit = Classifier.rows, [], 1

    def counted(self: Classifier, records: Sequence[object]) -> object:
        blocks.append(1)
        if len(blocks) == limit:
            raise Killed
        return original(self, records)

    monkeypatch.setattr(Classifier, "rows", counted)
    while not (tmp_path / "out.csv").exists():
        limit = len(blocks) + 2
        with suppress(Killed):
            classify(make(), Task(source=source, out=tmp_path / "out.csv"), screen=QUIET)
    assert len(blocks) == 7
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "straight.csv").read_bytes()


def test_long_texts_are_judged_by_what_fits_of_their_beginning(make: Make, tmp_path: Path) -> None:
    classifier = make()
    context = classifier.engine.model.max_seq_len
    text = alerts(1, seed=3)[0][0] + " and so on" * 2000
    found = alternatives(LABELS, text, classifier.engine.tokenizer, context)
    assert context - 8 <= max(map(len, found.ids)) <= context
    kept = text[: len(text) - found.cut]
    assert alternatives(LABELS, kept, classifier.engine.tokenizer, context) == (found.ids, 0)
    task = Task(source=table(tmp_path / "in.csv", [(text, "x"), ("short", "x")]), out=tmp_path / "out.jsonl")
    assert classify(classifier, task, screen=QUIET).shortened == 1
    with pytest.raises(ConfigError, match="template takes"):
        alternatives(
            LabelSet(labels=LABELS.labels, template="x y " * 99 + PROMPT), "a", classifier.engine.tokenizer, context
        )


def test_the_label_may_come_before_the_text(make: Make) -> None:
    """Then the text is judged under each label, which the first alternative's words begin."""
    labels = LabelSet(labels=LABELS.labels, template="{label}: {text}")
    scores = make(labels, method="sum").scores(TEXTS).scores
    assert scores.shape == (len(TEXTS), 3)
    assert float(scores.std(dim=1).min()) > 0


def test_marks_in_a_text_stay_as_they_are() -> None:
    assert LABELS.filled("a {label} {text}", "b") == PROMPT.replace("{label}", "b").replace(
        "{text}", "a {label} {text}"
    )


def test_labels_are_read_from_yaml_and_csv(tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text('template: "{text} = {label}"\nlabels: {a: one, b: two words}\n')
    found = read_labels(tmp_path / "l.yaml")
    assert (found.labels, found.template) == ({"a": "one", "b": "two words"}, "{text} = {label}")
    (tmp_path / "l.csv").write_text("label,words\na,one\nb,two words\n")
    assert read_labels(tmp_path / "l.csv") == LabelSet(labels=found.labels)
    assert read_labels(tmp_path / "l.csv").template == DEFAULT_TEMPLATE
    assert read_labels(tmp_path / "l.csv", template="{text} = {label}") == found
    (tmp_path / "m.csv").write_text("label\na\nb\n")
    assert read_labels(tmp_path / "m.csv").labels == {"a": "a", "b": "b"}
    (tmp_path / "n.csv").write_text("label\na\na\n")
    with pytest.raises(ConfigError, match="n.csv:3: the label 'a' is given twice"):
        read_labels(tmp_path / "n.csv")
    with pytest.raises(ConfigError, match="give a .yaml or .csv"):
        read_labels(tmp_path / "l.txt")
    (tmp_path / "o.yaml").write_text("labels: {a: one, b: two}\ntemplat: x\n")
    with pytest.raises(ConfigError, match="templat.*did you mean 'template'"):
        read_labels(tmp_path / "o.yaml")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"labels": {"a": "one"}}, "2 to 1000"),
        ({"labels": {"a": "one", "abstain": "two"}}, "no answer"),
        ({"labels": {"a": "one", "b": " "}}, "'b' no words"),
        ({"labels": {"a": "one", "b": "one"}}, "the same words"),
        ({"template": "{text}"}, "each once"),
        ({"template": "{text} {text} {label}"}, "each once"),
    ],
)
def test_labels_that_cant_be_told_apart_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LabelSet(**({"labels": {"a": "one", "b": "two"}} | wrong))


@pytest.mark.parametrize("wrong", [{"method": "best"}, {"abstain_below": 1.1}, {"batch_tokens": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ClassifySettings(labels=LABELS, **wrong)


def test_neutral_texts_leave_no_preference(make: Make) -> None:
    """With the prior taken off, a text that says nothing gives every label about the same probability."""
    found = Calibration().probabilities(make().scores([NEUTRAL[0]]).scores)
    raw = Calibration().probabilities(make(method="sum").scores([NEUTRAL[0]]).scores)
    assert float(found.max()) < float(raw.max())
