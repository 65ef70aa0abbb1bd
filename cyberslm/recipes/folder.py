"""The folder of a run: whose it is, whether it has room, and the files that say what made it."""

from __future__ import annotations

import json
import shutil

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.config import Loaded, differences, dump, load
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import NOT_THE_RESULT, NOT_THE_RESULT_SECTIONS, TrainRun
from cyberslm.recipes.machine import environment


def refuse_other_run(run: TrainRun) -> None:
    """Stop when the folder holds checkpoints of a configuration with another result."""
    kept = run.folder / "config.yaml"
    if not list_steps(run.folder / "checkpoints"):
        return
    if not kept.exists():
        raise ConfigError(
            f"out_dir: {run.folder} holds checkpoints, but the config.yaml of their run is gone: restore it, choose"
            " another out_dir, or delete that folder to start anew"
        )
    before = load(kept, TrainRun).value
    changed = {
        key: values
        for key, values in differences(before, run).items()
        if key not in NOT_THE_RESULT
        and not key.startswith(NOT_THE_RESULT_SECTIONS)
        and not key.startswith("model.vocab")
    }
    if changed:
        lines = "".join(f"\n  {key}: {old!r} there, {new!r} now" for key, (old, new) in sorted(changed.items()))
        raise ConfigError(
            f"out_dir: {run.folder} holds a run with another configuration:{lines}\n"
            "choose another out_dir, delete that folder to start anew, or give the same settings to go on with it"
        )


def require_space(run: TrainRun) -> None:
    """Refuse a run whose checkpoints have no room."""
    files.require_space(run.folder, space_needed(run), what="checkpoints and final/")


def space_needed(run: TrainRun) -> int:
    """Bytes still to come: the kept checkpoints (weights and two moments, fp32), the one being written, and final/."""
    writes = run.train.max_steps // min(run.checkpoint.interval, run.eval.interval) + 2
    missing = max(1, min(run.checkpoint.keep_last + 2, writes) - len(list_steps(run.folder / "checkpoints")))
    return run.model.num_parameters * 4 * (3 * missing + 1)


def free_bytes(run: TrainRun) -> int:
    """Free room where the run's folder is, or will be."""
    return shutil.disk_usage(next(path for path in (run.folder, *run.folder.resolve().parents) if path.exists())).free


def write_run_files(loaded: Loaded[TrainRun], run: TrainRun) -> None:
    files.write_text(run.folder / "base_config.yaml", loaded.text)
    files.write_text(run.folder / "config.yaml", dump(run))
    files.write_text(run.folder / "env.json", json.dumps(environment(), indent=2) + "\n")
