"""What is written in C++: compiled once for a machine, kept in the user's own cache, checked before it is loaded.

The library holds the decoding step of a whole network (`step.cpp`), and for rows of many tokens the products of int8
matrices (`prompts.cpp`), attention (`attention.cpp`), what else lies between products (`rows.cpp`) and the loss of
logits (`softmax.cpp`). It is one for
all networks, so that what names it is the source, the compiler with its options, and the processor. Like whatever has
a `Plan` it lies in a published folder (`cyberslm.files`) that only the user can write to. Whatever is wrong with a kept
one, it is made again; where it can't be made, the reason is a `BuildError`, and everything works without it, only
slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cyberslm import files
from cyberslm.errors import BusyError, CyberSLMError, IntegrityError

UNITS = ("step.cpp", "prompts.cpp", "attention.cpp", "rows.cpp", "softmax.cpp")
HEADERS = ("bytes.h", "cells.h", "matrix.h", "products.h", "vectors.h")
BY_ADDRESS = (
    *("attention_forward", "attention_backward", "norm_forward", "norm_backward"),
    *("gated", "turned", "softmax_loss", "int8_products"),
)
"""Functions that take the address of a structure and return nothing."""
LIBRARY = "cyberslm.so"
KIND = "cyberslm-native"
OPTIONS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
LONGEST, PAUSE = 600, 0.2  # seconds of compiling, and between looks at another process that compiles


class BuildError(CyberSLMError):
    """What is written in C++ can't be compiled here."""


class Plan(NamedTuple):
    """What a shared library is made of."""

    units: tuple[str, ...]
    options: tuple[str, ...]
    declare: Callable[[ctypes.CDLL], None]
    """Gives its functions their types."""
    headers: tuple[str, ...] = ()
    """Of our own."""
    version: str = ""
    """Of what else it was compiled with."""


def cache_folder() -> Path:
    """Where libraries are kept: ``CYBERSLM_CACHE``, else ``cyberslm`` in the user's cache folder."""
    if own := os.environ.get("CYBERSLM_CACHE"):
        return Path(own) / "native"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "cyberslm" / "native"


@functools.cache
def library() -> ctypes.CDLL:
    """The library that this process works with, made if there is none yet. Raises as `build_library` does."""
    compiler = find_compiler()
    return kept_library(compiler) or build_library(compiler)


@functools.cache
def multiplies_bytes() -> bool:
    """Whether this processor adds up products of bytes, as `int8_products` needs. Raises as `library` does."""
    return bool(library().multiplies_bytes())


def find_compiler() -> Path:
    """``CXX`` if it is set, else c++, g++ or clang++. Raises `BuildError` when there is none."""
    own = os.environ.get("CXX")
    for name in (own,) if own else ("c++", "g++", "clang++"):
        if (found := shutil.which(name)) is not None:
            return Path(found).resolve()
    there = f"CXX names {own!r:.200}, which isn't there" if own else "no C++ compiler was found"
    raise BuildError(f"{there}: install g++ or clang++, or name one in CXX")


def kept_library(compiler: Path) -> ctypes.CDLL | None:
    """The library made by an earlier process, as `kept` finds it."""
    return kept(_LIBRARY, compiler)


def build_library(compiler: Path) -> ctypes.CDLL:
    """Compile, keep and load the library, as `built` does."""
    return built(_LIBRARY, compiler)


def kept(plan: Plan, compiler: Path) -> ctypes.CDLL | None:
    """What an earlier process has made, if it is there, whole, and nobody else could have written it."""
    folder = cache_folder() / _key(plan, compiler)
    try:
        if not _is_private(folder) or files.verify(folder).get("kind") != KIND:
            return None
        return _loaded(plan, folder)
    except (IntegrityError, OSError):
        return None


def built(plan: Plan, compiler: Path) -> ctypes.CDLL:
    """Compile, keep and load it; where another process is at it, take what that one makes.

    Raises `BuildError` with the compiler's first complaint, `StorageError`.
    """
    folder = cache_folder() / _key(plan, compiler)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    until = time.monotonic() + LONGEST
    while True:
        try:
            return _built(plan, compiler, folder)
        except BusyError:
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE)
        if (found := kept(plan, compiler)) is not None:
            return found


def _built(plan: Plan, compiler: Path, folder: Path) -> ctypes.CDLL:
    def fill(staging: Path) -> dict[str, object]:
        command = [str(compiler), *map(str, _paths(plan.units)), *plan.options, "-o", str(staging / LIBRARY)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=LONGEST, check=False, cwd=staging
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler.name} could not be run: {error}") from error
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise BuildError(f"{compiler.name} could not compile what is written in C++: {complaint}")
        return {"kind": KIND, "compiler": str(compiler), "options": list(plan.options)}

    files.publish(folder, fill, replace=True)
    folder.chmod(0o700)
    try:
        return _loaded(plan, folder)
    except OSError as error:
        raise BuildError(f"the compiled library can't be loaded: {error}") from error


def _loaded(plan: Plan, folder: Path) -> ctypes.CDLL:
    import torch  # noqa: F401 (whose OpenMP and core the library then shares)

    library = ctypes.CDLL(str(folder / LIBRARY))
    plan.declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.decode_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.decode_step.restype = None
    library.scratch_floats.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.scratch_floats.restype = ctypes.c_int64
    library.multiplies_bytes.argtypes, library.multiplies_bytes.restype = [], ctypes.c_int64
    for function in (getattr(library, name) for name in BY_ADDRESS):
        function.argtypes, function.restype = [ctypes.c_void_p], None


_LIBRARY = Plan(UNITS, OPTIONS, _declare, HEADERS)


def _paths(names: tuple[str, ...]) -> list[Path]:
    return [Path(__file__).with_name(name) for name in names]


def _is_private(folder: Path) -> bool:
    """Whether the folders down to the library and it belong to the user, and no one else may write there."""
    for path in (folder.parent, folder, folder / LIBRARY):
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or stat.S_ISLNK(status.st_mode):
            return False
    return True


def _key(plan: Plan, compiler: Path) -> str:
    """Names it by everything that decides what it is."""
    found = compiler.stat()
    sources = [path.read_text(encoding="utf-8") for path in _paths(plan.units + plan.headers)]
    parts = (*sources, compiler, found.st_size, found.st_mtime_ns, plan.options, plan.version, _processor())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _processor() -> str:
    """Model and instruction sets, which ``-march=native`` compiles for."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + "".join(line for line in lines if line.startswith(wanted))
