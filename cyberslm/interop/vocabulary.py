"""The tokenizer inside a GGUF file, as the files that this package and Hugging Face tools read.

Model ``gpt2`` is a byte-level BPE: its merges become a ``tokenizer.json``, cut into words by the rule that
``tokenizer.ggml.pre`` names, for which llama.cpp has the expression in its code (src/llama-vocab.cpp). Model ``llama``
is a SentencePiece BPE: pieces and scores become the ``tokenizer.model`` that they once were, so that SentencePiece
itself encodes. A rule or a setting that is not known here is an error, as a guess would give other ids.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cyberslm.errors import TokenizerError
from cyberslm.interop.container import Value
from cyberslm.text.hf import bos_template
from cyberslm.text.hfjson import CONTRACTIONS, modern_words, read_json
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.proto import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import Tokenizer

UNUSED = 5
PAD_PIECE = re.compile(r"\[PAD\d+\]")
TEMPLATE = "tokenizer.chat_template"

PREFIX = "tokenizer.ggml."
ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
STOPS = ("eot_token_id", "eom_token_id")

_READ = frozenset(
    {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_space_prefix"}
    | {*ROLES.values(), *STOPS}
)
# Ids and counts that only name pieces, and what must have one value, because another would change ids.
_NAMES = re.compile(r"(?:cls|mask|seperator|(?:fim_)?(?:pre|suf|mid|pad|rep|sep|prefix|suffix|middle))_token_id")
_ONLY: dict[str, tuple[object, ...]] = {
    "add_eos_token": (False,),
    "add_sep_token": (False,),
    "remove_extra_whitespaces": (False,),
    "token_type_count": (1,),
}


class Words(NamedTuple):
    """How a text is cut before merges: an expression, or GPT-2's with or without each digit alone."""

    expression: str | None = None
    digits_alone: bool = False
    whole_words_first: bool = False
    """A word that is a piece is taken as it is, whatever the merges say."""
    adds_bos: bool = False


_GPT2 = Words()
_SMOLLM = Words(digits_alone=True)
_LLAMA3 = Words(modern_words(CONTRACTIONS, r"\p{N}{1,3}"), whole_words_first=True, adds_bos=True)
_QWEN2 = Words(modern_words(CONTRACTIONS, r"\p{N}"))
PRE_TOKENIZERS: dict[str, Words] = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "refact": _SMOLLM,
}


def read_tokenizer(values: Mapping[str, Value]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises TokenizerError that names what is missing, unknown or damaged."""
    _refuse_unknown(values)
    model = values.get(PREFIX + "model")
    if model == "gpt2":
        return _byte_level(values)
    if model == "llama":
        return _sentencepiece(values)
    raise TokenizerError(
        f"{PREFIX}model is {model!r:.40}; gpt2 (byte-level BPE) and llama (SentencePiece) can be imported"
    )


def stop_ids(values: Mapping[str, Value]) -> tuple[int, ...]:
    """Ids that end a turn or a message, which the file names besides the end of a document."""
    found = (values.get(PREFIX + key) for key in STOPS)
    return tuple(index for index in found if isinstance(index, int) and not isinstance(index, bool))


def _refuse_unknown(values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or name in _READ or _NAMES.fullmatch(name):
            continue
        if name not in _ONLY:
            raise TokenizerError(f"{key} is not known here, and it may change ids")
        if value not in _ONLY[name]:
            raise TokenizerError(f"{key} is {value!r:.40}; only {_ONLY[name][0]!r} can be imported")


def _pieces(values: Mapping[str, Value]) -> tuple[list[str], list[int]]:
    """Spellings and kinds, without the unused ones at the end that only fill up the embedding."""
    tokens = values.get(PREFIX + "tokens")
    kinds = values.get(PREFIX + "token_type")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{PREFIX}tokens is missing or no list of strings")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise TokenizerError(f"{PREFIX}token_type is missing or has another length than the {len(tokens):,} tokens")
    count = len(tokens)
    while count and kinds[count - 1] == UNUSED and PAD_PIECE.fullmatch(tokens[count - 1]):
        count -= 1
    seen: set[str] = set()
    for index, token in enumerate(tokens[:count]):
        if token in seen:
            raise TokenizerError(f"token {index} {token!r:.40} occurs twice")
        seen.add(token)
    return tokens[:count], [int(kind) for kind in kinds[:count]]


def _roles(values: Mapping[str, Value], tokens: Sequence[str]) -> dict[str, int]:
    """Ids that the file gives to bos, eos, unk and pad; one that says "none" is left out."""
    found = {}
    for role, key in ROLES.items():
        index = values.get(PREFIX + key)
        if index is None or index == 2**32 - 1:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise TokenizerError(f"{PREFIX}{key} is {index!r:.40}, which is no id of the {len(tokens):,} tokens")
        found[role] = index
    if "eos" not in found:
        raise TokenizerError(f"{PREFIX}{ROLES['eos']} is missing: nothing would end a text")
    return found


def _flag(values: Mapping[str, Value], key: str, *, default: bool) -> bool:
    value = values.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{PREFIX}{key} must be true or false, not {value!r:.40}")
    return value


def _byte_level(values: Mapping[str, Value]) -> Tokenizer:
    name = values.get(PREFIX + "pre")
    words = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if words is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise TokenizerError(
            f"{PREFIX}pre is {name!r:.40}, a rule for cutting text that is not known here; known: {known}"
        )
    tokens, kinds = _pieces(values)
    roles = _roles(values, tokens)
    add_bos = _flag(values, "add_bos_token", default=words.adds_bos) and "bos" in roles
    if _flag(values, "add_space_prefix", default=False):
        raise TokenizerError(f"{PREFIX}add_space_prefix is true; only false can be imported with model gpt2")
    special = {index for index, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)} | set(roles.values())
    added = [
        {"id": index, "content": tokens[index], "special": index in special, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, kind in enumerate(kinds)
        if index in special or kind == USER_DEFINED
    ]
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": cutting(words),
        "post_processor": bos_template(tokens[roles["bos"]], roles["bos"]) if add_bos else None,
        "decoder": _byte_step(use_regex=True),
        "model": _merging(values, tokens, special if words.whole_words_first else set(), words),
    }
    settings = {f"{role}_token": tokens[index] for role, index in roles.items()} | {"add_bos_token": add_bos}
    content = json.dumps(data, ensure_ascii=False).encode()
    return HuggingFaceTokenizer(read_json(content, settings), add_bos=add_bos, lossless=False)


def cutting(words: Words) -> dict[str, object]:
    if words.expression is not None:
        cut: dict[str, object] = {
            "type": "Split",
            "pattern": {"Regex": words.expression},
            "behavior": "Isolated",
            "invert": False,
        }
        return {"type": "Sequence", "pretokenizers": [cut, _byte_step(use_regex=False)]}
    if words.digits_alone:
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, _byte_step(use_regex=True)]}
    return _byte_step(use_regex=True)


def _byte_step(*, use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _merging(values: Mapping[str, Value], tokens: Sequence[str], left_out: set[int], words: Words) -> dict[str, object]:
    merges = values.get(PREFIX + "merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{PREFIX}merges is missing or no list of strings")
    pairs = [merge.split(" ") for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise TokenizerError(f"{PREFIX}merges holds {wrong!r:.40}, which is no pair of pieces")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": words.whole_words_first,
        "vocab": {token: index for index, token in enumerate(tokens) if index not in left_out},
        "merges": pairs,
    }


def _sentencepiece(values: Mapping[str, Value]) -> Tokenizer:
    tokens, kinds = _pieces(values)
    scores = values.get(PREFIX + "scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(tokens):
        raise TokenizerError(f"{PREFIX}scores is missing or shorter than the {len(tokens):,} tokens")
    roles = _roles(values, tokens)
    pieces = [
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", float(score)) + _number(3, kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=False)
    ]
    if UNKNOWN in kinds:
        roles.setdefault("unk", kinds.index(UNKNOWN))
    none = (1 << 64) - 1
    trainer = _number(3, 2) + _number(35, int(BYTE in kinds))
    for number, role in ((40, "unk"), (41, "bos"), (42, "eos"), (43, "pad")):
        index, wanted = roles.get(role, none), UNKNOWN if role == "unk" else CONTROL
        trainer += _number(number, index if index != none and kinds[index] == wanted else none)
    prefix = _flag(values, "add_space_prefix", default=True)
    normalizer = _field(1, b"identity") + _number(3, int(prefix)) + _number(4, 0) + _number(5, 1)
    model = b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)
    add_bos = _flag(values, "add_bos_token", default=True) and "bos" in roles
    return SentencePieceTokenizer.from_proto(model, add_bos=add_bos, lossless=False)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
