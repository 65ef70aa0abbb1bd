"""What a verb says last: the exact command to go on with, in one form."""

from __future__ import annotations

import shlex
from pathlib import Path


def next_command(verb: str, path: Path, options: str = "") -> str:
    """``next:  cyberslm VERB PATH OPTIONS``, the path quoted where a shell needs it."""
    return f"next:  cyberslm {verb} {shlex.quote(str(path))} {options}".rstrip()
