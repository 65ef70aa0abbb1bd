"""Nodes -> dataclasses, in three passes over the tree and the types together.

``canonical`` renames aliases and refuses unknown keys, per file, so that layers can be merged by name; ``merge`` lays
one tree over another; ``build`` makes the dataclasses bottom-up, leaves checked by pydantic in strict mode. All three
go on after a problem, so that one run reports everything.
"""

from __future__ import annotations

import functools
import json
import math
import os.path
import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cyberslm.config.hints import key_hint, value_hint
from cyberslm.config.nodes import Node, Place, Problems, shown
from cyberslm.config.schema import (
    bare,
    child_type,
    declared_defaults,
    fields_of,
    is_optional,
    is_path,
    item_section,
    members,
    names_of,
    phrase,
    section_of,
    set_by_parent,
)

_EXACT_FLOAT = 2**53
_TYPE_ERRORS = {"literal_error", "int_from_float", "none_required", "int_parsing_size"}


def canonical(node: Node, tp: Any, problems: Problems, root: type, key: str = "") -> Node:
    """The same tree with canonical names only. Unknown keys and settings given under two names become problems."""
    section, item = section_of(tp), item_section(tp)
    if section is None and item is not None:
        if isinstance(node.value, list):
            entries = [canonical(e, item, problems, root, f"{key}[{i}]") for i, e in enumerate(node.value)]
            return Node(node.place, entries)
        if isinstance(node.value, dict):
            named = {k: canonical(e, item, problems, root, f"{key}.{k}") for k, e in node.value.items()}
            return Node(node.place, named)
    if section is None or not isinstance(node.value, dict):
        return node
    names, known, spelled = names_of(section), fields_of(section), dict[str, str]()
    value: dict[str, Node] = {}
    for spelling, child in node.value.items():
        name = names.get(spelling)
        if name is None:
            hint = "" if problems.full else key_hint(spelling, section, root)
            problems.add(child.place, f"unknown key {shown(spelling)} {_inside(key)}{hint}")
        elif name in value:
            problems.add(
                child.place, f"{spelled[name]!r} and {spelling!r} are the same setting {_inside(key)}; keep one"
            )
        else:
            spelled[name] = spelling
            value[name] = canonical(child, known[name].type, problems, root, _join(key, name))
    return Node(node.place, value)


def merge(base: Node, over: Node) -> Node:
    """``over`` laid over ``base``: mappings merge, anything else replaces; an empty value adds nothing to a mapping."""
    if not isinstance(base.value, dict):
        return over
    if not isinstance(over.value, dict):
        return base if over.empty else over
    value = dict(base.value)
    for name, node in over.value.items():
        value[name] = merge(value[name], node) if name in value else node
    return Node(over.place, value)


def leaves(node: Node, tp: Any, key: str = "") -> Iterator[tuple[str, Node, Any]]:
    """The settings that a canonical tree sets: dotted name, value and type of each."""
    section = section_of(tp)
    if section is not None and isinstance(node.value, dict):
        for name, child in node.value.items():
            yield from leaves(child, fields_of(section)[name].type, _join(key, name))
    elif key and not (section is not None and node.empty):
        yield key, node, tp


def build(node: Node, tp: Any, problems: Problems, key: str = "", default: object = None) -> Any:
    """The value of a canonical tree. What is returned is of use only while ``problems`` did not grow."""
    section, item = section_of(tp), item_section(tp)
    if node.broken:
        problems.failures += 1
        return None
    if section is not None:
        if node.value is None and is_optional(tp):
            return None
        if isinstance(node.value, dict) or node.empty:
            return _build_section(node, section, problems, key, default)
    elif item is not None and get_origin(bare(tp)) is dict and isinstance(node.value, dict):
        return {name: build(entry, item, problems, _join(key, name)) for name, entry in node.value.items()}
    elif item is not None and get_origin(bare(tp)) in (list, tuple) and isinstance(node.value, list):
        entries = [build(entry, item, problems, f"{key}[{i}]") for i, entry in enumerate(node.value)]
        return tuple(entries) if get_origin(bare(tp)) is tuple else entries
    elif item is None:
        return _build_leaf(node, tp, problems, key)
    elif node.value is None and is_optional(tp):
        return None
    problems.add(node.place, f"{_title(key)} must be {phrase(tp)}, got {node}")
    return None


def _build_section(node: Node, cls: type, problems: Problems, key: str, default: object) -> Any:
    given = node.value if isinstance(node.value, dict) else {}
    preset = set_by_parent(cls, default) if isinstance(default, cls) else {}
    defaults = declared_defaults(cls) | preset
    arguments, before = dict(preset), problems.failures
    for name, field in fields_of(cls).items():
        path = _join(key, name)
        if name in given:
            arguments[name] = build(given[name], field.type, problems, path, defaults[name])
        elif defaults[name] is MISSING:
            if section_of(field.type) is None:
                problems.add(node.place, f"missing required key {name!r} {_inside(key)}")
            else:
                arguments[name] = _build_section(Node(node.place, {}), bare(field.type), problems, path, None)
    if problems.failures > before:
        return None
    try:
        return cls(**arguments)
    except ValueError as error:
        problems.add(*blame(str(error), node, cls, key))
        return None


def blame(message: str, node: Node, cls: type, key: str) -> tuple[Place, str]:
    """Place and wording of what ``__post_init__`` raised; a message that opens with a setting's name is put there."""
    named = re.match(r"[A-Za-z_]\w*(?:\.\w+)*", message)
    parts = named.group().split(".") if named else []
    if not parts or parts[0] not in fields_of(cls):
        return node.place, f"{key}: {message}" if key else message
    for part in parts:
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[part]
    return node.place, _join(key, message)


@functools.cache
def _adapter(tp: Any) -> TypeAdapter[Any]:
    return TypeAdapter(tp, config=ConfigDict(strict=True))


def _build_leaf(node: Node, tp: Any, problems: Problems, key: str) -> Any:
    before = problems.failures
    data = _plain(node, tp, problems, key)
    if problems.failures > before:
        return None
    try:
        return _adapter(tp).validate_json(json.dumps(data))
    except ValidationError as error:
        reported = set()
        details = error.errors(include_url=False, include_context=False, include_input=False)
        for detail in sorted(details, key=lambda detail: _is_type_error(detail["type"])):
            place, path, message = _describe(node, tp, key, detail["type"], detail["loc"], detail["msg"])
            if path not in reported:
                reported.add(path)
                problems.add(place, message)
        return None


def _plain(node: Node, tp: Any, problems: Problems, key: str) -> Any:
    """JSON data of a leaf: paths made absolute, ``1e4`` made an integer where only integers will do."""
    if isinstance(node.value, dict):
        return {k: _plain(e, child_type(tp, k), problems, _join(key, k)) for k, e in node.value.items()}
    problems.failures += node.broken
    if isinstance(node.value, list):
        return [_plain(e, child_type(tp, i), problems, f"{key}[{i}]") for i, e in enumerate(node.value)]
    kinds = {bare(member) for member in members(tp)}
    if isinstance(node.value, float) and int in kinds and float not in kinds:
        whole = math.floor(node.value)
        return whole if whole == node.value and abs(whole) <= _EXACT_FLOAT else node.value
    if isinstance(node.value, str) and any(is_path(member) for member in members(tp)):
        return _absolute(node, node.value, problems, key)
    return node.value


def _absolute(node: Node, value: str, problems: Problems, key: str) -> str:
    """Lexical: links are not followed, so that ``corpus.txt`` keeps its name and suffix whatever it points to."""
    if not value or "\0" in value:
        problems.add(node.place, f"{key} must be a path, got {shown(value)}")
        return value
    try:
        return os.path.normpath(node.place.base / Path(value).expanduser())
    except RuntimeError:
        problems.add(node.place, f"{key}: no home folder for {shown(value)}; write the path out")
        return value


def _is_type_error(kind: str) -> bool:
    """Rather than a value of the right type out of bounds, which says more when a union reports both."""
    return kind.endswith("_type") or kind in _TYPE_ERRORS


def _entry(node: Node, step: object) -> Node | None:
    if isinstance(node.value, dict) and isinstance(step, str):
        return node.value.get(step)
    if isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
        return node.value[step]
    return None


def _describe(node: Node, tp: Any, key: str, kind: str, loc: tuple[Any, ...], text: str) -> tuple[Place, str, str]:
    """Follow ``loc`` down to the entry at fault as far as tree and types go together."""
    for step in loc:
        entry = child_type(tp, step)
        inside = _entry(node, step)
        if entry is None or inside is None:
            break
        node, tp = inside, entry
        key = f"{key}[{step}]" if isinstance(step, int) else _join(key, step)
    if _is_type_error(kind):
        return node.place, key, f"{key} must be {phrase(tp)}, got {node}{value_hint(node, tp)}"
    if text.startswith("Input should "):
        return node.place, key, f"{key} must {text.removeprefix('Input should ')}, got {node}"
    return node.place, key, f"{key}: {text}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _title(key: str) -> str:
    return key or "a configuration"


def _inside(key: str) -> str:
    return f"in {key}" if key else "at the top level"
