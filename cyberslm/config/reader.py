"""YAML text -> nodes, by walking parser events with an explicit stack.

Only the tree-shaped part of YAML is accepted: one document, no anchors, aliases or tags, no repeated keys, bounded size
and depth. Events come before any object is built, so nested brackets and alias bombs are refused where they begin.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cyberslm.config.nodes import HALF_CHARACTER, MAX_DEPTH, Node, Place, Problems, is_unicode, printable, shown
from cyberslm.config.scalars import resolve
from cyberslm.errors import ConfigError

MAX_BYTES = 1 << 20


def read_file(path: Path, place: Place) -> str:
    """The text of a configuration file. Raises ``ConfigError`` when it can't be read, is too large or not UTF-8."""
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "no such file"
            raise ConfigError(f"{place}: {what}")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{place}: larger than {MAX_BYTES:,} bytes, the limit for a configuration file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{place.at(line)}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from None


class _Scanner(yaml.SafeLoader):
    """PyYAML scans up to 1,024 characters ahead of the first event; that too must not nest without limit."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - PyYAML's name
        if self.flow_level >= MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, _TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


class _Composer:
    """Puts events together. ``open`` holds the unfinished collections, outermost first."""

    def __init__(self, place: Place, problems: Problems, *, numbered: bool) -> None:
        self.place, self.problems, self.numbered = place, problems, numbered
        self.root: Node | None = None
        self.documents = 0
        self.open: list[tuple[Node, list[Node]]] = []

    def where(self, event: yaml.Event) -> Place:
        mark = event.start_mark
        return self.place.at(mark.line + 1) if self.numbered and mark else self.place

    def take(self, event: yaml.Event) -> None:
        place = self.where(event)
        self.refuse_extras(event, place)
        if isinstance(event, yaml.ScalarEvent):
            self.add(self.scalar(event, place))
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(self.open) >= MAX_DEPTH:
                raise ConfigError(f"{place}: {_TOO_DEEP}")
            value: dict[str, Node] | list[Node] = {} if isinstance(event, yaml.MappingStartEvent) else []
            self.open.append((Node(place, value), []))
        elif isinstance(event, yaml.CollectionEndEvent):
            node, _ = self.open.pop()
            self.add(node)

    def refuse_extras(self, event: yaml.Event, place: Place) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise ConfigError(f"{place}: a second document starts here; a configuration is one document")
        elif isinstance(event, yaml.NodeEvent):
            if event.anchor is not None:
                raise ConfigError(
                    f"{place}: anchors and aliases (& and *) are not read; write the value out or quote it"
                )
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise ConfigError(f"{place}: tags (such as {printable(tag)}) are not read; remove it")

    def scalar(self, event: yaml.ScalarEvent, place: Place) -> Node:
        quoted = event.style is not None
        if not is_unicode(event.value):
            self.problems.add(place, f"{shown(event.value)} {HALF_CHARACTER}")
            return Node(place, "", "", broken=True)
        try:
            return Node(place, event.value if quoted else resolve(event.value), event.value, quoted)
        except ValueError as error:
            keys = self.open[-1][1] if self.open else []
            self.problems.add(place, f"{keys[0].text}: {error}" if keys else str(error))
            return Node(place, event.value, event.value, broken=True)

    def add(self, node: Node) -> None:
        if not self.open:
            self.root = node
            return
        parent, pending = self.open[-1]
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif not isinstance(parent.value, dict):
            raise TypeError("a collection is a list or a dict")
        elif not pending:
            if node.text is None:
                raise ConfigError(f"{node.place}: a key must be a single word, got {node}")
            pending.append(node)
        else:
            self.add_entry(parent.value, pending.pop(), node)

    def add_entry(self, mapping: dict[str, Node], key: Node, node: Node) -> None:
        name = key.text or ""
        if name in mapping:
            first = mapping[name].place.line
            at = f" (first on line {first})" if first else ""
            self.problems.add(key.place, f"key {shown(name)} is given twice{at}; keep one")
        else:
            mapping[name] = replace(node, place=key.place)


def compose(text: str, place: Place, problems: Problems, *, numbered: bool = True) -> Node | None:
    """The tree of one YAML document, ``None`` when it is empty; with ``numbered``, places carry line numbers.

    Raises ``ConfigError`` where reading can't go on; what can be passed over is added to ``problems``.
    """
    composer = _Composer(place, problems, numbered=numbered)
    try:
        for event in yaml.parse(text, Loader=_Scanner):
            composer.take(event)
    except yaml.reader.ReaderError as error:
        at = place.at(text.count("\n", 0, error.position) + 1) if numbered else place
        raise ConfigError(f"{at}: character {error.character:#06x} is not allowed in YAML; remove it") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explain(error, text, place, numbered=numbered)) from None
    return composer.root


def _explain(error: yaml.MarkedYAMLError, text: str, place: Place, *, numbered: bool) -> str:
    mark = error.problem_mark or error.context_mark
    number = mark.line if mark else 0
    lines = text.splitlines()
    line = lines[number] if number < len(lines) else ""
    at = place.at(number + 1) if numbered else place
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in (error.problem or ""):
        return f"{at}: a tab where YAML wants spaces; indent with spaces"
    doing = f" {error.context}" if error.context else ""
    return f"{at}: not valid YAML{doing}: {printable(error.problem or 'unreadable', 200)}"
