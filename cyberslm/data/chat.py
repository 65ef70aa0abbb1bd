"""Conversations to documents of a token store: ids, and which of them are trained.

A conversation is one document; a preference is two in a row, its prompt with the chosen and with the rejected answer,
of which only the answers are trained. One longer than ``max_tokens`` is cut after the last answer that fits, or left
out; a preference is never cut. What is cut or left out is counted with its place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cyberslm.config import PathStr
from cyberslm.data.shards import Ids, token_type
from cyberslm.errors import ConfigError, DataError
from cyberslm.text.chat import MAX_TEMPLATE_BYTES, Learned, Renderer, renderer_for
from cyberslm.text.messages import Message, unpack
from cyberslm.text.tokenizer import Tokenizer

Format = Literal["text", "chat", "preference"]

CUT = "end of a conversation beyond data.chat.max_tokens"
LONG = "conversation longer than data.chat.max_tokens"


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How conversations become tokens, where `data.format` is chat or preference."""

    style: Literal["auto", "chatml", "markers", "plain"] = "auto"
    """How turns are written: as chatml, with the markers of a tokenizer trained here, or plain; auto takes the model's
    own chat template, else what its tokenizer has control tokens for."""
    template: PathStr | None = None
    """A chat_template.jinja to write turns by, with style auto; null takes the one beside tokenizer.path."""
    learn: Learned = "all"
    """The assistant's turns that are trained: all of a conversation, or its last."""
    too_long: Literal["cut", "drop", "error"] = "cut"
    """What is done with a conversation beyond max_tokens: cut after the last answer that fits, left out, an error."""
    max_tokens: int | None = None
    """Most tokens of a conversation, or of both sides of a preference together; null takes model.max_seq_len."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 2")
        if self.template is not None and self.style != "auto":
            raise ConfigError(f"template is given and style is {self.style}: leave one of them out")


class Made(NamedTuple):
    """A document's ids, which of them are trained (None: all), and the UTF-8 bytes of its text."""

    ids: Ids
    trained: npt.NDArray[np.bool_] | None
    text_bytes: int


class Encoded(NamedTuple):
    """The documents of one text, none where it is left out; ``counted`` names what was cut or left out."""

    documents: tuple[Made, ...]
    counted: str | None = None


Encode = Callable[[Sequence[str], int], Iterator[Encoded]]


def encode_texts(tokenizer: Tokenizer) -> Encode:
    """Plain texts, one document each."""

    def encode(texts: Sequence[str], threads: int) -> Iterator[Encoded]:
        for text, ids in zip(texts, tokenizer.encode_documents(texts, num_threads=threads), strict=True):
            yield Encoded((Made(ids, None, len(text.encode())),))

    return encode


def encode_conversations(tokenizer: Tokenizer, config: ChatConfig) -> Encode:
    """Conversations and preferences, as the readers pack them. Raises DataError for a text that is none."""
    maker = _Maker(renderer_of(config, tokenizer), config, token_type(tokenizer.vocab_size))
    return lambda texts, _threads: map(maker, texts)


def renderer_of(config: ChatConfig, tokenizer: Tokenizer) -> Renderer:
    """The renderer of the configured style or template."""
    return renderer_for(tokenizer, style=config.style, template=read_template(config))


def read_template(config: ChatConfig) -> str | None:
    """The text of ``data.chat.template``, if there is one. Raises ConfigError."""
    if config.template is None:
        return None
    try:
        with Path(config.template).open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"data.chat.template: {config.template} is larger than {MAX_TEMPLATE_BYTES:,} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"data.chat.template: can't read {config.template}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.chat.template: {config.template} is not UTF-8 text") from error


@dataclass(frozen=True)
class _Maker:
    renderer: Renderer
    config: ChatConfig
    dtype: np.dtype[np.integer]

    def __call__(self, text: str) -> Encoded:
        found = unpack(text)
        if found.chosen:
            return self._pair(found.messages, found.chosen, found.rejected)
        messages = found.messages
        whole = self._document(messages)
        if self._fits(whole):
            return Encoded((whole,))
        self._refuse(whole)
        if self.config.too_long == "cut":
            ends = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
            fitting = bisect_right(ends, self._room, key=lambda end: self._document(messages[:end]).ids.size)
            if fitting:
                return Encoded((self._document(messages[: ends[fitting - 1]]),), CUT)
        return Encoded((), LONG)

    def _pair(self, prompt: Sequence[Message], *answers: Sequence[Message]) -> Encoded:
        asked = self.renderer.prompt(prompt)
        both = tuple(self._answer(asked, [*prompt, *answer]) for answer in answers)
        if self._fits(*both):
            return Encoded(both)
        self._refuse(*both)
        return Encoded((), LONG)

    def _answer(self, asked: list[int], messages: Sequence[Message]) -> Made:
        """Only what comes after the prompt is trained."""
        made = self._document(messages)
        if made.ids[: len(asked)].tolist() != asked or made.trained is None:
            raise DataError(
                "the chat template doesn't write a prompt as the beginning of its answer: set data.chat.style"
            )
        made.trained[: len(asked)] = False
        return made

    def _document(self, messages: Sequence[Message]) -> Made:
        ids, trained = self.renderer.render(messages, learned=self.config.learn)
        size = sum(len(message.content.encode()) for message in messages)
        return Made(np.array(ids, self.dtype), np.array(trained, np.bool_), size)

    @property
    def _room(self) -> int:
        return self.config.max_tokens or 1 << 62

    def _fits(self, *made: Made) -> bool:
        return sum(each.ids.size for each in made) <= self._room

    def _refuse(self, *made: Made) -> None:
        if self.config.too_long == "error":
            size = sum(each.ids.size for each in made)
            raise DataError(
                f"a conversation of {size:,} tokens, and data.chat.max_tokens is {self._room:,}: shorten it, raise"
                " model.max_seq_len, or set data.chat.too_long to cut or drop"
            )
