"""Whole small runs in several processes, what happens to them, and what must be equal to the run of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Ended, all_of, in_ranks
from safetensors.torch import load_file

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.recipes.finetune import load_any
from cyberslm.recipes.hooks import RunHooks
from cyberslm.recipes.train import run_training
from cyberslm.training.trackers import read_metrics

Happening = Callable[[], object]


def one_run(path: str, overrides: tuple[str, ...], stop_at: int | None = None) -> tuple[int, int | None]:
    outcome = run_training(load_any(path, overrides), stop_at=stop_at, quiet=True)
    return outcome.state.step, outcome.signal_number


def run_in(world: int, path: Path, *overrides: str, stop_at: int | None = None) -> list[tuple[int, int | None]]:
    return all_of(in_ranks(one_run, str(path), overrides, stop_at, world=world))


def losses(run: Path) -> dict[tuple[str, int], float]:
    records = read_metrics(run / "metrics.jsonl")
    return {(record["type"], record["step"]): record["loss"] for record in records if "loss" in record}


def same_run(run: Path, wanted: Path) -> None:
    """The same losses at the same steps, and weights and moments that differ by rounding alone."""
    assert losses(run) == pytest.approx(losses(wanted), rel=1e-5)
    last, theirs = list_steps(run / "checkpoints")[-1], list_steps(wanted / "checkpoints")[-1]
    assert last.step == theirs.step
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        mine, other = load_file(last.path / name), load_file(theirs.path / name)
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert value.dtype == other[key].dtype
            torch.testing.assert_close(
                value, other[key], rtol=1e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert files.verify(run / "final")


def happening(rank: int, step: int, event: Happening) -> None:
    """Have ``event`` happen on that rank once it has made that step."""
    record = RunHooks.record

    def recording(self: RunHooks, entry: dict) -> None:
        record(self, entry)
        if (self.dist.rank, entry["type"], entry["step"]) == (rank, "train", step):
            event()

    RunHooks.record = recording


def refusals(ended: list[Ended]) -> set[str]:
    return {str(each.error) for each in ended}
