"""The Hugging Face twin of a SentencePiece model: ``tokenizer.json`` and the two files beside it, ids equal.

SentencePiece merges the neighbouring pair whose joined spelling is the best piece; ``tokenizer.json`` lists pairs. So
every split of a piece into two pieces is listed, ordered by the score of the piece. A unigram model is the same list of
scores on both sides; there the pieces that no text may become get a score that no spelling of theirs can lose against.
Control text is treated alike: ``split_special_tokens`` keeps text that spells a control piece from becoming its id, as
our ``encode`` does. Protected symbols are added tokens that are not special, looked for after the escapes are made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from cyberslm.text.codec import ESCAPES, SPACE_MARK
from cyberslm.text.proto import BPE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece, SentencePieceModel

MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
NAMES_FILE = "special_tokens_map.json"

Step = dict[str, object]

_NEVER = -float(1 << 20)


def twin_files(model: SentencePieceModel, *, add_bos: bool) -> dict[str, str]:
    """File name to JSON text, the same for the same model and rule; no tokenizer.json where no equal one exists."""
    pieces, roles = model.pieces, model.roles
    names = {
        "bos_token": pieces[roles.bos].text,
        "eos_token": pieces[roles.eos].text,
        "pad_token": pieces[roles.pad].text,
        "unk_token": pieces[roles.unk].text,
    }
    exact = not model.losses and not model.gaps
    files = settings_files(names, add_bos=add_bos, lossless=exact)
    if exact:
        tokenizer = _tokenizer(model, add_bos=add_bos)
        files[JSON_FILE] = json.dumps(tokenizer, ensure_ascii=False) + "\n"
    return files


def settings_files(names: dict[str, str], *, add_bos: bool, lossless: bool) -> dict[str, str]:
    """``tokenizer_config.json`` and ``special_tokens_map.json``; the first holds what loading reads back."""
    settings: dict[str, object] = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    if not lossless:
        settings["lossless"] = False
    return {
        CONFIG_FILE: json.dumps(settings, indent=2) + "\n",
        NAMES_FILE: json.dumps(names, indent=2) + "\n",
    }


def replace_step(old: str, new: str) -> Step:
    """A normaliser or decoder that replaces a string."""
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


ESCAPE_STEPS = [replace_step(*pair) for pair in ESCAPES]
UNESCAPE_STEPS = [replace_step(escaped, plain) for plain, escaped in reversed(ESCAPES)]


def _tokenizer(model: SentencePieceModel, *, add_bos: bool) -> dict[str, object]:
    added = [
        {"id": index, "content": piece.text, "special": piece.kind != USER_DEFINED}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        | {"normalized": piece.kind == USER_DEFINED}
        for index, piece in enumerate(model.pieces)
        if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    encoding = [*ESCAPE_STEPS, replace_step(" ", SPACE_MARK)]
    decoding: list[Step] = [replace_step(SPACE_MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.dummy_prefix:
        encoding.insert(len(ESCAPE_STEPS), {"type": "Prepend", "prepend": SPACE_MARK})
        decoding.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _sequence("normalizers", encoding),
        "pre_tokenizer": None,
        "post_processor": bos_template(model.pieces[model.roles.bos].text, model.roles.bos) if add_bos else None,
        "decoder": _sequence("decoders", [*decoding, *UNESCAPE_STEPS]),
        "model": _merging(model) if model.kind == BPE else _likeliest(model),
    }


def _merging(model: SentencePieceModel) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.roles.unk].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {piece.text: index for index, piece in enumerate(model.pieces)},
        "merges": _merges(model.pieces),
    }


def _likeliest(model: SentencePieceModel) -> dict[str, object]:
    scores = [(piece.text, piece.score if piece.kind == NORMAL else _NEVER) for piece in model.pieces]
    return {"type": "Unigram", "unk_id": model.roles.unk, "vocab": scores, "byte_fallback": True}


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Best piece first. Runs of spaces may share a score (Llama 2): then the leftmost grows, so long lefts lead."""
    normal = sorted((piece for piece in pieces if piece.kind == NORMAL), key=lambda piece: -piece.score)
    known = {piece.text for piece in normal}
    splits = [
        (piece.text[:at], piece.text[at:], piece.score)
        for piece in normal
        for at in range(1, len(piece.text))
        if piece.text[:at] in known and piece.text[at:] in known
    ]
    shared = {score for score, times in Counter(p.score for p in normal if len(p.text) > 1).items() if times > 1}
    splits.sort(key=lambda split: (-split[2], -len(split[0]) if split[2] in shared else 0))
    return [(left, right) for left, right, _ in splits]


def _sequence(key: str, steps: list[Step]) -> dict[str, object]:
    return {"type": "Sequence", key: steps}


def bos_template(bos: str, bos_id: int) -> dict[str, object]:
    def item(kind: str, name: str, segment: int) -> dict[str, object]:
        return {kind: {"id": name, "type_id": segment}}

    first = [item("SpecialToken", bos, 0), item("Sequence", "A", 0)]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, item("SpecialToken", bos, 1), item("Sequence", "B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
