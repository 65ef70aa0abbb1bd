"""A record to one plain, readable text, by its shape.

    text               the field ``text``, or the one that ``data.text_field`` names by a dotted path
    messages           ``messages`` (role, content) or ``conversations`` (from, value) as "role: content" lines
    preference         ``prompt``, then the ``chosen`` answer; the rejected one is no text to learn
    instruction        ``instruction``, ``input`` when it isn't empty, ``output``, a blank line between
    prompt_completion  ``prompt``, then ``completion``: a blank line between, unless white space is there already

``auto`` takes the first of these that a record has the fields for. With another ``data.format`` than text a record
becomes a conversation instead (`turns`). Errors name fields, never values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from cyberslm.data.readers.place import BAD_RECORD, Place, Texts, Unreadable
from cyberslm.data.readers.turns import SPOKEN, Record, asked_for, content_of, conversation_text, string

if TYPE_CHECKING:
    from cyberslm.data.config import Shape


Records = Iterator[tuple[object, int]]
"""Records as they are read, each with the line where it begins."""


def texts_of(records: Records, place: Place) -> Texts:
    """The texts of records; a bad one is told its place."""
    for record, line in records:
        yield from record_texts(record, line, place)


def record_texts(record: object, line: int, place: Place) -> Texts:
    """The text of a record, unless it is bad, which is told its place."""
    try:
        text = _record_text(record, line, place)
    except Unreadable as error:
        place.bad(error.problem, reason=BAD_RECORD, line=line)
        return
    yield text, line


def wanted_fields(place: Place) -> frozenset[str]:
    """The top-level fields that a record's text can come from."""
    if place.config.text_field is not None:
        return frozenset({place.config.text_field.split(".")[0]})
    if place.config.format != "text":
        return frozenset(name for shape in asked_for(place) for name in shape.needs | shape.may)
    return frozenset(name for shape in _asked_for(place.config.record_shape) for name in shape.needs | shape.may)


def _record_text(record: object, line: int, place: Place) -> str:
    if not isinstance(record, dict):
        raise Unreadable(f"a JSON {type(record).__name__} where an object, a record, is expected")
    if place.config.format != "text":
        return conversation_text(record, line, place)
    if (path := place.config.text_field) is not None:
        return string(_follow(record, path), path)
    wanted = place.config.record_shape
    for shape in _asked_for(wanted):
        if record.keys() >= shape.needs:
            return shape.text(record, line, place)
    asked = "of any record_shape" if wanted == "auto" else f"of record_shape {wanted}"
    raise Unreadable(f"not the fields {asked}; the record has {_some(record)}; data.text_field can name one of them")


@cache
def _asked_for(name: Shape) -> tuple[_Shape, ...]:
    return tuple(shape for shape in SHAPES if name in ("auto", shape.name))


def _follow(record: Record, path: str) -> object:
    value: object = record
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise Unreadable(f"no field {path!r} (data.text_field); the record has {_some(record)}")
    return value


def _text(record: Record, _line: int, _place: Place) -> str:
    return string(record["text"], "text")


def _messages(record: Record, line: int, place: Place) -> str:
    name = "messages" if "messages" in record else "conversations"
    return _conversation(record[name], name, line, place)


def _preference(record: Record, line: int, place: Place) -> str:
    prompt = _side(record.get("prompt", ""), "prompt", line, place)
    return _joined(prompt, _side(record["chosen"], "chosen", line, place))


def _instruction(record: Record, _line: int, _place: Place) -> str:
    parts = [string(record.get(name, ""), name) for name in ("instruction", "input", "output")]
    return "\n\n".join(part for part in parts if part.strip())


def _prompt_completion(record: Record, line: int, place: Place) -> str:
    prompt = _side(record["prompt"], "prompt", line, place)
    return _joined(prompt, _side(record["completion"], "completion", line, place))


def _side(value: object, name: str, line: int, place: Place) -> str:
    """A string, or a list of messages."""
    return _conversation(value, name, line, place) if isinstance(value, list) else string(value, name)


def _joined(before: str, after: str) -> str:
    bare = not before or not after or before[-1].isspace() or after[0].isspace()
    return before + ("" if bare else "\n\n") + after


def _conversation(value: object, name: str, line: int, place: Place) -> str:
    if not isinstance(value, list):
        raise Unreadable(f"field {name!r} is not a list of messages")
    turns = []
    for message in value:
        if not isinstance(message, Mapping):
            raise Unreadable(f"field {name!r} holds something that is not a message")
        role = message.get("role", message.get("from"))
        if not isinstance(role, str):
            raise Unreadable(f"field {name!r} has a message without a role")
        text = content_of(message.get("content", message.get("value")), name, line, place)
        if text:
            turns.append(f"{SPOKEN.get(role, role)}: {text}")
    return "\n\n".join(turns)


def _some(record: Record) -> str:
    names = ", ".join(ascii(str(name)[:40]) for name in list(record)[:8])
    return f"{names}, ..." if len(record) > 8 else names or "no fields"


class _Shape(NamedTuple):
    name: str
    needs: frozenset[str]
    """Fields that a record of this shape has."""
    may: frozenset[str]
    """Fields that it may have beside."""
    text: Callable[[Record, int, Place], str]


# In the order in which `auto` looks for them.
SHAPES = (
    _Shape("text", frozenset({"text"}), frozenset(), _text),
    _Shape("messages", frozenset({"messages"}), frozenset(), _messages),
    _Shape("messages", frozenset({"conversations"}), frozenset(), _messages),
    _Shape("preference", frozenset({"chosen"}), frozenset({"prompt"}), _preference),
    _Shape("instruction", frozenset({"instruction", "output"}), frozenset({"input"}), _instruction),
    _Shape("prompt_completion", frozenset({"prompt", "completion"}), frozenset(), _prompt_completion),
)
