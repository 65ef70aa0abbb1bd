"""A tokenizer as the metadata of a GGUF file, or a refusal that says what llama.cpp has no word for.

What stays different there, and is told as notes: llama.cpp turns text that spells a control piece into its id where it
parses special tokens, and it knows no escape for U+2581, which it takes as a space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cyberslm.errors import ConfigError
from cyberslm.interop.vocabulary import PRE_TOKENIZERS, PREFIX, ROLES, UNUSED, cutting
from cyberslm.text.hfjson import CONTRACTIONS, FOLDED, ImportedModel, cuts_like_qwen2
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.proto import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, SentencePieceModel
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import Tokenizer

_ESCAPED = "text with U+2581 or U+FDD0 has other ids there, as llama.cpp has no escape for them"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary(NamedTuple):
    """Values by their keys, and what differs from encoding here."""

    values: Mapping[str, object]
    notes: tuple[str, ...]


def vocabulary_of(tokenizer: Tokenizer, rows: int) -> Vocabulary:
    """Metadata for a model with that many rows of the embedding. Raises `ConfigError` when it can't be expressed."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        found = _sentencepiece(tokenizer.model)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        found = _byte_level(tokenizer.model)
    else:
        raise ConfigError(f"a tokenizer of type {type(tokenizer).__name__} can't be written to GGUF")
    tokens, kinds = found.values["tokens"], found.values["token_type"]
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        raise ConfigError("the tokenizer has no pieces")
    missing = rows - len(tokens)
    filled = {
        **found.values,
        "tokens": [*tokens, *(f"[PAD{len(tokens) + index}]" for index in range(missing))],
        "token_type": [*kinds, *[UNUSED] * missing],
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": False,
    }
    if "scores" in found.values:
        filled["scores"] = [*found.values["scores"], *[-1e9] * missing]  # type: ignore[misc]
    filled |= {key: getattr(tokenizer, f"{role}_id") for role, key in ROLES.items()}
    return Vocabulary({PREFIX + key: value for key, value in filled.items()}, found.notes)


def _sentencepiece(model: SentencePieceModel) -> Vocabulary:
    if model.kind != BPE:
        raise ConfigError(
            "tokenizer: model_type unigram picks the likeliest pieces, which llama.cpp does not do with bytes for what"
            " is unknown; a GGUF needs a tokenizer of model_type bpe"
        )
    if model.losses:
        raise ConfigError(f"tokenizer: {'; '.join(model.losses)}: llama.cpp would give other ids")
    notes = [_ESCAPED]
    if any(piece.kind == USER_DEFINED for piece in model.pieces):
        notes.append("where protected symbols overlap in a text, llama.cpp takes the longest first, not the first")
    return Vocabulary(
        {
            "model": "llama",
            "tokens": [piece.text for piece in model.pieces],
            "scores": [float(piece.score) for piece in model.pieces],
            "token_type": [piece.kind for piece in model.pieces],
            "add_space_prefix": model.dummy_prefix,
        },
        tuple(notes),
    )


def _byte_level(model: ImportedModel) -> Vocabulary:
    data = json.loads(model.content)
    if model.escaped:
        return _marked(model, data)
    words = data["model"]
    name = _rule(data, model.content)
    if bool(words.get("ignore_merges")) != PRE_TOKENIZERS[name].whole_words_first:
        raise ConfigError(
            f"tokenizer: ignore_merges is {words.get('ignore_merges')!r}, llama.cpp's rule {name} has another"
        )
    notes = []
    if normalizer := data.get("normalizer"):
        if normalizer != {"type": "NFC"}:
            raise ConfigError(f"tokenizer: the normalizer {normalizer.get('type')!r:.40} has no word in GGUF")
        notes.append("text is not brought to NFC there before it is encoded")
    added = {token["id"]: token["special"] for token in data["added_tokens"]}
    kinds = [
        UNUSED if not piece else {None: NORMAL, True: CONTROL, False: USER_DEFINED}[added.get(index)]
        for index, piece in enumerate(model.pieces)
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in words["merges"]]
    values = {
        "model": "gpt2",
        "pre": name,
        "tokens": [piece or f"[PAD{index}]" for index, piece in enumerate(model.pieces)],
        "token_type": kinds,
        "merges": merges,
    }
    return Vocabulary(values, tuple(notes))


def _marked(model: ImportedModel, data: Mapping[str, Any]) -> Vocabulary:
    """A SentencePiece vocabulary that came as merges (Llama 2, Mistral): scores are their order again."""
    steps = {"pre_tokenizer": data.get("pre_tokenizer"), "losses": model.losses}
    if wrong := next((name for name, value in steps.items() if value), None):
        raise ConfigError(f"tokenizer: {wrong} {steps[wrong]!r:.200} of its tokenizer.json have no word in GGUF")
    special = {token["id"]: token["special"] for token in data["added_tokens"]}
    scores = merge_scores(
        [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in data["model"]["merges"]]
    )
    kinds = []
    for index, piece in enumerate(model.pieces):
        if index == model.roles["unk_token"]:
            kinds.append(UNKNOWN)
        elif index in special:
            kinds.append(CONTROL if special[index] else USER_DEFINED)
        else:
            kinds.append(BYTE if _BYTE.fullmatch(piece) else NORMAL)
        if kinds[-1] == NORMAL and len(piece) > 1 and piece not in scores:
            raise ConfigError(f"tokenizer: no merge makes the piece {piece!r:.40}, llama.cpp would")
    values = {
        "model": "llama",
        "tokens": model.pieces,
        "scores": [scores.get(piece, 0.0) for piece in model.pieces],
        "token_type": kinds,
        "add_space_prefix": bool(model.prefix),
    }
    return Vocabulary(values, (_ESCAPED,))


def merge_scores(merges: Sequence[tuple[str, str]]) -> dict[str, float]:
    """A score for each merged piece, by which the best joined spelling first is the first merge first.

    Pieces whose merges stand among each other's shared a score: of those the leftmost is merged.
    """
    spans: dict[str, tuple[int, int]] = {}
    for rank, (left, right) in enumerate(merges):
        spans[left + right] = (spans.get(left + right, (rank, rank))[0], rank)
    scores: dict[str, float] = {}
    block, end = 0, -1
    for piece, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        block += first > end
        end = max(end, last)
        scores[piece] = -float(block)
    return scores


def _rule(data: Mapping[str, object], content: bytes) -> str:
    """The name that llama.cpp has for how the file cuts text into words."""
    if cuts_like_qwen2(content):
        return "qwen2"
    for name, words in PRE_TOKENIZERS.items():
        if _essence(data.get("pre_tokenizer")) == _essence(cutting(words)):
            return name
    raise ConfigError(
        f"tokenizer: llama.cpp has no rule that is known here for its pre_tokenizer {data.get('pre_tokenizer')!r:.200}"
    )


def _essence(step: object) -> object:
    """A step without what has no effect on ids, sequences of one opened."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence":
        steps = [_essence(inner) for inner in step.get("pretokenizers", ())]
        return steps[0] if len(steps) == 1 else steps
    rest = {key: value for key, value in step.items() if key != "trim_offsets"}
    if rest.get("type") == "Split" and isinstance(rest.get("pattern"), dict):
        pattern = rest["pattern"].get("Regex")
        rest["pattern"] = pattern.replace(FOLDED, CONTRACTIONS) if isinstance(pattern, str) else rest["pattern"]
    return rest
