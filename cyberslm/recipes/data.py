"""Prepared data of a run: made if needed, reused if they still fit their sources and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.config import differences
from cyberslm.data.inputs import find_inputs
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import Prepared, Texts, open_prepared, prepare, stale, training_texts
from cyberslm.data.store import TokenStore
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.recipes.config import TrainRun
from cyberslm.text.tokenizer import MODEL_FILE, SentencePieceTokenizer, Tokenizer, saved_bos_rule
from cyberslm.text.train import TokenizerConfig, train_tokenizer
from cyberslm.training.trackers import count, short

Say = Callable[[str], None]


def tokenizer_settings(config: TokenizerConfig) -> dict[str, object]:
    """What decides a tokenizer: the given file's hash and the rule for <bos>, or else all that training depends on."""
    if config.path is None:
        return {key: value for key, value in asdict(config).items() if key != "path"}
    path = Path(config.path)
    if not (path / MODEL_FILE if path.is_dir() else path).is_file():
        raise ConfigError(f"tokenizer.path: {path} is neither a tokenizer.model nor a folder that holds one")
    saved = saved_bos_rule(path if path.is_dir() else path.parent)
    if saved not in (None, config.add_bos):
        raise ConfigError(f"tokenizer.add_bos is {config.add_bos} and {path} was saved with {saved}: set it to that")
    return {"sha256": files.sha256_file(path / MODEL_FILE if path.is_dir() else path), "add_bos": config.add_bos}


def ensure_prepared(run: TrainRun, say: Say) -> Prepared:
    """The run's shards and tokenizer, prepared now unless ``data.prepared`` (default ``out_dir/data``) is current.

    A run that has begun goes on only with the tokens it began with, and its shards are not replaced by others:
    `IntegrityError`.
    """
    settings = tokenizer_settings(run.tokenizer)
    folder = run.prepared
    files.sweep(folder.parent)
    began_with = _began_with(run)
    reason = stale(folder, run.data, settings)
    if began_with is not None and reason is not None and folder.exists():
        raise IntegrityError(_OTHER_DATA.format(folder=run.folder, reason=reason))
    if reason is None:
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


def _prepare(run: TrainRun, settings: dict[str, object], reason: str, say: Say) -> Prepared:
    folder = run.prepared
    say(f"data: preparing {folder}: {reason}")
    files.make_folder(folder.parent)
    return prepare(
        run.data,
        lambda texts: _tokenizer(run.tokenizer, texts, say),
        folder,
        tokenizer_settings=settings,
        progress=_stages(say),
    )


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


def row_loader(run: TrainRun, prepared: Prepared, store: TokenStore) -> RowLoader:
    """Rows of ``store`` as the run trains on them; those of the training split are mixed as the run asks."""
    tokenizer = prepared.tokenizer
    return RowLoader(
        store,
        seq_len=run.model.max_seq_len,
        batch_rows=run.train.global_batch_size,
        seed=run.seed,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        layout=run.data.rows,
        isolate=run.data.isolate_documents,
        mixture=run.data.parts if store is prepared.train else {},
        mixture_unit=run.data.mixture_unit,
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
    return TextCount(len(found), sum(not file.is_jsonl for file in found), sum(file.size for file in found))


def write_tokenizer(run: TrainRun, folder: Path | None, say: Say) -> Path:
    """Train the run's tokenizer alone and write it to ``folder`` (default ``out_dir/tokenizer``)."""
    if run.tokenizer.path is not None:
        raise ConfigError("tokenizer.path names a tokenizer already: leave it out to train one")
    target = folder or run.folder / "tokenizer"
    tokenizer = _tokenizer(run.tokenizer, training_texts(run.data, _stages(say)), say)
    files.make_folder(target)
    tokenizer.save(target)
    return target


def describe(prepared: Prepared) -> Iterator[str]:
    """One line per source and split, for people."""
    for name, counts in sorted(dict(prepared.manifest["sources"]).items()):
        read = f"{counts['documents']:,} documents, {short(counts['bytes'], 'B')}, {short(counts['tokens'])} tokens"
        mended = counts["mended_surrogates"]
        notes = [f"{number:,} {why}" for why, number in sorted(counts["skipped"].items())]
        yield (
            f"data: {name}: {read}"
            + (f"; skipped: {', '.join(notes)}" if notes else "")
            + (f"; {mended:,} lone surrogates read as U+FFFD" if mended else "")
        )
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
    for quota in loader.quotas:
        yield (
            f"mixture: data.sources[{quota.source}]: {quota.per_epoch:,.1f} rows an epoch of"
            f" {count(quota.num_rows, 'row')}, {quota.per_epoch / loader.rows_per_epoch:.2%} of all"
        )


def _tokenizer(config: TokenizerConfig, texts: Texts, say: Say) -> Tokenizer:
    if config.path is not None:
        unused = sorted(set(differences(TokenizerConfig(), config)) - {"path", "add_bos"})
        if unused:
            say(f"warning: tokenizer.path is given, so nothing is trained and {', '.join(unused)} have no effect")
        return SentencePieceTokenizer.from_file(config.path, add_bos=config.add_bos)
    trained = train_tokenizer(texts(), config)
    report = trained.report
    cut = f", cut at {report.reserved:,} reserved characters" if report.reserved else ""
    say(
        f"tokenizer: {report.vocab_size:,} pieces from {short(report.bytes_used, 'B')} of {short(report.bytes, 'B')}"
        f" in {report.documents:,} documents{cut}"
    )
    return trained.tokenizer


def _stages(say: Say) -> Callable[[str, int, int], None]:
    """Name each stage once."""
    seen: set[str] = set()
    names = {"hash": "reading sources", "tokenizer": "training the tokenizer", "tokens": "writing token shards"}

    def progress(stage: str, _done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            say(f"data: {names.get(stage, stage)} ({short(total, 'B')})")

    return progress
