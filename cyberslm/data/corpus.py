"""The files of a configuration and passes over their documents: which are kept, on which side, and what is not.

Files are found and hashed once, so every pass reads the same bytes or fails. Validation sources come first. A training
document that has a copy in ``data.validation`` is left out and counted, so the two sides never share a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from cyberslm.data.config import DataConfig
from cyberslm.data.inputs import InputFile, Inspection, find_inputs, inspect
from cyberslm.data.shards import Place
from cyberslm.data.sources import Counts, copy_digest, is_validation, read_documents
from cyberslm.errors import DataError

Split = Literal["train", "validation"]
Stage = Literal["hash", "tokenizer", "tokens"]

Progress = Callable[[Stage, int, int], None]
"""Called with the stage, the bytes of source files done, and the bytes of all of them."""

PROGRESS_BYTES = 1 << 20


class Piece(NamedTuple):
    """A document that is kept; ``key`` names its source, such as data.sources[0]."""

    text: str
    text_bytes: int
    split: Split
    key: str
    place: Place


class Corpus:
    """Inspected files and the documents in them; raises DataError for what can't be read."""

    def __init__(self, config: DataConfig, progress: Progress) -> None:
        if not config.sources:
            raise DataError("data.sources is empty; list the files, folders or globs to learn from")
        train = find_inputs(config.sources, key="data.sources")
        validation = find_inputs(config.validation, key="data.validation")
        self.config = config
        self.files = validation.files + train.files
        self._passed_over = validation.passed_over | train.passed_over
        self._progress = progress
        self._total = sum(file.size for file in self.files)
        self._inspections: dict[Path, Inspection] = {}
        for file, _ in self._tracked("hash"):
            if file.path not in self._inspections:
                self._inspections[file.path] = inspect(file)
        self._held_out = {
            copy_digest(document.text)
            for file in validation.files
            for document in read_documents(file, self._inspections[file.path], config, Counts())
        }

    def training_texts(self) -> Iterator[str]:
        """Texts of the training documents; at the end makes sure that each split has what it needs."""
        counts = self.new_counts()
        for piece in self.pieces(counts, "tokenizer"):
            if piece.split == "train":
                yield piece.text
        self.check(counts)

    def pieces(self, counts: Mapping[str, Counts], stage: Stage) -> Iterator[Piece]:
        """Every document that is kept, each counted under its source."""
        for number, (file, done) in enumerate(self._tracked(stage)):
            source = _number(file.key)
            count, seen, told = counts[file.key], 0, 0
            for document in read_documents(file, self._inspections[file.path], self.config, count):
                text_bytes = len(document.text.encode())
                seen += text_bytes
                if seen - told >= PROGRESS_BYTES:
                    told = seen
                    self._progress(stage, done + min(seen, file.size), self._total)
                split = self._split(file, document.text)
                if split is None:
                    count.skip("copy in data.validation", f"{document.source}:{document.line}")
                else:
                    count.add(text_bytes, held_out=split == "validation")
                    yield Piece(document.text, text_bytes, split, file.key, Place(source, number, document.line))

    def new_counts(self) -> dict[str, Counts]:
        """Counts for each source, beginning with what its folders hold but is not read."""
        return {key: Counts(skipped=reasons.copy()) for key, reasons in self._passed_over.items()}

    def check(self, counts: Mapping[str, Counts]) -> None:
        """Raise DataError when there is no text, or when a split that is wanted is empty."""
        documents = sum(count.documents for count in counts.values())
        held_out = sum(count.validation_documents for count in counts.values())
        skipped = sum((count.skipped for count in counts.values()), start=Counter[str]())
        listed = ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items())) or "nothing"
        if documents == 0:
            raise DataError(f"data.sources hold no text: {len(self.files)} files read, skipped: {listed}")
        if documents == 1 and self.config.validation_fraction > 0 and not self.config.validation:
            raise DataError(
                f"data.sources hold one document (skipped: {listed}) and none is left to validate on; add text, cut it "
                "into more documents with data.txt_unit: paragraph, or set data.validation_fraction: 0"
            )
        if documents == held_out:
            raise DataError(
                f"all {documents} documents are held out and none is left to learn from (skipped: {listed}); lower "
                "data.validation_fraction, add to data.sources, or cut text files with data.txt_unit: paragraph"
            )
        if held_out == 0 and self.config.validation:
            raise DataError("data.validation holds no text; name other files, or leave it out")
        if held_out == 0 and self.config.validation_fraction > 0:
            raise DataError(
                f"data.validation_fraction {self.config.validation_fraction} holds out none of the {documents} "
                "documents; raise it, name files in data.validation, cut text files into more documents with "
                "data.txt_unit: paragraph, or set data.validation_fraction: 0 to train without validation"
            )

    def file_facts(self) -> Iterator[dict[str, object]]:
        """One plain record for each file that is read."""
        for file in self.files:
            digest = self._inspections[file.path].sha256
            yield {
                "source": file.key,
                "path": file.name,
                "size": file.size,
                "mtime_ns": file.mtime_ns,
                "sha256": digest,
            }

    def _split(self, file: InputFile, text: str) -> Split | None:
        if file.key.startswith("data.validation"):
            return "validation"
        if self.config.validation:
            return None if copy_digest(text) in self._held_out else "train"
        return "validation" if is_validation(text, self.config.validation_fraction) else "train"

    def _tracked(self, stage: Stage) -> Iterator[tuple[InputFile, int]]:
        done = 0
        for file in self.files:
            self._progress(stage, done, self._total)
            yield file, done
            done += file.size
        self._progress(stage, done, self._total)


def _number(key: str) -> int:
    """3 for data.sources[3]."""
    return int(key[key.index("[") + 1 : -1])
