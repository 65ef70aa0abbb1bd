"""What a killed or failed `publish` leaves for the next one to go on with.

The staging folder of ``publish(..., keep=True)`` holds a folder ``.kept`` that is never published: scratch files of the
caller, a key that names everything that decides the result, and marks. A mark is a manifest of files that are whole,
written after them. Nothing waits for the disk, since the checksums tell after a power cut what did not get there.

Invariant: once `Kept` has opened a folder, it holds nothing but what sound marks list, made under the same key.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cyberslm.errors import IntegrityError
from cyberslm.files.atomic import sha256_file, storage_errors, write_bytes
from cyberslm.files.manifest import seal, verify

KEPT = ".kept"
_KEY = "key"
_MARKS = "marks"


class Kept:
    """A folder being filled in which whole files outlive the process.

    ``scratch`` is for files that are not to be published. With ``key`` None nothing outlives anything. Raises
    ``StorageError``. Can be sent to worker processes, which must write inside `writing`.
    """

    def __init__(self, root: Path, key: str | None = None) -> None:
        self.root = root
        self.scratch = root / KEPT
        self.refused = False
        """There was work under another key; it is deleted."""
        self._key = key
        self._whole: frozenset[str] = frozenset()
        with storage_errors(root):
            self.scratch.mkdir(mode=0o700, exist_ok=True)
            if key is not None:
                with _lock(self.scratch, fcntl.LOCK_EX):
                    self._open(key)

    def holds(self, name: str) -> bool:
        """Whether an earlier process marked this, and every file of it is still as it was."""
        return name in self._whole

    def mark(self, name: str, paths: Iterable[Path]) -> None:
        """Note that files below ``root`` are whole, in place of what the mark listed before."""
        if self._key is None:
            return
        listed = {
            path.relative_to(self.root).as_posix(): {"sha256": sha256_file(path), "size": path.stat().st_size}
            for path in paths
        }
        temporary = self.scratch / _MARKS / f".{name}"
        temporary.write_bytes(seal({}, listed)[1])
        temporary.replace(self.scratch / _MARKS / name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold off the next process until a worker of one that was killed has left the folder alone."""
        with _lock(self.scratch, fcntl.LOCK_SH):
            yield

    def _open(self, key: str) -> None:
        note = self.scratch / _KEY
        found = _marks_in(self.root)
        same = note.is_file() and note.read_text(encoding="utf-8", errors="replace") == key
        self.refused = bool(found) and not same
        whole: dict[Path, Iterable[str]] = {}
        for mark in found if same else ():
            with suppress(IntegrityError):
                whole[mark] = verify(self.root, listed_in=mark)["files"]
        self._whole = frozenset(mark.name for mark in whole)
        spared = {*whole, *(self.root / name for names in whole.values() for name in names)}
        _delete_but(self.root, spared | {note} if same else spared)
        (self.scratch / _MARKS).mkdir(exist_ok=True)
        if not same:
            write_bytes(note, key.encode())


def has_kept(staging: Path) -> bool:
    """Whether a staging folder is one that a later process may go on with."""
    return (staging / KEPT / _KEY).is_file()


def is_worth_keeping(staging: Path) -> bool:
    """Whether anything in it is whole."""
    return has_kept(staging) and bool(_marks_in(staging))


def _marks_in(staging: Path) -> list[Path]:
    marks = staging / KEPT / _MARKS
    return sorted(path for path in marks.iterdir() if not path.name.startswith(".")) if marks.is_dir() else []


def _delete_but(root: Path, spared: set[Path]) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if path != root / KEPT and not any(path.iterdir()):
                path.rmdir()
        elif path not in spared:
            path.unlink()


@contextmanager
def _lock(folder: Path, kind: int) -> Iterator[None]:
    """Wait for a lock of a folder; where the file system has none, go on without."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
