"""Which files feed a run, in an order that no file system decides.

``find_inputs`` turns files, folders and globs into a list sorted by relative path (as bytes, so that no locale changes
it), each real file once. Nothing is passed over in silence: what a folder holds but is not read is counted by its
reason. A named file, or one that a glob matches, is read whatever its extension; inside a folder only the known
extensions are (``readers.formats``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cyberslm import files
from cyberslm.data.readers.formats import Format, named_format, why_not_read
from cyberslm.data.readers.place import printable_text
from cyberslm.errors import DataError


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file to read; ``name`` is its path below the source, printable and equal on every machine."""

    key: str
    path: Path
    name: str
    size: int
    mtime_ns: int

    @property
    def named_format(self) -> Format:
        """What its name says it is; one that says nothing is read as text."""
        return named_format(self.path.name) or "text"

    @property
    def identity(self) -> tuple[str, str]:
        return self.key, self.name


@dataclass
class Inputs:
    """The files of one list of sources and, per source key, what was passed over and why."""

    files: list[InputFile] = field(default_factory=list)
    passed_over: dict[str, Counter[str]] = field(default_factory=dict)


class _Found(NamedTuple):
    path: Path
    base: Path
    passed_over: str | None


def find_inputs(sources: Sequence[str], *, key: str) -> Inputs:
    """The files of ``sources`` in their order, sorted within each; DataError names the key of one that is absent."""
    inputs = Inputs()
    seen: set[Path] = set()
    for index, source in enumerate(sources):
        source_key = f"{key}[{index}]" if key.startswith("data.") else key
        passed_over = inputs.passed_over[source_key] = Counter()
        for found in sorted(set(_expand(source, source_key)), key=_sort_key):
            if found.passed_over is not None:
                passed_over[found.passed_over] += 1
                continue
            real = Path(os.path.realpath(found.path))
            if real in seen:
                passed_over["the same file again"] += 1
                continue
            seen.add(real)
            inputs.files.append(_input_file(found, source_key))
    return inputs


def hash_file(file: InputFile) -> str:
    """SHA-256 of a file's bytes as they are on disk. Raises DataError when it can't be read."""
    with reading(file.path):
        return files.sha256_file(file.path)


def printable(path: Path) -> str:
    """A path as text that every terminal and JSON file can hold, the same under every locale; no two look alike."""
    return printable_text(os.fsencode(path.as_posix()).replace(b"\\", rb"\\").decode("utf-8", "backslashreplace"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError that names the path."""
    try:
        yield
    except OSError as error:
        at = Path(error.filename) if isinstance(error.filename, str) else path
        raise DataError(f"cannot read {printable(at)}: {error.strerror or error}") from error


def _sort_key(found: _Found) -> bytes:
    return os.fsencode(found.path.relative_to(found.base).as_posix())


def _input_file(found: _Found, key: str) -> InputFile:
    with reading(found.path):
        stat = found.path.stat()
    name = printable(found.path.relative_to(found.base))
    return InputFile(key=key, path=found.path, name=name, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def _expand(source: str, key: str) -> Iterator[_Found]:
    # The bytes of the path are UTF-8 whatever the locale's own encoding of file names is.
    path = Path(os.fsdecode(source.encode("utf-8", "surrogateescape")))
    with reading(path):
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield _Found(path, path.parent, None)
        elif path.exists():
            raise DataError(f"{key}: {printable(path)} is neither a file nor a folder")
        elif any(mark in source for mark in "*?["):
            yield from _glob(path, key)
        else:
            raise DataError(f"{key}: there is no file or folder {printable(path)}")


def _glob(pattern: Path, key: str) -> Iterator[_Found]:
    parts = pattern.parts
    first = next(index for index, part in enumerate(parts) if any(mark in part for mark in "*?["))
    base, wants_hidden = Path(*parts[:first]), any(part.startswith(".") for part in parts[first:])
    try:
        matches = list(base.glob(str(Path(*parts[first:])))) if base.is_dir() else []
    except ValueError as error:
        raise DataError(f"{key}: the glob {printable(pattern)} is not valid: {error}") from error
    if parts[-1] == "**":
        matches = [match for match in matches if match.is_dir()]
    if not matches:
        raise DataError(f"{key}: the glob {printable(pattern)} matches nothing")
    only_folders = all(match.is_dir() for match in matches)
    for match in matches:
        if not wants_hidden and any(part.startswith(".") for part in match.relative_to(base).parts):
            yield _Found(match, base, "hidden")
        elif only_folders:
            yield from (found._replace(base=base) for found in _walk(match))
        elif match.is_file():
            yield _Found(match, base, None)
        else:
            yield _Found(match, base, "folder beside the files of a glob" if match.is_dir() else "not a regular file")


def _walk(folder: Path) -> Iterator[_Found]:
    inside = Path(os.path.realpath(folder))
    for at, folders, names in os.walk(folder, onerror=_raise):
        here = Path(at)
        for name in list(folders):
            why = _why_not_entered(here / name)
            if why is not None:
                folders.remove(name)
                yield _Found(here / name, folder, why)
        for name in names:
            yield _Found(here / name, folder, _why_passed_over(here / name, inside))


def _why_not_entered(folder: Path) -> str | None:
    if folder.is_symlink():
        return "link to a folder"
    if folder.name.startswith("."):
        return "hidden"
    if files.looks_published(folder) or ((folder / ".lock").is_file() and (folder / "checkpoints").is_dir()):
        return "folder that CyberSLM wrote"
    return None


def _why_passed_over(path: Path, inside: Path) -> str | None:
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
        return "link out of the folder"
    if not path.is_file():
        return "not a regular file"
    return why_not_read(printable(Path(path.name)))


def _raise(error: OSError) -> None:
    raise error
