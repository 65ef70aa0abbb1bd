"""The ``data:`` section of a run: which text, how it is cut into documents and split, and where its token shards live.

Everything that decides which tokens are written is in ``shaping``; two runs whose ``shaping`` and files are equal share
their shards. ``threads`` and ``prepared`` only say how and where; ``rows``, ``isolate_documents`` and ``mixture`` how
the shards are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from cyberslm.config import PathStr
from cyberslm.errors import ConfigError

MAX_SHARD_TOKENS = 1 << 40
MAX_THREADS = 1024
MAX_MIXTURE = 1e9

Layout = Literal["concat", "pack"]
MixtureUnit = Literal["share", "epochs"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to learn from, and how it becomes token shards."""

    sources: tuple[PathStr, ...] = ()
    """Files, folders or globs to learn from: .txt .text .md .rst .log text, .jsonl .ndjson with one record a line."""
    validation: tuple[PathStr, ...] = ()
    """Files, folders or globs to measure on; empty means that a share of the sources is held out instead."""
    validation_fraction: float = 0.05
    """Share of the documents held out when `validation` is empty, chosen by a hash of their text; 0 holds out none."""
    text_field: str = "text"
    """The field of a JSON record that holds its text."""
    txt_unit: Literal["file", "paragraph", "line"] = "file"
    """What one document is in a plain-text file: the file, each block between blank lines, or each line."""
    on_bad_line: Literal["error", "skip"] = "error"
    """What a JSON line without text or a file that is not UTF-8 leads to: an error with its place or a counted skip."""
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
        if not self.text_field:
            raise ConfigError("text_field is empty; name the field of the JSON records that holds the text")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads is {self.threads}; it must be 0 (all CPUs) to {MAX_THREADS}")
        if not 1 <= self.shard_tokens <= MAX_SHARD_TOKENS:
            raise ConfigError(f"shard_tokens is {self.shard_tokens}; it must be 1 to {MAX_SHARD_TOKENS}")

        for source, amount in self.mixture.items():
            self._check_mixture(source, amount)
        if self.mixture and not any(self.mixture.values()):
            raise ConfigError("mixture is 0 for every source; give one that is to be used more")

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

    def shaping(self) -> dict[str, object]:
        """The settings, paths apart, that change which tokens are written and where they go."""
        return {
            "text_field": self.text_field,
            "txt_unit": self.txt_unit,
            "on_bad_line": self.on_bad_line,
            "validation_fraction": None if self.validation else self.validation_fraction,
            "shard_tokens": self.shard_tokens,
        }
