"""Curves of finished and of running runs, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cyberslm.errors import ConfigError
from cyberslm.training.plots import Axis, can_plot, curves
from cyberslm.training.trackers import read_metrics


def chart(
    runs: Sequence[Path], *, labels: Sequence[str] | None = None, x: Axis = "step", bits_per_byte: bool = False
) -> bytes:
    """A PNG of ``runs``, folders or metrics files, named ``labels`` or as their folders are.

    Raises `ConfigError` for one without records, for equal labels, and where matplotlib is missing.
    """
    if not can_plot():
        raise ConfigError("plot needs matplotlib: pip install 'cyberslm[plots]'")
    names = list(labels or _names([path.parent if path.is_file() else path for path in runs]))
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two runs are named {next(n for n in names if names.count(n) > 1)!r}: give others by --label"
        )
    return curves(
        {name: _records(path) for name, path in zip(names, runs, strict=True)}, x=x, bits_per_byte=bits_per_byte
    )


def _records(path: Path) -> list[dict]:
    file = path if path.is_file() else path / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{path} is no run: there is no {file.name} in it")
    records = [r for r in read_metrics(file) if r.get("type") in ("train", "validation") and type(r.get("step")) is int]
    if not records:
        raise ConfigError(f"{file} has no record of a step yet")
    return records


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with their parents' where names alone would be equal."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]
