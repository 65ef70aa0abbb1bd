"""Output that keeps to a JSON schema, a regular expression, a list of choices or a grammar, from any model.

A `Constraint` says what; `Grammars` compiles it for one tokenizer with ``llguidance`` (extra ``constrain``), which
answers before each token which ids keep the text on a way to an end. It sees tokens as bytes, so any cutting of the
text into tokens is fine; control ids and the escape by which the tokenizer spells U+2581 are never made. Near the end
of the budget only what can still be finished is let through (`closing`). Sizes are checked before compiling, and the
compiler and each step have a limit of work; beyond it the row ends unfinished.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cyberslm.errors import ConfigError, GenerationError
from cyberslm.generation.closing import Admits, Closing, Words
from cyberslm.generation.schemas import ascii_digits, checked
from cyberslm.generation.walk import Vocabulary
from cyberslm.text.codec import ESCAPE, SPACE_MARK

KEPT_GRAMMARS = 64
MAX_REGEX_CHARS = 20_000
MAX_GRAMMAR_CHARS = 1 << 18
MAX_LITERALS = 24
_LITERAL = re.compile(r"[A-Za-z0-9 ]{2,24}")
MAX_CHOICES = 20_000
MAX_CHOICE_CHARS = 1 << 20
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}
_PLAIN_ESCAPES = {"json_allowed_escapes": '"\\'}
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 1_000_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """What an answer must be as a whole. Made by `json_schema`, `regex`, `choice` or `grammar`."""

    kind: ConstraintKind
    source: str

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Constraint:
        """JSON, without white space, that a schema (text or mapping) admits."""
        return cls("json_schema", checked(schema))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        r"""Text that a regular expression matches wholly: Rust's syntax, no look-around; ``\d`` is 0 to 9."""
        return cls("regex", ascii_digits(_sized("regular expression", pattern, MAX_REGEX_CHARS)))

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Constraint:
        """One of some texts."""
        texts = [choices] if isinstance(choices, str) else list(dict.fromkeys(choices))
        if not texts or len(texts) > MAX_CHOICES:
            raise GenerationError(f"give between 1 and {MAX_CHOICES} different choices, not {len(texts)}")
        for text in texts:
            _sized("choice", text, MAX_CHOICE_CHARS)
        return cls("choice", _sized("list of choices", json.dumps(texts), MAX_CHOICE_CHARS))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Text of a grammar in llguidance's dialect of Lark, from its rule ``start``."""
        return cls("grammar", _sized("grammar", lark, MAX_GRAMMAR_CHARS))


Encode = Callable[[str], Sequence[int]]


class Grammars:
    """Constraints compiled for one tokenizer: its bytes, how it encodes, whether bytes are escaped, and the prefix of
    its texts."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode, *, eos_id: int, escaped: bool, prefix: bytes) -> None:
        self._library = _library()
        self._vocabulary, self._eos_id, self._escaped, self._prefix = vocabulary, eos_id, escaped, prefix
        self._tokenizer = self._library.LLTokenizer(
            _Wrapper(vocabulary, encode, eos_id), n_vocab=len(vocabulary.table), eos_token=eos_id
        )
        self._limits = self._library.LLParserLimits(**_LIMITS)
        self._words = Words(vocabulary.table, eos_id)
        self._same = _first_of_same(vocabulary.table)
        self._compiled: dict[tuple[Constraint, bool, bool], Any] = {}

    def guide(
        self,
        constraint: Constraint,
        *,
        budget: int,
        stop_ids: Sequence[int],
        at_start: bool = False,
        admits: Admits | None = None,
    ) -> GrammarGuide:
        """A new guide for an answer of at most ``budget`` tokens, which ``stop_ids`` may end.

        ``at_start`` says that the text begins here, where the decoder drops the prefix that encoding puts there;
        ``admits`` is what else binds the answer. Raises `GenerationError` for what can't be compiled, met or finished.
        """
        matcher = self._matcher(constraint, at_start=at_start, plain=admits is not None).deep_copy()
        literals = dict.fromkeys(_LITERAL.findall(constraint.source[:MAX_REGEX_CHARS]))
        closing = Closing(self._words, matcher, budget, admits, list(literals)[-MAX_LITERALS:])
        if closing.shortest is None and constraint.kind == "json_schema" and admits is None:
            raise GenerationError("the JSON schema can't be met: no answer that ends was found")
        if closing.shortest is not None and len(closing.shortest) > budget:
            raise GenerationError(
                f"max_new_tokens {budget} is too small for {_NAMES[constraint.kind]}:"
                f" the shortest answer found has {len(closing.shortest)} tokens"
            )
        return GrammarGuide(matcher, closing, self._same, list(stop_ids), budget)

    def accepts(self, constraint: Constraint, ids: Iterable[int], *, at_start: bool = False) -> bool:
        """Whether an answer, without its stop id, is whole."""
        matcher = self._matcher(constraint, at_start=at_start, plain=False).deep_copy()
        for token in ids:
            matcher.compute_bitmask()  # as while it was made: each step has work of its own to spend
            if not matcher.consume_token(int(self._same[token])):
                return False
        return bool(matcher.is_accepting())

    def _matcher(self, constraint: Constraint, *, at_start: bool, plain: bool) -> Any:
        key = (constraint, at_start and bool(self._prefix), plain)
        if key not in self._compiled:
            if len(self._compiled) >= KEPT_GRAMMARS:
                self._compiled.clear()
            self._compiled[key] = self._compile(constraint, with_prefix=key[1], plain=plain)
        return self._compiled[key]

    def _compile(self, constraint: Constraint, *, with_prefix: bool, plain: bool) -> Any:
        if self._escaped and constraint.kind == "choice":
            _refuse_marks(json.loads(constraint.source))
        grammar = self._grammar(constraint, plain=plain)
        if with_prefix:
            prefix = json.dumps(self._prefix.decode())
            grammar = [{"name": "text", "lark_grammar": f"start: {prefix} @answer"}, {"name": "answer", **grammar[0]}]
        text = json.dumps({"grammars": grammar})
        name = _NAMES[constraint.kind]
        failed, messages = self._library.LLMatcher.validate_grammar_with_warnings(
            text, self._tokenizer, limits=self._limits
        )
        if failed:
            raise GenerationError(f"{name} can't be used: {' '.join(messages)[:400].strip()}")
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GenerationError(f"{name} can't be met: {matcher.get_error().splitlines()[0][:200]}")
        return matcher

    @staticmethod
    def _grammar(constraint: Constraint, *, plain: bool) -> list[dict[str, Any]]:
        if constraint.kind == "grammar":
            return [{"lark_grammar": constraint.source}]
        if constraint.kind == "choice":
            options = " | ".join(json.dumps(text) for text in json.loads(constraint.source))
            return [{"lark_grammar": f"start: CHOICE\nCHOICE: {options}"}]
        make = _library().LLMatcher
        if constraint.kind == "regex":
            made = make.grammar_from_regex(constraint.source)
        else:
            form = _JSON_FORM | (_PLAIN_ESCAPES if plain else {})
            made = make.grammar_from_json_schema(constraint.source, overrides=form)
        grammars: list[dict[str, Any]] = json.loads(made)["grammars"]
        return [{key: value for key, value in grammars[0].items() if value is not None and key != "name"}]


_NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
}


class GrammarGuide:
    """A `Guide` that keeps to a compiled constraint. ``same`` gives for each id the first with the same bytes, which is
    the one that the matcher knows."""

    def __init__(self, matcher: Any, closing: Closing, same: np.ndarray, stops: list[int], budget: int) -> None:
        self._matcher, self._closing, self._same = matcher, closing, same
        self._stops, self._room = stops, budget

    def allowed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=len(self._same), bitorder="little").astype(bool)
        failed = self._matcher.is_error()
        if failed:
            mask[:] = False
        else:
            mask = self._closing.narrow(mask, self._matcher, self._room)[self._same]
        mask[self._stops] = not failed and self._matcher.is_accepting()
        return torch.from_numpy(mask)

    def may_continue(self, token: int, data: bytes) -> bool:
        """Whether a token and then these bytes, one by one, may come next."""
        tokens = [int(self._same[token]), *self._closing.words.spell_singly(data)]
        return bool(self._matcher.validate_tokens(tokens) == len(tokens))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(int(self._same[token]))
        self._closing.accept(int(self._same[token]))
        self._room -= 1

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fork(self, admits: Admits | None = None) -> GrammarGuide:
        matcher, closing = self._matcher.deep_copy(), self._closing.fork(admits)
        return GrammarGuide(matcher, closing, self._same, self._stops, self._room)


class _Wrapper:
    """The tokenizer in the form in which llguidance takes one: bytes, special ids, and a way to encode.

    Ids without text, and all but the first with the same bytes, pass as special: no grammar lets them come. Where only
    one text can follow, llguidance lets the tokens come that it is encoded to: those that the model has learned.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self._table, self._encode, self._same = vocabulary.table, encode, _first_of_same(vocabulary.table)
        hidden = vocabulary.empty | (self._same != np.arange(len(vocabulary.table)))
        self.tokens = [b"<%d>" % t if hidden[t] else data for t, data in enumerate(vocabulary.table)]
        self.special_token_ids = np.flatnonzero(hidden).tolist()
        self._words = Words(vocabulary.table, eos_id)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = self._encode(data.decode("utf-8", "replace"))
        if b"".join(self._table[token] for token in ids) != data:  # with a prefix, an escape, or half a character
            return self._words.spell(data) or []
        return self._same[ids].tolist()


def _first_of_same(table: Sequence[bytes]) -> np.ndarray:
    """For each id the first with the same bytes; itself where it has none."""
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(data, token) if data else token for token, data in enumerate(table)])


def _sized(name: str, text: object, limit: int) -> str:
    if not isinstance(text, str) or not text:
        raise GenerationError(f"a {name} must be text that isn't empty, not {text!r:.40}")
    if len(text) > limit:
        raise GenerationError(f"the {name} has {len(text)} characters; at most {limit} are taken")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GenerationError(f"the {name} is not valid Unicode: {error}") from error
    return text


def _refuse_marks(choices: Iterable[str]) -> None:
    for choice in choices:
        if ESCAPE in choice or SPACE_MARK in choice:
            raise GenerationError(f"the choice {choice!r:.80} holds U+2581 or U+FDD0, which constrained text can't")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("a constraint needs the llguidance library: pip install 'cyberslm[constrain]'") from None
    return llguidance
