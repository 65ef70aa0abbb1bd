"""Whole runs in several processes, held against the run of one process that the other tests share."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MakeRun
from ranked_runs import happening, one_run, refusals, run_in, same_run
from ranks import all_of, in_ranks
from safetensors.torch import load_file

from cyberslm.checkpoint.folder import load_model
from cyberslm.checkpoint.steps import list_steps
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import load_run


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_run_of_two_processes_is_that_of_one(make_run: MakeRun, trained: Path, strategy: str) -> None:
    path = make_run()
    assert run_in(2, path, f"distributed.strategy={strategy}") == [(20, None)] * 2
    run = path.parent / "run"
    same_run(run, trained / "run")
    assert (run / "train.log").read_text().count(f"processes: 2 ({strategy}, gloo), each 2 rows of a step") == 1
    assert not list(run.rglob("*cyberslm-partial*"))


def test_checkpoints_go_from_any_number_of_processes_to_any_other(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    one_run(str(path), (), stop_at=3)
    run_in(2, path, "distributed.strategy=ddp", stop_at=7)
    run_in(3, path, "distributed.strategy=fsdp", "train.activation_checkpointing=true", stop_at=12)
    run_in(2, path, "distributed.strategy=ddp", "train.micro_batch_size=1", stop_at=13)
    one_run(str(path), ("distributed.strategy=fsdp",), stop_at=16)
    one_run(str(path), ())
    run = path.parent / "run"
    same_run(run, trained / "run")
    weights = load_file(run / "final" / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == load_model(run / "final").model.config.num_parameters


def test_compile_is_refused_with_fsdp(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"compile: true doesn't go with distributed.strategy: fsdp"):
        load_run(make_run(), ("compile=true", "distributed.strategy=fsdp"))


@pytest.mark.slow
def test_compiled_run_of_two_processes_is_that_of_one(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    run_in(2, path, "compile=true")
    same_run(path.parent / "run", trained / "run")
    assert "\ncompiled: " in (path.parent / "run" / "train.log").read_text()


def struck(path: str, rank: int, number: int) -> tuple[int, int | None]:
    happening(rank, 7, lambda: os.kill(os.getpid(), number))
    return one_run(path, ("distributed.strategy=fsdp",))


def test_signal_to_one_process_saves_and_stops_all(make_run: MakeRun) -> None:
    path = make_run()
    assert all_of(in_ranks(struck, str(path), 1, signal.SIGTERM)) == [(7, signal.SIGTERM)] * 2
    assert list_steps(path.parent / "run" / "checkpoints")[-1].step == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_process_ends_the_other_and_the_last_checkpoint_is_whole(
    make_run: MakeRun, trained: Path, rank: int
) -> None:
    path = make_run()
    ended = in_ranks(struck, str(path), rank, signal.SIGKILL)
    assert ended[rank].code == -signal.SIGKILL
    survivor = ended[1 - rank].error
    assert survivor is not None
    assert survivor.startswith(f"TrainingError: rank {1 - rank} lost another rank")
    assert "the same command goes on from it" in survivor
    assert list_steps(path.parent / "run" / "checkpoints")[-1].step == 5
    one_run(str(path), ())
    same_run(path.parent / "run", trained / "run")


def on_a_full_disk(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    happening(0, 7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))
    one_run(path, ())


def test_full_disk_on_the_first_process_ends_all_and_leaves_the_last_checkpoint(make_run: MakeRun) -> None:
    path = make_run()
    first, second = in_ranks(on_a_full_disk, str(path))
    assert re.match(r"StorageError: model.safetensors \(11\d,\d{3} bytes\) could not be written", str(first.error))
    assert str(second.error).startswith("TrainingError: rank 1 lost another rank")
    checkpoints = path.parent / "run" / "checkpoints"
    assert list_steps(checkpoints)[-1].step == 5
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-00000005"]


def test_fewer_rows_than_processes_are_refused_by_all(make_run: MakeRun) -> None:
    ended = in_ranks(one_run, str(make_run()), ("train.global_batch_size=1",))
    assert len(refusals(ended)) == 1
    assert "train.global_batch_size 1 must be at least the number of processes, 2" in refusals(ended).pop()


def test_impossible_batch_is_refused_alone_too(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="global_batch_size"):
        one_run(str(make_run()), ("train.global_batch_size=0",))


def torchrun(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run([*launcher, *arguments], check=False, capture_output=True, text=True, timeout=120)


def test_refusal_under_torchrun_is_one_message(make_run: MakeRun) -> None:
    """Each process printed its own error, or the one that lost its partner spoke for the one that knew why."""
    path = make_run({"data.validation_fraction": 0.0, "data.sources": ["nothing-there"]})
    done = torchrun("-m", "cyberslm", "train", str(path))
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr
    assert "nothing-there" in told[0]
    assert done.returncode != 0


CRASHING = """
import os, signal, sys
from ranked_runs import happening
from cyberslm.cli import run
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    happening(1, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))
run()
"""


@pytest.mark.slow
def test_torchrun_starts_again_from_the_last_checkpoint(
    make_run: MakeRun, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run()
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    done = torchrun("--max-restarts=1", str(script), "train", str(path))
    assert done.returncode == 0, done.stderr
    assert f"resuming from {path.parent / 'run' / 'checkpoints' / 'step-00000005'}" in done.stderr
    same_run(path.parent / "run", trained / "run")
