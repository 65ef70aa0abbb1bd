"""The one way to write: a file or a folder appears under its name whole, or not at all.

Everything is written beside its target under another name, synced, and renamed; the rename is the only step that
readers see (``atomic``, ``folders``). ``manifest.json`` comes last into a folder and holds size and SHA-256 of each
file and of itself, so that "the manifest verifies" and "the folder is complete and unchanged" are one statement
(``manifest``).

Whatever kills the process, ``sweep`` finds by name what it left: ``.cyberslm-*.tmp`` files, folders being filled or
deleted (``.NAME.cyberslm-partial``), and a whole folder set aside for the instant of a replacement
(``.NAME.cyberslm-old``). A lock on each, which the kernel drops with its process, tells what a live process is writing
from litter. A folder being filled stays where it holds work that its next ``publish`` goes on with (``kept``).
"""

from __future__ import annotations

from cyberslm.files.atomic import lock, make_folder, require_space, sha256_file, write_bytes, write_text
from cyberslm.files.folders import forget, publish, remove, scratch, sweep
from cyberslm.files.kept import Kept
from cyberslm.files.manifest import MANIFEST, looks_published, read_manifest, verify

__all__ = [
    "MANIFEST",
    "Kept",
    "forget",
    "lock",
    "looks_published",
    "make_folder",
    "publish",
    "read_manifest",
    "remove",
    "require_space",
    "scratch",
    "sha256_file",
    "sweep",
    "verify",
    "write_bytes",
    "write_text",
]
