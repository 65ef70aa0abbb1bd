"""What a preparation must have in common with one that was killed, to go on with what that one left whole.

Everything that decides a byte of the result: settings, the redaction key (by a digest), evaluation files, the list of
files with size and time of change, the tokenizer's settings, Python and this program's own code. Of a redaction key
that is drawn anew each time nothing can be kept.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from cyberslm.data.config import DataConfig
from cyberslm.data.inputs import InputFile, printable


def key_of(config: DataConfig, settings: Mapping[str, object], *facts: object) -> str | None:
    """One name for ``settings`` (`settings_of`) and ``facts`` (JSON values); None where nothing can be kept."""
    if config.redact is not None and config.redact.key_file is None:
        return None
    decides = json.dumps([_program(), sys.version, settings, *facts], sort_keys=True)
    return hashlib.sha256(decides.encode()).hexdigest()


def listed(files: Iterable[InputFile]) -> list[tuple[object, ...]]:
    """What tells input files from others, and from themselves after a change."""
    return [(file.key, printable(file.path.absolute()), file.name, file.size, file.mtime_ns) for file in files]


def _program() -> str:
    """SHA-256 of the package's code: a fixed reader must not go on with what the broken one made."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
