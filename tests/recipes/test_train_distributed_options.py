"""Optimizers, budgets, answers to faults and estimates of whole runs in several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import MakeRun
from ranked_runs import happening, losses, one_run, refusals, run_in, same_run
from ranks import all_of, in_ranks
from runs import of_type, slow, spikes_at, train

from cyberslm.checkpoint.steps import list_steps
from cyberslm.recipes.config import load_run
from cyberslm.recipes.estimate import needed_memory
from cyberslm.recipes.train import run_training
from cyberslm.training.distributed import Dist

EVERYTHING = {
    "optimizer": {"name": "muon", "lr": 3e-3},
    "train": {
        "max_steps": 44,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "batch_ramp": [[6, 2]],
        "ema_decay": 0.9,
        "on_spike": "rollback",
        "patience": 9,
    },
    "checkpoint.interval": 8,
    "eval.interval": 8,
    "checkpoint.keep_last": 1,
}


def with_spike(path: str, stop_at: int | None = None) -> int:
    with pytest.MonkeyPatch.context() as patched:
        spikes_at(patched, 39)
        return run_training(load_run(path), stop_at=stop_at, quiet=True).state.rollbacks


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_muon_mean_ramp_and_rollback_of_two_processes_are_those_of_one(
    make_run: MakeRun, tmp_path: Path, strategy: str
) -> None:
    """The run stops with the mean among what it saves, and goes on; the rollback comes after that."""
    alone = make_run(EVERYTHING, folder=tmp_path / "alone")
    with_spike(str(alone))
    path = make_run(EVERYTHING | {"distributed.strategy": strategy}, folder=tmp_path / "two")
    all_of(in_ranks(with_spike, str(path), 19))
    assert all_of(in_ranks(with_spike, str(path))) == [1, 1]
    mine, theirs = path.parent / "run", alone.parent / "run"
    assert of_type(mine, "rollback") == of_type(theirs, "rollback")
    assert len(of_type(mine, "rollback")) == 1
    same_run(mine, theirs)


def begun_anew(path: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        spikes_at(patched, 36)
        run_training(load_run(path), quiet=True)


@pytest.mark.slow
def test_rollback_to_the_beginning_fills_what_is_cut_up(make_run: MakeRun, tmp_path: Path) -> None:
    never = {"train.on_spike": "rollback", "train.max_steps": 40, "checkpoint.interval": 99, "eval.interval": 99}
    paths = [
        make_run(never | {"distributed.strategy": "fsdp", "train.ema_decay": 0.9}, folder=tmp_path / name)
        for name in "ab"
    ]
    begun_anew(str(paths[0]))
    all_of(in_ranks(begun_anew, str(paths[1])))
    assert [record["step"] for record in of_type(paths[1].parent / "run", "rollback")] == [1]
    same_run(paths[1].parent / "run", paths[0].parent / "run")


def timed(path: str) -> tuple:
    with pytest.MonkeyPatch.context() as patched:
        slow(patched, 2.0 if os.environ["RANK"] == "0" else 0.5)
        state = run_training(load_run(path), quiet=True).state
    return state.step, state.ended, state.seconds, [tuple(decision) for decision in state.decisions]


def test_clock_of_the_first_process_ends_all_at_the_same_step(make_run: MakeRun) -> None:
    """With clocks of their own, ranks would decide on other numbers of steps and wait for each other for ever."""
    path = make_run({"train": {"max_time": "1m", "global_batch_size": 4, "micro_batch_size": 2}})
    first, second = all_of(in_ranks(timed, str(path)))
    assert first == second
    assert first[:3] == (30, "max_time", 60.0)
    assert [record["total"] for record in of_type(path.parent / "run", "plan")] == [each[1] for each in first[3]]


def told_to_save(path: str) -> tuple[int, int | None]:
    happening(1, 7, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    return one_run(path, ("distributed.strategy=fsdp", "checkpoint.keep_last=9"))


def test_signal_to_save_reaches_all_and_the_run_goes_on(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    assert all_of(in_ranks(told_to_save, str(path))) == [(20, None)] * 2
    assert 7 in [step.step for step in list_steps(path.parent / "run" / "checkpoints")]
    assert losses(path.parent / "run") == pytest.approx(losses(trained / "run"), rel=1e-5)


def test_stage_of_fewer_rows_than_processes_is_refused_by_name(make_run: MakeRun) -> None:
    path = make_run({"train.batch_ramp": [[3, 1], [3, 2]]})
    (told,) = refusals(in_ranks(one_run, str(path), ()))
    assert "train.batch_ramp: a stage of 1 rows must be at least the number of processes, 2" in told


def other_seed(path: str) -> None:
    one_run(path, (f"seed={os.environ['RANK']}",))


def test_processes_of_different_configurations_are_refused(make_run: MakeRun) -> None:
    (told,) = refusals(in_ranks(other_seed, str(make_run())))
    assert "process 1 has another configuration than process 0, by 'seed: 0'" in told


def with_a_compiler_on_the_first(path: str) -> tuple[int, int | None]:
    def compiled(function: object, **_options: object) -> object:
        if os.environ["RANK"] == "0":
            return function
        raise RuntimeError("no compiler here")

    def compiled_later(function: object, **options: object) -> object:
        return lambda *inputs: compiled(function, **options)(*inputs)  # type: ignore[operator]

    torch.compile = compiled_later  # type: ignore[assignment]
    return one_run(path, ("compile=true",))


def test_all_go_without_compiling_where_one_can_t(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    assert all_of(in_ranks(with_a_compiler_on_the_first, str(path))) == [(5, None)] * 2
    log = (path.parent / "run" / "train.log").read_text()
    assert "warning: not compiled, the run goes on without (compile: false leaves this out): no compiler here" in log


def test_estimate_and_trackers_of_two_processes_are_the_first_s(make_run: MakeRun) -> None:
    pytest.importorskip("tensorboard")
    path = make_run({"train.max_steps": 5, "logging.probe": True, "logging.trackers": ["tensorboard"]})
    run_in(2, path, "device=cpu")
    run = path.parent / "run"
    log = (run / "train.log").read_text()
    assert log.count("at the peak of each process") == 1
    assert log.count("in each of 2 processes at once, without what they send to each other") == 1
    assert len(list((run / "tensorboard").iterdir())) == 1
    (first,) = of_type(run, "run")
    for record in of_type(run, "train"):
        rate = record["tokens_per_second"] * first["flops_per_token"] / first["limit_flops_per_second"]
        assert record["share_of_limit"] == pytest.approx(rate)


def test_memory_of_a_process_is_that_of_its_rows_and_its_share(make_run: MakeRun) -> None:
    run = load_run(make_run({"device": "cpu", "train.global_batch_size": 8, "train.micro_batch_size": 4})).value
    alone, ddp, fsdp = (needed_memory(run, dist) for dist in (Dist(), Dist(world=8), Dist(world=8, strategy="fsdp")))
    assert ddp.activations < alone.activations
    assert (ddp.weights, ddp.optimizer, ddp.gathered) == (alone.weights, alone.optimizer, 0)
    assert (fsdp.weights, fsdp.optimizer) == (alone.weights // 8, alone.optimizer // 8)
    assert fsdp.gathered == 8 * run.model.num_parameters, "two layers are all that the network has"


def test_run_alone_has_no_line_about_processes(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    train(path)
    assert "process" not in (path.parent / "run" / "train.log").read_text()
