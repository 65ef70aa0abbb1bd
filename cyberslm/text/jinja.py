"""Chat templates that came with a model.

A template that gives on all probes what a style of ours gives is that style (`recognised`). Any other is run in a
sandbox with limits (`sandbox`). Its text is then cut at the control tokens that *it* spelled; what a message spells was
swapped for other characters before, so that a message can forge nothing.

Training needs to know which tokens an assistant said. They are those that a longer part of the conversation adds to a
shorter one; a template that writes earlier turns anew when later ones come gives no such prefix and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from cyberslm.errors import DataError, GenerationError
from cyberslm.text.chat import STYLES, Learned, Rendered, TurnRenderer, control_pieces
from cyberslm.text.messages import Message, last_answer
from cyberslm.text.sandbox import Program, names_of
from cyberslm.text.tokenizer import Tokenizer

_PRIVATE = range(0xF0000, 0xFFFFD)
_PROBES: tuple[tuple[Message, ...], ...] = (
    (Message("user", "What  is\nit? "),),
    (Message("system", " Be\nbrief. "), Message("user", "What  is\nit? ")),
    (Message("user", "a"), Message("assistant", " <think>b</think> c\n"), Message("user", "d")),
    (Message("user", "a"), Message("assistant", "b"), Message("tool", "c"), Message("assistant", "")),
)


def recognised(tokenizer: Tokenizer, template: str) -> TurnRenderer | None:
    """The style of ours that gives the same text as ``template`` on every probe, if there is one."""
    theirs = _Foreign(tokenizer, template)
    control = control_pieces(tokenizer)
    for style in (style for style in STYLES if all(piece in control for piece in style.needs)):
        bare = TurnRenderer(tokenizer, style, bos=False)
        try:
            first = theirs.text(_PROBES[0])
            system = _system(first, bare)
            for bos in (False, True):
                ours = TurnRenderer(tokenizer, style, bos=bos, system=system)
                if all(theirs.text(p, asks=asks) == ours.text(p, asks=asks) for p in _PROBES for asks in (False, True)):
                    return ours
        except GenerationError:
            return None
    return None


class JinjaRenderer:
    """A foreign template with a tokenizer; raises ConfigError when it can't be read."""

    name = "template"

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.template = template
        self._tokenizer, self._control = tokenizer, control_pieces(tokenizer)
        self._foreign = _Foreign(tokenizer, template)
        self._spelled = re.compile("|".join(re.escape(piece) for piece in sorted(self._control, key=len, reverse=True)))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The end of text, and the control token that the template puts after an answer."""
        question = Message("user", "a")
        asked = self._ids([question], asks=True)
        added = self._ids([question, Message("assistant", "b")], asks=False)[len(asked) :]
        ends = [token for token in added if token in self._tokenizer.control_ids]
        return frozenset({self._tokenizer.eos_id, *ends[:1]})

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids after which the assistant speaks. Raises GenerationError where the template fails."""
        return self._ids(messages, asks=True)

    def render(self, messages: Sequence[Message], *, learned: Learned = "all") -> Rendered:
        """A whole conversation; raises DataError where the template leaves open which tokens are an answer."""
        ids = self._ids(messages, asks=False)
        trained = [False] * len(ids)
        last = last_answer(messages)
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            asked, answered = self._ids(messages[:number], asks=True), self._ids(messages[: number + 1], asks=False)
            if answered[: len(asked)] != asked or ids[: len(answered)] != answered:
                raise DataError(
                    "the model's chat template writes earlier turns anew when later ones come, so that nothing tells"
                    " which tokens are an answer: set data.chat.style to chatml, markers or plain to train"
                )
            stop = 1 + max(
                (at for at, token in enumerate(answered) if token in self._tokenizer.control_ids), default=-1
            )
            if stop <= len(asked):
                raise DataError(
                    "the model's chat template ends an answer with no control token, so it can't be learned"
                )
            if learned == "all" or number == last:
                trained[len(asked) : stop] = [True] * (stop - len(asked))
        return Rendered(ids, trained)

    def _ids(self, messages: Sequence[Message], *, asks: bool) -> list[int]:
        """What the template spelled becomes control ids, what messages spelled stays text."""
        contents = "".join(message.content for message in messages)
        spelled = sorted((piece for piece in self._control if piece in contents), key=len, reverse=True)
        free = (char for char in map(chr, _PRIVATE) if char not in contents)
        hidden = {piece: next(free) for piece in spelled}
        shown = {char: piece for piece, char in hidden.items()}
        guarded = [message._replace(content=_swap(message.content, hidden)) for message in messages]
        text = self._foreign.text(guarded, asks=asks)
        ids: list[int] = []
        start = 0
        for found in self._spelled.finditer(text):
            ids += [*self._encode(_swap(text[start : found.start()], shown)), self._control[found[0]]]
            start = found.end()
        return ids + self._encode(_swap(text[start:], shown))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []


class _Foreign:
    """A template with the names of the tokenizer's special tokens."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._program = Program(template)
        roles = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id, "unk": tokenizer.unk_id}
        self._names = {f"{role}_token": tokenizer.piece(index) for role, index in roles.items()}

    def text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        return self._program.run(names_of(messages, asks=asks) | self._names)


def _system(first: str, bare: TurnRenderer) -> str | None:
    """What a template says as the system to a conversation that has no system message, read off its text."""
    before, _, after = bare.text((Message("system", "\0"), *_PROBES[0])).partition("\0")
    start = first.find(before) if before else -1
    if start < 0 or len(first) < start + len(before) + len(after) or not first.endswith(after):
        return None
    return first[start + len(before) : len(first) - len(after)]


def _swap(text: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text
