"""Defaults < what follows from the rest < ``extends`` < the file < the command line.

Each layer is read and checked by itself, so that a message names the file and line that is wrong, then all are merged
by canonical name and built once. Mappings merge deeply; other values, lists too, replace.
"""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

from cyberslm.config.build import blame, build, canonical, leaves, merge
from cyberslm.config.nodes import Node, Place, Problems, from_python, printable
from cyberslm.config.reader import compose, read_file
from cyberslm.config.scalars import resolve
from cyberslm.errors import ConfigError

MAX_CHAIN = 8

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Follow = Callable[[Mapping[str, object]], Mapping[str, object]]
"""From the values that are given to those that follow from them, both by dotted canonical key."""


@dataclass(frozen=True)
class Loaded(Generic[T_co]):
    """A configuration and where it came from."""

    value: T_co
    """The root dataclass."""
    given: frozenset[str]
    """Dotted canonical keys that the files or the command line set, such as ``model.vocab_size``, or that follow."""
    path: Path
    """The file that was named, absolute."""
    text: str
    """Its YAML as written, without what it extends."""


def load(path: str | Path, cls: type[T], overrides: Sequence[str] = (), *, follow: Follow | None = None) -> Loaded[T]:
    """Read a YAML file, what it extends and ``key=value`` overrides into ``cls``.

    An override's value follows the scalar rules of YAML (``True`` is a boolean too) and may be a flow list or mapping,
    as in ``data.sources=[a, b]``; other text is taken as it is. Relative ``PathStr`` values start from the folder of
    the file that wrote them, in an override from the current folder. ``follow`` may add settings: it sees the values
    that are given, each checked by itself, before they are checked together. A `ConfigError` of it that opens with the
    name of a setting is put where that was written.

    Raises ``ConfigError`` that lists every problem, one per line.
    """
    problems = Problems()
    text, layers = _read_chain(Path(path), problems)
    layers += [node for argument in overrides if (node := _override(argument, problems)) is not None]
    tree = reduce(merge, [canonical(layer, cls, problems, cls) for layer in layers])
    if follow is not None:
        tree = _with_what_follows(tree, cls, follow, problems)
    value = build(tree, cls, problems)
    problems.raise_if_any()
    return Loaded(value, frozenset(key for key, *_ in leaves(tree, cls)), Path(path).absolute(), text)


def top_keys(path: str | Path, overrides: Sequence[str] = ()) -> frozenset[str]:
    """The names at the top level of a file, what it extends and overrides: which kind of configuration it is.

    Only form is checked; what else is wrong is for ``load`` to say.
    """
    problems = Problems()
    _, layers = _read_chain(Path(path), problems)
    layers += [node for argument in overrides if (node := _override(argument, problems)) is not None]
    return frozenset(name for layer in layers if isinstance(layer.value, dict) for name in layer.value)


def _with_what_follows(tree: Node, cls: type, follow: Follow, problems: Problems) -> Node:
    """The tree over the settings that follow from it. Values that are of no use are left to ``build`` to name."""
    given: dict[str, object] = {}
    usable = True
    for key, node, tp in leaves(tree, cls):
        alone = Problems()
        value = build(node, tp, alone, key)
        if alone.failures:
            usable = False
        else:
            given[key] = value
    try:
        found = _nested(follow(given))
    except ConfigError as error:
        if usable:
            problems.add(*blame(str(error), tree, cls, ""))
            problems.raise_if_any()
        return tree
    return merge(from_python(found, Place("what follows from the given settings", Path.cwd()), problems), tree)


def _nested(flat: Mapping[str, object]) -> dict[str, object]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


def parse(mapping: Mapping[str, object], cls: type[T], *, where: str) -> T:
    """``cls`` from JSON-like data by the rules of ``load``; each problem of a ``ConfigError`` opens with ``where``."""
    problems = Problems()
    place = Place(printable(where, 200), Path.cwd())
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{place}: must be a mapping, got {type(mapping).__name__}")
    tree = canonical(from_python(mapping, place, problems), cls, problems, cls)
    value = build(tree, cls, problems)
    problems.raise_if_any()
    return value


def _read_chain(path: Path, problems: Problems) -> tuple[str, list[Node]]:
    """The text of ``path`` and the trees of it and all it extends, base first."""
    layers: list[Node] = []
    seen: set[Path] = set()
    first_text = ""
    named_at: Place | None = None
    while True:
        place = Place(printable(str(path), 300), path.parent.absolute())
        real = Path(os.path.realpath(path))
        if real in seen:
            raise ConfigError(f"{named_at}: extends {place}, which extends this file in turn; break the circle")
        if len(seen) == MAX_CHAIN:
            raise ConfigError(f"{named_at}: more than {MAX_CHAIN} files in a chain of extends")
        if _is_missing(path):
            start = f"{named_at}: extends a file that does not exist: " if named_at else "no such file: "
            raise ConfigError(f"{start}{place}{_nearby(path)}")
        seen.add(real)
        text = read_file(path, place)
        first_text = first_text if layers else text
        node = _root(text, place, problems)
        base = node.value.pop("extends", None) if isinstance(node.value, dict) else None
        layers.insert(0, node)
        if base is None:
            return first_text, layers
        if not isinstance(base.value, str) or not base.value or "\0" in base.value:
            raise ConfigError(f"{base.place}: extends must be the path of one YAML file, got {base}")
        named_at = base.place
        path = Path(os.path.normpath(path.parent / base.value))


def _root(text: str, place: Place, problems: Problems) -> Node:
    node = compose(text, place, problems)
    if node is None or node.empty:
        raise ConfigError(f"{place}: is empty; write settings as 'key: value'")
    if not isinstance(node.value, dict):
        raise ConfigError(f"{node.place}: must hold settings as 'key: value', got {node}")
    return node


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:
        return False


def _nearby(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"})
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {near[0]!r}?" if near else ""


def _override(argument: str, problems: Problems) -> Node | None:
    """The tree of one ``a.b=value``."""
    place = Place(f"command line: {printable(argument, 100)}", Path.cwd())
    key, equals, text = argument.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals:
        problems.add(place, "not a setting; write key=value")
    elif key.startswith("-"):
        problems.add(place, f"settings take no dashes; write {printable(key.lstrip('-'))}=...")
    elif not all(names):
        problems.add(place, "a key is missing; write section.key=value")
    else:
        node = _override_value(text.strip(), place, problems)
        for name in reversed(names):
            node = Node(place, {name: node})
        return node
    return None


def _override_value(text: str, place: Place, problems: Problems) -> Node:
    try:
        if text.startswith(("[", "{", '"', "'")):
            return compose(text, place, problems, numbered=False) or Node(place, None)
        return Node(place, resolve(text), text or None)
    except ConfigError as error:
        problems.add_line(place, str(error))
    except ValueError as error:
        problems.add(place, str(error))
    return Node(place, None, broken=True)
