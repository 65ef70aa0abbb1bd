"""Whole runs with the optimizers, budgets and answers to faults that `train` can be given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeRun
from runs import fingerprint, of_type, scripted_scores, slow, spikes_at, train
from safetensors.torch import load_file

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.errors import ConfigError, TrainingError
from cyberslm.recipes.config import load_run
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.train import Outcome, run_training
from cyberslm.training.config import NO_LIMIT

WSD = {"name": "wsd", "warmup_steps": 4, "decay_fraction": 0.25}


def again(path: Path, *overrides: str) -> Outcome:
    return run_training(load_run(path, overrides), quiet=True)


VARIANTS = {
    "muon": {"optimizer": {"name": "muon", "lr": 3e-3, "decay_embeddings": False}},
    "ema": {"train.ema_decay": 0.9},
    "ramp": {"train.batch_ramp": [[3, 1], [6, 3]]},
    "all": {
        "optimizer": {"name": "muon", "lr": 3e-3, "muon_lr": 0.02, "muon_adjust": "original"},
        "train.ema_decay": 0.99,
        "train.batch_ramp": [[7, 2]],
        "train.on_spike": "skip",
        "train.patience": 9,
        "model.dropout": 0.1,
        "precision": "bf16",
        "scheduler": WSD | {"decay_shape": "sqrt"},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_stop_of_a_run_resumes_to_the_same_bits(make_run: MakeRun, tmp_path: Path, variant: str) -> None:
    prints = []
    for name, stops in (("straight", ()), ("stopped", (1, 3, 4, 8, 11))):
        (tmp_path / name).mkdir()
        path = make_run({**VARIANTS[variant], "train.max_steps": 12}, folder=tmp_path / name)
        for stop in stops:
            train(path, stop_at=stop)
        train(path)
        prints.append(fingerprint(tmp_path / name / "run"))
    assert prints[0] == prints[1]


def test_variants_are_different_runs(make_run: MakeRun, tmp_path: Path) -> None:
    """Each option has an effect on the weights."""
    finals = {}
    for variant, changes in {"plain": {}, **VARIANTS}.items():
        (tmp_path / variant).mkdir()
        path = make_run({**changes, "train.max_steps": 6}, folder=tmp_path / variant)
        train(path)
        finals[variant] = files.sha256_file(path.parent / "run" / "final" / "model.safetensors")
    assert len(set(finals.values())) == len(finals)


def test_groups_are_shown_and_recorded(make_run: MakeRun) -> None:
    path = make_run({"optimizer": {"name": "muon", "lr": 3e-3}, "train.max_steps": 5})
    train(path)
    groups = of_type(path.parent / "run", "run")[0]["groups"]
    assert {name: (g["algorithm"], g["weight_decay"]) for name, g in groups.items()} == {
        "hidden": ("muon", 0.1),
        "embeddings": ("adamw", 0.1),
        "gains": ("adamw", 0.0),
    }
    assert sum(g["parameters"] for g in groups.values()) == load_run(path).value.model.num_parameters
    log = (path.parent / "run" / "train.log").read_text()
    assert f"hidden {groups['hidden']['parameters']:,} (muon, lr 0.003, decay 0.1)" in log


def test_mean_of_the_weights_is_validated_published_and_named(make_run: MakeRun) -> None:
    path = make_run({"train.ema_decay": 0.8, "checkpoint.final": "last", "train.max_steps": 10})
    train(path)
    run = path.parent / "run"
    step = list_steps(run / "checkpoints")[-1].path
    published = load_file(step / "model.safetensors")
    training = load_file(step / "training" / "optimizer.safetensors")
    assert torch.equal(
        load_file(run / "final" / "model.safetensors")["model.norm.weight"], published["model.norm.weight"]
    )
    assert not torch.equal(training["trained/norm.weight"], published["model.norm.weight"])
    assert files.verify(run / "final")["ema_decay"] == files.verify(step)["ema_decay"] == 0.8
    assert "running mean of the weights, decay 0.8" in (run / "train.log").read_text()
    assert files.verify(step)["validation"]["loss"] == pytest.approx(of_type(run, "validation")[-1]["loss"])
    assert evaluate(run).score.num_tokens > 0


def test_mean_changes_what_is_published_and_not_what_is_trained(make_run: MakeRun, trained: Path) -> None:
    path = make_run({"train.ema_decay": 0.8})
    train(path)
    weights = []
    for run in (path.parent / "run", trained / "run"):
        step = list_steps(run / "checkpoints")[-1].path
        weights.append((load_file(step / "model.safetensors"), load_file(step / "training" / "optimizer.safetensors")))
    (mean, with_mean), (plain, without) = weights
    assert torch.equal(with_mean["trained/norm.weight"], plain["model.norm.weight"])
    assert all(torch.equal(with_mean[name], tensor) for name, tensor in without.items())
    assert not torch.equal(mean["model.norm.weight"], plain["model.norm.weight"])


# Length


@pytest.mark.parametrize(
    ("scheduler", "stop"), [(WSD, 15), ({"name": "constant", "warmup_steps": 4}, 20), ({"warmup_steps": 4}, 4)]
)
def test_run_may_become_longer_while_nothing_done_would_have_been_different(
    make_run: MakeRun, tmp_path: Path, scheduler: dict, stop: int
) -> None:
    finals = []
    for name, first in (("straight", "40"), ("extended", "20")):
        (tmp_path / name).mkdir()
        path = make_run({"scheduler": scheduler, "checkpoint.final": "last"}, folder=tmp_path / name)
        train(path, f"train.max_steps={first}", stop_at=stop)
        train(path, "train.max_steps=40")
        finals.append(files.sha256_file(path.parent / "run" / "final" / "model.safetensors"))
    assert finals[0] == finals[1]
    assert f"train.max_steps is 40 now, it was 20: the {stop} steps" in (path.parent / "run" / "train.log").read_text()


@pytest.mark.parametrize(
    ("scheduler", "stop", "steps", "why"),
    [
        (WSD, 17, 40, "with 20 steps the wsd rate is below its peak at step 17"),
        (WSD, 15, 16, "with 16 steps the wsd rate is below its peak at step 15"),
        ({"warmup_steps": 4}, 5, 40, "with 20 steps the cosine rate is below its peak at step 5"),
        ({"name": "constant", "warmup_steps": 4}, 10, 9, "step 10 is made already"),
    ],
)
def test_other_length_is_refused_with_the_reason_when_it_would_have_been_another_run(
    make_run: MakeRun, scheduler: dict, stop: int, steps: int, why: str
) -> None:
    """G36: on resume the schedule was rebuilt from the changed configuration, and jumped."""
    path = make_run({"scheduler": scheduler})
    train(path, stop_at=stop)
    with pytest.raises(ConfigError, match=rf"train.max_steps: 20 there, {steps} now\n{why}"):
        train(path, f"train.max_steps={steps}")


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.name=muon",
        "optimizer.decay_embeddings=false",
        "scheduler.decay_shape=sqrt",
        "train.max_time=1h",
        "train.batch_ramp=[[2, 2]]",
        "train.ema_decay=0.9",
        "train.spike_factor=3",
        "train.on_spike=skip",
        "train.patience=3",
        "train.min_delta=0.1",
    ],
)
def test_setting_that_changes_the_result_is_refused_in_a_started_run(make_run: MakeRun, override: str) -> None:
    path = make_run()
    (path.parent / "run").mkdir()
    train(path, stop_at=5)
    with pytest.raises(ConfigError, match=rf"\n  {override.split('=')[0]}: .* there, .* now"):
        train(path, override)


def test_setting_that_only_says_when_to_give_up_may_change(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    train(path, stop_at=10)
    train(path, "train.max_bad_steps=9", "train.max_rollbacks=9")
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


def test_time_budget_ends_the_run_at_the_end_of_its_schedule_and_for_good(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run({"train": {"max_time": "1m", "global_batch_size": 4, "micro_batch_size": 2}, "scheduler": WSD})
    assert load_run(path).value.train.max_steps == NO_LIMIT
    slow(monkeypatch, 2.0)
    train(path, stop_at=17)
    outcome = again(path)
    run = path.parent / "run"
    assert (outcome.state.step, outcome.state.ended, outcome.state.seconds) == (30, "max_time", 60.0)
    rates = [record["lr"] for record in of_type(run, "train")]
    assert rates[-1] == pytest.approx(3e-4)
    assert [record["total"] for record in of_type(run, "plan")] == [d.total for d in outcome.state.decisions]
    assert of_type(run, "validation")[-1]["step"] == 30
    log = (run / "train.log").read_text()
    assert "steps: as many as 1m allow, of 128 tokens" in log
    assert "step 4 | plan: 30 steps in train.max_time, 0:00:08 of it gone" in log
    assert "step 30/30 | loss" in log
    assert "ended by train.max_time" in log
    assert again(path).state.step == 30
    assert "this run is finished" in (run / "train.log").read_text()


def test_time_budget_with_a_number_of_steps_ends_at_the_first_of_both(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, 2.0)
    state = again(make_run({"train.max_time": "10m"})).state
    assert (state.step, state.ended) == (20, None)


def test_number_of_steps_may_not_change_under_a_time_budget(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 2.0)
    path = make_run({"train.max_time": "10m", "scheduler": {"name": "constant", "warmup_steps": 4}})
    train(path, stop_at=5)
    with pytest.raises(
        ConfigError, match=r"20 there, 40 now\nwith train.max_time the number of steps is already decided"
    ):
        train(path, "train.max_steps=40")


def test_time_of_less_than_a_step_makes_one_and_publishes_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, 2.0)
    path = make_run({"train": {"max_time": "1s"}})
    outcome = again(path)
    assert (outcome.state.step, outcome.state.ended) == (1, "max_time")
    assert files.verify(path.parent / "run" / "final")["step"] == 1


def test_patience_ends_the_run_for_good_and_final_is_the_best(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run({"train.patience": 2})
    scripted_scores(monkeypatch, 5.0, 5.5, 5.25, 1.0)
    outcome = again(path)
    assert (outcome.state.step, outcome.state.ended) == (15, "patience")
    assert files.verify(path.parent / "run" / "final")["step"] == 5
    assert again(path).state.step == 15
    assert "15 steps" in (path.parent / "run" / "train.log").read_text()


def test_patience_without_validation_text_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="train.patience is 2 and there is no validation text"):
        train(make_run({"train.patience": 2, "data.validation_fraction": 0.0}))


# Spikes


ROLLBACK = {"train.on_spike": "rollback", "train.max_steps": 48, "checkpoint.interval": 8, "checkpoint.keep_last": 1}


@pytest.mark.parametrize("variant", [pytest.param("plain", marks=pytest.mark.slow), "all"])
def test_rollback_repeats_its_bits_whatever_stopped_the_run(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    changes = {**VARIANTS.get(variant, {}), **ROLLBACK}
    spikes_at(monkeypatch, 39, 45)
    prints = []
    for name, stops in (("straight", ()), ("stopped", (31, 34, 37, 45))):
        (tmp_path / name).mkdir()
        path = make_run(changes, folder=tmp_path / name)
        for stop in stops:
            train(path, stop_at=stop)
        train(path)
        prints.append(fingerprint(tmp_path / name / "run"))
    run = tmp_path / "straight" / "run"
    assert [(r["step"], r["spike"]) for r in of_type(run, "rollback")] == [(33, 39), (33, 38)]
    assert [record["step"] for record in of_type(run, "train")] == list(range(1, 49))
    assert prints[0] == prints[1]


def test_rollback_before_the_first_checkpoint_begins_anew(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    spikes_at(monkeypatch, 36)
    path = make_run({**ROLLBACK, "checkpoint.interval": 100, "eval.interval": 100})
    outcome = again(path)
    run = path.parent / "run"
    assert [(r["step"], r["spike"], r["passed_rows"]) for r in of_type(run, "rollback")] == [(1, 36, 36 * 4)]
    assert len(of_type(run, "run")) == 1
    assert (outcome.state.rollbacks, outcome.state.passed_rows, outcome.state.step) == (1, 144, 48)
    assert "rollback 1 to step 0; 144 rows passed over so far" in (run / "train.log").read_text()


def test_best_checkpoint_of_steps_that_were_taken_back_is_gone(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes_at(monkeypatch, 39)
    scripted_scores(monkeypatch, 5.0, 4.0, 3.0, 1.0, 2.5, 2.4, 2.6, 2.7)
    path = make_run({**ROLLBACK, "checkpoint.interval": 16, "eval.interval": 12})
    outcome = again(path)
    # validations at 12, 16, 24, 32, 36 of the branch taken back, then 36 and 48
    assert (outcome.state.best_step, outcome.state.best_loss) == (32, 1.0)
    assert [step.step for step in list_steps(path.parent / "run" / "checkpoints")] == [32, 48]


def test_run_stops_after_its_rollbacks_and_goes_on_with_more(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes_at(monkeypatch, 39, 45)
    path = make_run({**ROLLBACK, "train.max_rollbacks": 1})
    with pytest.raises(TrainingError, match="another loss spike after 1 rollbacks"):
        train(path)
    assert again(path, "train.max_rollbacks=2").state.step == 48


# Signals


def wait_for(path: Path, words: str, process: subprocess.Popen) -> None:
    for _ in range(1200):
        if path.exists() and words in path.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{words!r} never came")


def test_sigusr1_saves_and_the_run_goes_on_to_the_same_bits(make_run: MakeRun, tmp_path: Path) -> None:
    """Sent at many moments, also while it validates and saves, and before training has begun."""
    changes = {"train.max_steps": 60, "eval.interval": 10, "checkpoint.interval": 30, "logging.interval": 1}
    for name in ("straight", "signalled"):
        (tmp_path / name).mkdir()
    straight, signalled = (make_run(changes, folder=tmp_path / name) for name in ("straight", "signalled"))
    train(straight)
    command = [sys.executable, "-m", "cyberslm", "train", str(signalled)]
    log = tmp_path / "signalled" / "run" / "train.log"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(log, "", process)
        for moment in range(40):
            if process.poll() is not None:
                break
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.01 + 0.003 * moment)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "saving after this step, then going on" in said
    saved = log.read_text().count("| saved ")
    assert saved > (tmp_path / "straight" / "run" / "train.log").read_text().count("| saved ")
    assert fingerprint(tmp_path / "signalled" / "run") == fingerprint(tmp_path / "straight" / "run")


def test_sigusr1_while_saving_asks_for_another_save(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from cyberslm.recipes import origin

    real: Callable = origin.save_model
    before = signal.getsignal(signal.SIGUSR1)
    calls = []

    def save(*args: object) -> None:
        calls.append(args)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        real(*args)

    monkeypatch.setattr(origin, "save_model", save)
    path = make_run({"train.max_steps": 12})
    train(path)
    log = (path.parent / "run" / "train.log").read_text()
    assert [step for step in range(1, 13) if f"step {step}/12 | saved" in log] == [5, 6, 10, 12]
    assert signal.getsignal(signal.SIGUSR1) == before
