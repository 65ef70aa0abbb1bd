"""Guides for one tokenizer: what a request asks of its answer, as the masks that the decoding loop obeys.

A constraint and grounding hold together: a token passes when both let it, and an answer may end when both let it end.
The escape that spells U+2581 in the bytes of our tokenizers is never made under either, as it would read otherwise than
it was judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from cyberslm.decoding.guide import Guide
from cyberslm.generation.constrain import GrammarGuide, Grammars
from cyberslm.generation.demand import Demand
from cyberslm.generation.grounding import SideBySide, TextGuide
from cyberslm.generation.walk import Forbidden, Vocabulary, Walk
from cyberslm.text.codec import ESCAPE
from cyberslm.text.tokenizer import Tokenizer


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

    def guide(self, demand: Demand, *, prompt_ids: Sequence[int], budget: int, stop_ids: Iterable[int]) -> Guide | None:
        """The guide of one answer of at most ``budget`` tokens; None when nothing is asked. `GenerationError`."""
        if not demand:
            return None
        stops = sorted(stop_ids)
        walks = list(self._escape)
        if demand.ground is not None:
            walks += demand.ground.walks(*self._source(prompt_ids), self._vocabulary)
        side_by_side = SideBySide(walks, self._vocabulary)
        text = TextGuide(side_by_side, side_by_side.start, budget, stops)
        if demand.constraint is None:
            return text
        grammar = self._of_grammars().guide(
            demand.constraint,
            budget=budget,
            stop_ids=stops,
            at_start=self._at_start(prompt_ids),
            admits=text.admits if demand.ground else None,
        )
        return BothGuide(grammar, text, grounded=demand.ground is not None) if walks else grammar

    def is_met(self, demand: Demand, *, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> bool:
        """Whether an answer, ``ids`` without a stop id, is whole and uncut, and invents no identifier."""
        if demand.ground is not None:
            source, tail = self._source(prompt_ids)
            if demand.ground.invented(source, text, tail=tail):
                return False
        if demand.constraint is None:
            return True
        decoder = self._tokenizer.stream_decoder(after=prompt_ids)
        whole = "".join([*map(decoder.push, ids), decoder.finish()])
        accepts = self._of_grammars().accepts(demand.constraint, ids, at_start=self._at_start(prompt_ids))
        return whole == text and accepts

    def _source(self, prompt_ids: Sequence[int]) -> tuple[str, str]:
        """The prompt's text, and that of its part which the answer continues: behind the last control id."""
        parts: list[list[int]] = [[]]
        for token in prompt_ids:
            if token in self._tokenizer.control_ids:
                parts.append([])
            else:
                parts[-1].append(token)
        texts = [self._tokenizer.decode(part) for part in parts]
        return "\n".join(texts), texts[-1]

    def _of_grammars(self) -> Grammars:
        if self._grammars is None:
            spelling = self._tokenizer.spelling
            self._grammars = Grammars(
                self._vocabulary,
                partial(self._tokenizer.encode, add_special_tokens=False),
                eos_id=self._tokenizer.eos_id,
                escaped=spelling.escaped,
                prefix=spelling.prefix,
            )
        return self._grammars

    def _at_start(self, prompt_ids: Sequence[int]) -> bool:
        return not prompt_ids or prompt_ids[-1] == self._tokenizer.spelling.begins


class BothGuide:
    """A grammar's guide and a text's, of one answer."""

    def __init__(self, grammar: GrammarGuide, text: TextGuide, *, grounded: bool) -> None:
        self._grammar, self._text, self._grounded = grammar, text, grounded

    def allowed(self) -> Tensor:
        return self._grammar.allowed() & self._text.allowed(self._grammar.may_continue)

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
