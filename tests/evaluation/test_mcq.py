"""Multiple choice by likelihood, against sums token by token; files of questions; what is reported."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cyberslm.cli.main import app
from cyberslm.errors import DataError
from cyberslm.evaluation.mcq import Question, ask, read_questions
from cyberslm.recipes.use import load


def questions(count: int = 12) -> list[Question]:
    draw = random.Random(0)
    words = ["class", "import", "the", "Improper", "function", "x", "yield", "return value"]
    return [
        Question(str(n), f"Statement {n} is:", tuple(draw.sample(words, 3 + n % 2)), draw.randrange(3))
        for n in range(count)
    ]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def plain_log_prob(engine, prompt: str, choice: str) -> float:
    """The sum over the tokens after the prompt's, from whole logits."""
    start = [] if engine.tokenizer.add_bos else [engine.tokenizer.eos_id]
    before, ids = (start + engine.tokenizer.encode(text) for text in (prompt, f"{prompt} {choice}"))
    same = 0
    while same < len(before) and ids[same] == before[same]:
        same += 1
    with torch.no_grad():
        shares = engine.model(torch.tensor([ids]))[0].log_softmax(-1)
    return sum(shares[at - 1, ids[at]].item() for at in range(same, len(ids)))


def test_answers_are_those_of_sums_token_by_token(trained):
    engine = load(trained / "run")
    right = right_per_byte = 0
    for question in questions():
        sums = [plain_log_prob(engine, question.prompt, choice) for choice in question.choices]
        right += max(range(len(sums)), key=sums.__getitem__) == question.answer
        per_byte = [value / len(choice.encode()) for value, choice in zip(sums, question.choices, strict=True)]
        right_per_byte += max(range(len(sums)), key=per_byte.__getitem__) == question.answer
    found = ask(engine.model, engine.tokenizer, questions())
    assert (found.asked, found.right, found.right_per_byte) == (12, right, right_per_byte)
    assert found.chance == pytest.approx((6 / 3 + 6 / 4) / 12)


def test_batches_do_not_change_answers(trained, monkeypatch):
    engine = load(trained / "run")
    whole = ask(engine.model, engine.tokenizer, questions())
    monkeypatch.setattr("cyberslm.evaluation.mcq.BATCH", 1)
    assert ask(engine.model, engine.tokenizer, questions()) == whole


def test_a_question_that_does_not_fit_is_named_and_not_asked(trained):
    engine = load(trained / "run")
    long = Question("long", "x " * 200, ("a", "b"), 0)
    found = ask(engine.model, engine.tokenizer, [*questions(3), long])
    assert (found.asked, found.too_long) == (3, ("long",))
    with pytest.raises(DataError, match="none of the 1 questions fits"):
        ask(engine.model, engine.tokenizer, [long])


GOOD = {"id": 7, "question": "Which?", "choices": ["a", "b"], "answer": 1}


def test_questions_are_read(tmp_path):
    asked = {"prompt": "Name:", "choices": ["a", "b", "c"], "answer": 0}
    path = write(tmp_path / "q.jsonl", GOOD, "", asked)
    assert read_questions(path) == [
        Question("7", "Which?\nAnswer:", ("a", "b"), 1),
        Question(f"{path}:3", "Name:", ("a", "b", "c"), 0),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ([], "object"),
        ({**GOOD, "question": 3}, "prompt or question"),
        ({**GOOD, "choices": ["a"]}, "2 to 64"),
        ({**GOOD, "choices": ["a", "a"]}, "different"),
        ({**GOOD, "choices": ["a", 3]}, "texts"),
        ({**GOOD, "answer": 2}, "0 to 1"),
        ({**GOOD, "answer": True}, "0 to 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = write(tmp_path / "q.jsonl", GOOD, line)
    with pytest.raises(DataError, match=rf"q\.jsonl:2: .*{reason}"):
        read_questions(path)


def test_no_questions_are_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no questions"):
        read_questions(write(tmp_path / "q.jsonl", ""))
    with pytest.raises(DataError, match="can't read"):
        read_questions(tmp_path / "absent")


def test_eval_mcq_shows_accuracy_interval_and_chance(trained, tmp_path):
    path = write(tmp_path / "q.jsonl", *[{**GOOD, "id": n} for n in range(8)])
    run = str(trained / "run")
    shown = CliRunner().invoke(app, ["eval", run, "--mcq", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "8 questions, chance 50.0%" in shown.output
    assert "95 % interval" in shown.output
    record = json.loads(CliRunner().invoke(app, ["eval", run, "--mcq", str(path), "--json"]).output)
    assert record["questions"] == 8
    low, high = record["accuracy_interval"]
    assert low <= record["accuracy"] <= high
