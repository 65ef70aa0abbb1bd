"""The library in C++: made once, kept, looked at before it is loaded, and waited for where another process makes it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cyberslm.native.build import BuildError, build_library, find_compiler, kept_library

pytestmark = pytest.mark.usefixtures("native_cache")


def made_library() -> Path:
    """The one that this machine's compiler has made."""
    library = kept_library(find_compiler())
    assert library is not None
    return Path(library._name)


def copying_compiler(folder: Path, made: Path, *, seconds: float = 0.0) -> Path:
    """A compiler that copies a finished library and counts in ``runs``."""
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\necho >> {folder}/runs\nsleep {seconds}\nfor last; do :; done\ncp {made} "$last"\n')
    compiler.chmod(0o755)
    return compiler


def test_a_kept_library_is_used_again_and_a_damaged_one_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = copying_compiler(tmp_path, made_library())
    monkeypatch.setenv("CYBERSLM_CACHE", str(tmp_path / "own"))
    assert kept_library(compiler) is None
    build_library(compiler)
    assert isinstance(kept_library(compiler), ctypes.CDLL)
    (library,) = (tmp_path / "own").glob("native/*/cyberslm.so")
    damaged = library.read_bytes()[:-1] + b"x"
    library.unlink()  # the file itself is in use
    library.write_bytes(damaged)
    assert kept_library(compiler) is None
    build_library(compiler)
    assert isinstance(kept_library(compiler), ctypes.CDLL)
    assert (tmp_path / "runs").read_text() == "\n\n"


def test_a_library_that_others_could_have_written_is_not_loaded() -> None:
    folder = made_library().parent
    folder.chmod(0o777)
    assert kept_library(find_compiler()) is None
    folder.chmod(0o700)
    assert kept_library(find_compiler()) is not None


def test_processes_that_want_it_at_once_compile_it_once(tmp_path: Path) -> None:
    """The second one failed, as the folder was being written by another process."""
    compiler = copying_compiler(tmp_path, made_library(), seconds=4.0)
    environment = os.environ | {"CYBERSLM_CACHE": str(tmp_path / "own"), "CXX": str(compiler)}
    command = [sys.executable, "-c", "from cyberslm.native.build import library; library()"]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len((tmp_path / "runs").read_text().splitlines()) == 1


def test_a_compiler_that_is_named_and_not_there_is_no_reason_to_take_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX names 'no-such-compiler', which isn't there"):
        find_compiler()
