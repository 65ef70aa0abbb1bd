"""What was probably meant: the end of an error message that says what to write instead."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from cyberslm.config.nodes import Node
from cyberslm.config.scalars import has_leading_zero, resolve
from cyberslm.config.schema import bare, choices, fields_of, members, names_of, walk

_MAX_HINTED_KEY = 64


def value_hint(node: Node, tp: Any) -> str:
    kinds, words = {bare(member) for member in members(tp)}, choices(tp)
    text_allowed = str in kinds or any(isinstance(word, str) for word in words)
    if isinstance(node.value, str):
        return _text_hint(node, node.value, kinds, [word for word in words if isinstance(word, str)])
    if node.value is None:
        return '; for empty text write ""' if str in kinds else "; give a value or remove the key"
    if text_allowed and not isinstance(node.value, dict | list):
        return "; put it in quotes to make it text"
    return ""


def _text_hint(node: Node, text: str, kinds: set[Any], words: list[str]) -> str:
    numeric = bool(kinds & {int, float})
    near = difflib.get_close_matches(text[:_MAX_HINTED_KEY], words, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if bool in kinds and text.lower() in {"yes", "no", "on", "off", "y", "n"}:
        return "; write true or false"
    if numeric and has_leading_zero(text):
        return "; a leading zero is ambiguous, so remove it (or write 0o for octal)"
    if numeric and text.lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        return "; numbers must be finite"
    if node.quoted and (numeric or bool in kinds) and _is_number_or_bool(text):
        return "; remove the quotes"
    return ""


def _is_number_or_bool(text: str) -> bool:
    try:
        return isinstance(resolve(text), bool | int | float)
    except ValueError:
        return False


def key_hint(key: str, section: type, root: type) -> str:
    """The first of: another spelling here, the same name elsewhere, a near name here, a near name elsewhere."""
    known = names_of(section)
    if len(key) > _MAX_HINTED_KEY:
        return ""
    plain = key.replace("-", "_")
    elsewhere = _homes(root)
    if plain in known:
        return f"; did you mean {plain!r}?"
    if plain in elsewhere:
        return f"; {plain!r} belongs {elsewhere[plain]}"
    if "." in key and key.rpartition(".")[2] in elsewhere:
        return "; nest the settings of a section under its name instead of writing a dot"
    near = difflib.get_close_matches(plain, sorted(known), n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    far = difflib.get_close_matches(plain, sorted(elsewhere), n=1, cutoff=0.8)
    if far:
        return f"; did you mean {far[0]!r}, which belongs {elsewhere[far[0]]}?"
    return f"; known keys: {', '.join(sorted(fields_of(section)))}"


@functools.cache
def _homes(root: type) -> dict[str, str]:
    """Name of a setting or section -> the sections that have it, in words."""
    homes: dict[str, list[str]] = {}
    for path, _, _ in walk(root):
        parts = path.split(".")
        for depth, name in enumerate(parts):
            section = ".".join(parts[:depth])
            words = f"under {section!r}" if section else "at the top level"
            if words not in homes.setdefault(name.removesuffix("[]"), []):
                homes[name.removesuffix("[]")].append(words)
    return {name: " or ".join(words) for name, words in homes.items()}
