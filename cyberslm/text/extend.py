"""A tokenizer with more tokens at the end of its vocabulary: texts that become one token wherever they stand.

In a SentencePiece model they are user-defined pieces, in a ``tokenizer.json`` added tokens that are not special. All
ids that were there stay. A text that the old tokenizer keeps exactly comes back exactly from the new one too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from cyberslm.errors import TokenizerError
from cyberslm.text import proto
from cyberslm.text.basics import varint
from cyberslm.text.codec import ESCAPE, SPACE_MARK
from cyberslm.text.hfjson import read_json
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import Tokenizer


def extended(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer with ``tokens`` as ids from ``tokenizer.vocab_size`` on.

    Raises `TokenizerError` naming a token that is one already, that holds white space or a reserved character, or where
    the kind of tokenizer can't take any exactly.
    """
    for token in tokens:
        _refuse_unfit(tokenizer, token)
    if isinstance(tokenizer, SentencePieceTokenizer):
        grown: Tokenizer = _with_pieces(tokenizer, tokens)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        grown = _with_added(tokenizer, tokens)
    else:
        raise TokenizerError(f"tokens can't be added to a {type(tokenizer).__name__}")
    for number, token in enumerate(tokens, tokenizer.vocab_size):
        if grown.encode(token, add_special_tokens=False) != [number]:
            raise TokenizerError(f"{token!r} can't be added: with it among the others it isn't one token")
    return grown


def _refuse_unfit(tokenizer: Tokenizer, token: str) -> None:
    if not token or any(c.isspace() or c in (SPACE_MARK, ESCAPE, "\0") or "\ud800" <= c <= "\udfff" for c in token):
        raise TokenizerError(f"{token!r} can't be added: it is empty or holds white space or a reserved character")
    if len(tokenizer.encode(token, add_special_tokens=False)) == 1:
        raise TokenizerError(f"{token!r} is one token already: leave it out")


def _with_pieces(tokenizer: SentencePieceTokenizer, tokens: Sequence[str]) -> SentencePieceTokenizer:
    if tokenizer.losses:
        raise TokenizerError(f"tokens can't be added to a tokenizer that isn't exact: {'; '.join(tokenizer.losses)}")
    model = tokenizer.content + b"".join(_piece(token) for token in tokens)
    return SentencePieceTokenizer(model, add_bos=tokenizer.add_bos)


def _piece(text: str) -> bytes:
    """Field 1 of the model: a user-defined piece of score 0."""
    spelled = text.encode()
    inner = b"\x0a" + varint(len(spelled)) + spelled + b"\x15" + struct.pack("<f", 0.0)
    inner += b"\x18" + varint(proto.USER_DEFINED)
    return b"\x0a" + varint(len(inner)) + inner


def _with_added(tokenizer: HuggingFaceTokenizer, tokens: Sequence[str]) -> HuggingFaceTokenizer:
    data = json.loads(tokenizer.model.content)
    added = [
        {"id": number, "content": token, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, token in enumerate(tokens, tokenizer.vocab_size)
    ]
    data["added_tokens"] = [*(data.get("added_tokens") or []), *added]
    content = json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")
    names: dict[str, object] = dict(tokenizer.model.names)
    model = read_json(content, names | {"add_bos_token": tokenizer.add_bos})
    return HuggingFaceTokenizer(model, add_bos=tokenizer.add_bos, lossless=not tokenizer.losses)
