"""`Chat`: a conversation with a model, through the engine and the one renderer of turns.

What was said is kept as messages; each answer begins with the ids of all of them, rendered anew: nothing but the
messages is state. When they and an answer exceed the context, the oldest exchanges are left out, at turn borders. An
answer ends with the id that ends a turn, which the model was trained to make.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
    """Messages so far, and how they go on. ``left_out`` is the number that the last answer didn't see."""

    def __init__(self, engine: Engine, renderer: Renderer, *, system: str | None = None) -> None:
        self.engine, self.renderer = engine, renderer
        self.messages: list[Message] = [] if system is None else [Message("system", system)]
        self.left_out = 0

    def reply(self, text: str, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Say something and yield the answer as it is made; when it ends, or is given up, both are messages.

        Raises GenerationError, and forgets what was said, when the message alone doesn't fit the context.
        """
        params = SamplingParams() if params is None else params
        context = self.engine.model.max_seq_len
        budget = params.max_new_tokens or max(1, min(ANSWER_TOKENS, context // ANSWER_SHARE))
        if budget >= context:
            raise GenerationError(f"max_new_tokens {budget} leaves no room for a message in a context of {context}")
        asked = [*self.messages, Message("user", text)]
        kept, ids = fit(self.renderer, asked, context - budget)
        self.left_out = len(asked) - len(kept)
        stops = tuple(sorted({*params.stop_ids, *self.renderer.stop_ids} - {self.engine.tokenizer.eos_id}))
        return self._events(asked, self.engine.stream([ids], replace(params, max_new_tokens=budget, stop_ids=stops)))

    def _events(self, asked: list[Message], events: Iterator[TokenEvent]) -> Iterator[TokenEvent]:
        said: list[str] = []
        try:
            for event in events:
                said.append(event.text)
                yield event
        finally:
            self.messages = [*asked, Message("assistant", "".join(said))]
