"""Messages to ids *and* loss mask: one renderer for training, chat, serving and evaluation.

A turn is what opens it, who speaks, what is said, and what ends it. Control tokens come in by their ids alone, so that
text which spells one stays text. Ids and mask are made together, token by token: trained is what an assistant says and
the token that ends its turn, the one by which a model learns to stop. The text between two control tokens is encoded as
one, as other programs do; only the place where an answer begins is always a border of tokens, as it is when the model
is asked (they differ where an answer begins with white space that would merge with the line end before it).

    chatml    <|im_start|>user LF Hi<|im_end|> LF      models that have these control tokens: SmolLM2, Qwen
    markers   <|user|>Hi<|end|>                        models whose tokenizer was trained here
    plain     ### User: LF Hi LF LF                    any other; an answer ends with <eos>, and text can forge turns

`template` is the same as a Jinja template, which goes into ``chat_template.jinja`` for other programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

from cyberslm.errors import ConfigError, GenerationError
from cyberslm.text.messages import Message, last_answer
from cyberslm.text.tokenizer import Tokenizer

Learned = Literal["all", "last"]
"""The assistant turns that are trained: all of a conversation, or its last."""
StyleName = Literal["chatml", "markers", "plain"]

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 16


class Rendered(NamedTuple):
    """The ids of a conversation and which of them are trained."""

    ids: list[int]
    trained: list[bool]


class Renderer(Protocol):
    """What a chat, a server and training ask of a format."""

    @property
    def name(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    def render(self, messages: Sequence[Message], *, learned: Learned = "all") -> Rendered: ...
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...


class Part(NamedTuple):
    """Text, or a control token by its spelling; ``answer``: an assistant says it, and it may be learned."""

    text: str
    control: bool = False
    answer: bool = False
    learned: bool = True


END = Part("", control=True)


class Style(NamedTuple):
    """A format: control tokens that it needs, and the parts of a turn. ``{role}`` and ``{Role}`` stand for the role."""

    name: StyleName
    needs: tuple[str, ...]
    opens: str
    header: str
    ends: str
    """What ends a turn; empty: the end of text, and that for assistants only."""
    tail: str

    def turn(self, message: Message, end_of_text: str) -> Iterator[Part]:
        """The parts of a turn."""
        yield from self.start(message.role)
        answer = message.role == "assistant"
        yield Part(message.content, answer=answer)
        if self.ends or answer:
            yield Part(self.ends or end_of_text, control=True, answer=answer)
        yield Part(self.tail)

    def start(self, role: str) -> Iterator[Part]:
        """What comes before something is said."""
        if self.opens:
            yield Part(self.opens.format(role=role), control=True)
        yield Part(self.header.format(role=role, Role=role.capitalize()))

    def template(self, *, bos: str, eos: str, system: str | None) -> str:
        """The Jinja template that gives the same text."""
        first = ""
        if system is not None:
            said = "".join(part.text for part in self.turn(Message("system", system), eos))
            first = "{% if loop.first and messages[0]['role'] != 'system' %}{{ " + _quoted(said) + " }}{% endif %}"
        opens = (_quoted(self.opens) if self.opens else "''").replace("{role}", "' + message['role'] + '")
        header = _quoted(self.header).replace("{role}", "' + message['role'] + '")
        header = header.replace("{Role}", "' + message['role'] | capitalize + '")
        ends = f"{{{{ {_quoted(self.ends + self.tail)} }}}}"
        if not self.ends:
            ends = "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}" + ends
        asks = "".join(part.text for part in self.start("assistant"))
        return (
            ("{{ bos_token }}" if bos else "")
            + "{% for message in messages %}"
            + first
            + f"{{{{ {opens} }}}}{{{{ {header} }}}}{{{{ message['content'] }}}}{ends}"
            + "{% endfor %}{% if add_generation_prompt %}{{ "
            + _quoted(asks)
            + " }}{% endif %}"
        )


CHATML = Style("chatml", ("<|im_start|>", "<|im_end|>"), "<|im_start|>", "{role}\n", "<|im_end|>", "\n")
MARKERS = Style(
    "markers",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    *("<|{role}|>", "", "<|end|>", ""),
)
PLAIN = Style("plain", (), "", "### {Role}:\n", "", "\n\n")
STYLES: tuple[Style, ...] = (CHATML, MARKERS, PLAIN)


class TurnRenderer:
    """A style with a tokenizer; ``system`` is said first where a conversation has no system message of its own."""

    def __init__(
        self, tokenizer: Tokenizer, style: Style, *, bos: bool | None = None, system: str | None = None
    ) -> None:
        self.control = control_pieces(tokenizer)
        if missing := [piece for piece in style.needs if piece not in self.control]:
            raise ConfigError(
                f"the {style.name} format needs the control piece {missing[0]}, which the tokenizer doesn't have: take"
                f" {best_style(tokenizer).name}, or a tokenizer with it (tokenizer.control_pieces)"
            )
        self.style, self.system, self.bos = style, system, tokenizer.add_bos if bos is None else bos
        self._tokenizer = tokenizer
        self._end_of_text = tokenizer.piece(tokenizer.eos_id)
        self._prefixed = b"".join(map(tokenizer.token_bytes, self._encode("a"))) != b"a"

    @property
    def name(self) -> str:
        return self.style.name

    @property
    def template(self) -> str:
        """For ``chat_template.jinja``."""
        bos = self._tokenizer.piece(self._tokenizer.bos_id) if self.bos else ""
        return self.style.template(bos=bos, eos=self._end_of_text, system=self.system)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        return frozenset({self._tokenizer.eos_id, self.control[self.style.ends or self._end_of_text]})

    def render(self, messages: Sequence[Message], *, learned: Learned = "all") -> Rendered:
        """A whole conversation, with the answers that are ``learned`` marked."""
        only = last_answer(messages) if learned == "last" else None
        parts: list[Part] = []
        for number, message in enumerate(messages):
            turn = self.style.turn(message, self._end_of_text)
            parts += turn if only in (None, number) else (part._replace(learned=False) for part in turn)
        return self._ids([*self._before(messages), *parts])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids after which the assistant speaks."""
        turns = [part for message in messages for part in self.style.turn(message, self._end_of_text)]
        return self._ids([*self._before(messages), *turns, *self.style.start("assistant")]).ids

    def text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """What the template gives: for a look at it, not to be encoded."""
        turns = [part for message in messages for part in self.style.turn(message, self._end_of_text)]
        return "".join(
            part.text for part in (*self._before(messages), *turns, *(self.style.start("assistant") if asks else ()))
        )

    def _before(self, messages: Sequence[Message]) -> Iterator[Part]:
        if self.bos:
            yield Part(self._tokenizer.piece(self._tokenizer.bos_id), control=True)
        if self.system is not None and messages and messages[0].role != "system":
            yield from self.style.turn(Message("system", self.system), self._end_of_text)

    def _ids(self, parts: Sequence[Part]) -> Rendered:
        """Text between control tokens is encoded as one; where an answer begins in it, a token begins."""
        ids: list[int] = []
        trained: list[bool] = []
        before = ""
        for part, after in zip(parts, (*parts[1:], END), strict=True):
            if part.control:
                found, new = [self.control[part.text]], 0
            elif part.answer and part.text:
                found, new = self._answer(before, part.text)
                before = ""
            elif after.control or (after.answer and not after.text):
                found, before = self._encode(before + part.text), ""
                new = len(found)
            else:
                before += part.text
                continue
            ids += found
            trained += [part.answer and part.learned and place >= new for place in range(len(found))]
        return Rendered(ids, trained)

    def _answer(self, before: str, answer: str) -> tuple[list[int], int]:
        """Ids of both texts, and where those of the answer begin."""
        asked, together = self._encode(before), self._encode(before + answer)
        if together[: len(asked)] == asked:
            return together, len(asked)
        if not self._prefixed:
            return asked + self._encode(answer), len(asked)
        same = [mine == theirs for mine, theirs in zip(asked, together, strict=False)]
        return together, sum(accumulate(same, min))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []


def control_pieces(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that only a program can put in, by their spelling."""
    return {tokenizer.piece(index): index for index in sorted(tokenizer.control_ids)}


def best_style(tokenizer: Tokenizer) -> Style:
    """The first style for which the tokenizer has the control tokens."""
    control = control_pieces(tokenizer)
    return next(style for style in STYLES if all(piece in control for piece in style.needs))


def renderer_for(
    tokenizer: Tokenizer, *, style: StyleName | Literal["auto"] = "auto", template: str | None = None
) -> Renderer:
    """The renderer of a model: by name, else by its ``template``, else by the control tokens that it has.

    A template that is no style of ours is rendered by Jinja, with limits. Raises ConfigError for one that is broken.
    """
    if style != "auto":
        return TurnRenderer(tokenizer, next(known for known in STYLES if known.name == style))
    own = TurnRenderer(tokenizer, best_style(tokenizer))
    if template is None or template == own.template:
        return own
    from cyberslm.text.jinja import JinjaRenderer, recognised

    return recognised(tokenizer, template) or JinjaRenderer(tokenizer, template)


def fit(renderer: Renderer, messages: Sequence[Message], room: int) -> tuple[list[Message], list[int]]:
    """The messages whose prompt has at most ``room`` tokens, and its ids: the oldest turns go first, whole exchanges.

    A system message stays. Raises GenerationError when the last message alone doesn't fit.
    """
    kept = [message for message in messages[:1] if message.role == "system"]
    rest = list(messages[len(kept) :])
    while True:
        ids = renderer.prompt([*kept, *rest])
        if len(ids) <= room:
            return [*kept, *rest], ids
        later = next((at for at in range(1, len(rest)) if rest[at].role == "user"), None)
        if later is None:
            raise GenerationError(f"the message takes {len(ids):,} tokens and there is room for {room:,}: shorten it")
        rest = rest[later:]


def _quoted(text: str) -> str:
    """A Jinja string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
