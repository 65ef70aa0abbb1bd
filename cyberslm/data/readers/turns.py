"""A record to a conversation, by its shape; what every reader of messages needs besides.

    messages           ``messages`` (role, content) or ``conversations`` (from, value)
    instruction        ``instruction`` and ``input`` when it isn't empty are asked, ``output`` is the answer
    prompt_completion  ``prompt`` is asked (or is a list of messages), ``completion`` is the answer
    preference         ``prompt``, ``chosen`` and ``rejected``; without a prompt, what both lists of messages share

A record that teaches nothing (no answer, or a choice between equals) is bad input. Errors name fields, never values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cyberslm.data.readers.place import Place, Unreadable
from cyberslm.text.messages import ROLES, Conversation, Message, pack

Record = dict[str, object]

SPOKEN = {"human": "user", "gpt": "assistant"}
NOT_TEXT = "part of a message that is not text"


def conversation_text(record: Record, line: int, place: Place) -> str:
    """The conversation of a record as one text (`text.messages`); raises Unreadable."""
    pairs = place.config.format == "preference"
    for shape in asked_for(place):
        if record.keys() >= shape.needs:
            return pack(_teaching(shape.read(record, _Spot(line, place)), pairs=pairs))
    wanted = (
        "chosen and rejected" if pairs else "messages, conversations, instruction and output, prompt and completion"
    )
    raise Unreadable(f"not the fields of a {'preference' if pairs else 'conversation'}: {wanted}")


def asked_for(place: Place) -> list[Shape]:
    """The shapes that ``data.format`` and ``data.record_shape`` allow, in the order of looking."""
    wanted, pairs = place.config.record_shape, place.config.format == "preference"
    return [shape for shape in SHAPES if (shape.name == "preference") == pairs and wanted in ("auto", shape.name)]


def string(value: object, name: str) -> str:
    """The value of a field that must be a string."""
    if not isinstance(value, str):
        raise Unreadable(f"field {name!r} is not a string")
    return value


def content_of(content: object, name: str, line: int, place: Place) -> str:
    """What a message says: a string, or the parts of a list that are text."""
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise Unreadable(f"field {name!r} has a message whose content is neither a string nor a list of parts")
    texts = []
    for part in content or [None]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            place.skip(NOT_TEXT, line)
    return "\n".join(texts)


class _Spot(NamedTuple):
    line: int
    place: Place

    def messages(self, value: object, name: str) -> tuple[Message, ...]:
        if not isinstance(value, list):
            raise Unreadable(f"field {name!r} is not a list of messages")
        return tuple(self._message(each, name) for each in value)

    def side(self, value: object, name: str, role: Any) -> tuple[Message, ...]:
        """A list of messages, or what ``role`` says."""
        return self.messages(value, name) if isinstance(value, list) else (Message(role, string(value, name)),)

    def _message(self, message: object, name: str) -> Message:
        if not isinstance(message, Mapping):
            raise Unreadable(f"field {name!r} holds something that is not a message")
        spoken = message.get("role", message.get("from"))
        role = next((known for known in ROLES if known == SPOKEN.get(str(spoken), spoken)), None)
        if role is None:
            raise Unreadable(f"field {name!r} has a message without a known role ({', '.join(ROLES)})")
        if message.get("tool_calls"):
            raise Unreadable(f"field {name!r} has a message with tool_calls, which no format here can say")
        return Message(role, content_of(message.get("content", message.get("value")), name, self.line, self.place))


def _messages(record: Record, spot: _Spot) -> Conversation:
    name = "messages" if "messages" in record else "conversations"
    return Conversation(spot.messages(record[name], name))


def _instruction(record: Record, _spot: _Spot) -> Conversation:
    asked, given, said = (string(record.get(name, ""), name) for name in ("instruction", "input", "output"))
    question = f"{asked}\n\n{given}" if given.strip() else asked
    return Conversation((Message("user", question), Message("assistant", said)))


def _prompt_completion(record: Record, spot: _Spot) -> Conversation:
    asked = spot.side(record["prompt"], "prompt", "user")
    return Conversation(asked + spot.side(record["completion"], "completion", "assistant"))


def _preference(record: Record, spot: _Spot) -> Conversation:
    sides = (spot.side(record[name], name, "assistant") for name in ("chosen", "rejected"))
    chosen, rejected = sides
    if "prompt" in record:
        return Conversation(spot.side(record["prompt"], "prompt", "user"), chosen, rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return Conversation(chosen[:shared], chosen[shared:], rejected[shared:])


def _teaching(found: Conversation, *, pairs: bool) -> Conversation:
    for name, messages in (
        (("chosen", found.chosen), ("rejected", found.rejected)) if pairs else (("", found.messages),)
    ):
        answers = [message.content for message in messages if message.role == "assistant"]
        if not any(answer.strip() for answer in answers):
            raise Unreadable(f"{name or 'a conversation'} without an answer of the assistant, so nothing to learn")
    if pairs and not found.messages:
        raise Unreadable("a preference without a prompt")
    if pairs and found.chosen == found.rejected:
        raise Unreadable("chosen and rejected are the same, so nothing to learn")
    return found


class Shape(NamedTuple):
    """A kind of record: its name, the fields that it has, those that it may have, and what it says."""

    name: str
    needs: frozenset[str]
    may: frozenset[str]
    read: Callable[[Record, _Spot], Conversation]


SHAPES = (
    Shape("messages", frozenset({"messages"}), frozenset(), _messages),
    Shape("messages", frozenset({"conversations"}), frozenset(), _messages),
    Shape("instruction", frozenset({"instruction", "output"}), frozenset({"input"}), _instruction),
    Shape("prompt_completion", frozenset({"prompt", "completion"}), frozenset(), _prompt_completion),
    Shape("preference", frozenset({"chosen", "rejected"}), frozenset({"prompt"}), _preference),
)
"""In the order in which ``auto`` looks for them."""
