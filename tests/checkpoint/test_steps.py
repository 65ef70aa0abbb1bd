from __future__ import annotations

import os
from pathlib import Path

import pytest

from cyberslm import files
from cyberslm.checkpoint.folder import KIND
from cyberslm.checkpoint.steps import best, list_steps, newest, rotate, step_folder
from cyberslm.errors import IntegrityError


def make(checkpoints: Path, step: int, loss: float | None = None) -> Path:
    def fill(staging: Path) -> dict:
        (staging / "model.safetensors").write_bytes(b"weights of %d" % step)
        return {"kind": KIND, "step": step} | ({} if loss is None else {"validation": {"loss": loss}})

    files.publish(step_folder(checkpoints, step), fill, replace=True)
    return step_folder(checkpoints, step)


def steps(checkpoints: Path) -> list[int]:
    return [step.step for step in list_steps(checkpoints)]


def test_rotation_keeps_the_newest_and_the_best_by_number_not_time(tmp_path: Path) -> None:
    """G43 (transformers#11769): rotation by name or time deleted the newest or the best."""
    for step, loss in ((999_999, 1.0), (1_000_000, 3.0), (99_999_999, 2.5), (100_000_000, 2.0)):
        os.utime(make(tmp_path, step, loss), (2e9 - step, 2e9 - step))
    gone = rotate(tmp_path, 1, current=100_000_000)
    assert steps(tmp_path) == [999_999, 100_000_000]
    assert len(gone) == 2
    assert rotate(tmp_path, 1, current=100_000_000) == []


def test_rotation_touches_nothing_it_does_not_know(tmp_path: Path) -> None:
    for step in range(1, 5):
        make(tmp_path, step)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "mine.txt").write_text("x")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "step-00000003-copy").mkdir()
    rotate(tmp_path, 2, current=4)
    assert steps(tmp_path) == [3, 4]
    assert {"step-00000009", "notes.md", "step-00000003-copy"} < {path.name for path in tmp_path.iterdir()}


def test_newest_passes_over_damaged_ones_and_names_the_file(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"weights of 4")
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-2])
    said: list[str] = []
    found = newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 2
    assert "step-00000003 is damaged" in said[0]
    assert "model.safetensors" in said[0]
    assert "step-00000002 is damaged" in said[1]


def test_step_without_a_manifest_is_refused_and_one_with_another_number_passed_over(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", lambda _: None) is None
    make(tmp_path, 3)
    make(tmp_path, 7).rename(tmp_path / "step-00000008")
    said: list[str] = []
    found = newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 3
    assert "its manifest says step 7" in said[0]
    (tmp_path / "step-00000009").mkdir()
    with pytest.raises(IntegrityError, match="step-00000009 is no checkpoint"):
        newest(tmp_path, said.append)


def test_checkpoints_of_which_none_is_whole_are_not_trained_over(tmp_path: Path) -> None:
    """Flipped manifests were passed over in silence, and the run began anew at step 0."""
    for step in (1, 2):
        manifest = make(tmp_path, step) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"a", b"b", 1))
    said: list[str] = []
    with pytest.raises(IntegrityError, match="none of the 2 checkpoints in .* is whole"):
        newest(tmp_path, said.append)
    assert len(said) == 2


@pytest.mark.parametrize("odd", [float("inf"), "low", None])
def test_best_ignores_scores_that_are_no_numbers(tmp_path: Path, odd: object) -> None:
    make(tmp_path, 1, 2.0)
    make(tmp_path, 2, 1.5)
    make(tmp_path, 3, 1.5)
    make(tmp_path, 4, None if odd == float("inf") else odd)  # type: ignore[arg-type]
    top = best(list_steps(tmp_path))
    assert top is not None
    assert top.step == 2


def test_step_just_written_is_kept_beside_a_damaged_later_one(tmp_path: Path) -> None:
    """A damaged step 10 counted as the newest, so that the good step 7 was deleted right after it was saved."""
    for step, loss in ((5, 3.0), (10, 1.0)):
        make(tmp_path, step, loss)
    (tmp_path / "step-00000010" / "model.safetensors").write_bytes(b"weights of 11")
    make(tmp_path, 7, 4.0)
    rotate(tmp_path, 1, current=7)
    assert steps(tmp_path) == [5, 7, 10]
