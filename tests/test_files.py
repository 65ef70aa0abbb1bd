from __future__ import annotations

import errno
import json
import os
import platform
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyberslm import files
from cyberslm.errors import BusyError, ConfigError, InputError, IntegrityError, StorageError
from cyberslm.files import folders
from cyberslm.files import manifest as manifest_module

STEPS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod", "close")


def fill_with(content: str, **fields: object) -> Callable[[Path], dict[str, object]]:
    def fill(staging: Path) -> dict[str, object]:
        (staging / "a.txt").write_text(content)
        (staging / "training").mkdir()
        (staging / "training" / "state.json").write_text(f'{{"content": "{content}"}}')
        return {"kind": content, **fields}

    return fill


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def run_and_die(action: Callable[[], object], *, at: int) -> bool:
    """Fork, and kill the child as it takes the ``at``-th step of ``action``. False if there is no such step."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def deadly(real):
            def step(*args, **kwargs):
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return step

        for name in STEPS:
            setattr(os, name, deadly(getattr(os, name)))
        action()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def every_death(action: Callable[[], object], reset: Callable[[], None]):
    """Yield after each place where ``action`` can be killed, the world reset before each."""
    at = 1
    reset()
    while run_and_die(action, at=at):
        yield at
        at += 1
        reset()
    assert at > 6


# Single files


def test_a_file_is_written_whole_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "x.bin"
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            files.write_bytes(path, b"\0data")
        finally:
            os.umask(before)
        assert path.read_bytes() == b"\0data"
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    files.write_text(path, "\u00e4\r\n")
    assert path.read_bytes() == b"\xc3\xa4\r\n"
    assert listing(tmp_path) == ["x.bin"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("far/real.txt")
    files.write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "far" / "real.txt").read_text() == "new"
    assert listing(tmp_path / "far") == ["real.txt"]


def test_a_file_is_old_or_new_wherever_the_process_is_killed(tmp_path):
    path = tmp_path / "x.json"
    seen = set()
    for _ in every_death(lambda: files.write_text(path, "new" * 9999), lambda: files.write_text(path, "old")):
        seen.add(path.read_text())
        files.sweep(tmp_path)
        assert listing(tmp_path) == ["x.json"]
    assert seen == {"old", "new" * 9999}


def test_content_reaches_the_disk_before_the_name_does(tmp_path, monkeypatch):
    steps = record_steps(monkeypatch)
    files.write_text(tmp_path / "x", "content")
    assert [kind for kind, _ in steps] == ["fsync", "replace", "fsync"]
    assert steps[0][1].startswith(str(tmp_path / ".cyberslm-"))
    assert steps[2][1] == str(tmp_path)


def record_steps(monkeypatch) -> list[tuple[str, str]]:
    steps: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor):
        steps.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        real["fsync"](descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):

        def move(source, target, name=name):
            steps.append((name, str(target)))
            real[name](source, target)

        monkeypatch.setattr(os, name, move)
    return steps


def test_what_cannot_be_written_is_a_storage_error_that_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    for place, reason in [
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path, "not a regular file"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
    ]:
        with pytest.raises(StorageError, match=reason):
            files.write_text(place, "x")
    files.write_text(path, "old")
    with full_disk(), pytest.raises(StorageError, match=f"cannot write {path}: File too large"):
        files.write_bytes(path, b"x" * 100_000)
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["x"]


class full_disk:  # noqa: N801 - reads as a statement
    """No file may grow past 4 KiB: the write fails midway, as on a full disk."""

    def __enter__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.limits[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        signal.signal(signal.SIGXFSZ, self.handler)


def test_a_full_disk_is_named_with_its_free_bytes(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    message = (
        r"cannot write .*x: No space left on device; [0-9,]+ bytes are free, so free some or choose another folder"
    )
    with pytest.raises(StorageError, match=message):
        files.write_text(tmp_path / "x", "data")
    with pytest.raises(StorageError, match="No space left on device; "):
        files.publish(tmp_path / "final", fill_with("new"))
    assert listing(tmp_path) == []


def test_an_interrupt_leaves_no_litter(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    for action in (
        lambda: files.write_text(tmp_path / "x", "y"),
        lambda: files.publish(tmp_path / "f", fill_with("n")),
    ):
        with pytest.raises(KeyboardInterrupt):
            action()
    assert listing(tmp_path) == []


# Folders


def test_a_published_folder_holds_its_files_and_a_manifest_that_verifies(tmp_path):
    target = tmp_path / "runs" / "final"
    manifest = files.publish(target, fill_with("new", steps=(1, 2)))
    assert manifest == files.read_manifest(target) == files.verify(target)
    assert listing(target) == ["a.txt", "manifest.json", "training", "training/state.json"]
    assert listing(tmp_path / "runs")[0] == "final"
    assert (manifest["kind"], manifest["steps"]) == ("new", [1, 2])
    assert manifest["files"]["a.txt"] == {"size": 3, "sha256": files.sha256_file(target / "a.txt")}
    assert set(manifest["files"]) == {"a.txt", "training/state.json"}


def test_modes_follow_the_umask_whatever_fill_used(tmp_path):
    def fill(staging: Path) -> dict[str, object]:
        (staging / "deep").mkdir(mode=0o700)
        (staging / "deep" / "x").write_text("x")
        (staging / "deep" / "x").chmod(0o600)
        return {}

    before = os.umask(0o027)
    try:
        files.publish(tmp_path / "f", fill)
    finally:
        os.umask(before)
    modes = {
        name: stat.S_IMODE((tmp_path / "f" / name).stat().st_mode) for name in (".", "deep", "deep/x", "manifest.json")
    }
    assert modes == {".": 0o750, "deep": 0o750, "deep/x": 0o640, "manifest.json": 0o640}


def test_everything_is_synced_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    files.publish(tmp_path / "f", fill_with("old"))
    steps = record_steps(monkeypatch)
    files.publish(tmp_path / "f", fill_with("new"), replace=True)
    partial = str(tmp_path / ".f.cyberslm-partial")
    synced = [
        f"{partial}/a.txt",
        f"{partial}/training/state.json",
        f"{partial}/training",
        f"{partial}/manifest.json",
        partial,
    ]
    assert steps[:8] == [
        *(("fsync", path) for path in synced),
        ("rename", str(tmp_path / ".f.cyberslm-old")),
        ("rename", str(tmp_path / "f")),
        ("fsync", str(tmp_path)),
    ]
    assert [kind for kind, _ in steps[8:]] == ["rename", "fsync"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_is_old_or_new_wherever_the_process_is_killed(tmp_path, replace):
    target = tmp_path / "run" / "final"
    target.parent.mkdir()
    seen = set()

    def reset() -> None:
        files.sweep(target.parent)
        if replace:
            files.publish(target, fill_with("old"), replace=True)
        elif target.exists():
            files.remove(target)

    for at in every_death(lambda: files.publish(target, fill_with("new"), replace=replace), reset):
        state = files.verify(target)["kind"] if target.exists() else "missing"
        if replace and state == "missing":
            assert files.verify(target.with_name(".final.cyberslm-old"))["kind"] == "old"
        seen.add(state)
        if at % 2:
            files.sweep(target.parent)
            assert listing(target.parent)[:1] == (["final"] if state != "missing" or replace else [])
        else:
            files.publish(target, fill_with("again"), replace=True)
            assert files.verify(target)["kind"] == "again"
            files.sweep(target.parent)
        assert all(name.split("/")[0] == "final" for name in listing(target.parent))
        if target.exists():
            assert files.verify(target)["kind"] in {"old", "new", "again"}
    assert seen == ({"old", "missing", "new"} if replace else {"missing", "new"})


def test_a_folder_is_whole_or_gone_wherever_its_removal_is_killed(tmp_path):
    target = tmp_path / "final"
    for _ in every_death(lambda: files.remove(target), lambda: files.publish(target, fill_with("x"), replace=True)):
        if target.exists():
            files.verify(target)
        files.sweep(tmp_path)
        assert listing(tmp_path)[:1] in ([], ["final"])


@pytest.mark.parametrize("replace", [False, True])
def test_a_failing_fill_leaves_everything_as_it_was(tmp_path, replace):
    target = tmp_path / "final"
    if replace:
        files.publish(target, fill_with("old"))

    def raising(error: BaseException) -> Callable[[Path], dict[str, object]]:
        def fill(staging: Path) -> dict[str, object]:
            (staging / "half.bin").write_bytes(b"x" * 100)
            raise error

        return fill

    def too_large(staging: Path) -> dict[str, object]:
        (staging / "large.bin").write_bytes(b"x" * 100_000)
        return {}

    before = listing(tmp_path)
    for error in (RuntimeError("bug"), KeyboardInterrupt(), StorageError("own")):
        with pytest.raises(type(error)):
            files.publish(target, raising(error), replace=replace)
    with pytest.raises(StorageError, match=r"cannot write .*final: No such file \(source.txt\)"):
        files.publish(target, raising(FileNotFoundError(2, "No such file", "source.txt")), replace=replace)
    with full_disk(), pytest.raises(StorageError, match="File too large"):
        files.publish(target, too_large, replace=replace)
    assert listing(tmp_path) == before
    if replace:
        assert files.verify(target)["kind"] == "old"


def test_the_target_is_put_back_when_the_second_rename_fails(tmp_path, monkeypatch):
    files.publish(tmp_path / "f", fill_with("old"))
    real = os.rename

    for error in (OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()):

        def rename(source, target, error=error):
            if str(source).endswith(".cyberslm-partial"):
                raise error
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises((StorageError, KeyboardInterrupt)):
            files.publish(tmp_path / "f", fill_with("new"), replace=True)
        assert files.verify(tmp_path / "f")["kind"] == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_only_own_or_empty_folders_give_way(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("cat")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("photos")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("photos", "file", "link", "dangling"):
        for replace in (False, True):
            with pytest.raises(StorageError, match="exists and is not a CyberSLM folder"):
                files.publish(tmp_path / name, fill_with("new"), replace=replace)
        with pytest.raises(StorageError, match="was not deleted"):
            files.remove(tmp_path / name)
    assert listing(tmp_path) == ["dangling", "file", "link", "photos", "photos/cat.jpg"]
    (tmp_path / "empty").mkdir()
    files.publish(tmp_path / "empty", fill_with("one"))
    with pytest.raises(StorageError, match="exists already"):
        files.publish(tmp_path / "empty", fill_with("two"))
    manifest = tmp_path / "empty" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    files.publish(tmp_path / "empty", fill_with("two"), replace=True)
    assert files.verify(tmp_path / "empty")["kind"] == "two"


def test_a_target_that_appears_while_filling_is_kept(tmp_path):
    target = tmp_path / "f"

    def fill(staging: Path) -> dict[str, object]:
        target.mkdir()
        (target / "other").write_text("other")
        return {}

    with pytest.raises(StorageError, match="not a CyberSLM folder"):
        files.publish(target, fill, replace=True)
    assert listing(tmp_path) == ["f", "f/other"]


def test_links_and_a_manifest_of_its_own_are_not_published(tmp_path):
    for make in (
        lambda staging: (staging / "x").symlink_to("/etc/passwd"),
        lambda staging: (staging / "d").symlink_to("/etc"),
        lambda staging: (staging / "manifest.json").write_text("{}"),
        lambda staging: os.mkfifo(staging / "pipe"),
    ):
        with pytest.raises(StorageError, match="plain files"):
            files.publish(tmp_path / "f", lambda staging, make=make: make(staging) and {} or {})
    for fields in ({"files": {}}, {"self": "x"}, {"x": float("nan")}, {"x": b""}, {"x": "y" * (5 << 20)}):
        with pytest.raises(InputError):
            files.publish(tmp_path / "f", lambda staging, fields=fields: fields)
    assert listing(tmp_path) == []


# Manifests


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("published") / "f"
    files.publish(target, fill_with("content" * 20, when="2024-01-01", loss=1.5e-7, note="\u00e4\ud800"))
    return target


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_found(published):
    path = published / "manifest.json"
    data = path.read_bytes()
    try:
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 8)
            path.write_bytes(damaged)
            with pytest.raises(IntegrityError):
                files.read_manifest(published)
        for edited in (data[:-1], data + b"\n", data[: len(data) // 2], b"", data.replace(b"\n", b"\r\n")):
            path.write_bytes(edited)
            with pytest.raises(IntegrityError):
                files.read_manifest(published)
    finally:
        path.write_bytes(data)
    assert files.verify(published)["loss"] == 1.5e-7


def test_a_flipped_bit_in_a_file_is_found(published):
    for name in ("a.txt", "training/state.json"):
        path = published / name
        data = path.read_bytes()
        for position in random.Random(1).sample(range(len(data)), 20):
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 8)
            path.write_bytes(damaged)
            with pytest.raises(IntegrityError, match=rf"{name}: has another SHA-256"):
                files.verify(published)
        path.write_bytes(data)
    files.verify(published)


def test_verify_names_each_file_and_what_is_wrong(tmp_path):
    def fill(staging: Path) -> dict[str, object]:
        for name in ("cut", "gone", "grown", "inner", "leaves", "loop", "turned"):
            (staging / name).write_text(name)
        return {}

    target = tmp_path / "f"
    files.publish(target, fill)
    (tmp_path / "outside").write_text("leaves")
    (target / "cut").write_text("cu")
    (target / "grown").write_text("grown!")
    for name in ("gone", "leaves", "loop", "turned", "inner"):
        (target / name).unlink()
    (target / "leaves").symlink_to(tmp_path / "outside")
    (target / "loop").symlink_to("loop")
    (target / "turned").mkdir()
    (target / "kept").write_text("inner")
    (target / "inner").symlink_to("kept")
    with pytest.raises(IntegrityError) as caught:
        files.verify(target)
    lines = str(caught.value).replace(f"{target}/", "").splitlines()
    assert [line for line in lines if not line.startswith("loop")] == [
        "cut: has 2 bytes, but the manifest says 3",
        "gone: is missing",
        "grown: has 6 bytes, but the manifest says 5",
        "leaves: is a link that leaves the folder",
        "turned: is not a regular file",
    ]
    assert len(lines) == 6


def test_a_folder_without_manifest_is_not_finished(tmp_path):
    with pytest.raises(IntegrityError, match=f"no manifest.json in {tmp_path}: not a finished CyberSLM folder"):
        files.verify(tmp_path)
    with pytest.raises(IntegrityError, match="no folder .*none"):
        files.read_manifest(tmp_path / "none")
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(IntegrityError, match="cannot be read: Is a directory"):
        files.read_manifest(tmp_path)


def forge(folder: Path, manifest: object) -> None:
    """A manifest whose own checksum is right, as an attacker would write it."""
    if isinstance(manifest, dict):
        manifest["self"] = manifest_module.hashlib.sha256(manifest_module._canonical(manifest)).hexdigest()
        (folder / "manifest.json").write_bytes(manifest_module._canonical(manifest))
    else:
        (folder / "manifest.json").write_text(json.dumps(manifest))


GOOD = {"sha256": "0" * 64, "size": 0}


@pytest.mark.parametrize(
    "listed",
    [
        *({name: GOOD} for name in ("../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a/", "", ".", "..", "a\0b")),
        {"manifest.json": GOOD},
        *({"x": entry} for entry in (None, [], {}, "x", {"size": 0}, {**GOOD, "size": -1}, {**GOOD, "size": True})),
        *(
            {"x": {**GOOD, key: value}}
            for key, value in (("size", 1.0), ("sha256", "0" * 63), ("sha256", 0), ("mode", 1))
        ),
        [],
        None,
    ],
    ids=str,
)
def test_a_forged_manifest_cannot_name_files_outside_or_skip_a_check(tmp_path, listed):
    forge(tmp_path, {"files": listed})
    with pytest.raises(IntegrityError, match="lists"):
        files.read_manifest(tmp_path)


def test_hostile_manifests_are_refused_cleanly(tmp_path):
    forge(tmp_path, {"files": {}})
    assert files.verify(tmp_path)["files"] == {}
    for text in ("[" * 100_000, "[]", "null", '{"files": {}, "files": {}}', "9" * 5000, '{"a": NaN}', "\ufeff{}", "x"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(IntegrityError):
            files.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b" " * (4 << 20) + b"{}")
    with pytest.raises(IntegrityError, match="larger than 4,194,304 bytes"):
        files.read_manifest(tmp_path)


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_arbitrary_bytes_are_no_manifest(tmp_path, data):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(IntegrityError):
        files.read_manifest(tmp_path)


# Sweep, lock, space


def test_sweep_leaves_what_is_not_ours(tmp_path):
    (tmp_path / ".photos.cyberslm-old").mkdir()
    (tmp_path / ".photos.cyberslm-old" / "cat.jpg").write_text("cat")
    (tmp_path / ".empty.cyberslm-old").mkdir()
    (tmp_path / ".link.cyberslm-partial").symlink_to(".photos.cyberslm-old")
    (tmp_path / ".file.cyberslm-partial").write_text("x")
    (tmp_path / ".cyberslm-notes.tmp").write_text("x")
    (tmp_path / ".cyberslm-0123456789abcdef.tmp").symlink_to("elsewhere")
    before = listing(tmp_path)
    assert files.sweep(tmp_path) == []
    assert listing(tmp_path) == before
    assert files.sweep(tmp_path / "none") == []


def test_sweep_says_what_it_did(tmp_path):
    files.publish(tmp_path / "a", fill_with("a"))
    (tmp_path / "a").rename(tmp_path / ".a.cyberslm-old")
    files.publish(tmp_path / "b", fill_with("b"))
    files.publish(tmp_path / "c", fill_with("c"))
    (tmp_path / "c").rename(tmp_path / ".b.cyberslm-old")
    (tmp_path / ".d.cyberslm-partial").mkdir()
    (tmp_path / ".d.cyberslm-partial" / "x").write_text("x")
    (tmp_path / ".cyberslm-0123456789abcdef.tmp").write_text("x")
    names = [path.name for path in files.sweep(tmp_path)]
    assert names == [".a.cyberslm-old", ".b.cyberslm-old", ".cyberslm-0123456789abcdef.tmp", ".d.cyberslm-partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (files.verify(tmp_path / "a")["kind"], files.verify(tmp_path / "b")["kind"]) == ("a", "b")


def test_sweep_and_publish_keep_off_what_a_live_process_is_writing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cyberslm import files\n"
        "def fill(staging):\n"
        "    (staging / 'x').write_text('x'); print('filling', flush=True); sys.stdin.readline(); return {}\n"
        "files.publish(Path(sys.argv[1]), fill)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "f")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "filling\n"
        assert files.sweep(tmp_path) == []
        with pytest.raises(StorageError, match="is being written by another process"):
            files.publish(tmp_path / "f", fill_with("mine"))
        child.stdin.write("\n")
        child.stdin.close()
        assert child.wait() == 0
    assert set(files.verify(tmp_path / "f")["files"]) == {"x"}


def test_those_who_publish_one_folder_at_once_end_well_or_are_told_that_it_is_busy(tmp_path):
    """One that came between another's look and its making of the staging folder ended in "File exists"."""

    def publish_often(name: str) -> None:
        done = 0
        while done < 20:
            try:
                files.publish(tmp_path / "f", fill_with(name), replace=True)
                done += 1
            except BusyError:
                time.sleep(0.001)

    def clear_often() -> None:
        for _ in range(200):
            files.sweep(tmp_path)
            time.sleep(0.001)

    with ThreadPoolExecutor(4) as pool:
        clearing = pool.submit(clear_often)
        list(pool.map(publish_often, "abc"))
        clearing.result()
    assert files.verify(tmp_path / "f")["kind"] in "abc"
    assert listing(tmp_path) == ["f", "f/a.txt", "f/manifest.json", "f/training", "f/training/state.json"]


def test_an_error_after_the_rename_leaves_another_process_s_staging_folder(tmp_path, monkeypatch):
    """It was taken for our own, which has its name by then."""
    files.publish(tmp_path / "f", fill_with("first"))

    def interrupted(_aside, target):
        target.with_name(".f.cyberslm-partial").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_settle_aside", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.publish(tmp_path / "f", fill_with("second"), replace=True)
    assert (tmp_path / ".f.cyberslm-partial").is_dir()
    assert files.verify(tmp_path / "f")["kind"] == "second"


def test_a_folder_that_is_still_being_cleared_after_is_waited_for(tmp_path):
    """The whole work of the second was thrown away."""
    files.publish(tmp_path / "f", fill_with("first"))
    with folders.locked(tmp_path / "f") as mine, ThreadPoolExecutor(1) as pool:
        assert mine
        second = pool.submit(files.publish, tmp_path / "f", fill_with("second"), replace=True)
        time.sleep(0.2)
        assert not second.done()
        (tmp_path / "f").rename(tmp_path / "elsewhere")  # what was waited for is gone: nothing stands in the way
        (tmp_path / "elsewhere" / "a.txt").write_text("changed")
    second.result()
    assert files.verify(tmp_path / "f")["kind"] == "second"


def test_a_lock_ends_with_its_owner_though_a_child_has_the_descriptor(tmp_path):
    with folders.locked(tmp_path) as mine:
        assert mine
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
    with folders.locked(tmp_path) as mine:
        assert mine
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_new_staging_folder_that_is_cleared_away_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, swept = folders.locked, []

    def late(path, **options):
        if path.is_dir() and not swept:
            swept.append(path)
            path.rmdir()
        return real(path, **options)

    monkeypatch.setattr(folders, "locked", late)
    files.publish(tmp_path / "f", fill_with("mine"))
    assert swept
    assert files.verify(tmp_path / "f")["kind"] == "mine"


def test_lock_that_outlives_its_owner_in_a_child_is_told_apart(tmp_path):
    """A worker process inherits the lock and, when its parent is killed, keeps it."""
    code = (
        "import os, sys, time; from cyberslm import files\n"
        "with files.lock(sys.argv[1]):\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True); time.sleep(60); os._exit(0)\n"
        "    os._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        owner.wait()
        try:
            words = f"in use by a child of process {owner.pid} on .* since .*, which is gone: end that child"
            with pytest.raises(StorageError, match=words), files.lock(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "nonsense", "\u0663 2026 host", "99999999999999999999 2026 host", "7"])
def test_lock_file_with_anything_in_it_is_no_obstacle(tmp_path, text):
    (tmp_path / ".lock").write_text(text)
    with files.lock(tmp_path):
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(StorageError, match="is in use by"), files.lock(tmp_path):
            pass


def test_a_folder_is_held_by_one_process_and_freed_by_its_death(tmp_path):
    code = (
        "import sys; from cyberslm import files\n"
        "with files.lock(sys.argv[1]):\n    print('held', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"in use by process {child.pid}"), files.lock(tmp_path):
            pass
        child.kill()
        child.wait()
    with files.lock(tmp_path):
        pid, since, host = (tmp_path / ".lock").read_text().split()
        assert (int(pid), host) == (os.getpid(), platform.node())
        assert abs(datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() < 60
        owner = re.escape(f"process {pid} on {host} since {since}")
        with pytest.raises(StorageError, match=f"in use by {owner}; wait"), files.lock(tmp_path):
            pass
    with pytest.raises(ZeroDivisionError), files.lock(tmp_path):
        1 / 0  # noqa: B018
    with files.lock(tmp_path):
        pass
    with pytest.raises(StorageError, match="cannot write .*none/.lock: No such file"), files.lock(tmp_path / "none"):
        pass


def test_space_is_required_before_work_begins(tmp_path):
    files.require_space(tmp_path / "not" / "yet", 1, what="training")
    with pytest.raises(ConfigError, match=r"training needs 1,152,921,504,606,846,976 bytes, but .* bytes free"):
        files.require_space(tmp_path / "not" / "yet", 1 << 60, what="training")


def test_the_hash_is_that_of_the_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert files.sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_sweep_leaves_folders_that_only_look_like_litter(tmp_path):
    """Any ``.x.partial`` beside a run's folder was deleted."""
    for name in (".dl.partial", ".app.old", ".cyberslm-partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        (tmp_path / name / "f").write_text("precious")
    assert files.sweep(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".app.old", ".cyberslm-partial", ".dl.partial"]


def test_folder_with_the_manifest_of_another_program_is_never_replaced(tmp_path):
    """A web app's ``final/`` with a manifest.json of its own was replaced."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "manifest.json").write_text('{"name": "app", "files": {"a": 1}}')
    for attempt in (
        lambda: files.publish(tmp_path / "final", lambda staging: {}, replace=True),
        lambda: files.remove(tmp_path / "final"),
    ):
        with pytest.raises(StorageError, match="not a CyberSLM folder"):
            attempt()
    assert (tmp_path / "final" / "manifest.json").read_text().startswith('{"name"')


def test_folder_of_ours_with_a_damaged_manifest_can_be_replaced(tmp_path):
    files.publish(tmp_path / "m", lambda staging: {"kind": "x"})
    manifest = tmp_path / "m" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    files.publish(tmp_path / "m", lambda staging: {"kind": "y"}, replace=True)
    assert files.verify(tmp_path / "m")["kind"] == "y"


def test_scratch_of_a_live_process_is_not_swept_and_ends_with_its_block(tmp_path: Path) -> None:
    """One process removed the temporary files that another was reading."""
    with files.scratch(tmp_path) as one, files.scratch(tmp_path) as other:
        assert one != other
        (one / "x").write_text("x")
        code = "import sys; from cyberslm import files; print(len(files.sweep(sys.argv[1])))"
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "0"
        assert (one / "x").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".scratch-1.cyberslm-partial").mkdir()
    assert len(files.sweep(tmp_path)) == 1


# Work that outlives its process


def fill_and_mark(key: str, *names: str, then: BaseException | None = None) -> Callable[[Path], dict[str, object]]:
    """Write and mark the files that aren't held yet; the manifest tells which these were."""

    def fill(staging: Path) -> dict[str, object]:
        kept = files.Kept(staging, key)
        made = [name for name in names if not kept.holds(name)]
        for name in made:
            (staging / name).write_text(name)
            kept.mark(name, [staging / name])
        (kept.scratch / "more").mkdir(exist_ok=True)
        (kept.scratch / "more" / "unmarked").write_text("x")
        (staging / "unmarked").write_text("x")
        if then is not None:
            raise then
        return {"made": made, "refused": kept.refused}

    return fill


def test_marked_files_outlive_an_error_and_nothing_else_does(tmp_path: Path) -> None:
    for error in (RuntimeError("bug"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")):
        with pytest.raises((type(error), StorageError)):
            files.publish(tmp_path / "f", fill_and_mark("k", "a", "b", then=error), keep=True)
    assert files.sweep(tmp_path) == []
    manifest = files.publish(tmp_path / "f", fill_and_mark("k", "a", "b", "c"), keep=True)
    assert (manifest["made"], manifest["refused"]) == (["c"], False)
    assert listing(tmp_path) == ["f", "f/a", "f/b", "f/c", "f/manifest.json", "f/unmarked"]


def test_work_under_another_key_is_deleted(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        files.publish(tmp_path / "f", fill_and_mark("k", "a", then=RuntimeError()), keep=True)
    manifest = files.publish(tmp_path / "f", fill_and_mark("other", "b"), keep=True)
    assert (manifest["made"], manifest["refused"]) == (["b"], True)
    assert listing(tmp_path) == ["f", "f/b", "f/manifest.json", "f/unmarked"]


def test_kept_work_gives_way_to_a_publish_that_keeps_nothing_and_to_forget(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        files.publish(tmp_path / "f", fill_and_mark("k", "a", then=RuntimeError()), keep=True)
    files.publish(tmp_path / "f", fill_with("x"))
    assert "f/a" not in listing(tmp_path)
    with pytest.raises(RuntimeError):
        files.publish(tmp_path / "f", fill_and_mark("k", "a", then=RuntimeError()), replace=True, keep=True)
    assert files.forget(tmp_path / "f")
    assert not files.forget(tmp_path / "f")
    assert files.verify(tmp_path / "f")["kind"] == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_an_error_before_anything_is_whole_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        files.publish(tmp_path / "f", fill_and_mark("k", then=RuntimeError()), keep=True)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("replace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kept_work_is_whole_or_gone_wherever_the_process_is_killed(tmp_path: Path, replace: bool) -> None:
    """Each start takes over what the one before had marked, so the later a kill is, the more is there."""
    target = tmp_path / "run" / "f"
    target.parent.mkdir()
    if replace:
        files.publish(target, fill_with("old"))
    staging, most = target.with_name(".f.cyberslm-partial"), 0
    publish = lambda: files.publish(target, fill_and_mark("k", "a", "b", "c"), replace=True, keep=True)  # noqa: E731
    for _ in every_death(publish, lambda: None):
        files.sweep(target.parent)
        names = [path.name for path in (staging / ".kept" / "marks").glob("[!.]*")] if staging.exists() else []
        assert all((staging / name).read_text() == name for name in names)
        most = max(most, len(names))
        if target.exists():
            files.verify(target)
    assert most == 3
    assert listing(target.parent) == ["f", "f/a", "f/b", "f/c", "f/manifest.json", "f/unmarked"]


def test_two_processes_never_share_kept_work(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        files.publish(tmp_path / "f", fill_and_mark("k", "a", then=RuntimeError()), keep=True)

    def fill(staging: Path) -> dict[str, object]:
        before = listing(staging)
        for keep in (True, False):
            with pytest.raises(StorageError, match="being written by another process"):
                files.publish(tmp_path / "f", fill_and_mark("other", "b"), keep=keep)
        assert not files.forget(tmp_path / "f")
        assert listing(staging) == before
        return fill_and_mark("k", "a")(staging)

    assert files.publish(tmp_path / "f", fill, keep=True)["made"] == []


def test_opening_waits_for_a_worker_of_a_killed_process(tmp_path: Path) -> None:
    """A worker lives on for an instant, and could write over what its successor had just made."""
    kept = files.Kept(tmp_path, "k")
    code = (
        "import sys, time; from pathlib import Path; from cyberslm.files import Kept\n"
        "kept = Kept(Path(sys.argv[1]))\n"
        "with kept.writing():\n"
        "    print('in', flush=True); time.sleep(0.5); (kept.root / 'late').write_text('x')\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "in\n"
    files.Kept(tmp_path, "k")
    assert worker.wait() == 0
    assert not (tmp_path / "late").exists()
    assert not kept.holds("late")
