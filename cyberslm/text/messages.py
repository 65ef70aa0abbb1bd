"""Messages, conversations, and the one text form in which they travel where documents do.

A record of a conversation goes the way of every document: it is redacted, compared with others and split by its text.
So it is written as one text, in which U+FDD1 opens a turn and U+FDD2 ends the name of who speaks: noncharacters, never
meant for interchange (Unicode 23.7), which are escaped where a message holds one. ``unpack(pack(x)) == x``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from cyberslm.errors import DataError, InputError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)

TURN, SAYS, ESCAPE = "\ufdd1", "\ufdd2", "\ufdd3"
CHOSEN, REJECTED = "+", "-"

_ESCAPES = {TURN: ESCAPE + "1", SAYS: ESCAPE + "2", ESCAPE: ESCAPE + "3"}
_SPECIAL = re.compile("[\ufdd1\ufdd2\ufdd3]")
_ESCAPED = re.compile("\ufdd3([123])")


class Message(NamedTuple):
    """Who speaks, and what is said."""

    role: Role
    content: str


class Conversation(NamedTuple):
    """Messages, or with ``chosen`` and ``rejected`` a prompt and two ways to go on, of which the first is better."""

    messages: tuple[Message, ...]
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()

    @property
    def contents(self) -> Iterator[str]:
        """What is said, to learn a vocabulary from; the rejected answer is no text to learn from."""
        return (message.content for message in (*self.messages, *self.chosen))


def checked(messages: Iterable[object]) -> tuple[Message, ...]:
    """Messages from (role, content) pairs or mappings with these keys. Raises InputError naming what is wrong."""
    found = [_message(message, number) for number, message in enumerate(messages)]
    if not found:
        raise InputError("a conversation needs at least one message")
    return tuple(found)


def pack(conversation: Conversation) -> str:
    """A conversation as one text."""
    parts = (("", conversation.messages), (CHOSEN, conversation.chosen), (REJECTED, conversation.rejected))
    turns = (
        f"{TURN}{mark}{role}{SAYS}{_SPECIAL.sub(lambda found: _ESCAPES[found[0]], content)}"
        for mark, messages in parts
        for role, content in messages
    )
    return "".join(turns)


def unpack(text: str) -> Conversation:
    """The inverse of ``pack``. Raises DataError for any other text."""
    first, *turns = text.split(TURN)
    if first or not turns:
        raise DataError("a text that is no conversation is where one is expected")
    parts: dict[str, list[Message]] = {"": [], CHOSEN: [], REJECTED: []}
    for turn in turns:
        name, gap, content = turn.partition(SAYS)
        mark = name[:1] if name[:1] in (CHOSEN, REJECTED) else ""
        role = next((role for role in ROLES if name == mark + role), None)
        if not gap or role is None:
            raise DataError("a conversation has a turn without a known role")
        plain = _ESCAPED.sub(lambda found: chr(0xFDD0 + int(found[1])), content)
        parts[mark].append(Message(role, plain))
    return Conversation(*(tuple(found) for found in parts.values()))


def last_answer(messages: Sequence[Message]) -> int:
    """The number of the last assistant message, -1 where there is none."""
    return max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)


def _message(message: object, number: int) -> Message:
    if isinstance(message, dict):
        message = (message.get("role"), message.get("content"))
    if not isinstance(message, tuple | list) or len(message) != 2:
        raise InputError(f"message {number} is neither a (role, content) pair nor a mapping with these keys")
    role, content = message
    if role not in ROLES:
        raise InputError(f"message {number} has the role {role!r:.40}; known roles: {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise InputError(f"message {number} has content of type {type(content).__name__}; it must be text")
    return Message(role, content)
