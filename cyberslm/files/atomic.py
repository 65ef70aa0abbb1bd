"""Single files, locks and what the file system says: temp name, write, sync, rename, sync the folder.

The order is the point: content reaches the disk before the name does, and the folder is synced last, so that a crash at
any moment leaves the old file or the new one. See fsync(2) and rename(2).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from cyberslm.errors import ConfigError, StorageError

PAUSE = 0.01
"""Seconds between two tries for a lock."""
TEMPORARY = re.compile(r"\.cyberslm-[0-9a-f]{16}\.tmp")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write one file, replacing what was there. The mode is what the umask gives a new file.

    A symbolic link stays and the file it points to is replaced. The folder must exist, and anything but a regular file
    is left alone. Raises ``StorageError``.
    """
    with storage_errors(Path(path)):
        real = Path(os.path.realpath(path))
        if real.exists() and not real.is_file():
            raise StorageError(f"cannot write {path}: it is not a regular file")
        temporary = real.with_name(f".cyberslm-{secrets.token_hex(8)}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb") as stream:
                try_lock(descriptor)
                stream.write(data)
                stream.flush()
                os.fsync(descriptor)
                temporary.replace(real)
            sync(real.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: str | Path, text: str) -> None:
    """``write_bytes`` of UTF-8, line ends as given."""
    write_bytes(path, text.encode())


def make_folder(path: str | Path) -> Path:
    """Make a folder and its parents unless it is there. Raises ``StorageError``."""
    with storage_errors(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def lock(folder: str | Path) -> Iterator[None]:
    """Hold a folder for this process; ``.lock`` says which process on which host, since when.

    Raises ``StorageError`` when another holds it. The kernel drops a lock with its process, so that what a killed one
    left is only text and is written over.
    """
    path = Path(folder) / ".lock"
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as stream:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _holder(stream.read(400).decode(errors="replace"))
            raise StorageError(f"{folder} is in use by {who}; wait for it or choose another folder") from None
        except OSError as error:
            raise StorageError(f"{folder} cannot be locked: {error.strerror}") from error
        try:
            with storage_errors(path):
                stream.truncate(0)
                since = datetime.now(UTC).isoformat(timespec="seconds")
                stream.write(f"{os.getpid()} {since} {platform.node()}\n".encode())
            yield
        finally:
            stream.truncate(0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _holder(text: str) -> str:
    """The owner named in a lock file. A dead one's lock lives on only in a child that it left behind."""
    pid, _, rest = text.strip().partition(" ")
    since, _, host = rest.partition(" ")
    if not (pid.isascii() and pid.isdigit()):
        return "another process"
    known = f" on {host} since {since}" if host else ""
    if host == platform.node() and not _is_alive(int(pid)):
        return f"a child of process {pid}{known}, which is gone: end that child"
    return f"process {pid}{known}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def require_space(folder: str | Path, needed: int, *, what: str) -> None:
    """Raise ``ConfigError`` when the file system of ``folder`` has under ``needed`` bytes; it need not exist yet."""
    with storage_errors(Path(folder)):
        free = _free_bytes(Path(folder))
    if free < needed:
        raise ConfigError(
            f"{what} needs {needed:,} bytes, but {folder} has {free:,} bytes free; free some or choose another folder"
        )


def _free_bytes(path: Path) -> int:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Say what could not be written, the file elsewhere that stood in the way, and the free bytes when that is why."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        if isinstance(error.filename, str) and Path(error.filename).parent != path.parent:
            message += f" ({error.filename})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += f"; {_free_bytes(path):,} bytes are free, so free some or choose another folder"
        raise StorageError(message) from error


def sync(path: Path) -> None:
    """Wait until a file's or a folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """False when a live process holds it. Where the file system has no locks, nobody can be seen to hold any."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def locked(path: Path, *, patience: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a file or folder: whether it is ours, after so many seconds, and still what has that name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield False
        return
    mine = False
    try:
        until = time.monotonic() + patience
        while not (mine := try_lock(descriptor)) and time.monotonic() < until:
            time.sleep(PAUSE)
        yield mine and is_file(path, os.fstat(descriptor))
    finally:
        if mine:
            with suppress(OSError):  # said so, as children that were forked meanwhile have the descriptor too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_file(path: Path, status: os.stat_result) -> bool:
    """Whether a name is that of the file or folder of ``status``."""
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


def is_live(path: Path) -> bool:
    """Whether a process holds the lock of a file or folder being written, or has just finished with it."""
    with locked(path) as idle:
        return not idle
