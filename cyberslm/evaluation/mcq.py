"""Multiple choice by likelihood: a question is right when the model finds the right choice likelier than the others.

    {"id": "79", "prompt": "Weakness description: ...\\nWeakness name:", "choices": ["...", ...], "answer": 2}

Each choice is what would follow the prompt and a space. ``accuracy`` compares log-probabilities, ``accuracy_per_byte``
those divided by the bytes of the choice, which favours neither short nor long ones; a tie goes to the first choice.
Both stand beside chance and Wilson's 95 % interval: on a hundred questions that is some ten points either way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cyberslm.errors import DataError
from cyberslm.evaluation.calibration import wilson
from cyberslm.evaluation.scoring import EndingScore, score_endings
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer

MAX_QUESTIONS = 1_000_000
MAX_LINE = 1 << 20
MAX_CHOICES = 64
BATCH = 64


class Question(NamedTuple):
    """``answer`` is the place of the right choice, from 0."""

    name: str
    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Result:
    """How many of ``asked`` questions were answered right, by either measure, and what guessing would give."""

    asked: int
    right: int
    right_per_byte: int
    chance: float
    too_long: tuple[str, ...]
    """Questions that don't fit the context and were not asked."""

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    @property
    def accuracy_per_byte(self) -> float:
        return self.right_per_byte / self.asked

    def to_json(self) -> dict[str, object]:
        return {
            "questions": self.asked,
            "too_long": len(self.too_long),
            "accuracy": self.accuracy,
            "accuracy_interval": wilson(self.right, self.asked),
            "accuracy_per_byte": self.accuracy_per_byte,
            "accuracy_per_byte_interval": wilson(self.right_per_byte, self.asked),
            "chance": self.chance,
        }


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON Lines file. Raises DataError naming the line."""
    found: list[Question] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE or number > MAX_QUESTIONS:
                    raise DataError(f"{path}:{number}: a line of more than {MAX_LINE:,} bytes, or too many lines")
                if line.strip():
                    found.append(_question(line, f"{path}:{number}"))
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error
    if not found:
        raise DataError(f"{path} holds no questions")
    return found


def ask(
    model: CyberSLM,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Ask every question that fits the context. Raises DataError when none does."""
    fitting: list[tuple[Question, list[list[int]]]] = []
    too_long = []
    for question in questions:
        sequences = _sequences(question, tokenizer)
        if max(map(len, sequences)) > model.max_seq_len + 1:
            too_long.append(question.name)
        else:
            fitting.append((question, sequences))
    if not fitting:
        raise DataError(f"none of the {len(questions):,} questions fits the model's context of {model.max_seq_len}")
    right = right_per_byte = done = 0
    for at in range(0, len(fitting), BATCH):
        batch = fitting[at : at + BATCH]
        for (question, _), scores in zip(batch, score_endings(model, [ids for _, ids in batch]), strict=True):
            plain, per_byte = _picked(question, scores[:-1])
            right += plain == question.answer
            right_per_byte += per_byte == question.answer
        done += len(batch)
        progress(done)
    chance = sum(1 / len(question.choices) for question, _ in fitting) / len(fitting)
    return Result(len(fitting), right, right_per_byte, chance, tuple(too_long))


def _sequences(question: Question, tokenizer: Tokenizer) -> list[list[int]]:
    """Each choice after the prompt; and the prompt with <eos>, so that what choices share is scored like the rest."""
    start = [] if tokenizer.add_bos else [tokenizer.eos_id]
    texts = [f"{question.prompt} {choice}" for choice in question.choices]
    return [[*start, *tokenizer.encode(text)] for text in texts] + [
        [*start, *tokenizer.encode(question.prompt), tokenizer.eos_id]
    ]


def _picked(question: Question, scores: Sequence[EndingScore]) -> tuple[int, int]:
    sizes = [len(choice.encode()) for choice in question.choices]
    places = range(len(sizes))
    plain = min(places, key=lambda place: scores[place].loss_sum)
    return plain, min(places, key=lambda place: scores[place].loss_sum / sizes[place])


def _question(line: bytes, where: str) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a question must be an object")
    prompt = record.get("prompt")
    if prompt is None and isinstance(record.get("question"), str):
        prompt = f"{record['question']}\nAnswer:"
    choices, answer = record.get("choices"), record.get("answer")
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{where}: needs a text in prompt or question")
    if not isinstance(choices, list) or not all(isinstance(each, str) and each for each in choices):
        raise DataError(f"{where}: choices must be texts")
    if not 2 <= len(choices) <= MAX_CHOICES or len(set(choices)) < len(choices):
        raise DataError(f"{where}: needs 2 to {MAX_CHOICES} different choices")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(f"{where}: answer must be the place of the right choice, 0 to {len(choices) - 1}")
    return Question(str(record.get("id", where)), prompt, tuple(choices), answer)
