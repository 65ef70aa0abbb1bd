"""`Chat`: a conversation with a model, through the engine and the one renderer of turns.

What was said is kept as messages; each answer begins with the ids of all of them, rendered anew: nothing but the
messages is state. When they and an answer exceed the context, the oldest exchanges are left out, at turn borders. An
answer ends with the id that ends a turn, which the model was trained to make.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from cyberslm.decoding.request import FinishReason
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.generation.engine import Engine
from cyberslm.generation.session import TokenEvent
from cyberslm.text.chat import Renderer, fit
from cyberslm.text.messages import Message

ANSWER_TOKENS = 256
ANSWER_SHARE = 4
"""Without ``max_new_tokens`` an answer gets 256 tokens, or a quarter of a shorter context."""


class Chat:
    """Messages so far, and how they go on."""

    def __init__(self, engine: Engine, renderer: Renderer, *, system: str | None = None) -> None:
        self.engine, self.renderer = engine, renderer
        self.messages: list[Message] = [] if system is None else [Message("system", system)]
        self.left_out = 0
        """Messages that the last answer didn't see."""
        self.finish_reason: FinishReason | None = None
        """How the last answer ended: cancelled while it has not, and when it was given up."""
        self._answer: Generator[TokenEvent] | None = None

    def reply(self, text: str, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Say something and yield the answer as it is made.

        What was said and the answer as far as it was yielded are messages at once, so they stay when the rest is given
        up: by leaving the loop, or by the next reply, which ends an answer that is still being made. Raises
        GenerationError, and forgets what was said, when the message alone doesn't fit the context.
        """
        params = SamplingParams() if params is None else params
        context = self.engine.model.max_seq_len
        budget = params.max_new_tokens or max(1, min(ANSWER_TOKENS, context // ANSWER_SHARE))
        if budget >= context:
            raise GenerationError(f"max_new_tokens {budget} leaves no room for a message in a context of {context}")
        asked = [*self.messages, Message("user", text)]
        kept, ids = fit(self.renderer, asked, context - budget)
        stops = tuple(sorted({*params.stop_ids, *self.renderer.stop_ids} - {self.engine.tokenizer.eos_id}))
        events = self.engine.stream([ids], replace(params, max_new_tokens=budget, stop_ids=stops))
        self.left_out = len(asked) - len(kept)
        self.messages, self.finish_reason = [*asked, Message("assistant", "")], "cancelled"
        if self._answer is not None:
            self._answer.close()
        self._answer = self._told(asked, events)
        return self._answer

    def _told(self, asked: list[Message], events: Iterator[TokenEvent]) -> Generator[TokenEvent]:
        said = ""
        for event in events:
            said += event.text
            self.messages = [*asked, Message("assistant", said)]
            self.finish_reason = event.finish_reason or "cancelled"
            yield event
