"""Train the tokenizer on an organisation's own text, with SentencePiece's trainer made honest.

The trainer drops sentences that are long or hold a reserved character, and strips newlines at their ends, all silently.
Here documents are cut into passages below its limit (whitespace kept), cut again at reserved characters, and ended with
a border that shields the newlines; the report counts what was used. The same documents in the same order give the same
model, byte for byte.
"""

from __future__ import annotations

import heapq
import io
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import sentencepiece

from cyberslm.config import PathStr
from cyberslm.errors import ConfigError, DataError, TokenizerError
from cyberslm.text.codec import escape, mend
from cyberslm.text.proto import BOS, EOS, PAD, UNK
from cyberslm.text.tokenizer import SentencePieceTokenizer

# A control piece's spelling in the text is a word border to the trainer and never part of a piece.
_BORDER = "<pad>"
_FIXED_PIECES = 4 + 256
_MAX_VOCAB = 1_000_000
_PASSAGE_CHARS = 2048
# A character has at most 4 bytes, an escaped one 4 as well.
_PASSAGE_BYTES = 4 * _PASSAGE_CHARS + len(_BORDER)
_RESERVED = re.compile("[\0\u2585]")
# The trainer's own default; it is stored in the model, so it must not follow the machine.
_TRAINER_THREADS = 16
_MEASURED_BYTES = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15
_TOO_LARGE = re.compile(r"set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens: one tokenizer is trained on the training split, or a given one is used."""

    path: PathStr | None = None
    """An existing tokenizer.model, or a folder that holds one; null trains one on the training split."""

    vocab_size: int = 32_000
    """Number of pieces to train, including 4 control pieces and 256 bytes."""

    character_coverage: float = 0.9995
    """Share of the text's characters that get a piece of their own (0.98 to 1); rarer ones are spelled in bytes."""

    split_digits: bool = True
    """Give each digit its own token, so that numbers, addresses and hashes are spelled uniformly."""

    max_piece_length: int = 16
    """Longest piece in characters (1 to 512)."""

    add_bos: bool = True
    """Begin every document and prompt with <bos>; the rule is saved with the tokenizer."""

    shrink: bool = False
    """Take the largest workable vocabulary when the text can't support vocab_size, instead of stopping."""

    max_train_bytes: int = 64_000_000
    """Most UTF-8 bytes to train on (20 bytes of memory each); from more text, evenly spread passages are taken."""

    def __post_init__(self) -> None:
        limits = (
            ("vocab_size", _FIXED_PIECES, _MAX_VOCAB),
            ("character_coverage", 0.98, 1),
            ("max_piece_length", 1, 512),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}: {value} is outside {low} to {high:,}")
        if self.max_train_bytes < 1:
            raise ConfigError(f"max_train_bytes: {self.max_train_bytes} is less than 1")
        if self.path is not None and not self.path:
            raise ConfigError("path: is empty; give a path, or null to train a tokenizer")


class TrainingReport(NamedTuple):
    """What the tokenizer was made from; ``bytes`` are UTF-8 bytes of text."""

    documents: int
    bytes: int
    bytes_used: int
    """Bytes of the passages trained on; less than ``bytes`` only by ``max_train_bytes``."""
    reserved: int
    """Characters (NUL, U+2585) that the trainer can't take; the text was cut there, nothing around them was lost."""
    mended: int
    """Lone surrogates read as U+FFFD."""
    vocab_size: int
    bytes_per_token: float
    """Measured on evenly spread passages of the text trained on, up to 1 MiB."""
    seconds: float


class TrainedTokenizer(NamedTuple):
    tokenizer: SentencePieceTokenizer
    report: TrainingReport


class _Sample:
    """The passages of a stream that fit a byte limit, spread evenly however long the stream turns out to be.

    Passage ``i`` has the phase ``i * golden ratio mod 1``, whose smallest values are evenly spread over ``i`` at every
    cut-off; the smallest phases that fit are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int, str, int]] = []
        self._seen = 0
        self._cutoff = 1 << 64
        self.bytes_used = 0

    def add(self, passage: str, size: int) -> None:
        phase = self._seen * _GOLDEN % (1 << 64)
        self._seen += 1
        if phase >= self._cutoff:
            return
        heapq.heappush(self._heap, (-phase, self._seen, passage, size))
        self.bytes_used += size
        while self.bytes_used > self._limit and len(self._heap) > 1:
            last = heapq.heappop(self._heap)
            self._cutoff = -last[0]
            self.bytes_used -= last[3]

    def passages(self) -> list[str]:
        return [passage for _, _, passage, _ in sorted(self._heap, key=lambda item: item[1])]


def train_tokenizer(documents: Iterable[str], config: TokenizerConfig) -> TrainedTokenizer:
    """Train on documents, read once.

    Raises DataError when there is no text, ConfigError when ``vocab_size`` doesn't suit it, TokenizerError otherwise.
    """
    started = time.perf_counter()
    sample = _Sample(config.max_train_bytes)
    num_documents = num_bytes = mended = 0
    for document in documents:
        if not isinstance(document, str):
            raise TokenizerError(f"a document to train on must be a str, not {type(document).__name__}")
        text, _, replaced = mend(document)
        num_documents += 1
        mended += replaced
        for passage in _passages(text):
            size = len(passage.encode())
            num_bytes += size
            sample.add(passage, size)
    passages = sample.passages()
    if not any(_RESERVED.sub("", passage) for passage in passages):
        raise DataError(f"no text to train a tokenizer on: {num_documents} documents, all empty; check data.sources")
    tokenizer = SentencePieceTokenizer.from_proto(_train(passages, config), add_bos=config.add_bos)
    report = TrainingReport(
        documents=num_documents,
        bytes=num_bytes,
        bytes_used=sample.bytes_used,
        reserved=sum(len(_RESERVED.findall(passage)) for passage in passages),
        mended=mended,
        vocab_size=tokenizer.vocab_size,
        bytes_per_token=_bytes_per_token(tokenizer, passages, sample.bytes_used),
        seconds=time.perf_counter() - started,
    )
    return TrainedTokenizer(tokenizer, report)


def _passages(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PASSAGE_CHARS:
        end = _border(text, start, start + _PASSAGE_CHARS)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _border(text: str, start: int, end: int) -> int:
    """The last place before ``end`` where a run of newlines, or else of spaces, begins; or else ``end``."""
    for mark in "\n ":
        at = text.rfind(mark, start + 1, end)
        while at > start and text[at - 1] == mark:
            at -= 1
        if at > start:
            return at
    return end


def _train(passages: list[str], config: TokenizerConfig) -> bytes:
    try:
        return _run_trainer(passages, config)
    except RuntimeError as error:
        reason = str(error)
    if found := _TOO_SMALL.search(reason):
        raise ConfigError(
            f"tokenizer.vocab_size: {config.vocab_size:,} is too small for this text: 4 control pieces, 256 bytes and "
            f"its characters need at least {int(found[1]):,}; raise it or lower tokenizer.character_coverage"
        )
    if not (found := _TOO_LARGE.search(reason)):
        raise TokenizerError(f"tokenizer training failed: {reason}")
    largest = int(found[1])
    if config.shrink and largest < config.vocab_size:
        return _train(passages, replace(config, vocab_size=largest))
    raise ConfigError(
        f"tokenizer.vocab_size: {config.vocab_size:,} is more than this text supports; the largest workable size is "
        f"{largest:,}; lower it, add text, or set tokenizer.shrink: true"
    )


def _run_trainer(passages: list[str], config: TokenizerConfig) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_sentences(passages),
        model_writer=model,
        model_type="bpe",
        vocab_size=config.vocab_size,
        character_coverage=config.character_coverage,
        max_sentencepiece_length=config.max_piece_length,
        max_sentence_length=_PASSAGE_BYTES,
        split_digits=config.split_digits,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=_TRAINER_THREADS,
        minloglevel=3,
        pad_id=PAD,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_piece=_BORDER,
        unk_piece="<unk>",
        bos_piece="<bos>",
        eos_piece="<eos>",
    )
    return model.getvalue()


def _sentences(passages: list[str]) -> Iterator[str]:
    """What the trainer reads; the border at the end keeps it from stripping newlines."""
    for passage in passages:
        for text in _RESERVED.split(passage):
            if text:
                yield escape(text) + _BORDER


def _bytes_per_token(tokenizer: SentencePieceTokenizer, passages: list[str], size: int) -> float:
    measured = passages[:: max(1, -(-size // _MEASURED_BYTES))]
    tokens = sum(len(ids) - 1 - tokenizer.add_bos for ids in tokenizer.encode_documents(measured))
    return sum(len(passage.encode()) for passage in measured) / tokens
