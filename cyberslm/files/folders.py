"""Whole folders: filled under ``.NAME.cyberslm-partial``, sealed with a manifest, renamed into place.

A replacement takes two renames: the old folder goes to ``.NAME.cyberslm-old``, the new one gets the name. Between the
two, and only there, the name is missing and ``sweep`` (or the next ``publish``) puts the old folder back. A folder set
aside is always whole, because it is renamed to a ``-partial`` before it is deleted. A ``-partial`` that holds kept work
(``kept``) stays until its target is published or prepared in another way.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from cyberslm.errors import BusyError, StorageError
from cyberslm.files.atomic import TEMPORARY, is_file, is_live, locked, sha256_file, storage_errors, sync, try_lock
from cyberslm.files.kept import KEPT, has_kept, is_worth_keeping
from cyberslm.files.manifest import MANIFEST, looks_published, seal

PATIENCE = 60
"""Seconds to wait for another process that clears away what it has replaced, or looks at what we have just made."""
_BUSY = "{target} is being written by another process; wait for it or choose another name"


def publish(
    target: str | Path,
    fill: Callable[[Path], Mapping[str, object]],
    *,
    replace: bool = False,
    keep: bool = False,
) -> dict[str, Any]:
    """Make a folder appear complete; returns its manifest.

    ``fill`` gets an empty folder beside the target, writes files and sub-folders into it and returns the fields of the
    manifest besides ``files`` and ``self``. On any error or interrupt what it wrote is removed and an existing target
    is as before. With ``replace`` an existing CyberSLM folder is swapped for the new one; without, only an empty folder
    may stand in the way. Missing parents are made. With ``keep``, what is marked whole (`Kept`) stays after an error or
    a kill, and ``fill`` gets the folder as an earlier call left it. Raises ``StorageError``.
    """
    target = Path(target).absolute()
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _tidy(target, keep=keep)
        _refuse(target, replace=replace)
        with _stage(target, keep=keep) as (staging, mode):
            fields = fill(staging)
            manifest, data = seal(fields, _settle_files(staging, mode))
            (staging / MANIFEST).write_bytes(data)
            sync(staging / MANIFEST)
            sync(staging)
            _refuse(target, replace=replace)
            _give_name(staging, target)
    return manifest


def forget(target: str | Path) -> bool:
    """Delete what a killed or failed publish left to go on with, unless a process is at it; whether there was any."""
    target = Path(target).absolute()
    with storage_errors(target):
        return _sweep_folder(_staging(target), target)


def remove(target: str | Path) -> None:
    """Delete a published folder: its name disappears in one step, so that no half of it is ever seen under it.

    Raises ``StorageError``, also for a folder without a manifest, which is not ours to delete.
    """
    target = Path(target).absolute()
    with storage_errors(target):
        if not _is_published(target):
            raise StorageError(f"{target} is not a CyberSLM folder and was not deleted")
        _delete(target, _staging(_aside(target)))


def sweep(parent: str | Path) -> list[Path]:
    """Clear what killed processes left directly in ``parent``; returns the paths removed or put back.

    A folder set aside whose target is missing is put back under its name. What a live process is writing stays, and
    what a dead one left to go on with.
    """
    parent = Path(parent)
    if not parent.is_dir():
        return []
    swept = []
    with storage_errors(parent):
        for path in sorted(parent.iterdir()):
            match = re.fullmatch(r"\.(.+)\.cyberslm-(?:partial|old)", path.name)
            if match and not has_kept(path) and _sweep_folder(path, path.with_name(match[1])):
                swept.append(path)
            elif TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink() and not is_live(path):
                path.unlink(missing_ok=True)
                swept.append(path)
        if swept:
            sync(parent)
    return swept


@contextmanager
def scratch(parent: str | Path) -> Iterator[Path]:
    """A folder for temporary files in ``parent``, removed at the end; `sweep` clears it after a killed process."""
    with storage_errors(Path(parent)):
        folder = Path(tempfile.mkdtemp(prefix=".scratch-", suffix=".cyberslm-partial", dir=parent))
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try_lock(descriptor)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.cyberslm-partial")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.cyberslm-old")


def _tidy(target: Path, *, keep: bool) -> None:
    """Clear or put back what an earlier, killed publish of this target left, but for what may be gone on with."""
    staging, aside = _staging(target), _aside(target)
    _sweep_folder(_staging(aside), aside)
    _sweep_folder(aside, target)
    if not (keep and has_kept(staging)) and staging.exists() and not _sweep_folder(staging, target):
        raise BusyError(_BUSY.format(target=target))


def _is_published(folder: Path) -> bool:
    """Whether a folder is ours to replace or delete: one that was published, damaged or not."""
    return folder.is_dir() and not folder.is_symlink() and looks_published(folder)


def _refuse(target: Path, *, replace: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if _is_published(target):
        if not replace:
            raise StorageError(f"{target} exists already; remove it or choose another name")
    elif target.is_symlink() or not target.is_dir() or any(target.iterdir()):
        raise StorageError(f"{target} exists and is not a CyberSLM folder; move it away or choose another name")


@contextmanager
def _stage(target: Path, *, keep: bool) -> Iterator[tuple[Path, int]]:
    """A locked staging folder, empty unless there is work to ``keep``, and the mode that the umask gave it.

    It is gone when the body fails.
    """
    staging = _staging(target)
    with _claimed(staging, keep=keep) as mine:
        if not mine:
            raise BusyError(_BUSY.format(target=target))
        ours = staging.stat()
        try:
            yield staging, stat.S_IMODE(ours.st_mode)
        except BaseException:
            # once it has its name, another process may have a folder where it was
            if is_file(staging, ours) and not (keep and is_worth_keeping(staging)):
                shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def _claimed(staging: Path, *, keep: bool) -> Iterator[bool]:
    """Make the folder, or take kept work up, and lock it; False where another process is at it."""
    while True:
        kept = keep and has_kept(staging)
        try:
            staging.mkdir(exist_ok=kept)
        except FileExistsError:
            yield False
            return
        with locked(staging, patience=0 if kept else PATIENCE) as mine:
            if mine or kept:
                yield mine
                return
        # a new one, empty and not yet locked, looks like that of a dead process to one who clears up just then


def _give_name(staging: Path, target: Path) -> None:
    """What has the name is set aside before, and locked until it is deleted or, after an error, put back."""
    aside = _aside(target)
    with locked(target, patience=PATIENCE) if _is_published(target) else nullcontext(True) as free:
        if not free and _is_published(target):
            raise BusyError(_BUSY.format(target=target))
        try:
            if _is_published(target):
                target.rename(aside)
            with _without_kept(staging, _staging(aside)):
                staging.rename(target)
            sync(target.parent)
        finally:
            if aside.exists():
                _settle_aside(aside, target)


@contextmanager
def _without_kept(staging: Path, doomed: Path) -> Iterator[None]:
    """Take kept work out of a folder for the instant that gives it its name, and delete it."""
    kept = staging / KEPT
    if not kept.exists():
        yield
        return
    shutil.rmtree(doomed, ignore_errors=True)
    kept.rename(doomed)
    try:
        yield
    except BaseException:
        doomed.rename(kept)
        raise
    shutil.rmtree(doomed, ignore_errors=True)


def _settle_files(staging: Path, mode: int) -> dict[str, dict[str, object]]:
    """Give all files and sub-folders the umask's mode, sync them, and list name -> SHA-256 and size in bytes."""
    listed: dict[str, dict[str, object]] = {}
    folders = []
    for path in sorted(staging.rglob("*")):
        if path.is_relative_to(staging / KEPT):
            continue
        name = path.relative_to(staging).as_posix()
        if path.is_dir() and not path.is_symlink():
            path.chmod(mode)
            folders.append(path)
            continue
        if path.is_symlink() or not path.is_file() or name == MANIFEST:
            raise StorageError(f"cannot publish {name}: a folder holds plain files, and its {MANIFEST} is written last")
        path.chmod(mode & 0o666)
        sync(path)
        listed[name] = {"sha256": sha256_file(path), "size": path.stat().st_size}
    for folder in reversed(folders):
        sync(folder)
    return listed


def _settle_aside(aside: Path, target: Path) -> None:
    """Put a folder set aside back when its target is missing, else delete it."""
    if target.exists():
        _delete(aside, _staging(aside))
    else:
        aside.rename(target)


def _delete(folder: Path, doomed: Path) -> None:
    """By us or by another who is at it just now."""
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(doomed)
        sync(folder.parent)
        _rmtree(doomed)


def _rmtree(folder: Path) -> None:
    """All that is still there of it; others may be deleting too."""

    def go_on(_function: object, _path: str, info: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    shutil.rmtree(folder, onerror=go_on)


def _sweep_folder(path: Path, target: Path) -> bool:
    """Settle an ``-old`` or remove a ``-partial``, unless a live process is publishing that target."""
    if not path.is_dir() or path.is_symlink():
        return False
    with locked(path) as idle:
        if not idle:
            return False
        if path == _staging(target):
            _rmtree(path)
        elif _is_published(path):
            _settle_aside(path, target)
        else:
            return False
    return True
