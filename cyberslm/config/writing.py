"""Dataclasses -> YAML: the resolved settings of a run, and a template whose comments are the field documentation.

Both load back equal under the rules of this package and read the same in a YAML 1.1 reader.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from cyberslm.config import scalars
from cyberslm.config.schema import (
    declared_defaults,
    doc_at,
    documented_fields,
    fields_of,
    is_optional,
    phrase,
    section_doc,
    section_of,
    set_by_parent,
)
from cyberslm.errors import ConfigError

_WIDTH = 100


def to_mapping(config: Any) -> dict[str, Any]:
    """A dataclass tree as plain dicts, lists and scalars, ready for JSON."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.init}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def dump(config: Any) -> str:
    """A dataclass tree as YAML that ``load`` reads back equal."""
    return "".join(f"{line}\n" for line in _block(to_mapping(config))) or "{}\n"


def _block(mapping: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in mapping.items():
        name = scalars.write(key)
        if isinstance(value, Mapping) and value:
            lines += [f"{name}:", *(f"  {line}" for line in _block(value))]
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            lines += [f"{name}:", *(f"  - {_flow(entry)}" for entry in value)]
        else:
            lines.append(f"{name}: {_flow(value)}")
    return lines


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalars.write(key)}: {_flow(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(entry) for entry in value) + "]"
    return scalars.write(value)


LEFT_OUT = object()
"""A value for ``template``: the setting stands in a comment, so that what it takes when left out applies."""


def template(cls: type, values: Mapping[str, object] | None = None, *, header: str = "") -> str:
    """Commented YAML of every setting: its documentation above its default or ``values["dotted.key"]``.

    An optional section that is off, and a setting whose value is ``LEFT_OUT``, are written out in comments. A required
    setting without a value is left empty for the user to fill. Raises ``ConfigError`` for a key of ``values`` that is
    not a setting of ``cls``.
    """
    values = values or {}
    known = [key for key in documented_fields(cls) if "[]" not in key]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"no setting {unknown[0]!r} in {cls.__name__}; known: {', '.join(known)}")
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    lines += [""] if header else []
    return "\n".join(lines + _settings(cls, cls, "", values, None)) + "\n"


def _settings(root: type, cls: type, prefix: str, values: Mapping[str, object], default: object) -> list[str]:
    lines: list[str] = []
    defaults = declared_defaults(cls) | (set_by_parent(cls, default) if isinstance(default, cls) else {})
    for name, field in fields_of(cls).items():
        key, section = f"{prefix}{name}", section_of(field.type)
        doc = doc_at(root, key) or (section_doc(section) if section else "")
        lines += [""] if section and lines and lines[-1] else []
        lines += [f"# {line}" for line in textwrap.wrap(doc, _WIDTH)]
        if section is None:
            left_out = values.get(key) is LEFT_OUT
            setting = _setting(name, field.type, defaults[name] if left_out else values.get(key, defaults[name]))
            lines += [f"# {line}" for line in setting] if left_out else setting
            continue
        inner = _settings(root, section, f"{key}.", values, defaults[name])
        block = [f"{name}:", *(f"  {line}".rstrip() for line in inner)]
        given = any(other.startswith(f"{key}.") for other in values)
        if is_optional(field.type) and defaults[name] is None and not given:
            block = [f"{name}: null", *(f"# {line}".rstrip() for line in block)]
        lines += [*block, ""]
    return lines[:-1] if lines and not lines[-1] else lines


def _setting(name: str, tp: Any, value: object) -> list[str]:
    if value is MISSING:
        return [f"{name}:  # required: {phrase(tp)}"]
    return _block({name: _plain(value)})


def differences(a: Any, b: Any) -> dict[str, tuple[object, object]]:
    """Dotted key -> (value in ``a``, value in ``b``) where two configurations of one class differ.

    A section that only one of them has is reported whole, the other side ``None``.
    """
    if type(a) is not type(b):
        raise TypeError(f"can't compare {type(a).__name__} with {type(b).__name__}")
    found: dict[str, tuple[object, object]] = {}
    for field in fields(a):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if is_dataclass(one) and type(one) is type(other):
            found |= {f"{field.name}.{key}": pair for key, pair in differences(one, other).items()}
        elif one != other:
            found[field.name] = (_plain(one), _plain(other))
    return found
