"""Lines appended in whole blocks: whatever stops the work, the next start goes on, and the result is the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cyberslm.errors import ConfigError, StorageError
from cyberslm.files import blocks as module
from cyberslm.files.blocks import Blocks, unfinished


class Killed(BaseException):
    pass


BLOCKS = [[b"a\n", b"b\n"], [], [b"c\n"], [b"d\n", b"e\n", b"f\n"]]


def work(target: Path, *, key: str = "k", replace: bool = False, said: list[str] | None = None) -> int:
    """Append all blocks that are missing and finish; how many were made now."""
    made = 0
    with unfinished(target, key=key, replace=replace, say=(said if said is not None else []).append) as found:
        at = 0
        for block in BLOCKS:
            taken = len(block) + 1
            if at >= found.taken:
                found.append(b"".join(block), taken=taken)
                made += 1
            at += taken
        found.finish(row.upper() for row in found.rows())
    return made


def test_killed_at_any_step_it_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    limit = 0

    def counted(name: str, original: object, owner: object) -> None:
        def step(*args: object, **kwargs: object) -> object:
            nonlocal steps
            steps += 1
            if steps == limit:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    for owner, name in (
        (os, "fsync"),
        (module, "write_text"),
        (Path, "replace"),
        (module, "sync"),
        (module.shutil, "rmtree"),
    ):
        counted(name, getattr(owner, name), owner)
    work(tmp_path / "straight")
    straight, total = (tmp_path / "straight").read_bytes(), steps
    assert total > 15
    for number in range(1, total + 1):
        target = tmp_path / f"out-{number}"
        steps, limit = 0, number
        with pytest.raises(Killed):
            work(target)
        assert not target.exists() or target.read_bytes() == straight
        steps, limit = 0, -1
        work(target)
        assert target.read_bytes() == straight
        assert not (tmp_path / f".{target.name}.cyberslm-work").exists()


def test_only_missing_blocks_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "finish", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        work(tmp_path / "out")
    monkeypatch.undo()
    said: list[str] = []
    assert work(tmp_path / "out", said=said) == 0
    assert said == [f"{tmp_path / 'out'}: goes on after 10 records"]


def test_half_a_block_behind_the_state_is_cut_off(tmp_path: Path) -> None:
    with unfinished(tmp_path / "out", key="k", replace=False, say=print) as found:
        found.append(b"a\nb\n", taken=3)
    with (tmp_path / ".out.cyberslm-work" / "rows").open("ab") as stream:
        stream.write(b"half a li")
    work(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"A\nB\nC\nD\nE\nF\n"


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"[",
        b"[]",
        b'{"key": "k", "taken": -1, "size": 0}',
        b'{"key": "k", "taken": 1, "size": 99}',
        b'{"key": "k"}',
    ],
)
def test_a_damaged_state_begins_anew(tmp_path: Path, state: bytes) -> None:
    with unfinished(tmp_path / "out", key="k", replace=False, say=print) as found:
        found.append(b"wrong\n", taken=3)
    (tmp_path / ".out.cyberslm-work" / "state.json").write_bytes(state)
    assert work(tmp_path / "out") == len(BLOCKS)
    assert (tmp_path / "out").read_bytes() == b"A\nB\nC\nD\nE\nF\n"


def test_other_work_on_the_target_begins_anew_and_says_so(tmp_path: Path) -> None:
    with unfinished(tmp_path / "out", key="other", replace=False, say=print) as found:
        found.append(b"wrong\n", taken=3)
        (found.folder / "left.json").write_text("{}")
        (found.folder / "folder").mkdir()
    said: list[str] = []
    assert work(tmp_path / "out", said=said) == len(BLOCKS)
    assert "begins anew" in said[0]
    assert (tmp_path / "out").read_bytes() == b"A\nB\nC\nD\nE\nF\n"


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="--force"):
        work(target)
    assert target.read_bytes() == b"mine"
    assert not (tmp_path / ".out.cyberslm-work").exists()
    work(target, replace=True)
    assert target.read_bytes() == b"A\nB\nC\nD\nE\nF\n"
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        work(tmp_path / "folder", replace=True)


def test_two_processes_dont_share_a_target(tmp_path: Path) -> None:
    with (
        unfinished(tmp_path / "out", key="k", replace=False, say=print),
        pytest.raises(StorageError, match="in use by"),
    ):
        work(tmp_path / "out")


def test_the_state_is_never_ahead_of_the_rows(tmp_path: Path) -> None:
    with unfinished(tmp_path / "out", key="k", replace=False, say=print) as found:
        for number in range(5):
            found.append(b"x\n" * number, taken=number)
            state = json.loads((found.folder / "state.json").read_text())
            assert state["size"] == (found.folder / "rows").stat().st_size
            assert state["taken"] == found.taken
