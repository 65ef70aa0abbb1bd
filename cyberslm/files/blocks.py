"""Lines that are made over hours: appended in whole blocks, and gone on with after a kill at any moment.

Beside a target ``NAME`` lies the folder ``.NAME.cyberslm-work`` while the work lasts. A block is appended to its
``rows`` and synced before ``state.json``, replaced in one step, says how many bytes and how many inputs it now covers;
what lies behind those bytes is cut off at the next start. At the end the target is written from the rows, under another
name, synced and renamed, and the folder goes. ``key`` names all that decides the rows: work begun under another key is
begun anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cyberslm.errors import ConfigError
from cyberslm.files.atomic import lock, make_folder, storage_errors, sync, write_text

_STATE = "state.json"
MAX_STATE_BYTES = 1 << 16


class Blocks:
    """The unfinished lines of a target; `unfinished` opens one."""

    def __init__(self, target: Path, folder: Path, key: str, state: Mapping[str, int] | None) -> None:
        self.folder, self.key = folder, key
        """A place for other files of this work, gone when it is done."""
        self.taken, size = (0, 0) if state is None else (state["taken"], state["size"])
        """Inputs that the rows so far cover."""
        self._target, self._rows, self._size = target, folder / "rows", size
        with storage_errors(self._rows):
            if state is None:
                _clear(folder)
            self._file = self._rows.open("ab")
            self._file.truncate(size)
        if state is None:
            self._tell()

    def append(self, rows: bytes, *, taken: int) -> None:
        """Add the rows of the next ``taken`` inputs, all or none of them."""
        with storage_errors(self._target):
            self._file.write(rows)
            self._file.flush()
            os.fsync(self._file.fileno())
        self._size += len(rows)
        self.taken += taken
        self._tell()

    def _tell(self) -> None:
        write_text(self.folder / _STATE, json.dumps({"key": self.key, "taken": self.taken, "size": self._size}) + "\n")

    def rows(self) -> Iterator[bytes]:
        """Every line so far, with its end."""
        with self._rows.open("rb") as stream:
            yield from stream

    def finish(self, parts: Iterable[bytes]) -> None:
        """Write the target and remove the folder."""
        result = self.folder / "result"
        with storage_errors(self._target):
            with result.open("wb") as stream:
                for part in parts:
                    stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())
            result.replace(os.path.realpath(self._target))
            sync(self._target.absolute().parent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self._file.close()


@contextmanager
def unfinished(target: Path, *, key: str, replace: bool, say: Callable[[str], None]) -> Iterator[Blocks]:
    """The work on ``target``, begun or gone on with, and locked for this process.

    Raises `StorageError` when another process is at it, and `ConfigError` when the target exists, unless ``replace``
    allows that or this very work was begun over it.
    """
    folder = target.with_name(f".{target.name}.cyberslm-work")
    if target.is_dir() or (target.exists() and not replace and _state(folder, key) is None):
        raise ConfigError(f"{target} exists: name another file with --out, or replace it with --force")
    make_folder(folder)
    with lock(folder):
        state = _state(folder, key)
        if state is None and (folder / _STATE).exists():
            say(f"{target}: was begun with other settings, input or model, and begins anew")
        blocks = Blocks(target, folder, key, state)
        if blocks.taken:
            say(f"{target}: goes on after {blocks.taken:,} records")
        try:
            yield blocks
        finally:
            blocks.close()


def _state(folder: Path, key: str) -> dict[str, int] | None:
    """How far the work of this key is; None when there is none that can be gone on with."""
    try:
        with (folder / _STATE).open("rb") as stream:
            state = json.loads(stream.read(MAX_STATE_BYTES))
        held = (folder / "rows").stat().st_size
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(state, dict) or state.get("key") != key:
        return None
    numbers = {name: state.get(name) for name in ("taken", "size")}
    whole = all(type(number) is int and number >= 0 for number in numbers.values())
    return numbers if whole and held >= numbers["size"] else None  # type: ignore[return-value, operator]


def _clear(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        elif left.name != ".lock":
            left.unlink()
