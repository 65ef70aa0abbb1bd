"""Prepared data of a run: made if needed, reused if they still fit their sources and settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.config import differences
from cyberslm.data.clean.counts import table
from cyberslm.data.corpus import report_of
from cyberslm.data.inputs import find_inputs
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import REPORT_FOLDER, Prepared, clean_corpus, open_prepared, prepare, stale
from cyberslm.data.slices import prepare_slice
from cyberslm.data.store import TokenStore
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.finetune import FinetuneRun, base_tokenizer, replayed
from cyberslm.recipes.replay import mixture_of
from cyberslm.recipes.tokenizer import Say, make_tokenizer, tokenizer_settings
from cyberslm.recipes.vocabulary import write_extended
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.training.trackers import count, short


def ensure_prepared(run: TrainRun, say: Say) -> Prepared:
    """The run's shards and tokenizer, prepared now unless ``data.prepared`` (default ``out_dir/data``) is current.

    A run that has begun goes on only with the tokens it began with, and its shards are not replaced by others:
    `IntegrityError`.
    """
    if isinstance(run, FinetuneRun) and run.extend_vocab is not None:
        write_extended(base_tokenizer(run), run.extend_vocab.read(), run.folder / "tokenizer")
    settings = tokenizer_settings(run.tokenizer)
    folder = run.prepared
    files.sweep(folder.parent)
    began_with = _began_with(run)
    reason = stale(folder, run.corpus, settings)
    if began_with is not None and reason is not None and folder.exists():
        raise IntegrityError(_OTHER_DATA.format(folder=run.folder, reason=reason))
    if reason is None:
        files.forget(folder)
        say(f"data: {folder} is up to date")
        prepared = open_verified(folder)
    else:
        prepared = _prepare(run, settings, reason, say)
    if began_with not in (None, prepared.data_sha256):
        raise IntegrityError(_OTHER_DATA.format(folder=run.folder, reason=f"the tokens in {folder} are others"))
    return prepared


def _began_with(run: TrainRun) -> str | None:
    """``data_sha256`` of the run's newest checkpoint."""
    steps = list_steps(run.folder / "checkpoints")
    return str(files.read_manifest(steps[-1].path).get("data_sha256")) if steps else None


_OTHER_DATA = (
    "{folder} holds a run that began with other data than there is now ({reason}): restore the text, delete the"
    " prepared folder if only that is damaged, give data.sources=[] to go on with its tokens as they are, or choose"
    " another out_dir"
)


def _prepare(
    run: TrainRun, settings: dict[str, object], reason: str, say: Say, slices: Sequence[Path] = ()
) -> Prepared:
    folder = run.prepared
    say(f"data: preparing {folder}: {reason}")
    if run.data.redact is not None and run.data.redact.key_file is None:
        say(
            "warning: data.redact.key_file is not set: pseudonyms hold for this preparation only,"
            " and if it is stopped the next one begins anew"
        )
    files.make_folder(folder.parent)
    return prepare(
        run.corpus,
        lambda texts: make_tokenizer(run.tokenizer, texts, say),
        folder,
        tokenizer_settings=settings,
        slices=slices,
        progress=_stages(say),
    )


def write_slice(run: TrainRun, number: int, count: int, say: Say) -> Path:
    """Read and redact slice ``number`` of ``count`` alone; `merge_slices` makes shards of all of them."""
    folder = slices_folder(run) / f"{number:05d}-of-{count:05d}"
    files.make_folder(folder.parent)
    files.sweep(folder.parent)
    if not prepare_slice(run.corpus, folder, number=number, count=count, progress=_stages(say)):
        say(f"data: {folder} is up to date")
    return folder


def merge_slices(run: TrainRun, say: Say) -> Prepared:
    """Prepared data from the slices in `slices_folder`, bit for bit those of one machine."""
    parent = slices_folder(run)
    slices = sorted(path for path in parent.glob("*-of-*") if path.is_dir()) if parent.is_dir() else []
    if not slices:
        raise ConfigError(f"{parent} holds no slices: make them with  cyberslm data prepare CONFIG --slice 1/N")
    reason = f"from {len(slices)} slices"
    if _began_with(run) is not None and run.prepared.exists():
        raise IntegrityError(_OTHER_DATA.format(folder=run.folder, reason="its shards would be made anew"))
    return _prepare(run, tokenizer_settings(run.tokenizer), reason, say, slices)


def slices_folder(run: TrainRun) -> Path:
    """Where a run's slices are, beside its prepared data."""
    return run.prepared.with_name(f"{run.prepared.name}-slices")


def dry_run(run: TrainRun, say: Say) -> Iterator[str]:
    """What reading, redacting and cleaning would leave, in lines for people; nothing is written that stays."""
    files.make_folder(run.prepared.parent)
    files.sweep(run.prepared.parent)
    with clean_corpus(run.corpus, run.prepared.parent, _stages(say)) as corpus:
        counts = corpus.new_counts()
        splits = Counter(piece.split for piece in corpus.pieces(counts, "tokens"))
        for name, each in counts.items():
            yield _source_line(name, each.summary())
        yield from _report_lines(report_of(corpus), table(corpus.steps) if corpus.steps else "")
        yield f"data: would keep {splits['train']:,} documents to train on and {splits['validation']:,} to validate on"


def fit_model(config: CyberSLMConfig, tokenizer: Tokenizer, *, given: frozenset[str]) -> CyberSLMConfig:
    """The model's configuration with the tokenizer's control ids and, unless it was ``given``, its vocabulary."""
    size = config.vocab_size if "model.vocab_size" in given else tokenizer.vocab_size
    if size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size {size} is below the tokenizer's {tokenizer.vocab_size}: leave it out or raise it"
        )
    pad, bos, eos = tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id
    fitted = replace(config, vocab_size=size, pad_token_id=pad, bos_token_id=bos, eos_token_id=eos)
    for key, (asked, own) in differences(config, fitted).items():
        if key != "vocab_size" and f"model.{key}" in given:
            raise ConfigError(f"model.{key} is the tokenizer's, {own}, not {asked}: leave it out")
    return fitted


def open_verified(folder: Path) -> Prepared:
    """Prepared data whose every file has the SHA-256 of its manifest; `IntegrityError` names one that hasn't."""
    prepared = open_prepared(folder)
    files.verify(folder)
    return prepared


def row_loader(
    run: TrainRun, prepared: Prepared, store: TokenStore, *, reference: npt.NDArray[np.float64] | None = None
) -> RowLoader:
    """Rows of ``store`` as the run trains on them; those of the training split are mixed as the run asks."""
    tokenizer = prepared.tokenizer
    mixture, unit = mixture_of(run, prepared) if store is prepared.train else ({}, run.data.mixture_unit)
    return RowLoader(
        store,
        seq_len=run.seq_len,
        batch_rows=run.train.global_batch_size,
        seed=run.seed,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        layout=run.data.rows,
        isolate=run.data.isolate_documents,
        pairs=run.data.format == "preference",
        reference=reference,
        mixture=mixture,
        mixture_unit=unit,
        ramp=run.train.batch_ramp,
        by_source=replayed(run) is not None,
    )


def bytes_per_id(tokenizer: Tokenizer) -> Tensor:
    """UTF-8 bytes of each id's text ``(V,)``, 0 for control ids."""
    return torch.tensor([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])


class TextCount(NamedTuple):
    num_files: int
    txt_files: int
    num_bytes: int


def count_text(source: Path) -> TextCount:
    """How much readable text a file or folder holds."""
    found = find_inputs([str(source)], key="TEXT").files
    return TextCount(len(found), sum(file.named_format == "text" for file in found), sum(file.size for file in found))


def write_tokenizer(run: TrainRun, folder: Path | None, say: Say) -> Path:
    """Train the run's tokenizer alone and write it to ``folder`` (default ``out_dir/tokenizer``)."""
    if run.tokenizer.path is not None:
        raise ConfigError("tokenizer.path names a tokenizer already: leave it out to train one")
    target = folder or run.folder / "tokenizer"
    files.make_folder(target)
    files.sweep(target)
    with clean_corpus(run.corpus, target, _stages(say)) as corpus:
        tokenizer = make_tokenizer(run.tokenizer, corpus.training_texts, say)
    tokenizer.save(target)
    return target


def describe(prepared: Prepared) -> Iterator[str]:
    """One line per source and split, and what cleaning and redaction did, for people."""
    for name, counts in sorted(dict(prepared.manifest["sources"]).items()):
        yield _source_line(name, counts)
    report = prepared.folder / REPORT_FOLDER
    if report.is_dir():
        cleaning = report / "cleaning.txt"
        shown = cleaning.read_text(encoding="utf-8") if cleaning.is_file() else ""
        yield from _report_lines(json.loads((report / "cleaning.json").read_text(encoding="utf-8")), shown)
    for name, store in (("train", prepared.train), ("validation", prepared.validation)):
        if store is not None:
            yield (
                f"data: {name}: {store.num_documents:,} documents, {short(store.num_tokens)} tokens,"
                f" {store.text_bytes / max(1, store.num_tokens):.2f} bytes per token"
            )


def describe_rows(loader: RowLoader) -> Iterator[str]:
    """How text lies in rows, unless it is just cut, and what each source gives to an epoch, if they are mixed."""
    usage = loader.usage
    if loader.layout == "pack":
        cut = f"; {count(usage.cut, 'longer document')} cut into {usage.pieces:,} pieces" if usage.cut else ""
        yield f"rows: {usage.rows:,} packed, {usage.padding:.2%} padding{cut}"
    if loader.isolate:
        yield "rows: documents don't see each other"
    total = sum(quota.per_epoch for quota in loader.quotas)
    for quota in loader.quotas:
        yield (
            f"mixture: data.sources[{quota.source}]: {quota.per_epoch:,.1f} rows an epoch of"
            f" {count(quota.num_rows, 'row')}, {quota.per_epoch / total:.2%} of all"
        )


def _source_line(name: str, counts: Mapping[str, Any]) -> str:
    read = f"{counts['documents']:,} documents, {short(counts['bytes'], 'B')}"
    notes = [f"{number:,} {why}" for why, number in sorted(counts["skipped"].items())]
    mended = counts["mended_surrogates"]
    return (
        f"data: {name}: {read}"
        + (f", {short(counts['tokens'])} tokens" if counts["tokens"] else "")
        + (f"; skipped: {', '.join(notes)}" if notes else "")
        + (f"; {mended:,} lone surrogates read as U+FFFD" if mended else "")
        + (f"; {counts['cuts']:,} cuts in documents beyond data.max_document_bytes" if counts["cuts"] else "")
    )


def _report_lines(report: Mapping[str, Any], cleaning: str) -> Iterator[str]:
    redaction = report["redaction"]
    if redaction is not None:
        classes = ", ".join(f"{number:,} {name}" for name, number in redaction["classes"].items()) or "nothing"
        yield f"data: redacted {classes} in {redaction['changed']:,} of {redaction['documents']:,} documents"
        if redaction["standins_before"]:
            found = ", ".join(f"{number:,} {name}" for name, number in redaction["standins_before"].items())
            yield f"data: left alone as redacted already: {found} (see data.redact.private_blocks)"
    yield from cleaning.split("\n")[:-1]
    for name, found in report["duplicates"].items():
        near = (
            f"; {found['clusters']:,} groups of near copies, the largest of {found['largest_cluster']:,};"
            f" {found['template_pairs']:,} pairs of one template kept apart"
        )
        looked = f"data: {name}: {found['distinct']:,} of {found['texts']:,} texts are distinct"
        yield looked + (near if name.startswith("near_duplicates") else "")


def _stages(say: Say) -> Callable[[str, int, int], None]:
    """Name each stage once."""
    seen: set[str] = set()
    names = {
        "read": "reading sources",
        "clean": "cleaning",
        "tokenizer": "training the tokenizer",
        "tokens": "writing token shards",
    }
    kept = {
        "refused": "what an earlier start left came from other settings, files or program and is deleted",
        "parts kept": "kept {done:,} of {total:,} parts that an earlier start read",
        "cleaning kept": "kept the text that an earlier start cleaned",
        "tokenizer kept": "kept the tokenizer that an earlier start trained",
        "shards kept": "kept {total:,} shards that an earlier start wrote",
    }

    def progress(stage: str, done: int, total: int) -> None:
        if stage in kept:
            say(f"data: {kept[stage].format(done=done, total=total)}")
        elif stage not in seen and (done < total or not total):
            seen.add(stage)
            say(f"data: {names[stage]} ({short(total - done, 'B')})")

    return progress
