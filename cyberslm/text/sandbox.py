"""Jinja for chat templates of unknown origin: an immutable sandbox that counts what it does.

Jinja's own sandbox keeps a template from Python's insides, not from time and memory: a loop in a loop, a string that
doubles itself, or a million padded blanks. So every turn of a loop, call and operator is a step, what they make counts
by its characters, and methods and filters that make text longer by a number are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from cyberslm.errors import ConfigError, GenerationError
from cyberslm.text.chat import MAX_TEMPLATE_BYTES

MAX_STEPS = 100_000
MAX_CHARACTERS = 1 << 24

_FILTERS = (
    *("capitalize", "default", "d", "first", "int", "items", "last", "length", "count", "list", "lower", "map"),
    *("reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique"),
    "upper",
)
_GROWING = frozenset({"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "join", "replace"})
_NUMBERS = 1 << 53
_MARKED = re.compile(r"\{%([-+]?)\s*(end)?generation\s*(-?)%\}")
"""What some templates put around an answer; here prefixes tell which tokens it is."""


class _TooMuch(Exception):
    """A limit was met."""


class Program:
    """A compiled template. Raises ConfigError when it can't be compiled."""

    def __init__(self, template: str) -> None:
        if len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"the chat template is larger than {MAX_TEMPLATE_BYTES:,} bytes")
        self._limits = _Limits()
        source = _MARKED.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", template)
        try:
            self._template = _Sandbox(self._limits).from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ConfigError(f"the chat template can't be used: {str(error)[:200]}") from None

    def run(self, names: Mapping[str, object]) -> str:
        """The text that it gives. Raises GenerationError when it fails, refuses its input or meets a limit."""
        self._limits.start()
        text: list[str] = []
        try:
            for piece in self._template.generate(names):
                self._limits.hold(piece)
                text.append(piece)
        except _TooMuch as error:
            raise GenerationError(f"the model's chat template {error}") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise GenerationError(f"the model's chat template failed: {str(error)[:200]}") from None
        return "".join(text)


class _Limits:
    """What one run has used."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.steps = self.characters = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _TooMuch(f"takes more than {MAX_STEPS:,} steps")

    def hold(self, made: object) -> None:
        self.step()
        if isinstance(made, str | list | tuple):
            self.room(len(made))

    def room(self, characters: int) -> None:
        self.characters += characters
        if self.characters > MAX_CHARACTERS:
            raise _TooMuch(f"makes more than {MAX_CHARACTERS:,} characters")

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def join(self, values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
        """Jinja's filter, its size known before it is made."""
        texts = [str(value if attribute is None else value[attribute]) for value in self.counted(values)]
        self.room(sum(map(len, texts)) + len(str(between)) * len(texts))
        return str(between).join(texts)

    def replace(self, text: str, old: str, new: str) -> str:
        """Jinja's filter, its size known before it is made."""
        self.room(len(text) + len(new) * text.count(old))
        return text.replace(old, new)


class _Counting(NodeTransformer):
    """Loops count their turns, and ``~`` is an addition, which is counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        whole: nodes.Expr = _filtered(node.nodes[0], "string")
        for each in node.nodes[1:]:
            whole = nodes.Add(whole, _filtered(each, "string"), lineno=node.lineno)
        return whole


class _Sandbox(ImmutableSandboxedEnvironment):
    """The dialect of chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "-", "/", "//"})

    def __init__(self, limits: _Limits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self._limits = limits
        own = {"counted": limits.counted, "join": limits.join, "replace": limits.replace, "tojson": _json}
        self.filters = {name: self.filters[name] for name in _FILTERS} | own
        self.globals = {name: self.globals[name] for name in ("namespace", "range")} | {"raise_exception": _refuse}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = all(isinstance(each, int | float) and abs(each) < _NUMBERS for each in (left, right))
        if operator == "**" or (operator != "+" and not numbers):
            raise _TooMuch(f"uses the operator {operator} on something else than small numbers")
        made = super().call_binop(context, operator, left, right)
        self._limits.hold(made)
        return made

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        self._limits.step()
        made = super().call(context, called, *args, **kwargs)
        self._limits.hold(made)
        return made

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _GROWING and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would let ``str.format`` pass in a form of its own; here it is an attribute like others."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        _Counting().visit(parsed)
        return parsed


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:200])


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent if indent is None else min(indent, 8))


def names_of(messages: Sequence[tuple[str, str]], *, asks: bool) -> dict[str, object]:
    """What a chat template is given, but for the names of special tokens."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return {"messages": listed, "add_generation_prompt": asks, "tools": None, "documents": None}
