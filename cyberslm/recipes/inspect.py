"""`cyberslm data inspect`: what prepared data hold, what is not in them and why, and what rows look like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cyberslm import files
from cyberslm.data.lengths import Lengths, bins, document_sizes, length_chart
from cyberslm.data.loader import RowLoader
from cyberslm.data.order import row_at
from cyberslm.data.prepare import REPORT_FOLDER, Prepared, stale
from cyberslm.data.store import Ints, TokenStore
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import describe, open_verified, row_loader
from cyberslm.recipes.finetune import load_any
from cyberslm.recipes.shown import COLOURED, LEGEND, shown_row
from cyberslm.recipes.tokenizer import tokenizer_settings
from cyberslm.text.tokenizer import Tokenizer

YAML = (".yaml", ".yml")
KIND = "cyberslm-prepared-data/"
SHOWN = 3
SHOWN_CHARACTERS = 72
BAR = 40


class Subject(NamedTuple):
    """Prepared data, and if a configuration was named its run and why the data no longer fit it."""

    prepared: Prepared
    run: TrainRun | None = None
    stale: str | None = None


def open_subject(path: Path) -> Subject:
    """The data of a configuration, or in a run's or a prepared folder. Raises ConfigError where there are none yet."""
    run = load_any(path).value if path.suffix in YAML else None
    for folder in [run.prepared] if run is not None else [path, path / "data"]:
        if files.looks_published(folder) and str(files.read_manifest(folder).get("format")).startswith(KIND):
            prepared = open_verified(folder)
            if run is None:
                return Subject(prepared)
            return Subject(prepared, run, stale(folder, run.data, tokenizer_settings(run.tokenizer)))
    raise ConfigError(f"{path} has no prepared data: make them with  cyberslm data prepare CONFIG.yaml")


def summary(subject: Subject) -> dict[str, Any]:
    """Everything countable, as plain data."""
    prepared = subject.prepared
    report = prepared.folder / REPORT_FOLDER / "cleaning.json"
    return {
        "folder": str(prepared.folder),
        "data_sha256": prepared.data_sha256,
        "sources": prepared.manifest["sources"],
        "report": json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None,
        "lengths": {
            split: {name: Lengths.of(sizes)._asdict() for name, sizes in sizes_by_source(store).items()}
            for split, store in _stores(prepared)
        },
    }


def lines(subject: Subject, *, samples: int, seed: int, colour: bool) -> Iterator[str]:
    """The same and more, for people; ``samples`` random rows with token borders, learned tokens marked."""
    prepared, run, reason = subject
    if reason is not None:
        yield f"warning: these data no longer fit the configuration: {reason}"
    yield from describe(prepared)
    for key, counts in prepared.manifest["sources"].items():
        yield from (
            f"first skipped in {key}, {why}: {place}" for why, place in counts.get("first_skipped", {}).items() if place
        )
    for split, store in _stores(prepared):
        yield ""
        yield from _length_table(split, sizes_by_source(store))
    yield ""
    sizes = document_sizes(prepared.train)
    yield from _histogram(sizes)
    order = np.argsort(sizes, kind="stable")
    for title, chosen in (("longest", order[::-1][:SHOWN]), ("shortest", order[:SHOWN])):
        yield ""
        yield f"{title} training documents:"
        for document in chosen.tolist():
            yield f"  {sizes[document]:,} tokens  {_place(prepared.train, document)}  {_start(prepared, document)}"
    if run is not None:
        loader = row_loader(run, prepared, prepared.train)
        yield ""
        yield from _rows(loader)
        yield from _samples(loader, prepared.tokenizer, samples=samples, seed=seed, colour=colour)


def sizes_by_source(store: TokenStore) -> dict[str, Ints]:
    """Tokens of each document, by the key of its source."""
    sizes = document_sizes(store)
    return {
        store.origin(each.first_token).source: sizes[each.first_document : each.end_document] for each in store.sources
    }


def chart(subject: Subject) -> bytes:
    """The PNG of document lengths in the training split."""
    row = None if subject.run is None else subject.run.model.max_seq_len
    return length_chart(sizes_by_source(subject.prepared.train), row=row)


def _stores(prepared: Prepared) -> Iterator[tuple[str, TokenStore]]:
    yield "train", prepared.train
    if prepared.validation is not None:
        yield "validation", prepared.validation


def _length_table(split: str, sizes: Mapping[str, Ints]) -> Iterator[str]:
    width = max(len(name) for name in (*sizes, split))
    heads = ("documents", "tokens", "shortest", "median", "mean", "95 %", "longest")
    yield f"{split:{width}}" + "".join(f"{head:>13}" for head in heads)
    for name, each in sizes.items():
        found = Lengths.of(each)
        cells = [f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in found]
        yield f"{name:{width}}" + "".join(f"{cell:>13}" for cell in cells)


def _histogram(sizes: Ints) -> Iterator[str]:
    yield "training documents by length in tokens:"
    found = bins(sizes)
    most = max(count for *_, count in found)
    first = next(place for place, (*_, count) in enumerate(found) if count)
    for low, high, count in found[first:]:
        yield f"  {low:>10,} to {high - 1:<10,} {count:>11,}  {'#' * round(BAR * count / most)}"


def _place(store: TokenStore, document: int) -> str:
    origin = store.origin(store.document_bounds(document)[0])
    return f"{origin.source} {origin.file}:{origin.line}"


def _start(prepared: Prepared, document: int) -> str:
    start, stop = prepared.train.document_bounds(document)
    text = prepared.tokenizer.decode(prepared.train.slice(start, min(stop, start + SHOWN_CHARACTERS)).tolist())
    shown = text[:SHOWN_CHARACTERS].encode("unicode_escape").decode("ascii")[:SHOWN_CHARACTERS]
    return f"{shown}..." if len(text) > SHOWN_CHARACTERS else shown


def _rows(loader: RowLoader) -> Iterator[str]:
    usage = loader.usage
    cut = f"; {usage.cut:,} documents longer than a row, in {usage.pieces:,} pieces" if usage.cut else ""
    yield (
        f"rows: {usage.rows:,} of {usage.seq_len:,} tokens, {100 * (1 - usage.padding):.2f} % used"
        f" ({loader.layout}{', documents isolated' if loader.isolate else ''}){cut}"
    )


def _samples(loader: RowLoader, tokenizer: Tokenizer, *, samples: int, seed: int, colour: bool) -> Iterator[str]:
    if samples:
        yield f"random rows; {COLOURED if colour else LEGEND}"
    loader = replace(loader, ramp=())  # steps of one size, so that a row's place gives its step
    for sample in range(samples):
        step, row = divmod(
            int(row_at(seed, 0, sample % loader.rows_per_epoch, loader.rows_per_epoch)), loader.batch_rows
        )
        yield f"row {sample}: {shown_row(loader, loader.bordered(step), row, tokenizer, colour=colour)}"
