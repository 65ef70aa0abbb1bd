"""The Hugging Face twin of a SentencePiece model: ``tokenizer.json`` and the two files beside it, ids equal.

SentencePiece merges the neighbouring pair whose joined spelling is the best piece; ``tokenizer.json`` lists pairs. So
every split of a piece into two pieces is listed, ordered by the score of the piece. Control text is treated alike:
``split_special_tokens`` keeps text that spells a control piece from becoming its id, as our ``encode`` does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cyberslm.text.codec import ESCAPES, SPACE_MARK
from cyberslm.text.proto import BOS, CONTROL, EOS, NORMAL, PAD, UNK, UNKNOWN, Piece

CONFIG_FILE = "tokenizer_config.json"


def twin_files(pieces: Sequence[Piece], *, add_bos: bool) -> dict[str, str]:
    """File name to JSON text; the same for the same vocabulary and rule."""
    names = {
        "bos_token": pieces[BOS].text,
        "eos_token": pieces[EOS].text,
        "pad_token": pieces[PAD].text,
        "unk_token": pieces[UNK].text,
    }
    settings = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    return {
        "tokenizer.json": json.dumps(_tokenizer(pieces, add_bos=add_bos), ensure_ascii=False) + "\n",
        CONFIG_FILE: json.dumps(settings, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(names, indent=2) + "\n",
    }


def _tokenizer(pieces: Sequence[Piece], *, add_bos: bool) -> dict[str, object]:
    added = [
        {"id": index, "content": piece.text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, piece in enumerate(pieces)
        if piece.kind in (CONTROL, UNKNOWN)
    ]
    unescapes = [_replace(escaped, plain) for plain, escaped in reversed(ESCAPES)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _sequence("normalizers", [_replace(*pair) for pair in (*ESCAPES, (" ", SPACE_MARK))]),
        "pre_tokenizer": None,
        "post_processor": _template(pieces[BOS].text) if add_bos else None,
        "decoder": _sequence(
            "decoders", [_replace(SPACE_MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *unescapes]
        ),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[UNK].text,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.text: index for index, piece in enumerate(pieces)},
            "merges": _merges(pieces),
        },
    }


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    normal = sorted((piece for piece in pieces if piece.kind == NORMAL), key=lambda piece: -piece.score)
    known = {piece.text for piece in normal}
    return [
        (piece.text[:at], piece.text[at:])
        for piece in normal
        for at in range(1, len(piece.text))
        if piece.text[:at] in known and piece.text[at:] in known
    ]


def _replace(old: str, new: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _sequence(key: str, steps: list[dict[str, object]]) -> dict[str, object]:
    return {"type": "Sequence", key: steps}


def _template(bos: str) -> dict[str, object]:
    def item(kind: str, name: str, segment: int) -> dict[str, object]:
        return {kind: {"id": name, "type_id": segment}}

    first = [item("SpecialToken", bos, 0), item("Sequence", "A", 0)]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, item("SpecialToken", bos, 1), item("Sequence", "B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
    }
