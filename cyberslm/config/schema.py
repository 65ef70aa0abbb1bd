"""What a settings dataclass says about itself: names, aliases, types, defaults and the sentence under each field.

Nothing here knows about files. A *section* is a stdlib dataclass; a field may hold a section, an optional section, or a
list, tuple or dict of sections. Any other type is a leaf that pydantic checks. The string literal under a field is its
documentation, read from the class source because Python does not keep it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class _PathMarker:
    """Marks a ``str`` field as a path."""


PathStr = Annotated[str, _PathMarker()]
"""A ``str`` that holds a path: made absolute against the folder of the file that wrote it, ``~`` expanded.

A default is no file's word and stays as it is, so it is best ``None`` or absolute."""


@dataclass(frozen=True)
class Field:
    """One setting; ``aliases`` are other spellings accepted for ``name``."""

    name: str
    type: Any
    aliases: tuple[str, ...]
    default: object
    factory: Any

    def make_default(self) -> object:
        """A fresh default, or ``MISSING`` when the setting has none."""
        return self.default if self.factory is MISSING else self.factory()


class FieldDoc(NamedTuple):
    """For help and reference pages. ``default`` is ``dataclasses.MISSING`` for a required setting."""

    type: str
    default: object
    doc: str


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """The settings of a section by canonical name. Raises ``TypeError`` for a field type that can't be read."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in fields(cls):
        if not field.init:
            continue
        alias = field.metadata.get("alias", ())
        aliases = (alias,) if isinstance(alias, str) else tuple(alias)
        found[field.name] = Field(field.name, hints[field.name], aliases, field.default, field.default_factory)
        _refuse_hidden_sections(cls, field.name, hints[field.name])
    return found


@functools.cache
def names_of(cls: type) -> dict[str, str]:
    """Every accepted spelling of a section's settings -> canonical name."""
    return {spelling: field.name for field in fields_of(cls).values() for spelling in (field.name, *field.aliases)}


def members(tp: Any) -> tuple[Any, ...]:
    """The alternatives of a union, also of an annotated one; any other type is its only alternative."""
    origin = get_origin(tp)
    if origin is Annotated and get_origin(get_args(tp)[0]) in (Union, UnionType):
        return members(get_args(tp)[0])
    return get_args(tp) if origin in (Union, UnionType) else (tp,)


def bare(tp: Any) -> Any:
    """``T`` for ``T``, ``T | None`` and ``Annotated[T, ...]``."""
    while get_origin(tp) is Annotated:
        tp = get_args(tp)[0]
    others = [member for member in members(tp) if member is not NoneType]
    return bare(others[0]) if len(others) == 1 and others[0] is not tp else tp


def is_optional(tp: Any) -> bool:
    return NoneType in members(tp)


def is_path(tp: Any) -> bool:
    return get_origin(tp) is Annotated and any(isinstance(mark, _PathMarker) for mark in get_args(tp)[1:])


def section_of(tp: Any) -> type | None:
    """The dataclass of a section or optional section."""
    inner = bare(tp)
    return inner if isinstance(inner, type) and is_dataclass(inner) else None


def child_type(tp: Any, key: object) -> Any | None:
    """The type of one entry of a list, tuple or dict type; ``None`` when ``tp`` is neither or has no such entry."""
    inner = bare(tp)
    origin, args = get_origin(inner), get_args(inner)
    if origin is dict and isinstance(key, str):
        return args[1]
    if origin is list and isinstance(key, int):
        return args[0]
    if origin is tuple and isinstance(key, int):
        if args[1:] == (...,):
            return args[0]
        return args[key] if key < len(args) else None
    return None


def item_section(tp: Any) -> type | None:
    """The dataclass of the entries of ``list[S]``, ``tuple[S, ...]`` and ``dict[str, S]``."""
    inner = bare(tp)
    if get_origin(inner) is tuple and get_args(inner)[1:] != (...,):
        return None
    entry = child_type(inner, "") or child_type(inner, 0)
    return section_of(entry) if entry is not None else None


def declared_defaults(cls: type) -> dict[str, object]:
    """Default of each setting, ``MISSING`` where it has none."""
    return {name: field.make_default() for name, field in fields_of(cls).items()}


def set_by_parent(cls: type, instance: object) -> dict[str, object]:
    """What a parent set differently from ``cls`` when it made ``instance`` as the default of a section.

    A value that ``__post_init__`` works out from others is left out, to be worked out again.
    """
    try:
        pristine = cls()
    except (TypeError, ValueError):
        return {name: getattr(instance, name) for name in fields_of(cls)}
    values = {name: getattr(instance, name) for name in fields_of(cls)}
    return {name: value for name, value in values.items() if value != getattr(pristine, name)}


def walk(cls: type, prefix: str = "", instance: object = None) -> Iterator[tuple[str, Field, object]]:
    """Every leaf below ``cls`` as (dotted key, field, default); what a list of sections holds as ``key[].name``."""
    defaults = declared_defaults(cls) | ({} if instance is None else set_by_parent(cls, instance))
    for name, field in fields_of(cls).items():
        key = f"{prefix}{name}"
        section, default = section_of(field.type), defaults[name]
        if section is not None:
            yield from walk(section, f"{key}.", default if isinstance(default, section) else None)
            continue
        yield key, field, default
        item = item_section(field.type)
        if item is not None:
            yield from walk(item, f"{key}[].")


def documented_fields(cls: type) -> dict[str, FieldDoc]:
    """Dotted key -> type, default and documentation of every setting below ``cls``."""
    return {key: FieldDoc(type_text(f.type), default, doc_at(cls, key)) for key, f, default in walk(cls)}


def doc_at(cls: type, key: str) -> str:
    """The documentation of the field at a dotted key of ``walk``."""
    head, _, rest = key.partition(".")
    name = head.removesuffix("[]")
    if not rest:
        return field_docs(cls).get(name, "")
    tp = fields_of(cls)[name].type
    section = section_of(tp) or item_section(tp)
    return doc_at(section, rest) if section else ""


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field -> the string literal under it, base classes included; empty where the source isn't at hand."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, after in zip(body, body[1:], strict=False):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def section_doc(cls: type) -> str:
    """First paragraph of a section's docstring; a dataclass without one is given its signature, which is left out."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split("\n\n")[0].split())


def type_text(tp: Any) -> str:
    """A type as the reference shows it, such as ``int``, ``path | null`` or ``'a' | 'b'``."""
    if is_path(tp):
        return "path"
    if len(members(tp)) > 1:
        return " | ".join(type_text(member) for member in members(tp))
    inner = bare(tp)
    origin, args = get_origin(inner), get_args(inner)
    if origin is Literal:
        return " | ".join(_yaml_word(choice) for choice in args)
    if origin in (list, tuple):
        entries = dict.fromkeys(type_text(entry) for entry in args if entry is not ...)
        return f"list[{', '.join(entries)}]"
    if origin is dict:
        return f"dict[{type_text(args[0])}, {type_text(args[1])}]"
    return "null" if inner is NoneType else getattr(inner, "__name__", str(inner))


_PHRASES = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def phrase(tp: Any) -> str:
    """A type in the words of an error message: what the value must be."""
    if len(members(tp)) > 1:
        return " or ".join(phrase(member) for member in members(tp))
    inner = bare(tp)
    origin, args = get_origin(inner), get_args(inner)
    if origin is Literal:
        choices = ", ".join(_yaml_word(choice) for choice in args)
        return f"one of {choices}" if len(args) > 1 else choices
    if origin is tuple and args[1:] != (...,):
        return "a list of " + ", then ".join(phrase(entry) for entry in args)
    if origin in (list, tuple):
        return f"a list (each entry {phrase(args[0])})"
    if origin is dict:
        return f"a mapping (each value {phrase(args[1])})"
    if section_of(inner):
        return "a section (a mapping of its settings)"
    return _PHRASES.get(inner, type_text(inner))


def choices(tp: Any) -> list[object]:
    """All ``Literal`` values that ``tp`` allows."""
    return [
        choice for member in members(tp) if get_origin(bare(member)) is Literal for choice in get_args(bare(member))
    ]


def _yaml_word(value: object) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _refuse_hidden_sections(cls: type, name: str, tp: Any) -> None:
    """Sections are read in ``S``, ``S | None`` and one level of ``list``, ``tuple[S, ...]`` or ``dict``."""
    if section_of(tp) is None and item_section(tp) is None and _holds_section(tp):
        raise TypeError(f"{cls.__name__}.{name}: a section can't be read from a {tp}")


def _holds_section(tp: Any) -> bool:
    return section_of(tp) is not None or any(_holds_section(inner) for inner in get_args(tp))
