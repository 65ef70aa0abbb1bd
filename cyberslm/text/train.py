"""Train the tokenizer on an organisation's own text, with SentencePiece's trainer made honest.

The trainer drops sentences that are long or hold a reserved character, and strips newlines at their ends, all silently.
Here documents are cut into passages below its limit (whitespace kept), cut again at reserved characters, and ended with
a border that shields the newlines; the report counts what was used. The same documents in the same order give the same
model, byte for byte.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import sentencepiece

from cyberslm.errors import ConfigError, DataError, TokenizerError
from cyberslm.text import proto
from cyberslm.text.codec import escape, mend
from cyberslm.text.config import ROLES, TokenizerConfig
from cyberslm.text.passages import PASSAGE_CHARS, PassageSample
from cyberslm.text.spm import SentencePieceTokenizer

# A fixed piece's spelling in the text is a word border to the trainer and never part of a learned piece.
_BORDER = ROLES[0]
# A character has at most 4 bytes, an escaped one 4 as well.
_PASSAGE_BYTES = 4 * PASSAGE_CHARS + len(_BORDER)
_RESERVED = re.compile("[\0\u2585]")
_DIGIT = "[0-9\uff10-\uff19]"
_TRIPLE = re.compile(f" ?{_DIGIT}{{1,3}}")
# The trainer's own default; it is stored in the model, so it must not follow the machine.
_TRAINER_THREADS = 16
_MEASURED_BYTES = 1 << 20
_TOO_LARGE = re.compile(r"set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


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


def train_tokenizer(documents: Iterable[str], config: TokenizerConfig) -> TrainedTokenizer:
    """Train on documents, read once.

    Raises DataError when there is no text, ConfigError when ``vocab_size`` doesn't suit it, TokenizerError otherwise.
    """
    started = time.perf_counter()
    sample = PassageSample(config.max_train_bytes)
    num_documents = mended = 0
    for document in documents:
        if not isinstance(document, str):
            raise TokenizerError(f"a document to train on must be a str, not {type(document).__name__}")
        text, _, replaced = mend(document)
        num_documents += 1
        mended += replaced
        sample.add(text)
    passages = sample.passages()
    if not any(_RESERVED.sub("", passage) for passage in passages):
        raise DataError(f"no text to train a tokenizer on: {num_documents} documents, all empty; check data.sources")
    tokenizer = SentencePieceTokenizer.from_proto(_train(passages, config), add_bos=config.add_bos is not False)
    report = TrainingReport(
        documents=num_documents,
        bytes=sample.bytes_seen,
        bytes_used=sample.bytes_used,
        reserved=sum(len(_RESERVED.findall(passage)) for passage in passages),
        mended=mended,
        vocab_size=tokenizer.vocab_size,
        bytes_per_token=_bytes_per_token(tokenizer, passages, sample.bytes_used),
        seconds=time.perf_counter() - started,
    )
    return TrainedTokenizer(tokenizer, report)


def _train(passages: list[str], config: TokenizerConfig) -> bytes:
    try:
        return _run_trainer(passages, config)
    except RuntimeError as error:
        reason = str(error)
    if found := _TOO_SMALL.search(reason):
        raise ConfigError(
            f"tokenizer.vocab_size: {config.vocab_size:,} is too small for this text: {config.fixed_pieces - 256:,}"
            f" fixed pieces, 256 bytes and its characters need at least {int(found[1]):,}; raise it or lower"
            " tokenizer.character_coverage"
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
    unigram = config.model_type == "unigram"
    special: dict[str, Any] = {f"{role[1:-1]}_id": index for index, role in enumerate(ROLES)}
    special |= {f"{role[1:-1]}_piece": role for role in ROLES}
    if unigram:
        special["required_chars"] = "".join(sorted(_spelling_of_fixed(config)))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_sentences(passages, config),
        model_writer=model,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        control_symbols=list(config.control_pieces),
        user_defined_symbols=list(config.protected),
        character_coverage=config.character_coverage,
        max_sentencepiece_length=config.max_piece_length,
        max_sentence_length=_PASSAGE_BYTES + (2 * len(_BORDER) * PASSAGE_CHARS if config.digits == "triple" else 0),
        split_digits=config.digits == "single",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=_TRAINER_THREADS,
        minloglevel=3,
        **special,
    )
    return proto.scores_on_grid(model.getvalue()) if unigram else model.getvalue()


def _spelling_of_fixed(config: TokenizerConfig) -> set[str]:
    """Characters that a unigram model needs as pieces, so that text which spells a fixed piece isn't cheaper as it."""
    return set("".join(ROLES + config.control_pieces) + "<0x123456789ABCDEF>")


def _sentences(passages: list[str], config: TokenizerConfig) -> Iterator[str]:
    """What the trainer reads; the border at the end keeps it from stripping newlines.

    Three digits between borders are a word of their own, so that a piece with digits holds at most those and a space.
    """
    for passage in passages:
        for text in _RESERVED.split(passage):
            if text:
                text = escape(text)
                yield (_TRIPLE.sub(rf"{_BORDER}\g<0>{_BORDER}", text) if config.digits == "triple" else text) + _BORDER


def _bytes_per_token(tokenizer: SentencePieceTokenizer, passages: list[str], size: int) -> float:
    measured = passages[:: max(1, -(-size // _MEASURED_BYTES))]
    tokens = sum(len(ids) - 1 - tokenizer.add_bos for ids in tokenizer.encode_documents(measured))
    return sum(len(passage.encode()) for passage in measured) / tokens
