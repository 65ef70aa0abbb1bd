"""Fields out of the text of each record: JSON that keeps to a schema, copied from the text where it names things.

The schema binds the model token by token (`generation.constrain`), so what is written is valid whatever the model is;
what it says is as good as the model. Identifiers (addresses, domains, hashes, CVE ids ...) can only be copied from the
record, the template, the schema and an allow-list (`generation.grounding`). An answer that was not finished leaves its
fields empty and says why: never half a value.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cyberslm import files
from cyberslm.data.records import Record
from cyberslm.errors import ConfigError
from cyberslm.generation.constrain import Constraint
from cyberslm.generation.demand import Demand
from cyberslm.generation.engine import Completion, Engine
from cyberslm.generation.grounding import Grounding, Identifier
from cyberslm.generation.schemas import MAX_SCHEMA_CHARS
from cyberslm.recipes.labels import TEXT, beginning
from cyberslm.recipes.use import find_model, load
from cyberslm.recipes.work import Done, Row, Task, Worker, work_through
from cyberslm.training.trackers import Screen, count

DEFAULT_TEMPLATE = "{text}\nJSON:\n"
BATCH_ROWS = 16
BLOCK_RECORDS = 64
MAX_ALLOW_BYTES = 1 << 24
FORMAT_KINDS = {"ipv4": "ipv4", "ipv6": "ipv6", "hostname": "domain", "email": "email", "uri": "url"}
"""Formats of a JSON schema, and the kinds of identifiers that they are."""
OWN_FIELDS = ("line", "status", "cut")


@dataclass(frozen=True, kw_only=True)
class ExtractSettings:
    """What is asked of each record. Raises `ConfigError` naming the field, `GenerationError` for a schema."""

    schema: str
    """A JSON schema of an object, whose properties become the new fields."""
    template: str = DEFAULT_TEMPLATE
    """The prompt, in which {text} is replaced once by the record's text."""
    max_new_tokens: int = 256
    """Most tokens of an answer; the text gets what the context leaves."""
    ground: bool = True
    """Let identifiers only be copied from record, template, schema and allow-list."""
    allow: tuple[str, ...] = ()
    """Identifiers that may be written although the record doesn't hold them."""
    batch_rows: int = BATCH_ROWS
    """Records that are answered together."""

    def __post_init__(self) -> None:
        if self.template.count(TEXT) != 1:
            raise ConfigError(f"template is {self.template!r}; it must have {TEXT} once")
        if self.max_new_tokens < 1 or self.batch_rows < 1:
            raise ConfigError(
                f"max_new_tokens ({self.max_new_tokens}) and batch_rows ({self.batch_rows}) must be at least 1"
            )
        if self.allow and not self.ground:
            raise ConfigError("an allow-list is of use only with grounding: leave out --allow or --no-ground")
        if clash := sorted(set(OWN_FIELDS) & set(self.names)):
            raise ConfigError(f"schema has a property {clash[0]!r}, a field that every result has: rename it")
        _ = self.demand

    @property
    def names(self) -> list[str]:
        """The new fields."""
        try:
            schema = json.loads(self.schema)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"schema is not JSON: {str(error)[:120]}") from None
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(properties, dict) or not properties or schema.get("type") != "object":
            raise ConfigError("schema must be of type object and name its properties: they become the new fields")
        return list(properties)

    @cached_property
    def demand(self) -> Demand:
        """What binds each answer. Identifiers that the schema itself spells, such as a choice, may be written."""
        constraint = Constraint.json_schema(self.schema)
        if not self.ground:
            return Demand(constraint)
        spelt = sorted({found.value for found in Grounding().identifiers(self.schema)})
        return Demand(constraint, Grounding(allow=(*self.allow, *spelt)))

    def demand_of(self, text: str) -> Demand | None:
        """What binds the answer about one text; None when no answer can.

        With grounding, a property that is nothing but of a format of `FORMAT_KINDS` becomes a choice among the
        identifiers of that kind that the text and the allow-list hold: greedy writing can't lose its way in it.
        """
        demand = self.demand
        kinds = self._copied
        if demand.ground is None or not kinds:
            return demand
        schema = json.loads(self.schema)
        held = sorted(demand.ground.identifiers(text) | self._allowed)
        for name, kind in kinds.items():
            choices: list[str | None] = [each.value for each in held if each.kind == kind]
            choices += [None] if "null" in schema["properties"][name].get("type", ()) else []
            if not choices:
                return None
            schema["properties"][name] = {"enum": choices}
        return demand._replace(constraint=Constraint.json_schema(schema))

    @cached_property
    def _copied(self) -> dict[str, str]:
        """Properties that can only be identifiers of a kind."""
        properties = json.loads(self.schema)["properties"]
        return {name: kind for name, part in properties.items() if (kind := _copied_kind(part)) is not None}

    @cached_property
    def _allowed(self) -> set[Identifier]:
        ground = self.demand.ground
        return set() if ground is None else ground.identifiers("\n".join(ground.allow))


@dataclass
class Extracted:
    """How the answers ended."""

    done: Done
    statuses: Counter[str] = field(default_factory=Counter)
    shortened: int = 0

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return self.done.figures() | {"statuses": dict(self.statuses.most_common()), "shortened": self.shortened}

    def lines(self, out: Path) -> Iterator[str]:
        """For people."""
        meanings = {
            "budget": "not finished within --max-new-tokens",
            "blocked": "nothing that schema and grounding both allow",
        }
        for status, number in self.statuses.items():
            if status in meanings:
                yield f"{number:,} without fields: {meanings[status]} (status {status})"
        if self.shortened:
            yield f"{count(self.shortened, 'text')} longer than the context has room for, read from the beginning alone"
        yield from self.done.lines(out)


def extract(model: Path, task: Task, settings: ExtractSettings, *, screen: Screen, device: str = "auto") -> Extracted:
    """Fill the schema's fields from every record of the task's input.

    New fields: ``line``, the properties of the schema (null where the answer has none), ``status`` (ok, budget or
    blocked) and ``cut``, characters of the text that were left out.
    """
    folder = find_model(model)
    engine = load(folder, device=device)
    names = settings.names
    found = Extracted(Done())

    def begin(_place: Path) -> Worker:
        return lambda records: list(_rows(engine, records, settings, names))

    def see(fields: Mapping[str, Any]) -> None:
        found.statuses[fields[task.prefix + "status"]] += 1
        found.shortened += fields[task.prefix + "cut"] > 0

    found.done = work_through(
        task,
        begin,
        decided_by={
            "verb": "extract",
            "model": files.read_manifest(folder)["self"],
            "device": engine.model.device.type,
            "settings": [
                getattr(settings, name)
                for name in ("schema", "template", "max_new_tokens", "ground", "allow", "batch_rows")
            ],
        },
        screen=screen,
        see=see,
    )
    return found


def read_schema(path: Path) -> str:
    """The text of a schema file. Raises `ConfigError`."""
    return _text(path, "--schema", MAX_SCHEMA_CHARS)


def read_allowed(path: Path) -> tuple[str, ...]:
    """The identifiers of an allow-list, one a line. Raises `ConfigError`."""
    lines = _text(path, "--allow", MAX_ALLOW_BYTES).splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def _rows(engine: Engine, records: Sequence[Record], settings: ExtractSettings, names: Sequence[str]) -> Iterator[Row]:
    for first in range(0, len(records), settings.batch_rows):
        batch = records[first : first + settings.batch_rows]
        prompts, cuts = zip(*(_prompt(engine, record.text, settings) for record in batch), strict=True)
        demands = [settings.demand_of(r.text[: len(r.text) - cut]) for r, cut in zip(batch, cuts, strict=True)]
        asked = {number: demand for number, demand in enumerate(demands) if demand is not None}
        answers = engine.generate(
            [prompts[number] for number in asked],
            demand=list(asked.values()),
            max_new_tokens=settings.max_new_tokens,
        )
        made_of = dict(zip(asked, answers, strict=True))
        for number, (record, cut) in enumerate(zip(batch, cuts, strict=True)):
            made = made_of.get(number)
            values = None if made is None else _values(made)
            ended = made is not None and made.finish_reason == "length"
            status = "ok" if values is not None else "budget" if ended else "blocked"
            fields = {name: None if values is None else values.get(name) for name in names}
            yield Row({"line": record.line, **fields, "status": status, "cut": cut})


def _copied_kind(part: object) -> str | None:
    """The kind of identifier that a property is bound to by its format alone."""
    if not isinstance(part, dict) or not part.keys() <= {"type", "format", "title", "description"}:
        return None
    return FORMAT_KINDS.get(str(part.get("format")))


def _values(made: Completion) -> dict[str, Any] | None:
    """The answer as an object; None unless it is whole and keeps to schema and grounding."""
    if not made.valid:
        return None
    found = json.loads(made.text)
    return found if isinstance(found, dict) else None


def _prompt(engine: Engine, text: str, settings: ExtractSettings) -> tuple[str, int]:
    """The prompt of a text and how many of its characters did not fit."""
    before, after = settings.template.split(TEXT)
    tokenizer = engine.tokenizer

    def ids_of(part: str) -> list[list[int]]:
        return [tokenizer.encode(before + part + after)]

    cut = beginning(text, ids_of, tokenizer, engine.model.max_seq_len - settings.max_new_tokens).cut
    return before + text[: len(text) - cut] + after, cut


def _text(path: Path, option: str, limit: int) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise ConfigError(f"{option} {path} has more than {limit:,} bytes, the limit")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{option} {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not UTF-8: {error}") from error
