"""Types of the fields of a dataclass, for configurations that are made in Python: YAML is checked when it is read."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def type_problems(config: object) -> list[str]:
    """What is not of the type of its field, one sentence each."""
    hints = get_type_hints(type(config))
    return [
        f"{field.name} must be {_named(hints[field.name])}, not {value!r}"
        for field in fields(config)  # type: ignore[arg-type]
        if not _is_of(value := getattr(config, field.name), hints[field.name])
    ]


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_is_of(value, member) for member in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(type(item) is int for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (NoneType if hint is None else hint)


def _named(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) is UnionType:
        return " or ".join(_named(member) for member in get_args(hint))
    if get_origin(hint) is tuple:
        return "a tuple of whole numbers"
    return {float: "a number", int: "a whole number", bool: "True or False", NoneType: "None"}.get(
        hint, str(hint.__name__)
    )
