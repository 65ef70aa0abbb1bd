"""Preparation that was killed, failed or stopped goes on, and nobody can tell from the result."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cyberslm import files
from cyberslm.config import dump
from cyberslm.data import parts, resume, tokenizing
from cyberslm.data import prepare as module
from cyberslm.data.clean import pipeline
from cyberslm.data.clean.config import (
    ContaminationConfig,
    ExactDuplicatesConfig,
    LengthConfig,
    NearDuplicatesConfig,
    StepConfig,
    TripwiresConfig,
    UnicodeConfig,
)
from cyberslm.data.config import DataConfig
from cyberslm.data.prepare import prepare
from cyberslm.data.redact.config import RedactConfig
from cyberslm.data.shards import ShardWriter
from cyberslm.data.slices import prepare_slice
from cyberslm.errors import DataError, StorageError

SECRET = "AKIA" + "IOSFODNN7" + "QWERTYU"
HIDDEN = "".join(chr(ord(letter) + 0xFEE0) for letter in SECRET)
STEPS = (
    StepConfig(tripwires=TripwiresConfig()),
    StepConfig(unicode=UnicodeConfig(normalize="NFKC")),
    StepConfig(length=LengthConfig(min_characters=12)),
    StepConfig(exact_duplicates=ExactDuplicatesConfig()),
    StepConfig(near_duplicates=NearDuplicatesConfig()),
)
Events = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "TASK_FILES", 3)
    monkeypatch.setattr(tokenizing, "BATCH_DOCUMENTS", 4)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Sixteen files, one of them an archive, with secrets, copies and something to redact only after cleaning."""
    source = tmp_path / "in"
    source.mkdir()
    for number in range(12):
        words = " ".join(f"word{number * 7 + index}" for index in range(30))
        (source / f"{number:02}.txt").write_text(
            f"report {number}: {words}\nhost 10.1.2.{number + 5} a{number}@b.org\n"
        )
    (source / "copy.txt").write_text((source / "03.txt").read_text())
    (source / "short.txt").write_text("tiny")
    (source / "keys.txt").write_text(f"the key is {SECRET} in this file\nand {HIDDEN} here\n")
    with zipfile.ZipFile(source / "more.zip", "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.txt", f"member {number} of the archive, with text of its own {number * 31}\n")
    (tmp_path / "redaction.key").write_text("0123456789abcdef" * 2)
    return DataConfig(
        sources=(str(source),),
        validation_fraction=0.3,
        redact=RedactConfig(key_file=str(tmp_path / "redaction.key")),
        steps=STEPS,
        shard_tokens=300,
        workers=1,
        threads=1,
    )


def made(config: DataConfig, target: Path, tokenizer, **options) -> Events:
    """Prepare with a tokenizer that is trained, as far as anyone can see; what progress was told."""
    events: Events = []

    def train(texts: module.Texts):
        assert sum(map(len, texts())) > 0
        return tokenizer

    options = {"tokenizer_settings": {"vocab_size": 260}} | options
    prepare(config, train, target, progress=lambda *event: events.append(event), **options)
    return events


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def staging_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.cyberslm-partial")


def killed(action: Callable[[], object], *, at: int) -> bool:
    """Fork, and kill the child at its ``at``-th call of a Python function. False if it had fewer."""
    pid = os.fork()
    if pid == 0:
        left = at

        def count(_frame, event, _argument) -> None:
            nonlocal left
            left -= event == "call"
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def calls_of(action: Callable[[], object]) -> int:
    """How many calls of Python functions an action makes."""
    calls = 0

    def count(_frame, event, _argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_any_number_of_times_the_bytes_are_those_of_one_run(
    tmp_path, config, byte_tokenizer, seed: int
):
    straight, target = tmp_path / "straight", tmp_path / "a" / "out"
    made(config, straight, byte_tokenizer)
    whole = calls_of(lambda: made(config, straight, byte_tokenizer))
    rng = random.Random(seed)
    deaths = sum(killed(lambda: made(config, target, byte_tokenizer), at=rng.randrange(1, whole)) for _ in range(10))
    made(config, target, byte_tokenizer)
    assert content(target) == content(straight)
    assert deaths > 3
    assert beside(target) == []


def fail_in_shards(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    real = ShardWriter.add

    def add(self, ids, **facts):
        if self.split == "train" and self.num_documents == after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, ids, **facts)

    monkeypatch.setattr(ShardWriter, "add", add)


@pytest.fixture
def broken_off(tmp_path, config, byte_tokenizer) -> Path:
    """The target of a preparation that ended with a full disk while it wrote its second training shard."""
    target = tmp_path / "a" / "out"
    with pytest.MonkeyPatch.context() as patch:
        fail_in_shards(patch, after=5)
        with pytest.raises(StorageError, match="No space left"):
            made(config, target, byte_tokenizer)
    assert beside(target) == [staging_of(target).name]
    return target


def test_what_is_whole_is_not_made_again(tmp_path, config, byte_tokenizer, broken_off, monkeypatch):
    made(config, tmp_path / "straight", byte_tokenizer)
    tokenized: list[str] = []
    real = type(byte_tokenizer).encode_documents

    def never(*_args, **_options):
        pytest.fail("made again")

    def encode(self, texts, **options):
        tokenized.extend(texts)
        return real(self, texts, **options)

    monkeypatch.setattr(parts.PartMaker, "__call__", never)
    monkeypatch.setattr(pipeline.Pipeline, "run", never)
    monkeypatch.setattr(type(byte_tokenizer), "encode_documents", encode)
    events: Events = []
    prepared = prepare(
        config,
        never,
        broken_off,
        tokenizer_settings={"vocab_size": 260},
        progress=lambda *event: events.append(event),
    )
    assert content(broken_off) == content(tmp_path / "straight")
    assert [event for event in events if event[0].endswith("kept")] == [
        ("parts kept", 6, 6),
        ("cleaning kept", 1, 1),
        ("tokenizer kept", 1, 1),
        ("shards kept", 2, 2),
    ]
    documents = prepared.train.num_documents + (prepared.validation.num_documents if prepared.validation else 0)
    assert 0 < len(tokenized) < documents


def test_a_file_that_cannot_be_read_leaves_the_parts_before_it(tmp_path, config, byte_tokenizer, monkeypatch):
    made(config, tmp_path / "straight", byte_tokenizer)
    target = tmp_path / "a" / "out"
    real = parts.hash_file

    def hash_file(file):
        if file.name == "11.txt":
            raise DataError("cannot read 11.txt")
        return real(file)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "hash_file", hash_file)
        with pytest.raises(DataError, match=r"11\.txt"):
            made(config, target, byte_tokenizer)
    events = made(config, target, byte_tokenizer)
    assert ("parts kept", 3, 6) in events
    assert content(target) == content(tmp_path / "straight")


def test_a_torn_file_is_made_again(tmp_path, config, byte_tokenizer, broken_off):
    """After a power cut a file may have its name and length, but not its bytes."""
    made(config, tmp_path / "straight", byte_tokenizer)
    staging = staging_of(broken_off)
    before = content(staging)
    assert len(before) > 20
    for at, name in enumerate(before):
        shutil.rmtree(staging)
        for each, data in before.items():
            (staging / each).parent.mkdir(parents=True, exist_ok=True)
            (staging / each).write_bytes(data)
        damage = (bytes(len(before[name])), before[name][:-1], None)[at % 3]
        (staging / name).unlink() if damage is None else (staging / name).write_bytes(damage)
        made(config, broken_off, byte_tokenizer)
        assert content(broken_off) == content(tmp_path / "straight"), name
        files.remove(broken_off)
        staging.mkdir()


@pytest.mark.parametrize("what", ["setting", "key", "file", "touch", "new file", "tokenizer", "evaluation", "program"])
def test_work_of_other_settings_files_or_program_is_thrown_away(
    tmp_path, config, byte_tokenizer, broken_off, monkeypatch, what: str
):
    options: dict = {}
    (tmp_path / "eval.txt").write_text(
        "an evaluation text that is long enough to be found in thirteen words or more, I say"
    )
    match what:
        case "setting":
            config = replace(config, txt_unit="line")
        case "key":
            (tmp_path / "redaction.key").write_text("another key that is long enough")
        case "file":
            (tmp_path / "in" / "05.txt").write_text("other words of quite another length that stand here now")
        case "touch":
            os.utime(tmp_path / "in" / "05.txt", ns=(1, 1))
        case "new file":
            (tmp_path / "in" / "new.txt").write_text("a text that was not there before, with words of its own")
        case "tokenizer":
            options = {"tokenizer_settings": {"vocab_size": 261}}
        case "evaluation":
            against = ContaminationConfig(against=(str(tmp_path / "eval.txt"),))
            config = replace(config, steps=(StepConfig(contamination=against), *STEPS))
        case "program":
            monkeypatch.setattr(resume, "_program", lambda: "mended")
    events = made(config, broken_off, byte_tokenizer, **options)
    assert [event[0] for event in events if event[0] == "refused" or event[0].endswith("kept")] == ["refused"]
    made(config, tmp_path / "straight", byte_tokenizer, **options)
    assert content(broken_off) == content(tmp_path / "straight")


@pytest.mark.parametrize("changes", [{"workers": 2}, {"threads": 3}, {"rows": "pack"}])
def test_settings_that_decide_no_token_do_not_matter(tmp_path, config, byte_tokenizer, broken_off, changes: dict):
    events = made(replace(config, **changes), broken_off, byte_tokenizer)
    assert ("shards kept", 2, 2) in events


def test_a_key_drawn_for_one_preparation_leaves_nothing_to_go_on_with(tmp_path, config, byte_tokenizer, monkeypatch):
    """Pseudonyms of two keys would stand side by side."""
    target = tmp_path / "a" / "out"
    fail_in_shards(monkeypatch, after=5)
    with pytest.raises(StorageError):
        made(replace(config, redact=RedactConfig()), target, byte_tokenizer)
    assert beside(target) == []


def test_what_is_kept_holds_no_value_and_no_key_and_is_for_its_owner_alone(config, broken_off):
    staging = staging_of(broken_off)
    assert stat.S_IMODE((staging / ".kept").stat().st_mode) == 0o700
    everything = io.BytesIO(b"\n".join(content(staging).values())).getvalue()
    for value in (SECRET, HIDDEN, "10.1.2.7", "a3@b.org", "0123456789abcdef" * 2):
        assert value.encode() not in everything
    assert b"report 3" in everything


def test_kept_work_is_swept_by_nobody_but_its_target(tmp_path, config, byte_tokenizer, broken_off):
    assert files.sweep(broken_off.parent) == []
    made(config, broken_off.parent / "other", byte_tokenizer)
    assert staging_of(broken_off).exists()
    assert files.forget(broken_off)
    assert beside(broken_off) == ["other"]
    assert not files.forget(broken_off)


def test_a_killed_slice_goes_on(tmp_path, config, byte_tokenizer):
    straight = tmp_path / "straight"
    made(config, straight, byte_tokenizer)
    folders = [tmp_path / "slices" / f"{number}" for number in (1, 2)]
    silent = module.silent
    for number, folder in enumerate(folders, 1):

        def work(target: Path = folder, number: int = number, progress=silent) -> None:
            prepare_slice(config, target, number=number, count=2, progress=progress)

        calls = calls_of(lambda: work(target=tmp_path / "slices" / "whole"))  # noqa: B023
        assert killed(work, at=int(calls * 0.75))
        events: Events = []
        work(progress=lambda *event: events.append(event))  # noqa: B023
        _, kept, of = next(event for event in events if event[0] == "parts kept")  # others come as time passes
        assert 0 < kept < of == 3
        assert content(folder) == content(tmp_path / "slices" / "whole")
        files.remove(tmp_path / "slices" / "whole")
    assert beside(folders[0]) == ["2"]
    target = tmp_path / "a" / "out"
    rng = random.Random(7)
    merge = lambda: made(config, target, byte_tokenizer, slices=folders)  # noqa: E731
    calls = calls_of(lambda: made(config, tmp_path / "merged", byte_tokenizer, slices=folders))
    assert sum(killed(merge, at=rng.randrange(1, calls * 3 // 4)) for _ in range(5)) > 1
    merge()
    assert content(target) == content(straight)
    assert content(tmp_path / "merged") == content(straight)


PREPARE = """
import sys
from pathlib import Path
from cyberslm.config import load
from cyberslm.data import parts, prepare as module
from cyberslm.data.config import DataConfig
from conftest import ByteTokenizer

def train(texts):
    list(texts())
    return ByteTokenizer()

if __name__ == "__main__":
    parts.TASK_FILES = 3
    module.load_tokenizer = ByteTokenizer.load
    config = load(Path(sys.argv[1]), DataConfig, [f"workers={sys.argv[3]}"]).value
    tell = lambda *event: print(*event, flush=True)
    module.prepare(config, train, Path(sys.argv[2]), tokenizer_settings={"vocab_size": 260}, progress=tell)
"""


@pytest.mark.slow
def test_any_number_of_workers_goes_on_for_any_other(tmp_path, config, byte_tokenizer):
    """Killed at the parent alone, at times that nobody chose, with workers in the midst of it."""
    made(config, tmp_path / "straight", byte_tokenizer)
    (tmp_path / "prepare.py").write_text(PREPARE)
    (tmp_path / "data.yaml").write_text(dump(config))
    target = tmp_path / "a" / "out"
    package = Path(files.__file__).parents[2]
    path = os.pathsep.join([str(Path(__file__).parent), str(package)])

    def start(workers: int) -> subprocess.Popen[str]:
        arguments = [sys.executable, tmp_path / "prepare.py", tmp_path / "data.yaml", target, str(workers)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})

    for workers, lines in ((2, 3), (3, 5), (1, 7), (2, 9)):
        process = start(workers)
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.kill()
        process.communicate()
    process = start(2)
    said = process.communicate()[0]
    assert process.returncode == 0
    assert "kept" in said
    assert content(target) == content(tmp_path / "straight")
    assert beside(target) == []
