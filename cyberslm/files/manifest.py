"""``manifest.json``: what a published folder holds, in bytes that admit no unnoticed change.

``{"files": {name: {"sha256", "size"}}, ..., "self": SHA-256 of the canonical JSON of everything else}``. The file must
be the canonical form of what it says (sorted keys, indent 2, ASCII, a newline at the end), so that there is one way to
write each manifest and any flipped bit shows. This finds damage and edits; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from cyberslm.errors import InputError, IntegrityError
from cyberslm.files.atomic import sha256_file

MANIFEST = "manifest.json"
MAX_BYTES = 4 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")


def seal(given: Mapping[str, object], files: Mapping[str, Mapping[str, object]]) -> tuple[dict[str, Any], bytes]:
    """A manifest and its bytes. Raises ``InputError`` for fields that are reserved, not JSON or too large to read."""
    reserved = {"files", "self"} & set(given)
    if reserved:
        raise InputError(f"the manifest field {min(reserved)!r} is reserved; choose another name")
    try:
        manifest: dict[str, Any] = json.loads(_canonical({**given, "files": files}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"manifest fields must be JSON: {error}") from error
    manifest["self"] = hashlib.sha256(_canonical(manifest)).hexdigest()
    data = _canonical(manifest)
    if len(data) > MAX_BYTES:
        raise InputError(
            f"a manifest of {len(data):,} bytes; at most {MAX_BYTES:,} are read, so use fewer files or fields"
        )
    return manifest, data


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder: itself checked, but not the files. Raises ``IntegrityError``."""
    return _read_sealed(Path(folder), Path(folder) / MANIFEST)


def looks_published(folder: str | Path) -> bool:
    """Whether a folder holds a manifest of ours, sound or damaged; a ``manifest.json`` of others doesn't count."""
    try:
        with (Path(folder) / MANIFEST).open("rb") as stream:
            data = stream.read(MAX_BYTES)
    except OSError:
        return False
    marks = (b'"files": {', b'"self": "', b'"sha256": "')
    return sum(mark in data for mark in marks) >= 2


def verify(folder: str | Path, *, listed_in: Path | None = None) -> dict[str, Any]:
    """The manifest of a folder whose files all have the size and SHA-256 it lists; ``listed_in`` names another list.

    Files that it does not list are not looked at. Raises ``IntegrityError`` that names each file and what is wrong.
    """
    folder = Path(folder)
    manifest = _read_sealed(folder, listed_in or folder / MANIFEST)
    found = ((name, _complaint(folder, name, entry)) for name, entry in manifest["files"].items())
    wrong = [f"{folder / name}: {complaint}" for name, complaint in found if complaint]
    if wrong:
        raise IntegrityError("\n".join(wrong))
    return manifest


def _read_sealed(folder: Path, path: Path) -> dict[str, Any]:
    data = _read(folder, path)
    try:
        manifest = json.loads(data)
        sound = isinstance(manifest, dict) and _is_sound(manifest, data)
    except (ValueError, RecursionError):
        raise IntegrityError(f"{path} is not JSON: it was damaged or edited") from None
    if not sound:
        raise IntegrityError(f"{path} does not match its own checksum: it was damaged or edited")
    _check_files(manifest.get("files"), path)
    return manifest


def _read(folder: Path, path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        missing = f"no {MANIFEST} in {folder}: not a finished CyberSLM folder"
        raise IntegrityError(missing if folder.exists() else f"no folder {folder}") from None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise IntegrityError(f"{path} is larger than {MAX_BYTES:,} bytes, the limit for a manifest")
    return data


def _canonical(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def _is_sound(manifest: dict[str, Any], data: bytes) -> bool:
    """Whether the bytes are the canonical form of what they say, and the checksum in them is that of the rest."""
    rest = {key: value for key, value in manifest.items() if key != "self"}
    return _canonical(manifest) == data and manifest.get("self") == hashlib.sha256(_canonical(rest)).hexdigest()


def _check_files(listed: object, path: Path) -> None:
    """Names stay inside the folder and entries are what ``verify`` compares; a checksum alone doesn't promise that."""
    if not isinstance(listed, dict):
        raise IntegrityError(f"{path} lists no files")
    for name, entry in listed.items():
        if not _is_inside(name):
            raise IntegrityError(f"{path} lists {name[:100]!r}, which is not a plain name inside the folder")
        if not _is_entry(entry):
            raise IntegrityError(f"{path} lists {name[:100]!r} without a size and SHA-256")


def _is_inside(name: str) -> bool:
    pure = PurePosixPath(name)
    plain = str(pure) == name and not pure.is_absolute() and ".." not in pure.parts and "\0" not in name
    return plain and name not in (".", MANIFEST)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"sha256", "size"}:
        return False
    size, digest = entry["size"], entry["sha256"]
    return type(size) is int and size >= 0 and isinstance(digest, str) and _SHA256.fullmatch(digest) is not None


def _complaint(folder: Path, name: str, entry: Mapping[str, Any]) -> str:
    """What is wrong with one listed file; empty when nothing is."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return "is a link that leaves the folder"
        if not path.is_file():
            return "is not a regular file" if path.exists() else "is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"has {size:,} bytes, but the manifest says {entry['size']:,}"
        if sha256_file(path) != entry["sha256"]:
            return "has another SHA-256 than the manifest says: it was damaged or edited"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except RuntimeError:
        return "is a link to itself"
    return ""
