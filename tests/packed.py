"""Archives in memory, as the tests need them."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping


def tar_of(files: Mapping[str, bytes], change: Callable[[tarfile.TarInfo], None] | None = None) -> bytes:
    """A tar file; ``change`` may alter each header."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if change is not None:
                change(info)
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


def zip_of(files: Mapping[str, bytes]) -> bytes:
    """A zip file, deflated."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return made.getvalue()
