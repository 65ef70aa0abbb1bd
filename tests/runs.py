"""Whole small runs, and what must be equal between two of them."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.data.loader import RowLoader
from cyberslm.recipes import preferences
from cyberslm.recipes.config import load_run
from cyberslm.recipes.train import run_training
from cyberslm.training.loss import Score
from cyberslm.training.trackers import read_metrics
from cyberslm.training.trainer import Plan

TIMED = ("seconds", "tokens_per_second", "peak_memory", "estimated_memory")
"""What depends on the moment and on the process: the command line trains in less memory than a program of one's own."""


def fingerprint(run: Path) -> dict[str, str]:
    """SHA-256 of what must not depend on interruptions: weights, optimizer, state and the log of losses."""
    last = list_steps(run / "checkpoints")[-1].path
    names = ("model.safetensors", "training/optimizer.safetensors", "training/state.json")
    hashes = {name: files.sha256_file(last / name) for name in names}
    log = [{k: v for k, v in record.items() if k not in TIMED} for record in read_metrics(run / "metrics.jsonl")]
    return hashes | {"log": hashlib.sha256(json.dumps(log).encode()).hexdigest(), "final": final_of(run)}


def final_of(run: Path) -> str:
    return files.sha256_file(run / "final" / "model.safetensors")


def train(path: Path, *overrides: str, stop_at: int | None = None) -> None:
    run_training(load_run(path, overrides), stop_at=stop_at, quiet=True)


def scripted_scores(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Validations at steps 5, 10, 15 and 20 give these losses."""
    left = list(losses)
    monkeypatch.setattr("cyberslm.recipes.hooks.measure", lambda *_, **__: Score(left.pop(0), 1, 1))


def of_type(run: Path, kind: str) -> list[dict]:
    return [record for record in read_metrics(run / "metrics.jsonl") if record["type"] == kind]


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A clock for the training loop that moves by ``seconds`` with each step's batch."""
    batch, now = RowLoader.batch, [0.0]

    def slowly(self: RowLoader, step: int, **place: int) -> object:
        now[0] += seconds
        return batch(self, step, **place)

    monkeypatch.setattr(RowLoader, "batch", slowly)
    monkeypatch.setattr("cyberslm.recipes.train.Plan", partial(Plan, clock=lambda: now[0]))


def spikes_at(monkeypatch: pytest.MonkeyPatch, *data_steps: int) -> None:
    """Multiply the loss of the rows that step ``n`` of the data has, whenever they come."""
    real, batch = preferences.next_token_loss, RowLoader.batch
    now: list[int] = [0]

    def watched(self: RowLoader, step: int, **place: int) -> object:
        now[0] = step + 1 + place.get("passed", 0) // self.batch_rows
        return batch(self, step, **place)

    def loss(*args: object, **kwargs: object) -> object:
        output = real(*args, **kwargs)
        return output._replace(loss_sum=output.loss_sum * 4) if now[0] in data_steps else output

    monkeypatch.setattr(RowLoader, "batch", watched)
    monkeypatch.setattr(preferences, "next_token_loss", loss)
