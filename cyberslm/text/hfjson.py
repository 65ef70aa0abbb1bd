"""A Hugging Face ``tokenizer.json``, read and judged before its library sees it.

Read are byte-pair models of two spellings: ``ByteLevel``, where each byte has a letter of its own (GPT-2, Llama 3,
Qwen, SmolLM2), and marks, where U+2581 stands for a space and <0xNN> for a byte (Llama 2, Mistral, twins of this
package). A file of the second kind gets the escapes of ``codec``, so that U+2581 comes back too. Whatever else a step
does to text is listed as a loss. A special token that merges could spell makes the file unfit: text must never become
one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cyberslm.errors import TokenizerError
from cyberslm.text import hf
from cyberslm.text.codec import ESCAPE, SPACE_MARK

MAX_JSON_BYTES = 64 * 2**20
MAX_IDS = 1_000_000

_EOS_NAMES = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>")
_ROLE_KEYS = ("pad_token", "unk_token", "bos_token", "eos_token")
_MARK_TO_SPACE = hf.replace_step(SPACE_MARK, " ")
_SPACE_TO_MARK = hf.replace_step(" ", SPACE_MARK)
_KEEPING = ("ByteLevel", "Digits", "Split", "Metaspace", "Punctuation")

Json = Mapping[str, object]


class ImportedModel(NamedTuple):
    """What a file says. ``table`` holds the bytes of each id, empty for control ids and for ids that nothing has."""

    content: bytes
    pieces: list[str]
    table: list[bytes]
    control_ids: frozenset[int]
    roles: dict[str, int]
    names: dict[str, str]
    add_bos: bool
    escaped: bool
    prefix: bytes
    losses: tuple[str, ...]


def read_json(content: bytes, settings: Json) -> ImportedModel:
    """Read a tokenizer.json beside the ``settings`` of its tokenizer_config.json (may be empty).

    Raises TokenizerError when it is damaged, of another kind, names no end of text or lets text be a special token.
    """
    data = _object(content)
    model = _part(data, "model")
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise TokenizerError(
            f"its model is {model.get('type')!r:.40}; only BPE can be imported, as text can't forge it"
        )
    if model.get("dropout"):
        raise TokenizerError("its model drops merges at random (dropout), so that ids would not repeat; set it to null")
    vocabulary = _vocabulary(model)
    added = _added(data)
    byte_level, prefix = _spelling(data)
    _refuse_forgeable(model, vocabulary, added)
    pieces = _pieces(vocabulary, added)
    control = {index for index, token in added.items() if token["special"]}
    names, roles = _roles(model, settings, added, {text: index for index, text in enumerate(pieces) if text}, data)
    table = [_token_bytes(text, byte_level=byte_level) for text in pieces]
    for index, token in added.items():
        table[index] = str(token["content"]).encode()
    for index in control | {roles["unk_token"]}:
        table[index] = b""
    losses = [
        *_losses(data, byte_level=byte_level, prefix=prefix),
        *_table_losses(model, vocabulary, byte_level=byte_level),
    ]
    losses += _added_losses(added, prefix=prefix)
    return ImportedModel(
        content=_prepared(data, content, byte_level=byte_level),
        pieces=pieces,
        table=table,
        control_ids=frozenset(control | {roles["unk_token"]}),
        roles=roles,
        names=names,
        add_bos=_adds_bos(data, settings, names),
        escaped=not byte_level,
        prefix=prefix,
        losses=tuple(losses),
    )


def with_bos_rule(model: ImportedModel, *, add_bos: bool) -> ImportedModel:
    """The model with a post-processor that puts <bos> before a text, or none that does."""
    data = json.loads(model.content)
    bos = model.names.get("bos_token")
    if add_bos == (bos is not None and _template_start(data) == bos):
        return model._replace(add_bos=add_bos)
    data["post_processor"] = hf.bos_template(bos, model.roles["bos_token"]) if add_bos and bos else None
    return model._replace(content=_dump(data), add_bos=add_bos)


def modern_words(contractions: str, digits: str) -> str:
    """How Llama 3 and Qwen2 cut text into words: an expression that differs in two places."""
    return (
        rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
FOLDED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2_WORDS = {modern_words(start, r"\p{N}") for start in (CONTRACTIONS, FOLDED)}


def cuts_like_qwen2(content: bytes) -> bool:
    """Whether a tokenizer.json cuts text into words as Qwen2's does."""
    steps = list(_steps(_object(content).get("pre_tokenizer")))
    patterns = [step.get("pattern") for step in steps if step.get("type") == "Split"]
    return len(steps) == 2 and any(isinstance(p, dict) and p.get("Regex") in _QWEN2_WORDS for p in patterns)


def byte_letters() -> dict[str, int]:
    """The letter of each byte at byte level: printable Latin-1 as it is, the others from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def _object(content: bytes) -> dict[str, object]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"is not JSON: {str(error)[:120]}") from None
    if not isinstance(data, dict):
        raise TokenizerError("doesn't hold an object")
    return data


def _part(data: Json, key: str) -> dict:
    value = data.get(key)
    if not isinstance(value, dict):
        raise TokenizerError(f"is no tokenizer.json: it has no object {key!r}")
    return value


def _vocabulary(model: Json) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise TokenizerError("its model has no vocabulary")
    ids = list(vocabulary.values())
    if not all(type(index) is int and 0 <= index < MAX_IDS for index in ids) or len(set(ids)) != len(ids):
        raise TokenizerError(f"its vocabulary has an id that occurs twice or is outside 0 to {MAX_IDS:,}")
    return vocabulary


def _added(data: Json) -> dict[int, Json]:
    found: dict[int, Json] = {}
    tokens = data.get("added_tokens") or []
    for token in tokens if isinstance(tokens, list) else [None]:
        index = token.get("id") if isinstance(token, dict) else None
        if not isinstance(token, dict) or type(index) is not int or not 0 <= index < MAX_IDS:
            raise TokenizerError("one of its added tokens has no id or an id that is out of range")
        if not isinstance(token.get("content"), str) or not isinstance(token.get("special"), bool):
            raise TokenizerError(f"its added token {index} has no content or doesn't say whether it is special")
        found[index] = token
    return found


def _steps(step: object) -> Iterator[Json]:
    """The steps of a normaliser, pre-tokenizer or decoder, sequences opened."""
    if not isinstance(step, dict):
        return
    if step.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            inner = step.get(key)
            for one in inner if isinstance(inner, list) else ():
                yield from _steps(one)
    else:
        yield step


def _spelling(data: Json) -> tuple[bool, bytes]:
    """Whether tokens are spelled at byte level, and what decoding takes off the start of a text."""
    steps = list(_steps(data.get("decoder")))
    kinds = {str(step.get("type")) for step in steps}
    if kinds == {"ByteLevel"}:
        return True, b""
    unknown = [step for step in steps if not _is_mark_step(step)]
    if unknown or not steps:
        raise TokenizerError(f"its decoder {[step.get('type') for step in unknown]!r:.80} is of an unknown kind")
    strips = any(step.get("type") == "Strip" and step.get("start") == 1 for step in steps)
    metaspace = any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
    return False, b" " if strips or metaspace else b""


def _is_mark_step(step: Json) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        return step in (_MARK_TO_SPACE, *hf.UNESCAPE_STEPS)
    if kind == "Strip":
        return step.get("content") == " " and step.get("start") in (0, 1) and step.get("stop") == 0
    if kind == "Metaspace":
        return step.get("replacement") == SPACE_MARK
    return kind in ("ByteFallback", "Fuse")


def _refuse_forgeable(model: Json, vocabulary: Mapping[str, int], added: Mapping[int, Json]) -> None:
    merges = model.get("merges")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges] if isinstance(merges, list) else []
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise TokenizerError("its merges are not pairs")
    spelled = {f"{left}{right}" for left, right in pairs}
    guarded = [str(token["content"]) for token in added.values() if token["special"]]
    unknown = model.get("unk_token")
    for text in [*guarded, unknown] if isinstance(unknown, str) else guarded:
        if text in vocabulary and (len(text) == 1 or text in spelled or model.get("ignore_merges")):
            raise TokenizerError(f"its special token {text!r:.80} can be spelled by text; such a file is not accepted")


def _pieces(vocabulary: Mapping[str, int], added: Mapping[int, Json]) -> list[str]:
    pieces = [""] * (max([*vocabulary.values(), *added]) + 1)
    for text, index in vocabulary.items():
        pieces[index] = text
    for index, token in added.items():
        if pieces[index] not in ("", token["content"]):
            raise TokenizerError(f"its added token {index} has the id of another piece")
        pieces[index] = str(token["content"])
    return pieces


def _roles(
    model: Json, settings: Json, added: Mapping[int, Json], ids: Mapping[str, int], data: Json
) -> tuple[dict[str, str], dict[str, int]]:
    """Names and ids of pad, unk, bos and eos; what is not named is covered by another, as users of the field expect."""
    special = {str(token["content"]) for token in added.values() if token["special"]}
    names: dict[str, str] = {}
    for key in _ROLE_KEYS:
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value in special:
            names[key] = value
    known = [name for name in _EOS_NAMES if name in special]
    if "eos_token" not in names and len(known) == 1:
        names["eos_token"] = known[0]
    if "eos_token" not in names:
        raise TokenizerError("names no end of text: put the tokenizer_config.json that names its eos_token beside it")
    if isinstance(model.get("unk_token"), str) and model["unk_token"] in ids:
        names.setdefault("unk_token", str(model["unk_token"]))
    first = _template_start(data)
    if first in special:
        names.setdefault("bos_token", str(first))
    covered = {
        "pad_token": names.get("pad_token", names.get("unk_token", names["eos_token"])),
        "unk_token": names.get("unk_token", names.get("pad_token", names["eos_token"])),
        "bos_token": names.get("bos_token", names["eos_token"]),
        "eos_token": names["eos_token"],
    }
    return names, {key: ids[name] for key, name in covered.items()}


def _template_start(data: Json) -> str | None:
    """The special token that a template puts before a text."""
    for step in _steps(data.get("post_processor")):
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            first = single[0].get("SpecialToken") if isinstance(single[0], dict) else None
            return str(first.get("id")) if isinstance(first, dict) else None
    return None


def _adds_bos(data: Json, settings: Json, names: Mapping[str, str]) -> bool:
    bos = names.get("bos_token")
    if bos is None:
        return False
    return _template_start(data) == bos or settings.get("add_bos_token") is True


def _losses(data: Json, *, byte_level: bool, prefix: bytes) -> Iterator[str]:
    normalizers = list(_steps(data.get("normalizer")))
    splitters = list(_steps(data.get("pre_tokenizer")))
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    kept = () if byte_level else (prepend, _SPACE_TO_MARK, *hf.ESCAPE_STEPS)
    for step in normalizers:
        if step not in kept:
            yield f"text is normalised ({step.get('type')})"
    for step in splitters:
        if step.get("type") not in _KEEPING or step.get("behavior") == "Removed":
            yield f"the pre-tokenizer {step.get('type')} may drop white space"
        if step.get("add_prefix_space") is True:
            yield "a space is put before a text that has none"
    metaspace = next((step for step in splitters if step.get("type") == "Metaspace"), None)
    puts = prepend in normalizers or (metaspace is not None and metaspace.get("prepend_scheme") != "never")
    if metaspace is not None and puts:
        yield "one space at the start of a text is lost"
    if puts != bool(prefix):
        yield "decoding doesn't take off the space that encoding puts before a text"
    if not byte_level and metaspace is None and _SPACE_TO_MARK not in normalizers:
        yield "spaces are not marked"
    if byte_level and not any(step.get("type") == "ByteLevel" for step in splitters):
        yield "text is not turned into bytes before it is encoded"


def _table_losses(model: Json, vocabulary: Mapping[str, int], *, byte_level: bool) -> Iterator[str]:
    bytes_there = byte_letters() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not (byte_level or model.get("byte_fallback")) or any(name not in vocabulary for name in bytes_there):
        yield "characters outside the vocabulary are lost (not all 256 bytes are there)"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        yield "pieces carry a mark of their place in the word"


def _added_losses(added: Mapping[int, Json], *, prefix: bytes) -> Iterator[str]:
    text = [token for token in added.values() if not token["special"]]
    if text and prefix:
        yield "a space is put after each added token"
    for token in text:
        content = str(token["content"])
        if token.get("lstrip") or token.get("rstrip") or SPACE_MARK in content or ESCAPE in content:
            yield f"white space beside {content!r:.40} is lost"


def _token_bytes(text: str, *, byte_level: bool) -> bytes:
    if byte_level:
        try:
            return bytes(_LETTERS[letter] for letter in text)
        except KeyError:
            return text.encode()
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace(SPACE_MARK, " ").encode()


def _prepared(data: dict[str, object], content: bytes, *, byte_level: bool) -> bytes:
    """The file as it will be used and saved: nothing is cut off or filled up, marks are escaped."""
    changes: dict[str, object] = {key: None for key in ("truncation", "padding") if data.get(key) is not None}
    if not byte_level:
        decoders, normalizers = list(_steps(data.get("decoder"))), list(_steps(data.get("normalizer")))
        if not all(step in decoders for step in hf.UNESCAPE_STEPS):
            changes["decoder"] = {"type": "Sequence", "decoders": [*decoders, *hf.UNESCAPE_STEPS]}
        if not all(step in normalizers for step in hf.ESCAPE_STEPS):
            changes["normalizer"] = {"type": "Sequence", "normalizers": [*hf.ESCAPE_STEPS, *normalizers]}
    return _dump(data | changes) if changes else content


def _dump(data: Json) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")


_LETTERS = byte_letters()
