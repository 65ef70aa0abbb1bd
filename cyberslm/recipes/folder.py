"""The folder of a run: whose it is, whether it has room, and the files that say what made it."""

from __future__ import annotations

import json
import shutil

from cyberslm import files
from cyberslm.checkpoint.steps import Step, list_steps
from cyberslm.config import Loaded, differences, dump
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import NOT_THE_RESULT, NOT_THE_RESULT_SECTIONS, TrainRun
from cyberslm.recipes.finetune import FinetuneRun, has_adapters, kept_run
from cyberslm.recipes.machine import environment
from cyberslm.recipes.origin import moving
from cyberslm.training.schedule import Decision, holds

LENGTH = "train.max_steps"


def refuse_other_run(run: TrainRun) -> str | None:
    """Stop when the folder holds checkpoints of a configuration with another result.

    ``train.max_steps`` may change as long as no step made so far depended on it; then that is returned in words.
    """
    kept = run.folder / "config.yaml"
    steps = list_steps(run.folder / "checkpoints")
    if not steps:
        return None
    if not kept.exists():
        raise ConfigError(
            f"out_dir: {run.folder} holds checkpoints, but the config.yaml of their run is gone: restore it, choose"
            " another out_dir, or delete that folder to start anew"
        )
    before = kept_run(kept)
    if type(before) is not type(run):
        raise ConfigError(
            f"out_dir: {run.folder} holds a run of another kind (train or finetune): choose another out_dir"
        )
    if isinstance(run, FinetuneRun):
        _refuse_other_base(run, steps[-1])
    changed = {
        key: values
        for key, values in differences(before, run).items()
        if key not in NOT_THE_RESULT
        and not key.startswith(NOT_THE_RESULT_SECTIONS)
        and not key.startswith("model.vocab")
    }
    said, why, done = None, "", steps[-1].step
    if set(changed) == {LENGTH} and not (why := _why_not(before, run, done)):
        old, new = changed.pop(LENGTH)
        said = f"{LENGTH} is {new:,} now, it was {old:,}: the {done:,} steps made so far are the same in both"
    if changed:
        lines = "".join(f"\n  {key}: {old!r} there, {new!r} now" for key, (old, new) in sorted(changed.items()))
        raise ConfigError(
            f"out_dir: {run.folder} holds a run with another configuration:{lines}\n{why}"
            "choose another out_dir, delete that folder to start anew, or give the same settings to go on with it"
        )
    return said


def _refuse_other_base(run: FinetuneRun, step: Step) -> None:
    began_with, now = files.read_manifest(step.path).get("base_sha256"), run.base_sha256
    if began_with != now:
        raise ConfigError(
            f"base: {run.base} is another model than the run in {run.folder} began with (manifest {now[:12]} now,"
            f" {str(began_with)[:12]} then): name that one, or choose another out_dir"
        )


def _why_not(before: TrainRun, run: TrainRun, done: int) -> str:
    """Why ``train.max_steps`` can't change after ``done`` steps; empty if it can."""
    if run.train.max_time is not None:
        return "with train.max_time the number of steps is already decided; "
    if run.train.max_steps < done:
        return f"step {done} is made already; "
    for total in (before.train.max_steps, run.train.max_steps):
        if not holds(done, run.scheduler, [Decision(0, total)]):
            return (
                f"with {total} steps the {run.scheduler.name} rate is below its peak at step {done}, so the steps made"
                " would have been others; "
            )
    return ""


def require_space(run: TrainRun) -> None:
    """Refuse a run whose checkpoints have no room."""
    files.require_space(run.folder, space_needed(run), what="checkpoints and final/")


def space_needed(run: TrainRun) -> int:
    """Bytes still to come: the kept checkpoints (weights, two moments and perhaps their mean, fp32; with adapters what
    is trained alone), the one being written, and final/."""
    writes = run.train.max_steps // min(run.checkpoint.interval, run.eval.interval) + 2
    kept = run.checkpoint.keep_last + 2 + (run.train.on_spike == "rollback")
    missing = max(1, min(kept, writes) - len(list_steps(run.folder / "checkpoints")))
    trained, whole = moving(run).trained, run.model.num_parameters
    step = (trained if has_adapters(run) else whole) + trained * (3 if run.train.ema_decay else 2)
    return 4 * (step * missing + whole)


def free_bytes(run: TrainRun) -> int:
    """Free room where the run's folder is, or will be."""
    return shutil.disk_usage(next(path for path in (run.folder, *run.folder.resolve().parents) if path.exists())).free


def write_run_files(loaded: Loaded[TrainRun], run: TrainRun) -> None:
    files.write_text(run.folder / "base_config.yaml", loaded.text)
    files.write_text(run.folder / "config.yaml", dump(run))
    files.write_text(run.folder / "env.json", json.dumps(environment(), indent=2) + "\n")
