"""Sources -> a folder of token shards that appears whole or not at all, can be traced to its files, and is reused.

    PREPARED/  train-00000.tokens ...  validation-00000.tokens ...  tokenizer/  inputs.jsonl  report/  manifest.json

The sources are read, redacted and cleaned once (``corpus``), into scratch files of the staging folder; what is left is
read for the tokenizer where one is trained (training documents only) and to write tokens. ``data_sha256`` covers the
shards alone, so equal text, settings and tokenizer give equal values in any folder, at any time, on any machine, for
any number of workers or slices, and however often the preparation was killed: the next one goes on with the parts,
the cleaned text, the tokenizer and the shards that are whole (``files.Kept``, ``resume``). Documents are tokenized in
batches: memory is bounded by a batch and by the longest document. ``inputs.jsonl`` lists each file that was read, with
the hash of its bytes, and ``members.jsonl`` the members of archives; each document in the shards has their numbers.
``report/`` says what cleaning and redaction did.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyberslm.data.clean.counts import table
from cyberslm.data.config import DataConfig
from cyberslm.data.corpus import (
    Corpus,
    Progress,
    Reading,
    read_parts,
    report_of,
    settings_of,
)
from cyberslm.data.inputs import find_inputs, hash_file, printable
from cyberslm.data.parts import Files, find_files
from cyberslm.data.resume import key_of, listed
from cyberslm.data.shards import INPUTS_FILE, PREPARE_AGAIN, SUFFIX
from cyberslm.data.slices import merged_reading
from cyberslm.data.store import TokenStore
from cyberslm.data.tokenizing import SPLITS, write_shards
from cyberslm.errors import DataError, IntegrityError, StorageError
from cyberslm.files import Kept, looks_published, publish, read_manifest, scratch, sha256_file
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer

FORMAT = "cyberslm-prepared-data/2"
REPORT_FOLDER = "report"
TOKENIZER_FOLDER = "tokenizer"
MANIFEST_KEYS = frozenset(
    {"format", "settings", "tokenizer_settings", "tokenizer_sha256", "sources", "data_sha256", "files"}
)
OWN_NAMES = re.compile(r"(train|validation)-\d{5,}\.tokens|tokenizer|report|(inputs|members)\.jsonl|manifest\.json")

Texts = Callable[[], Iterator[str]]


def silent(_stage: str, _done: int, _total: int) -> None:
    """A progress that shows nothing."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Token shards opened for reading; ``validation`` is None when nothing was held out."""

    folder: Path
    tokenizer: Tokenizer
    train: TokenStore
    validation: TokenStore | None
    manifest: Mapping[str, Any]

    def validation_source(self, number: int) -> str:
        """The key of a source of the validation split, by the number that its documents have there."""
        own = any(key.startswith("data.validation[") for key in self.manifest["sources"])
        return f"data.validation[{number}]" if own else f"data.sources[{number}]"

    @property
    def data_sha256(self) -> str:
        return str(self.manifest["data_sha256"])


def prepare(
    config: DataConfig,
    tokenizer_for: Callable[[Texts], Tokenizer],
    target: Path,
    *,
    tokenizer_settings: Mapping[str, object],
    slices: Sequence[Path] = (),
    progress: Progress = silent,
) -> Prepared:
    """Read the sources, tokenize them and publish ``target``, replacing earlier prepared data there.

    ``tokenizer_for`` gets a function that starts a pass over the training texts, and may call it any number of times.
    ``tokenizer_settings`` (JSON values) are kept for ``stale``. With ``slices``, the folders of all of them, nothing is
    read anew. Raises DataError for text that can't be used, and StorageError when ``target`` can't be written or holds
    anything else.
    """
    _refuse_foreign(target)
    try:
        found = _found(config, slices)
    except DataError as error:
        if not looks_published(target):
            raise
        raise DataError(f"{error}; or give data.sources=[] to use the data in {target} as they are") from error
    settings = settings_of(config)
    read = [read_manifest(folder)["self"] for folder in slices] or [listed(found.files), found.passed_over]
    key = key_of(config, settings, dict(tokenizer_settings), read)

    def fill(staging: Path) -> Mapping[str, object]:
        kept = Kept(staging, key)
        if kept.refused:
            progress("refused", 0, 0)
        corpus = Corpus(config, _reading(config, found, slices, kept, progress), kept, progress)
        tokenizer = _tokenizer(kept, tokenizer_for, corpus, progress)
        counts = write_shards(corpus, tokenizer, kept, progress)
        _write_report(corpus, staging / REPORT_FOLDER)
        with (staging / INPUTS_FILE).open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines(json.dumps(facts) + "\n" for facts in corpus.file_facts)
        return {
            "format": FORMAT,
            "settings": settings,
            "tokenizer_settings": dict(tokenizer_settings),
            "tokenizer_sha256": tokenizer.sha256,
            "sources": {key: each.summary() for key, each in counts.items()},
            "data_sha256": _data_sha256({path.name: sha256_file(path) for path in staging.glob(f"*{SUFFIX}")}),
        }

    publish(target, fill, replace=target.exists(), keep=key is not None)
    return open_prepared(target)


@contextmanager
def clean_corpus(config: DataConfig, folder: Path, progress: Progress = silent) -> Iterator[Corpus]:
    """Read and clean for a look at the result or for its texts, in scratch files below ``folder``."""
    found = _found(config)
    with scratch(folder) as inside:
        kept = Kept(inside)
        yield Corpus(config, _reading(config, found, (), kept, progress), kept, progress)


def _found(config: DataConfig, slices: Sequence[Path] = ()) -> Files:
    """The files to read, looked for before anything is written that could be taken for one."""
    if slices:
        return Files((), {})
    if not config.sources:
        raise DataError(
            "data.sources is empty: list the files, folders or globs to learn from (data.sources=[] is right only where"
            " data.prepared names a folder that holds prepared data)"
        )
    return find_files(config)


def _reading(config: DataConfig, found: Files, slices: Sequence[Path], kept: Kept, progress: Progress) -> Reading:
    if slices:
        return merged_reading(config, slices)
    return read_parts(config, found, kept, kept.scratch, progress)


def _tokenizer(
    kept: Kept, tokenizer_for: Callable[[Texts], Tokenizer], corpus: Corpus, progress: Progress
) -> Tokenizer:
    """The tokenizer, saved; one that an earlier start trained is not trained again."""
    folder = kept.root / TOKENIZER_FOLDER
    if kept.holds(TOKENIZER_FOLDER):
        progress("tokenizer kept", 1, 1)
        return load_tokenizer(folder)
    trained = False

    def texts() -> Iterator[str]:
        nonlocal trained
        trained = True
        return corpus.training_texts()

    tokenizer = tokenizer_for(texts)
    tokenizer.save(folder)
    if trained:
        kept.mark(TOKENIZER_FOLDER, folder.iterdir())
    return tokenizer


def _write_report(corpus: Corpus, folder: Path) -> None:
    """What cleaning and redaction did; nothing where there was neither."""
    if not corpus.config.steps and corpus.config.redact is None:
        return
    folder.mkdir()
    report = json.dumps(report_of(corpus), indent=2, ensure_ascii=False)
    (folder / "cleaning.json").write_text(report + "\n", encoding="utf-8")
    if corpus.steps:
        (folder / "cleaning.txt").write_text(table(corpus.steps), encoding="utf-8")
    if corpus.config.redact is not None:
        with (folder / "redactions.jsonl").open("wb") as stream:
            for path in corpus.finds:
                with path.open("rb") as finds:
                    shutil.copyfileobj(finds, stream)
        (folder / "digests.txt").write_text("".join(corpus.redaction.digest_lines()), encoding="utf-8")


def open_prepared(folder: Path) -> Prepared:
    """Open prepared data without hashing it; raises IntegrityError when a part is missing, damaged or foreign."""
    manifest: Mapping[str, Any] = read_manifest(folder)
    _check_listed(folder, manifest)
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    if tokenizer.sha256 != manifest["tokenizer_sha256"]:
        raise IntegrityError(f"{folder / TOKENIZER_FOLDER} is not the tokenizer of these shards; {PREPARE_AGAIN}")
    stores = {
        split: TokenStore.open(folder, split, tokenizer_sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size)
        for split in SPLITS
        if any(name.startswith(f"{split}-") for name in manifest["files"])
    }
    if "train" not in stores:
        raise IntegrityError(f"{folder} lists no training shard; {PREPARE_AGAIN}")
    return Prepared(
        folder=folder,
        tokenizer=tokenizer,
        train=stores["train"],
        validation=stores.get("validation"),
        manifest=manifest,
    )


def stale(folder: Path, config: DataConfig, tokenizer_settings: Mapping[str, object]) -> str | None:
    """Why ``folder`` can't serve ``config``, or None if it can.

    A source file is hashed only when its time of change differs and its size doesn't. With no sources set, prepared
    data are taken as they are: a machine that trains need not hold the text.
    """
    if not folder.exists():
        return "not there yet"
    try:
        manifest: Mapping[str, Any] = read_manifest(folder)
        _check_listed(folder, manifest)
    except IntegrityError as error:
        return str(error)
    if not config.sources:
        return None
    return _changed_setting(manifest, config, tokenizer_settings) or _changed_file(folder, config)


def _data_sha256(shard_hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(shard_hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _check_listed(folder: Path, manifest: Mapping[str, Any]) -> None:
    if manifest.get("format") != FORMAT:
        raise IntegrityError(f"{folder} holds {manifest.get('format')!r}, not {FORMAT!r}; {PREPARE_AGAIN}")
    if absent := MANIFEST_KEYS - manifest.keys():
        raise IntegrityError(f"{folder}: its manifest lacks {', '.join(sorted(absent))}; {PREPARE_AGAIN}")
    listed = manifest["files"]
    shards = {name: entry["sha256"] for name, entry in listed.items() if name.endswith(SUFFIX)}
    if _data_sha256(shards) != manifest["data_sha256"]:
        raise IntegrityError(f"{folder}: data_sha256 does not belong to the listed shards; {PREPARE_AGAIN}")
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise IntegrityError(f"{path} is missing or has not the size in its manifest; {PREPARE_AGAIN}")


def _changed_setting(
    manifest: Mapping[str, Any], config: DataConfig, tokenizer_settings: Mapping[str, object]
) -> str | None:
    before = _dotted(manifest["settings"], manifest["tokenizer_settings"])
    now = _dotted(settings_of(config), tokenizer_settings)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
    return None


def _dotted(data: Mapping[str, object], tokenizer: Mapping[str, object]) -> dict[str, object]:
    return {f"data.{key}": value for key, value in data.items()} | {
        f"tokenizer.{key}": value for key, value in tokenizer.items()
    }


def _changed_file(folder: Path, config: DataConfig) -> str | None:
    try:
        lines = (folder / INPUTS_FILE).read_text(encoding="utf-8").splitlines()
        before = {(facts["source"], facts["path"]): facts for facts in map(json.loads, lines)}
    except (OSError, ValueError, TypeError, KeyError):
        return f"{folder / INPUTS_FILE} is damaged"
    try:
        found = find_inputs(config.validation, key="data.validation").files
        found += find_inputs(config.sources, key="data.sources").files
        for file in found:
            facts = before.pop((file.key, file.name), None)
            if facts is None:
                return f"{printable(file.path)} is new"
            touched = file.mtime_ns != facts["mtime_ns"]
            if file.size != facts["size"] or (touched and hash_file(file) != facts["sha256"]):
                return f"{printable(file.path)} has changed"
    except DataError as error:
        return str(error)
    return next((f"{path} of {source} is gone" for source, path in before), None)


def _refuse_foreign(target: Path) -> None:
    """Replacing a folder deletes what it holds, so it must hold nothing but prepared data."""
    if not target.exists():
        return
    names = [entry.name for entry in target.iterdir()] if target.is_dir() else [target.name]
    foreign = next((name for name in sorted(names) if not OWN_NAMES.fullmatch(name)), None)
    if foreign is not None:
        raise StorageError(
            f"data.prepared: {target} holds {foreign!r}, which is not prepared data; name another folder"
        )
