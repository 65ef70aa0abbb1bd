"""The ``data:`` section of a run: which text, how it is cut into documents and split, and where its token shards live.

Everything that decides which tokens are written is in ``shaping``; two runs whose ``shaping`` and files are equal share
their shards. ``threads`` and ``prepared`` only say how and where; ``rows``, ``isolate_documents`` and ``mixture`` how
the shards are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cyberslm.config import PathStr
from cyberslm.data.chat import ChatConfig, Format
from cyberslm.data.clean.config import StepConfig
from cyberslm.data.readers.encodings import keeps_ascii
from cyberslm.data.redact.config import RedactConfig
from cyberslm.errors import ConfigError

MAX_SHARD_TOKENS = 1 << 40
MAX_THREADS = 1024
MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES = 1 << 10, 1 << 30
MAX_EXPANSION = 1_000_000
MAX_MIXTURE = 1e9

Layout = Literal["concat", "pack"]
MixtureUnit = Literal["share", "epochs"]
Shape = Literal["auto", "text", "prompt_completion", "instruction", "messages", "preference"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to learn from, and how it becomes token shards."""

    sources: tuple[PathStr, ...] = ()
    """Files, folders or globs to learn from: text, HTML, JSON, CSV, Parquet, mail, compressed or archived too."""
    validation: tuple[PathStr, ...] = ()
    """Files, folders or globs to measure on; empty means that a share of the sources is held out instead."""
    validation_fraction: float = 0.05
    """Share of the documents held out when `validation` is empty, chosen by a hash of their text; 0 holds out none."""
    text_field: str | None = None
    """Field with the text of JSON, CSV or Parquet records, or a dotted path such as body.text; null goes by shape."""
    record_shape: Shape = "auto"
    """The fields that make a record's text; auto tells the shape of each record by the fields it has."""
    format: Format = "text"
    """What records become: text; chat, conversations of which the assistant's turns are trained; or preference, pairs
    of a chosen and a rejected answer."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    txt_unit: Literal["file", "paragraph", "line"] = "file"
    """What one document is in a plain-text file: the file, each block between blank lines, or each line."""
    encodings: tuple[str, ...] = ()
    """Encodings to try in turn, such as cp1252, for text that is not UTF-8; text with a byte order mark needs none."""
    mail_headers: tuple[str, ...] = ("subject",)
    """Headers that are written above a mail's text, such as subject, from and date; empty keeps the text alone."""
    on_bad_input: Literal["error", "skip"] = "error"
    """What a damaged file, text in no known encoding or a record without text leads to: an error or a counted skip."""
    max_document_bytes: int = 1 << 26
    """A longer text is cut at line borders; a longer record, mail or page is bad input, for it must fit in memory."""
    max_expansion: int = 200
    """Most bytes that each byte of a compressed file or archive may become (64 MiB are always allowed)."""
    redact: RedactConfig | None = None
    """What leaves the text before anything else is done with it; null leaves all of it."""
    steps: tuple[StepConfig, ...] = ()
    """Cleaning steps in their order, one an entry, such as `- exact_duplicates: {}`; none is on by itself."""
    workers: int = 0
    """Processes that read, redact and clean; 0 takes every CPU from 64 MiB of files on, else one."""
    prepared: PathStr | None = None
    """Folder of the token shards, shared by runs that use the same text; the default is `data` in the run's folder."""
    threads: int = 0
    """Threads that tokenize; 0 takes every CPU this process may use."""
    shard_tokens: int = 100_000_000
    """Tokens after which a new shard file begins; a document is never cut over two shards."""
    rows: Layout = "concat"
    """concat cuts the text every max_seq_len tokens; pack fills rows with whole documents and cuts only longer ones."""
    isolate_documents: bool = False
    """Keep attention and positions inside each document of a row; off: a token sees all of its row before it."""
    mixture: dict[str, float] = field(default_factory=dict)
    """What each source contributes, by its place in `sources` from 0, such as {0: 3, 1: 1}; empty: all rows once."""
    mixture_unit: MixtureUnit = "share"
    """What `mixture` counts: each source's share of the rows, or how often its rows come in an epoch of the mixture."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ConfigError(
                f"validation_fraction is {self.validation_fraction}; it must be at least 0 and below 1, such as 0.05"
            )
        limits = (
            ("threads", 0, MAX_THREADS),
            ("workers", 0, MAX_THREADS),
            ("shard_tokens", 1, MAX_SHARD_TOKENS),
            ("max_document_bytes", MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES),
            ("max_expansion", 1, MAX_EXPANSION),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be {low:,} to {high:,}")
        self._check_records()
        if self.format == "text" and self.chat != ChatConfig():
            raise ConfigError("chat has settings, and format is text: set format to chat or preference")
        for problem in () if self.format == "text" else self._conversation_problems():
            raise ConfigError(f"format is {self.format}: {problem}")
        self._check_steps()
        for source, amount in self.mixture.items():
            self._check_mixture(source, amount)
        if self.mixture and not any(self.mixture.values()):
            raise ConfigError("mixture is 0 for every source; give one that is to be used more")

    def _check_records(self) -> None:
        if self.text_field is not None:
            if not all(self.text_field.split(".")):
                raise ConfigError(f"text_field is {self.text_field!r}; it must be a field such as text, or body.text")
            if self.record_shape not in ("auto", "text"):
                raise ConfigError(
                    f"text_field is {self.text_field!r} and record_shape is {self.record_shape}; leave one of them out"
                )
        for name in self.encodings:
            if not keeps_ascii(name):
                raise ConfigError(
                    f"encodings has {name!r}; it must be a known encoding that extends ASCII, such as cp1252 "
                    "(UTF-8 is always tried first, and UTF-16 and UTF-32 are told by their byte order mark)"
                )
        for name in self.mail_headers:
            if not name.isascii() or not name.replace("-", "").isalnum():
                raise ConfigError(f"mail_headers has {name!r}; it must be the name of a header, such as subject")

    def _conversation_problems(self) -> Iterator[str]:
        shapes = ("preference",) if self.format == "preference" else ("messages", "instruction", "prompt_completion")
        if self.record_shape not in ("auto", *shapes):
            yield f"record_shape must be auto or {', '.join(shapes)}, not {self.record_shape}"
        if self.text_field is not None:
            yield "text_field names a text, and records are conversations: leave it out"
        if self.rows != "pack" or not self.isolate_documents:
            yield "set rows: pack and isolate_documents: true, which keep conversations whole and apart"
        for step in self.steps:
            if step.changes_texts:
                yield f"steps: {step.name} changes texts, and turns must stay as they are: leave it out"

    @property
    def parts(self) -> dict[int, float]:
        """``mixture`` by the sources' numbers."""
        return {int(source): amount for source, amount in self.mixture.items()}

    def _check_mixture(self, source: str, amount: float) -> None:
        if not (source.isascii() and source.isdigit() and str(int(source)) == source):
            raise ConfigError(f"mixture has the key {source!r}; name a source by its place in data.sources, from 0")
        if self.sources and int(source) >= len(self.sources):
            raise ConfigError(f"mixture names source {source}; data.sources has 0 to {len(self.sources) - 1}")
        if not (math.isfinite(amount) and 0 <= amount <= MAX_MIXTURE):
            raise ConfigError(f"mixture gives source {source} {amount}; it must be from 0 to {MAX_MIXTURE:.0f}")

    def _check_steps(self) -> None:
        grouped = late = ""
        for at, step in enumerate(self.steps, 1):
            name = f"{step.name} (entry {at})"
            if grouped and step.changes_texts:
                late = late or f"{name} changes texts after {grouped}"
            if step.groups_texts:
                grouped = name
                late = "" if step.near_duplicates is not None else late
        if late:
            raise ConfigError(
                f"steps: {late} has told which are copies, so that equal texts could stand on both sides of the split;"
                " move it before that, or look for near_duplicates after it"
            )

    def shaping(self) -> dict[str, object]:
        """The settings, paths apart, that change which tokens are written and where they go."""
        return {
            "text_field": self.text_field,
            "record_shape": self.record_shape,
            "txt_unit": self.txt_unit,
            "encodings": list(self.encodings),
            "mail_headers": list(self.mail_headers),
            "on_bad_input": self.on_bad_input,
            "max_document_bytes": self.max_document_bytes,
            "max_expansion": self.max_expansion,
            "redact": None if self.redact is None else _without(self.redact, "key_file"),
            "steps": [{step.name: _without(step.settings, "against")} for step in self.steps],
            "validation_fraction": None if self.validation else self.validation_fraction,
            "shard_tokens": self.shard_tokens,
            **({} if self.format == "text" else {"format": self.format, "chat": _without(self.chat, "template")}),
        }


def _without(settings: Any, path: str) -> dict[str, object]:
    """Settings as JSON holds them, less the one that is a path."""
    plain = {key: value for key, value in asdict(settings).items() if key != path}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
