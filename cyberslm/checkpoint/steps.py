"""The step folders of a run: ``checkpoints/step-00001000/``.

A checkpoint exists if and only if its manifest verifies. Which one is newest or best is computed from the manifests, in
numeric order of their steps, never from names, times or a pointer file. Rotation keeps the newest ``keep_last`` and the
best, deletes only after the new one is on disk, and touches nothing it doesn't know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cyberslm import files
from cyberslm.checkpoint.folder import KIND, verify_model
from cyberslm.errors import IntegrityError

NAME = re.compile(r"step-(\d{8,})")


class Step(NamedTuple):
    step: int
    path: Path
    validation_loss: float | None


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def list_steps(checkpoints: Path) -> list[Step]:
    """Step folders with a sound manifest, oldest first (the files themselves are verified when one is used)."""
    found = []
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            try:
                manifest = files.read_manifest(path)
            except IntegrityError:
                continue
            if manifest.get("kind") == KIND and manifest.get("step") == int(match[1]):
                found.append(Step(int(match[1]), path, _loss(manifest)))
    return sorted(found)


def newest(checkpoints: Path, warn: Callable[[str], None]) -> Step | None:
    """The newest step that verifies in full; damaged ones are passed over with a warning that names the file."""
    for step in reversed(list_steps(checkpoints)):
        try:
            verify_model(step.path)
        except IntegrityError as error:
            warn(f"warning: checkpoint {step.path.name} is damaged and was passed over: {error}")
            continue
        return step
    return None


def best(steps: list[Step]) -> Step | None:
    """The step with the lowest validation loss, the earliest among equals; None if none was validated."""
    scored = [step for step in steps if step.validation_loss is not None]
    return min(scored, key=lambda step: (step.validation_loss, step.step), default=None)


def rotate(checkpoints: Path, keep_last: int) -> list[Path]:
    """Delete all but the newest ``keep_last`` and the best; return what was deleted."""
    steps = list_steps(checkpoints)
    kept = {step.step for step in steps[-keep_last:]}
    if (top := best(steps)) is not None:
        kept.add(top.step)
    gone = [step.path for step in steps if step.step not in kept]
    for path in gone:
        files.remove(path)
    return gone


def _loss(manifest: dict) -> float | None:
    validation = manifest.get("validation")
    loss = validation.get("loss") if isinstance(validation, dict) else None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
