"""The documents of a corpus to shards of both splits, in batches.

What an earlier start wrote is taken over: documents come in one order, so those that are there are a split's first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from cyberslm.data.chat import Encode, Encoded, encode_conversations, encode_texts
from cyberslm.data.corpus import Corpus, Piece, Progress, Split, available_cpus
from cyberslm.data.counts import Counts
from cyberslm.data.places import Places
from cyberslm.data.shards import MIN_TOKENS, Place, ShardWriter
from cyberslm.errors import DataError
from cyberslm.files import Kept
from cyberslm.text.tokenizer import Tokenizer

SPLITS: tuple[Split, ...] = ("train", "validation")
BATCH_CHARACTERS = 1 << 22
BATCH_DOCUMENTS = 4096

_Placed = tuple[Piece, Place]


def write_shards(corpus: Corpus, tokenizer: Tokenizer, kept: Kept, progress: Progress) -> dict[str, Counts]:
    """Write the shards of both splits into ``kept``'s root; returns what each source gave. Raises DataError."""
    counts = corpus.new_counts()
    threads = corpus.config.threads or available_cpus()
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                ShardWriter(
                    kept.root,
                    split,
                    vocab_size=tokenizer.vocab_size,
                    tokenizer_sha256=tokenizer.sha256,
                    shard_tokens=corpus.config.shard_tokens,
                    kept=kept,
                )
            )
            for split in SPLITS
        }
        if shards := sum(len(writer.paths) for writer in writers.values()):
            progress("shards kept", shards, shards)
        places = stack.enter_context(Places(corpus.file_facts, kept.root))
        shelves = {split: _Shelf(writer) for split, writer in writers.items()}
        placed = ((piece, places.of(piece.key, piece.name, piece.line)) for piece in corpus.pieces(counts, "tokens"))
        plain = corpus.config.format == "text"
        encode = encode_texts(tokenizer) if plain else encode_conversations(tokenizer, corpus.config.chat)
        for batch in _batches(_not_taken_over(placed, shelves, counts) if plain else placed):
            for (piece, place), made in _encoded(batch, encode, threads):
                _put(piece, place, made, shelves[piece.split], counts[piece.key])
    corpus.check(counts)
    for split, writer in writers.items():
        if writer.num_documents and writer.num_tokens < MIN_TOKENS:
            raise DataError(f"the {split} split has {writer.num_tokens} tokens; the smallest usable is {MIN_TOKENS}")
    return counts


class _Shelf:
    """A split's writer, and the tokens of each document that it took over from an earlier start."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self.taken_over = writer.taken_over()


def _not_taken_over(
    placed: Iterable[_Placed], shelves: Mapping[Split, _Shelf], counts: Mapping[str, Counts]
) -> Iterator[_Placed]:
    """The pieces that are still to be tokenized, where each is one document; tokens of the others are counted."""
    for piece, place in placed:
        tokens = next(shelves[piece.split].taken_over, None)
        if tokens is None:
            yield piece, place
        else:
            counts[piece.key].tokens += tokens


def _encoded(batch: Sequence[_Placed], encode: Encode, threads: int) -> Iterator[tuple[_Placed, Encoded]]:
    """Each piece with its documents; an error names the place."""
    made = encode([piece.text for piece, _ in batch], threads)
    for piece, place in batch:
        try:
            encoded = next(made)
        except DataError as error:
            raise DataError(f"{piece.name}:{piece.line}: {error}") from error
        yield (piece, place), encoded


def _put(piece: Piece, place: Place, made: Encoded, shelf: _Shelf, counts: Counts) -> None:
    """Write the documents of a piece that aren't there yet, and count."""
    if made.counted is not None:
        counts.skip(made.counted, f"{piece.name}:{piece.line}")
    if not made.documents:
        counts.take_back(piece.text_bytes, held_out=piece.split == "validation")
    for document in made.documents:
        if next(shelf.taken_over, None) is None:
            shelf.writer.add(document.ids, text_bytes=document.text_bytes, place=place, trained=document.trained)
        counts.tokens += document.ids.size


def _batches(pieces: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    batch: list[_Placed] = []
    size = 0
    for piece, place in pieces:
        batch.append((piece, place))
        size += len(piece.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
