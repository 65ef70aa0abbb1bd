"""Guides for one tokenizer: what a request asks of its answer, as the masks that the decoding loop obeys.

A constraint and grounding hold together: a token passes when both let it, and an answer may end when both let it end.
The escape that spells U+2581 in the bytes of our tokenizers is never made under either, as it would read otherwise than
it was judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cyberslm.decoding.guide import Guide
from cyberslm.generation.constrain import Constraint, GrammarGuide, Grammars
from cyberslm.generation.grounding import Grounding, SideBySide, TextGuide
from cyberslm.generation.walk import Forbidden, Vocabulary, Walk
from cyberslm.text.codec import ESCAPE
from cyberslm.text.tokenizer import Tokenizer


class Demand(NamedTuple):
    """What is asked of one answer; None asks nothing."""

    constraint: Constraint | None = None
    ground: Grounding | None = None

    def __bool__(self) -> bool:
        return self.constraint is not None or self.ground is not None


NOTHING = Demand()


class Guides:
    """Makes guides, and judges finished answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        controls = tokenizer.control_ids
        self._vocabulary = Vocabulary(
            lambda token: b"" if token in controls else tokenizer.token_bytes(token), tokenizer.vocab_size
        )
        escape = Walk(Forbidden(ESCAPE.encode()), self._vocabulary)
        self._escape = [(escape, escape.start)] if tokenizer.spelling.escaped else []
        self._grammars: Grammars | None = None

    def guide(
        self, demand: Demand, *, prompt: str, prompt_ids: Sequence[int], budget: int, stop_ids: Sequence[int]
    ) -> Guide | None:
        """The guide of one answer of at most ``budget`` tokens; None when nothing is asked. `GenerationError`."""
        if not demand:
            return None
        walks = demand.ground.walks(prompt, self._vocabulary) if demand.ground else []
        text = SideBySide([*walks, *self._escape], self._vocabulary)
        text_guide = TextGuide(text, text.start, budget, stop_ids)
        if demand.constraint is None:
            return text_guide
        grammar = self._of_grammars().guide(
            demand.constraint,
            budget=budget,
            stop_ids=stop_ids,
            at_start=self._at_start(prompt_ids),
            admits=text_guide.admits if demand.ground else None,
        )
        return BothGuide(grammar, text_guide, grounded=demand.ground is not None)

    def is_met(self, demand: Demand, *, prompt: str, prompt_ids: Sequence[int], text: str, ids: Sequence[int]) -> bool:
        """Whether an answer, ``ids`` without a stop id, is whole and holds no invented identifier."""
        if demand.ground and demand.ground.invented(prompt, text):
            return False
        if demand.constraint is None:
            return True
        return self._of_grammars().accepts(demand.constraint, ids, at_start=self._at_start(prompt_ids))

    def _of_grammars(self) -> Grammars:
        if self._grammars is None:
            spelling = self._tokenizer.spelling
            self._grammars = Grammars(
                self._vocabulary, eos_id=self._tokenizer.eos_id, escaped=spelling.escaped, prefix=spelling.prefix
            )
        return self._grammars

    def _at_start(self, prompt_ids: Sequence[int]) -> bool:
        return not prompt_ids or prompt_ids[-1] == self._tokenizer.spelling.begins


class BothGuide:
    """A grammar's guide and a text's, of one answer."""

    def __init__(self, grammar: GrammarGuide, text: TextGuide, *, grounded: bool) -> None:
        self._grammar, self._text, self._grounded = grammar, text, grounded

    def allowed(self) -> Tensor:
        return self._grammar.allowed() & self._text.allowed()

    def accept(self, token: int) -> None:
        self._grammar.accept(token)
        self._text.accept(token)

    @property
    def done(self) -> bool:
        return self._grammar.done and self._text.final

    def fork(self) -> BothGuide:
        text = self._text.fork()
        grammar = self._grammar.fork(text.admits if self._grounded else None)
        return BothGuide(grammar, text, grounded=self._grounded)
