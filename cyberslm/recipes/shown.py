"""A row of a batch as text for people: where tokens and documents begin, and which of them are learned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from cyberslm.data.loader import IGNORE, PADDING, Batch, RowLoader
from cyberslm.text.tokenizer import Tokenizer

LEGEND = "| between tokens, || between documents, [] not trained"
COLOURED = "\x1b[32mtrained\x1b[0m, \x1b[90mnot trained\x1b[0m, | between tokens, || between documents"


class _Token(NamedTuple):
    text: str
    learned: bool
    begins: bool
    """It is the first of a document, though not of the row."""


def shown_row(
    loader: RowLoader, batch: Batch, row: int, tokenizer: Tokenizer, *, limit: int | None = None, colour: bool = False
) -> str:
    """Row ``row`` of a batch from ``loader.bordered``, at most ``limit`` tokens of it."""
    across = loader.layout == "concat" and not loader.isolate
    found = list(islice(_tokens(batch.rows(row, row + 1), tokenizer, across=across), limit and limit + 1))
    pieces = [("||" if token.begins else "|") + _marked(token, colour=colour) for token in found[:limit]]
    return "".join(pieces).removeprefix("|") + (" ..." if limit is not None and len(found) > limit else "")


def _marked(token: _Token, *, colour: bool) -> str:
    if colour:
        return f"\x1b[{32 if token.learned else 90}m{token.text}\x1b[0m"
    return token.text if token.learned else f"[{token.text}]"


def _tokens(batch: Batch, tokenizer: Tokenizer, *, across: bool) -> Iterator[_Token]:
    """Each token of one row; the last of a document is often a target only, and no input.

    ``across``: a document's first token may be the target of the token before it.
    """
    inputs, targets, docs = (part[0].tolist() for part in batch[:3] if part is not None)
    length = len(docs) - docs.count(PADDING)
    for at in range(length):
        begins = at == 0 or docs[at] != docs[at - 1]
        learned = at > 0 and (across or not begins) and targets[at - 1] == inputs[at]
        yield _Token(_spell(inputs[at], tokenizer), learned, begins and at > 0)
        shown = at + 1 < length and (across or docs[at + 1] == docs[at])
        if targets[at] != IGNORE and not shown:
            yield _Token(_spell(targets[at], tokenizer), learned=True, begins=False)


def _spell(token: int, tokenizer: Tokenizer) -> str:
    if token in tokenizer.control_ids:
        return tokenizer.piece(token)
    text = tokenizer.token_bytes(token).decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")
    return text.replace("|", "\\x7c")
