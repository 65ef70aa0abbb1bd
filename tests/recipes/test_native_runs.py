"""Runs with the loops in C++, without them, and where they can't be built."""

from __future__ import annotations

import pytest
from conftest import MakeRun
from runs import train

from cyberslm.native.build import library
from cyberslm.training.trackers import read_metrics

LOOPS = ", loops in C++"


def losses(folder: object) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["type"] == "train"]


@pytest.mark.usefixtures("native_cache")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_runs_with_and_without_the_loops_differ_by_rounding(
    make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory, precision: str
) -> None:
    found = []
    for native in (True, False):
        path = make_run(
            {"native": native, "precision": precision, "train.max_steps": 10},
            folder=tmp_path_factory.mktemp("one"),
        )
        train(path)
        assert (LOOPS in (path.parent / "run" / "train.log").read_text()) is native
        found.append(losses(path.parent / "run"))
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], abs=1e-4 if precision == "fp32" else 0.02)


def test_without_a_compiler_a_run_says_so_once_and_goes_on(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.cache_clear()
    path = make_run({"train.max_steps": 5})
    train(path)
    log = (path.parent / "run" / "train.log").read_text()
    assert log.count("warning: slower, without the loops in C++ (native: false leaves them out): CXX names") == 1
    assert LOOPS not in log
    assert len(losses(path.parent / "run")) == 5
