"""Give each record of a file one of a set of labels, by likelihood, with probabilities that are calibrated or said to
be raw.

What the words of a label cost is compared across labels in one of three ways: their whole log-likelihood, its mean over
tokens, or what the text adds to it, that is less their log-likelihood after texts that say nothing (contextual
calibration, Zhao et al. 2021, https://arxiv.org/abs/2102.09690). A small labelled file turns scores into probabilities
(`evaluation.calibration`); the result is bound to the model and the labels and refused with others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cyberslm import files
from cyberslm.data.counts import Counts
from cyberslm.data.records import Record, RecordFile
from cyberslm.errors import ConfigError, DataError
from cyberslm.evaluation.calibration import Calibration, cross_validated, fit, report
from cyberslm.evaluation.scoring import BATCH_TOKENS, score_endings
from cyberslm.generation.engine import Engine
from cyberslm.recipes.calibrated import Binding, Calibrated, saved_calibration
from cyberslm.recipes.labels import ABSTAIN, LabelSet, alternatives
from cyberslm.recipes.use import find_model, load
from cyberslm.recipes.work import Done, Row, Task, Worker, blocks_of, work_through
from cyberslm.training.trackers import Screen, count

Method = Literal["prior", "sum", "mean"]
NEUTRAL = ("N/A", "-")
"""Texts that say nothing, after which a label's words have their prior likelihood."""
DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class ClassifySettings:
    """How labels are chosen. Raises `ConfigError` naming the field."""

    labels: LabelSet
    """The labels with their words, and the template."""
    method: Method = "prior"
    """What is compared: prior is what the text adds to a label's likelihood, sum all of it, mean its mean by token."""
    abstain_below: float = 0.0
    """A label of a lower probability is withheld and `abstain` written."""
    batch_tokens: int = BATCH_TOKENS
    """Positions of one forward pass."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"method is {self.method!r}; it must be one of {', '.join(get_args(Method))}")
        if not 0.0 <= self.abstain_below <= 1.0:
            raise ConfigError(f"abstain_below is {self.abstain_below}; it must be 0 to 1")
        if self.batch_tokens < 1:
            raise ConfigError(f"batch_tokens is {self.batch_tokens}; it must be at least 1")


@dataclass
class Classified:
    """How often each label was given."""

    done: Done
    labels: Counter[str] = field(default_factory=Counter)
    shortened: int = 0

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return self.done.figures() | {"labels": dict(self.labels.most_common()), "shortened": self.shortened}

    def lines(self, out: Path) -> Iterator[str]:
        """For people."""
        for label, number in self.labels.most_common():
            yield f"{number:9,}  {label}"
        if self.shortened:
            yield f"{count(self.shortened, 'text')} longer than the context, judged by the beginning alone"
        yield from self.done.lines(out)


class Classifier:
    """An opened model that scores labels by ``settings``; raw until it is given a calibration."""

    def __init__(self, model: Path, settings: ClassifySettings, *, device: str = "auto") -> None:
        folder = find_model(model)
        self.engine: Engine = load(folder, device=device)
        self.settings = settings
        identity = str(files.read_manifest(folder)["self"])
        self.binding = Binding(identity, settings.labels.sha256, len(settings.labels.names), settings.method)
        self.calibration = Calibration()
        self._prior: Tensor | None = None
        if settings.method == "prior":
            neutral = self.scores(NEUTRAL).scores
            self._prior = neutral.logsumexp(0) - math.log(len(NEUTRAL))

    def scores(self, texts: Sequence[str]) -> _Scores:
        """What is compared, ``(N, L)`` in nats, fp64, and the characters of each text that didn't fit."""
        model, tokenizer = self.engine.model, self.engine.tokenizer
        asked = [alternatives(self.settings.labels, text, tokenizer, model.max_seq_len) for text in texts]
        found = score_endings(model, [each.ids for each in asked], batch_tokens=self.settings.batch_tokens)
        mean = self.settings.method == "mean"
        scores = torch.tensor(
            [[-one.loss_sum / (one.num_tokens if mean else 1) for one in each] for each in found], dtype=torch.float64
        )
        return _Scores(scores if self._prior is None else scores - self._prior, [each.cut for each in asked])

    def calibrate(self, labelled: RecordFile, label_field: str, screen: Screen) -> Calibrated:
        """Fit a calibration on labelled records and take it. Raises `DataError` for a record with no known label."""
        names = {name: number for number, name in enumerate(self.settings.labels.names)}
        parts: list[Tensor] = []
        labels: list[int] = []
        with labelled.opened(Counts()) as opened:
            for block in blocks_of(opened.records):
                labels += [_label_of(record, label_field, names, labelled.name) for record in block]
                parts.append(self.scores([record.text for record in block]).scores)
        if not parts:
            raise DataError(f"{labelled.name} has no labelled record")
        scores = torch.cat(parts)
        for name, number in names.items():
            if number not in labels:
                screen.line(f"warning: {labelled.name} has no record of {name!r}, whose probability is a guess")
        held_out = cross_validated(scores, labels)
        self.calibration = fit(scores, labels)
        raw = report(Calibration().probabilities(scores), labels)
        return Calibrated(self.calibration, self.binding, raw, report(held_out, labels))

    def take(self, path: Path) -> None:
        """Use a calibration that was saved. Raises `ConfigError` when it is of another model, labels or method."""
        self.calibration = saved_calibration(path, self.binding)

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """New fields: ``line``, ``predicted``, ``confidence``, ``probabilities``, and ``cut``, characters left out."""
        found = self.scores([record.text for record in records])
        names = self.settings.labels.names
        rows = []
        for record, own, cut in zip(
            records, self.calibration.probabilities(found.scores).tolist(), found.cut, strict=True
        ):
            best = max(range(len(names)), key=own.__getitem__)
            confidence = round(own[best], DIGITS)
            sure = confidence >= self.settings.abstain_below
            fields = {
                "line": record.line,
                "predicted": names[best] if sure else ABSTAIN,
                "confidence": confidence,
                "probabilities": {name: round(value, DIGITS) for name, value in zip(names, own, strict=True)},
                "cut": cut,
            }
            rows.append(Row(fields))
        return rows


def classify(classifier: Classifier, task: Task, *, screen: Screen) -> Classified:
    """Label every record of the task's input."""
    settings = classifier.settings
    found = Classified(Done())
    if settings.abstain_below and not classifier.calibration.bias:
        screen.line("warning: abstain_below is given without a calibration, and raw probabilities only rank")

    def begin(_place: Path) -> Worker:
        return classifier.rows

    def see(fields: Mapping[str, Any]) -> None:
        found.labels[fields[task.prefix + "predicted"]] += 1
        found.shortened += fields[task.prefix + "cut"] > 0

    found.done = work_through(
        task,
        begin,
        decided_by={
            "verb": "classify",
            "bound_to": classifier.binding,
            "device": classifier.engine.model.device.type,
            "settings": [settings.abstain_below, settings.batch_tokens],
            "calibration": asdict(classifier.calibration),
        },
        screen=screen,
        see=see,
    )
    return found


class _Scores(NamedTuple):
    scores: Tensor
    cut: list[int]


def _label_of(record: Record, label_field: str, names: Mapping[str, int], where: str) -> int:
    label = record.fields.get(label_field)
    if not isinstance(label, str) or label not in names:
        place = f"{where}:{record.line}: field {label_field!r}"
        if label is None:
            raise DataError(f"{place} is missing; name the one that holds the label with --label-field")
        raise DataError(f"{place} is none of the labels; they are {', '.join(list(names)[:8])}")
    return names[label]
