"""The step folders of a run: ``checkpoints/step-00001000/``.

Each is a model folder, or an adapter folder where a run trains adapters. A checkpoint exists if and only if its
manifest verifies. Which one is newest or best is computed from the manifests, in numeric order of their steps, never
from names, times or a pointer file. Rotation keeps the newest ``keep_last``, the
best and what it is told to, deletes only after the new one is on disk, and touches nothing it doesn't know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from cyberslm import files
from cyberslm.checkpoint import adapter, folder
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
    for step, path in _named(checkpoints):
        try:
            manifest = files.read_manifest(path)
        except IntegrityError:
            continue
        if manifest.get("kind") in (folder.KIND, adapter.KIND) and manifest.get("step") == step:
            found.append(Step(step, path, _loss(manifest)))
    return found


def newest(checkpoints: Path, warn: Callable[[str], None]) -> Step | None:
    """The newest step that verifies in full; damaged ones are passed over with a warning that names the file.

    Raises `IntegrityError` when there are step folders and none is whole, and for one that was never a checkpoint: what
    is there is not to be trained over in silence.
    """
    named = _named(checkpoints)
    for step, path in reversed(named):
        if not files.looks_published(path):
            raise IntegrityError(f"{path} is no checkpoint (it has no manifest of one): delete it or move it away")
        try:
            manifest = verify_step(path)
            if manifest.get("step") != step:
                raise IntegrityError(f"its manifest says step {manifest.get('step')}")
        except IntegrityError as error:
            warn(f"warning: checkpoint {path.name} is damaged and is passed over: {error}")
            continue
        return Step(step, path, _loss(manifest))
    if named:
        raise IntegrityError(
            f"none of the {len(named)} checkpoints in {checkpoints} is whole: restore one, or delete them to start anew"
        )
    return None


def verify_step(path: Path) -> dict:
    """The manifest of a whole, undamaged step folder; `IntegrityError` otherwise."""
    is_adapter = files.read_manifest(path).get("kind") == adapter.KIND
    return adapter.verify_adapter(path) if is_adapter else folder.verify_model(path)


def best(steps: list[Step]) -> Step | None:
    """The step with the lowest validation loss, the earliest among equals; None if none was validated."""
    first = next(iter(ranked(steps)), None)
    return first if first is not None and first.validation_loss is not None else None


def rotate(checkpoints: Path, keep_last: int, *, current: int, keep: Collection[int] = ()) -> list[Path]:
    """Delete all but the newest ``keep_last``, the best and the steps ``keep`` up to the step just written.

    Returns what was deleted.

    A later step can only be one that was passed over as damaged; it is neither counted nor touched.
    """
    steps = [step for step in list_steps(checkpoints) if step.step <= current]
    kept = {*keep, *(step.step for step in steps[-keep_last:])}
    if (top := best(steps)) is not None:
        kept.add(top.step)
    gone = [step.path for step in steps if step.step not in kept]
    for path in gone:
        files.remove(path)
    return gone


def remove_after(checkpoints: Path, step: int) -> None:
    """Delete the checkpoints of later steps than ``step``: a run that went back to it makes those steps anew."""
    for found in list_steps(checkpoints):
        if found.step > step:
            files.remove(found.path)


def ranked(steps: list[Step]) -> list[Step]:
    """Validated steps, the best first (the earliest among equals), then the others, the newest first."""
    scored = sorted((s for s in steps if s.validation_loss is not None), key=lambda s: (s.validation_loss, s.step))
    return scored + [step for step in reversed(steps) if step.validation_loss is None]


def _named(checkpoints: Path) -> list[tuple[int, Path]]:
    """Folders that are named as steps, in numeric order."""
    matches = ((NAME.fullmatch(path.name), path) for path in (checkpoints.iterdir() if checkpoints.is_dir() else ()))
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir() and not path.is_symlink())


def _loss(manifest: dict) -> float | None:
    validation = manifest.get("validation")
    loss = validation.get("loss") if isinstance(validation, dict) else None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
