from __future__ import annotations

import math
from pathlib import Path

import pytest

from cyberslm.errors import ConfigError, StorageError
from cyberslm.training import elsewhere
from cyberslm.training.elsewhere import open_trackers, require_trackers

pytest.importorskip("tensorboard")


def read(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def write(run: Path, first: int, last: int, loss: float, *, step: int = 0) -> None:
    (tracker,) = open_trackers(["tensorboard"], run, step=step)
    for number in range(first, last + 1):
        tracker.write({"type": "train", "step": number, "loss": loss, "lr": 1e-3, "skipped": 0})
    tracker.sync()
    tracker.close()


def test_numbers_of_each_kind_have_tags_of_their_own(tmp_path: Path) -> None:
    (tracker,) = open_trackers(["tensorboard"], tmp_path, step=0)
    tracker.write({"type": "train", "step": 3, "loss": 2.0, "share_of_limit": 0.25})
    tracker.write({"type": "validation", "step": 3, "loss": 2.5, "best": True, "loss/data.sources[0]": 1.5})
    tracker.close()
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "train/loss") == [(3, 2.0)]
    assert scalars(folder, "train/share_of_limit") == [(3, 0.25)]
    assert scalars(folder, "validation/loss/data.sources[0]") == [(3, 1.5)]
    assert "train/step" not in read(folder).Tags()["scalars"]


def test_samples_and_the_run_are_text_as_it_is(tmp_path: Path) -> None:
    (tracker,) = open_trackers(["tensorboard"], tmp_path, step=0)
    tracker.write({"type": "run", "step": 0, "parameters": 7, "precision": "fp32"})
    tracker.write({"type": "sample", "step": 5, "prompt": "The *", "text": "# no title\n<b>"})
    tracker.close()
    found = read(tmp_path / "tensorboard")
    (event,) = found.Tensors("sample/The */text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (5, b"    # no title\n    <b>\n")
    (event,) = found.Tensors("run/text_summary")
    assert b"    parameters: 7\n" in event.tensor_proto.string_val[0]


def test_steps_after_the_one_gone_on_from_vanish(tmp_path: Path) -> None:
    write(tmp_path, 1, 8, 1.0)
    write(tmp_path, 6, 10, 2.0, step=5)
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(s, 1.0 if s <= 5 else 2.0) for s in range(1, 11)]


def test_numbers_that_are_not_finite_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, 1, 1, math.nan)
    assert math.isnan(scalars(tmp_path / "tensorboard", "train/loss")[0][1])


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(StorageError, match="tensorboard can't be written"):
        open_trackers(["tensorboard"], tmp_path, step=0)


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_trackers(["tensorboard"])
    monkeypatch.setattr(elsewhere, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tensorboard needs its library: pip install 'cyberslm\[trackers\]'"):
        require_trackers(["tensorboard"])
