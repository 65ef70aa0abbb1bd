"""The labels of a classification: their words, and the sentence in which a text and a label stand.

A label is judged by how likely the model finds its words in the template. All alternatives of a record are encoded
whole, so that no border between text and label is tokenized in a way that training never showed; what they begin with
alike is computed once. ``{label}`` may also come before ``{text}``: then the text is judged under each label.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cyberslm.config import load as load_yaml
from cyberslm.data.counts import Counts
from cyberslm.data.records import RecordFile
from cyberslm.errors import ConfigError
from cyberslm.evaluation.scoring import opening_id
from cyberslm.text.tokenizer import Tokenizer

ABSTAIN = "abstain"
TEXT, LABEL = "{text}", "{label}"
DEFAULT_TEMPLATE = "{text}\nCategory: {label}\n"
MAX_LABELS = 1000


@dataclass(frozen=True, kw_only=True)
class LabelSet:
    """The ``--labels`` file as YAML. Raises `ConfigError` naming the field."""

    labels: dict[str, str]
    """Each label and the words that stand for it in the template, such as {scan: port scan}."""
    template: str = DEFAULT_TEMPLATE
    """Text in which {text} and {label} are replaced, each written once."""

    def __post_init__(self) -> None:
        if not 2 <= len(self.labels) <= MAX_LABELS:
            raise ConfigError(f"labels has {len(self.labels)} entries; it must have 2 to {MAX_LABELS}")
        if ABSTAIN in self.labels:
            raise ConfigError(f"labels has {ABSTAIN!r}, the word for no answer: choose another")
        for label, words in self.labels.items():
            if not words.strip():
                raise ConfigError(f"labels gives {label!r} no words; write what stands for it in the template")
        if len(set(self.labels.values())) < len(self.labels):
            raise ConfigError("labels gives two labels the same words: nothing could tell them apart")
        if any(self.template.count(mark) != 1 for mark in (TEXT, LABEL)):
            raise ConfigError(f"template is {self.template!r}; it must have {TEXT} and {LABEL}, each once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Of the labels in their order, their words and the template."""
        return hashlib.sha256(json.dumps([list(self.labels.items()), self.template]).encode()).hexdigest()

    def filled(self, text: str, words: str) -> str:
        """The template with a text and a label's words; marks inside the text stay as they are."""
        first, second = sorted((TEXT, LABEL), key=self.template.index)
        before, rest = self.template.split(first)
        between, after = rest.split(second)
        values = {TEXT: text, LABEL: words}
        return before + values[first] + between + values[second] + after


class Alternatives(NamedTuple):
    """The ids of the filled template for every label, and how many characters of the text didn't fit."""

    ids: list[list[int]]
    cut: int


def alternatives(labels: LabelSet, text: str, tokenizer: Tokenizer, context: int) -> Alternatives:
    """Every label's ids for a text, of which as much is kept from the start as the context takes.

    Raises `ConfigError` when the template alone is too long.
    """
    kept = len(text)
    if len(text) > context:  # a first cut by the text alone, so that a huge one is not encoded for every label
        number = len(tokenizer.encode(text, add_special_tokens=False))
        kept = min(kept, kept * context // number + 1)
    while True:
        wholes = (labels.filled(text[:kept], words) for words in labels.labels.values())
        ids = [[opening_id(tokenizer), *tokenizer.encode(whole, add_special_tokens=False)] for whole in wholes]
        longest = max(map(len, ids))
        if longest <= context:
            return Alternatives(ids, len(text) - kept)
        if not kept:
            raise ConfigError(f"template takes {longest} tokens and the model's context is {context}: shorten it")
        kept = max(0, kept - max(1, kept * (longest - context) // longest))


def read_labels(path: Path, *, template: str | None = None) -> LabelSet:
    """The labels of a YAML file (`LabelSet`) or of a CSV with the columns label and words.

    ``template`` replaces the file's. Raises `ConfigError`.
    """
    if path.suffix in (".yaml", ".yml"):
        found = load_yaml(path, LabelSet).value
    elif path.suffix == ".csv":
        found = LabelSet(labels=_labels_of_csv(path))
    else:
        raise ConfigError(f"--labels {path}: give a .yaml or .csv file")
    return found if template is None else replace(found, template=template)


def _labels_of_csv(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with RecordFile(path=path, field="label").opened(Counts()) as opened:
        for record in opened.records:
            words = record.fields.get("words", record.text)
            if record.text in found or not isinstance(words, str):
                raise ConfigError(f"{path}:{record.line}: the label {record.text!r} is given twice or has no words")
            found[record.text] = words
    return found
