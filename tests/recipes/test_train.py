from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeRun
from ranks import in_ranks
from runs import final_of, fingerprint, scripted_scores, train

import cyberslm
from cyberslm import files
from cyberslm.checkpoint import folder
from cyberslm.checkpoint.steps import list_steps
from cyberslm.config import load
from cyberslm.errors import ConfigError, GenerationError, IntegrityError, StorageError, TrainingError
from cyberslm.recipes.check import check
from cyberslm.recipes.config import TrainRun, load_run
from cyberslm.recipes.data import ensure_prepared
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.train import run_training
from cyberslm.training.state import LATER, TrainState
from cyberslm.training.trackers import read_metrics


@pytest.mark.parametrize("stops", [(10,), (3,), (1, 2, 7, 19)])
def test_interrupted_run_gives_the_same_bits_as_a_straight_one(
    make_run: MakeRun, trained: Path, stops: tuple[int, ...]
) -> None:
    path = make_run()
    for stop in stops:
        train(path, stop_at=stop)
    train(path)
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_dropout_and_short_floats_resume_to_the_same_bits(make_run: MakeRun, tmp_path: Path, precision: str) -> None:
    changes = {"model.dropout": 0.1, "model.attn_dropout": 0.1, "precision": precision, "train.max_steps": 8}
    prints = []
    for name, stops in (("straight", ()), ("stopped", (3, 5))):
        (tmp_path / name).mkdir()
        path = make_run(changes, folder=tmp_path / name)
        for stop in stops:
            train(path, stop_at=stop)
        train(path)
        prints.append(fingerprint(tmp_path / name / "run"))
        state = json.loads(
            (tmp_path / name / "run" / "checkpoints" / "step-00000008" / "training" / "state.json").read_text()
        )
        assert (state["loss_scale"] is None) is (precision == "bf16")
        assert state["steps_at_scale"] == (0 if precision == "bf16" else 8 - state["overflows"])
    assert prints[0] == prints[1]


def test_checkpoint_of_a_version_without_a_loss_scale_goes_on_to_the_same_bits(
    make_run: MakeRun, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = make_run(), TrainState.to_json
    with monkeypatch.context() as before:
        before.setattr(
            TrainState, "to_json", lambda self: {key: v for key, v in known(self).items() if key not in LATER}
        )
        train(path, stop_at=7)
    train(path)
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


@pytest.mark.parametrize(("gone", "more"), [("spikes", {}), (None, {"mood": 1})])
def test_state_of_another_form_is_refused(gone: str | None, more: dict) -> None:
    value = {key: v for key, v in TrainState().to_json().items() if key != gone} | more
    with pytest.raises(IntegrityError, match="train state holds"):
        TrainState.from_json(value)


def test_run_folder_holds_what_the_design_says(trained: Path) -> None:
    run = trained / "run"
    present = {path.name for path in run.iterdir()}
    assert {
        "config.yaml",
        "base_config.yaml",
        "env.json",
        "metrics.jsonl",
        "train.log",
        "checkpoints",
        "final",
    } <= present
    assert load(run / "config.yaml", TrainRun).value.train.max_steps == 20
    assert (run / "base_config.yaml").read_text() == (trained / "run.yaml").read_text()
    assert json.loads((run / "env.json").read_text())["packages"]["torch"] == torch.__version__
    steps = list_steps(run / "checkpoints")
    assert steps[-1].step == 20
    assert len(steps) in (2, 3)  # the last two, and the best where it is neither
    records = read_metrics(run / "metrics.jsonl")
    assert (records[0]["type"], records[0]["tokens_per_step"]) == ("run", 128)
    assert sum(record["type"] == "run" for record in records) == 1
    assert [r["step"] for r in records if r["type"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["type"] == "validation"] == [5, 10, 15, 20]


def test_training_learns(trained: Path) -> None:
    losses = [r["loss"] for r in read_metrics(trained / "run" / "metrics.jsonl") if r["type"] == "validation"]
    assert losses[-1] < losses[0] < 6.0


def test_final_is_the_best_validated_step(trained: Path, make_run: MakeRun) -> None:
    manifest = files.verify(trained / "run" / "final")
    scores = {
        r["step"]: r["loss"] for r in read_metrics(trained / "run" / "metrics.jsonl") if r["type"] == "validation"
    }
    assert manifest["step"] == min(scores, key=scores.get)
    path = make_run({"checkpoint.final": "last", "train.max_steps": 5})
    train(path)
    assert files.verify(path.parent / "run" / "final")["step"] == 5


def test_finished_run_does_nothing_more(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    train(path)
    before = final_of(path.parent / "run"), (path.parent / "run" / "metrics.jsonl").read_bytes()
    outcome = run_training(load_run(path), quiet=True)
    assert (final_of(path.parent / "run"), (path.parent / "run" / "metrics.jsonl").read_bytes()) == before
    assert outcome.state.step == 5


def test_damaged_final_is_written_again(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    train(path)
    weights = path.parent / "run" / "final" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"?")
    train(path)
    assert weights.read_bytes() == whole


def test_resume_passes_over_a_damaged_checkpoint(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    train(path, stop_at=10)
    newest = list_steps(path.parent / "run" / "checkpoints")[-1]
    weights = newest.path / "training" / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    train(path)
    log = (path.parent / "run" / "train.log").read_text()
    assert "step-00000010 is damaged" in log
    assert "optimizer.safetensors" in log
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


@pytest.mark.parametrize("override", ["optimizer.lr=1e-4", "train.max_steps=40", "model.num_layers=3", "seed=4"])
def test_folder_of_a_run_with_another_configuration_is_refused(make_run: MakeRun, override: str) -> None:
    """G36: on resume the schedule was rebuilt from the changed configuration, and jumped."""
    path = make_run()
    train(path, stop_at=5)
    before = sorted(p.name for p in (path.parent / "run" / "checkpoints").iterdir())
    with pytest.raises(ConfigError, match=rf"another configuration:\n  {override.split('=')[0]}: .* there, .* now"):
        train(path, override)
    assert sorted(p.name for p in (path.parent / "run" / "checkpoints").iterdir()) == before


def test_settings_without_influence_on_the_result_may_change(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    train(path, stop_at=10)
    train(path, "logging.interval=1", "checkpoint.keep_last=3", "data.threads=1")
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


def test_changed_text_under_a_started_run_is_refused(make_run: MakeRun) -> None:
    path = make_run()
    train(path, stop_at=5)
    (path.parent / "text" / "new.txt").write_text("a document that was not there before\n" * 9)
    before = sorted((path.parent / "run" / "data").iterdir())
    with pytest.raises(IntegrityError, match=r"began with other data .*new.txt is new"):
        train(path)
    assert sorted((path.parent / "run" / "data").iterdir()) == before
    (path.parent / "text" / "new.txt").unlink()
    shutil.rmtree(path.parent / "run" / "data")
    train(path, stop_at=6)


def test_two_processes_cannot_train_in_one_folder(make_run: MakeRun) -> None:
    path = make_run()
    (path.parent / "run").mkdir()
    with files.lock(path.parent / "run"), pytest.raises(StorageError, match="is in use by process"):
        train(path)


def test_text_without_validation_trains_and_keeps_the_last(make_run: MakeRun) -> None:
    path = make_run({"data.validation_fraction": 0.0, "train.max_steps": 5})
    train(path)
    assert files.verify(path.parent / "run" / "final")["step"] == 5


def test_samples_are_written_and_do_not_change_the_result(make_run: MakeRun, trained: Path) -> None:
    path = make_run({"eval.sample_prompts": ["The "], "eval.sample_tokens": 4})
    train(path)
    samples = read_metrics(path.parent / "run" / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [5, 10, 15, 20]
    assert all(sample["prompt"] == "The " for sample in samples)
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


def test_plot_is_drawn(make_run: MakeRun) -> None:
    path = make_run({"logging.plots": True, "train.max_steps": 5})
    train(path)
    assert (path.parent / "run" / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_model_may_have_more_rows_than_the_tokenizer(make_run: MakeRun) -> None:
    path = make_run({"model.vocab_size": 512, "train.max_steps": 5})
    train(path)
    engine = cyberslm.load(path.parent / "run")
    assert (engine.model.config.vocab_size, engine.tokenizer.vocab_size) == (512, 400)


def test_size_of_the_vocabulary_given_once_counts_for_both(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5, "tokenizer": {}, "model.vocab_size": 420})
    run = load_run(path).value
    assert (run.model.vocab_size, run.tokenizer.vocab_size) == (420, 420)
    with pytest.raises(ConfigError, match=r"model.vocab_size 300 is below tokenizer.vocab_size 420"):
        load_run(path, ["tokenizer.vocab_size=420", "model.vocab_size=300"])


def test_existing_tokenizer_is_used_as_it_is(make_run: MakeRun, trained: Path) -> None:
    model = trained / "run" / "final" / "tokenizer.model"
    path = make_run({"tokenizer": {"path": str(model)}, "train.max_steps": 5})
    train(path)
    assert cyberslm.load(path.parent / "run").tokenizer.sha256 == files.sha256_file(model)


def test_short_warm_up_is_checked_against_the_steps(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"scheduler.warmup_steps 30 must be below train.max_steps 20"):
        load_run(make_run({"scheduler.warmup_steps": 30}))


def test_run_that_blows_up_keeps_its_last_good_checkpoint(make_run: MakeRun) -> None:
    path = make_run({"train.max_bad_steps": 1})
    train(path, stop_at=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.utils.get_total_norm", lambda *_: torch.tensor(float("nan")))
        with pytest.raises(TrainingError, match="not finite"):
            train(path)
    assert list_steps(path.parent / "run" / "checkpoints")[-1].step == 10
    train(path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_signal_saves_and_exits_and_the_run_goes_on_to_the_same_bits(
    make_run: MakeRun, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    changes = {"train.max_steps": 60, "eval.interval": 30, "checkpoint.interval": 30, "logging.interval": 1}
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight, stopped = (make_run(changes, folder=tmp_path / name) for name in ("straight", "stopped"))
    train(straight)
    command = [sys.executable, "-m", "cyberslm", "train", str(stopped)]
    log = tmp_path / "stopped" / "run" / "train.log"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(2400):
            if log.exists() and "step 3/60" in log.read_text():
                break
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command goes on from there" in said
    saved = list_steps(tmp_path / "stopped" / "run" / "checkpoints")[-1].step
    assert 3 <= saved < 60
    train(stopped)
    assert fingerprint(tmp_path / "stopped" / "run") == fingerprint(tmp_path / "straight" / "run")


def killed_while_writing(path: Path) -> None:
    write, calls = folder.write_tensors, iter(range(99))

    def write_and_die(*args: Any) -> None:
        write(*args)
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    folder.write_tensors = write_and_die
    train(path)


def test_killed_run_goes_on_by_itself(make_run: MakeRun, trained: Path) -> None:
    """SIGKILL at a moment of its own choosing: the newest whole checkpoint is found and nothing needs cleaning up."""
    path = make_run()
    (killed,) = in_ranks(killed_while_writing, path, world=1)
    assert killed.code == -signal.SIGKILL
    checkpoints = path.parent / "run" / "checkpoints"
    assert any(entry.name.endswith(".cyberslm-partial") for entry in checkpoints.iterdir())
    assert list_steps(checkpoints)[-1].step == 10
    train(path)
    assert not any(entry.name.startswith(".") for entry in checkpoints.iterdir())
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


def on_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    train(path)


def test_full_disk_stops_the_run_and_leaves_the_last_checkpoint(make_run: MakeRun) -> None:
    path = make_run()
    train(path, stop_at=5)
    (ended,) = in_ranks(on_a_full_disk, path, world=1)
    assert str(ended.error).startswith("StorageError: model.safetensors")
    checkpoints = path.parent / "run" / "checkpoints"
    assert [step.step for step in list_steps(checkpoints)][-1] == 5
    assert not any(entry.name.startswith(".") for entry in checkpoints.iterdir())


def test_too_little_free_space_is_said_before_training(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 1000})())
    path = make_run()
    with pytest.raises(ConfigError, match=r"checkpoints and final/ needs [\d,]+ bytes, but .* has 1,000 bytes free"):
        train(path)
    assert list_steps(path.parent / "run" / "checkpoints") == []


def test_damaged_shards_are_found_when_a_run_goes_on(make_run: MakeRun) -> None:
    """One flipped byte in a token shard went unnoticed in train and eval."""
    path = make_run()
    train(path, stop_at=5)
    shard = path.parent / "run" / "data" / "train-00000.tokens"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(IntegrityError, match=r"train-00000.tokens: has another SHA-256"):
        train(path)
    with pytest.raises(IntegrityError, match=r"train-00000.tokens"):
        evaluate(path.parent / "run")


def test_damaged_best_checkpoint_gives_way_to_the_next(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the best checkpoint damaged, every start ended in the same error and final/ was never written."""
    path = make_run({"checkpoint.keep_last": 4})
    scripted_scores(monkeypatch, 5.0, 3.0, 4.0, 4.5)
    train(path)
    run = path.parent / "run"
    assert files.verify(run / "final")["step"] == 10
    shutil.rmtree(run / "final")
    (run / "checkpoints" / "step-00000010" / "model.safetensors").write_bytes(b"")
    train(path)
    assert files.verify(run / "final")["step"] == 15
    assert "step-00000010 is damaged" in (run / "train.log").read_text()


def test_validation_that_is_not_finite_is_no_score_and_no_crash(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G42: a NaN score became best; here it also could not be written into a manifest."""
    path = make_run()
    scripted_scores(monkeypatch, 5.0, float("nan"), float("inf"), float("nan"))
    train(path)
    assert files.verify(path.parent / "run" / "final")["step"] == 5


def test_final_follows_the_setting_after_the_run_is_finished(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run()
    scripted_scores(monkeypatch, 5.0, 3.0, 4.0, 4.5)
    train(path)
    run = path.parent / "run"
    assert [step.step for step in list_steps(run / "checkpoints")] == [10, 15, 20]
    assert files.verify(run / "final")["step"] == 10
    train(path, "checkpoint.final=last")
    assert files.verify(run / "final")["step"] == 20


def test_checkpoints_without_their_configuration_are_not_trained_over(make_run: MakeRun) -> None:
    path = make_run()
    train(path, stop_at=5)
    (path.parent / "run" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"the config.yaml of their run is gone"):
        train(path, "optimizer.lr=0.01")


def test_sample_prompt_that_cannot_be_continued_is_refused_before_training(make_run: MakeRun) -> None:
    path = make_run({"eval.sample_prompts": ["hello"], "eval.sample_tokens": 48})
    with pytest.raises(GenerationError, match="do not fit the model's context of 32"):
        train(path)
    assert read_metrics(path.parent / "run" / "metrics.jsonl") == []


def test_keeping_all_checkpoints_does_not_ask_for_room_for_more_than_the_run_makes(make_run: MakeRun) -> None:
    train(make_run({"checkpoint.keep_last": 10**9, "train.max_steps": 5}))


def test_smaller_micro_batches_may_finish_a_run(make_run: MakeRun) -> None:
    path = make_run()
    train(path, stop_at=10)
    train(path, "train.micro_batch_size=1")
    assert files.verify(path.parent / "run" / "final")


def test_finished_run_stays_finished_when_its_text_is_gone(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    train(path)
    shutil.rmtree(path.parent / "text")
    train(path)
    assert "this run is finished" in (path.parent / "run" / "train.log").read_text()


def test_run_goes_on_without_its_text_when_told_so(make_run: MakeRun, trained: Path) -> None:
    path = make_run()
    train(path, stop_at=10)
    shutil.rmtree(path.parent / "text")
    with pytest.raises(IntegrityError, match=r"data.sources=\[\]"):
        train(path)
    train(path, "data.sources=[]")
    assert fingerprint(path.parent / "run") == fingerprint(trained / "run")


def test_moved_run_is_scored_on_its_own_data(make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    train(path)
    before = evaluate(path.parent / "run").score
    (path.parent / "run").rename(path.parent / "moved")
    assert evaluate(path.parent / "moved").score == before


def test_check_and_prepare_do_not_replace_the_shards_of_a_run_that_has_begun(make_run: MakeRun) -> None:
    """`cyberslm check` after the text had changed replaced the shards, and the run could never go on."""
    path = make_run()
    train(path, stop_at=5)
    (path.parent / "text" / "new.txt").write_text("a document that was not there before\n" * 9)
    run = load_run(path)
    for attempt in (lambda: list(check(run, print)), lambda: ensure_prepared(run.value, print)):
        with pytest.raises(IntegrityError, match="began with other data"):
            attempt()
    train(path, "data.sources=[]")


def test_resolved_configuration_of_a_run_loads_and_trains(make_run: MakeRun) -> None:
    """RUN/config.yaml was refused wherever the tokenizer had fewer pieces than its setting asked for."""
    path = make_run({"tokenizer": {"vocab_size": 9000, "shrink": True}, "train.max_steps": 5})
    train(path)
    run = load_run(path.parent / "run" / "config.yaml").value
    assert run.model.vocab_size < run.tokenizer.vocab_size
    train(path.parent / "run" / "config.yaml")


def test_control_ids_that_are_not_the_tokenizers_are_refused(make_run: MakeRun) -> None:
    """They were replaced in silence, and the second start was refused for it."""
    with pytest.raises(ConfigError, match="model.eos_token_id is the tokenizer's, 3, not 5"):
        train(make_run({"model.eos_token_id": 5}))


def test_tokenizer_keeps_the_rule_for_bos_it_was_saved_with(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = make_run({"tokenizer": {"vocab_size": 400, "add_bos": False}, "train.max_steps": 5}, folder=tmp_path / "a")
    train(first)
    (tmp_path / "b").mkdir()
    tokenizer = {"path": str(tmp_path / "a" / "run" / "final")}
    second = make_run({"tokenizer": tokenizer, "train.max_steps": 5}, folder=tmp_path / "b")
    with pytest.raises(ConfigError, match=r"tokenizer.add_bos is True and .* was saved with False"):
        train(second, "tokenizer.add_bos=true")
    train(second)
    assert cyberslm.load(tmp_path / "b" / "run").tokenizer.add_bos is False


def test_samples_are_made_without_a_validation_split(make_run: MakeRun) -> None:
    path = make_run({"data.validation_fraction": 0.0, "eval.sample_prompts": ["The"], "eval.sample_tokens": 4})
    train(path)
    assert [r["step"] for r in read_metrics(path.parent / "run" / "samples.jsonl")] == [5, 10, 15, 20]


def test_validated_rows_do_not_depend_on_the_micro_batch(make_run: MakeRun) -> None:
    losses = []
    for size in (1, 4):
        path = make_run({"train.micro_batch_size": size, "train.max_steps": 5, "out_dir": f"run{size}"})
        train(path)
        records = read_metrics(path.parent / f"run{size}" / "metrics.jsonl")
        losses += [r["loss"] for r in records if r["type"] == "validation"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_threads_of_the_host_program_are_given_back(make_run: MakeRun) -> None:
    before = torch.get_num_threads()
    train(make_run({"train.max_steps": 5, "threads": 2}))
    assert torch.get_num_threads() == before


def test_trackers_get_numbers_validations_by_source_and_samples(make_run: MakeRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sources = ["text/more.jsonl", "text/*.txt"]
    changes = {"logging.trackers": ["tensorboard"], "eval.sample_prompts": ["The"], "eval.sample_tokens": 4}
    path = make_run(changes | {"data.sources": sources, "logging.probe": True, "train.max_steps": 10})
    train(path, stop_at=7)
    train(path)
    found = EventAccumulator(str(path.parent / "run" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    records = read_metrics(path.parent / "run" / "metrics.jsonl")
    for kind, key in (("train", "loss"), ("train", "share_of_limit"), ("validation", "bits_per_byte/data.sources[1]")):
        steps = [record["step"] for record in records if record["type"] == kind]
        assert [event.step for event in found.Scalars(f"{kind}/{key}")] == steps
    assert [event.step for event in found.Tensors("sample/The/text_summary")] == [5, 10]
    assert "run/text_summary" in found.Tags()["tensors"]


@pytest.mark.parametrize(
    ("trackers", "words"),
    [(["tensorbord"], "trackers has 'tensorbord': known are tensorboard"), (["tensorboard"] * 2, "names one twice")],
)
def test_unknown_trackers_are_refused(make_run: MakeRun, trackers: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_run(make_run({"logging.trackers": trackers}))


def test_missing_library_of_a_tracker_is_said_before_any_work(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyberslm.training.elsewhere.find_spec", lambda _: None)
    path = make_run({"logging.trackers": ["tensorboard"]})
    with pytest.raises(ConfigError, match=r"pip install 'cyberslm\[trackers\]'"):
        train(path)
    assert not (path.parent / "run").exists()
