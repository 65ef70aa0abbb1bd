from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from conftest import MakeRun

from cyberslm.config import Loaded
from cyberslm.errors import ConfigError
from cyberslm.model.sizes import trained_flops_per_token
from cyberslm.recipes import estimate
from cyberslm.recipes.check import check
from cyberslm.recipes.config import TrainRun, load_run
from cyberslm.recipes.estimate import _rows_to_try, _validations, needed_memory
from cyberslm.recipes.machine import with_native
from cyberslm.recipes.train import run_training
from cyberslm.training.distributed import Dist
from cyberslm.training.memory import Needed
from cyberslm.training.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def shown(run: Loaded[TrainRun]) -> list[str]:
    return list(check(run, lambda _: None))


def test_check_says_memory_disk_speed_and_time(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.hardware, "busy_cores", lambda _: 0.0)
    lines = shown(load_run(make_run({"logging.probe": True, "threads": 1})))
    text = "\n".join(lines)
    assert re.search(r"^memory: 0.3\d GiB at the peak, .* GiB free of .* GiB \(program 0.36 GiB, ", text, re.MULTILINE)
    assert re.search(r"^disk: [\d.]+ [kM]?B for checkpoints and final/, .* free$", text, re.MULTILINE)
    assert re.search(r"^speed: [\d,]+ tokens/s, \d+% of the limit of .*FLOP/s of fp32 products", text, re.MULTILINE)
    assert re.search(r"^time: about 0:00:\d\d for 20 steps, 0:00:\d\d of it validation$", text, re.MULTILINE)
    assert "warning" not in text


def test_nothing_is_measured_where_the_probe_is_off(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(estimate, "product_rates", never)
    monkeypatch.setattr(estimate, "measure_speed", never)
    text = "\n".join(shown(load_run(make_run())))
    assert "memory: " in text
    assert "speed: " not in text


def test_header_records_and_lines_of_a_run_have_the_estimate(make_run: MakeRun) -> None:
    path = make_run({"device": "cpu", "logging.probe": True, "train.max_steps": 5})
    run_training(load_run(path), quiet=True)
    log = (path.parent / "run" / "train.log").read_text()
    assert "speed: " in log
    assert re.search(r"step 5/5 .* tok/s \| \d+% of limit \| .* mem \d+\.\d+G", log)
    first, *others = read_metrics(path.parent / "run" / "metrics.jsonl")
    assert first["limit_flops_per_second"] > 0
    assert first["estimated_tokens_per_second"] > 0
    assert first["estimated_memory"] == needed_memory(with_native(load_run(path).value, Dist(), print), Dist()).total
    for record in (r for r in others if r["type"] == "train"):
        rate = record["tokens_per_second"] * first["flops_per_token"] / first["limit_flops_per_second"]
        assert record["share_of_limit"] == pytest.approx(rate)
        assert record["peak_memory"] > 50 << 20


def test_probe_leaves_the_result_alone_and_is_not_made_again(make_run: MakeRun) -> None:
    losses = []
    for probe in (True, False):
        path = make_run({"logging.probe": probe, "train.max_steps": 6, "out_dir": f"run{probe}"})
        run_training(load_run(path), stop_at=3, quiet=True)
        run_training(load_run(path), quiet=True)
        records = read_metrics(path.parent / f"run{probe}" / "metrics.jsonl")
        losses.append([r["loss"] for r in records if r["type"] == "train"])
        log = (path.parent / f"run{probe}" / "train.log").read_text()
        assert log.count("tokens/s,") == probe
    assert losses[0] == losses[1]


def room(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    monkeypatch.setattr(estimate, "room", lambda _: estimate.Room("this machine", total, available))


def test_what_will_not_fit_is_a_warning_with_sizes_that_would(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"device": "cpu", "native": False, "model.max_seq_len": 512}
    changes |= {"train.micro_batch_size": 32, "train.global_batch_size": 32}
    run = load_run(make_run(changes | {"train.max_steps": 5, "logging.probe": True}))
    need = needed_memory(run.value, Dist())
    room(monkeypatch, 1 << 40, need.program + (need.total - need.program) // 3)
    (warning,) = [line for line in shown(run) if line.startswith("warning")]
    found = re.fullmatch(
        r"warning: will not fit: needs (\S+) GiB of (\S+) GiB of memory; (train.micro_batch_size=\d+) would need"
        r" (\S+) GiB",
        warning,
    )
    assert found
    assert float(found[4]) <= float(found[2]) < float(found[1])
    advised = load_run(make_run(changes), [found[3]])
    assert needed_memory(advised.value, Dist()).total / 2**30 == pytest.approx(float(found[4]), abs=0.006)
    room(monkeypatch, 1 << 40, need.program)
    assert "no batch is small enough: lower model.hidden_dim" in "\n".join(shown(run))


def test_run_whose_weights_alone_are_too_much_is_refused_before_anything_is_made(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(make_run({"device": "cpu"}))
    certain = needed_memory(run.value, Dist()).certain
    room(monkeypatch, certain - 1, certain - 1)
    for attempt in (lambda: shown(run), lambda: run_training(run, quiet=True)):
        with pytest.raises(ConfigError, match=r"parameters with the optimizer's state need .* lower model.hidden_dim"):
            attempt()
    assert not list((Path(run.value.out_dir) / "checkpoints").glob("*"))


def test_run_that_may_not_fit_is_tried_all_the_same(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 1 << 40, 1)
    path = make_run({"train.max_steps": 5, "logging.probe": True})
    run_training(load_run(path), quiet=True)
    assert "warning: will not fit" in (path.parent / "run" / "train.log").read_text()


def test_pass_that_takes_too_long_is_not_made(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "product_limit", lambda *_: 1e3)
    text = "\n".join(shown(load_run(make_run({"logging.probe": True}))))
    assert "speed: not measured; the limit of 1.00 kFLOP/s of fp32 products is 0 tokens/s at the very best" in text


def test_load_of_other_programs_is_said_beside_what_was_measured(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate.hardware, "busy_cores", lambda _: 1.25)
    text = "\n".join(shown(load_run(make_run({"logging.probe": True}))))
    assert "warning: other programs keep 1.2 cores busy" in text


@pytest.mark.parametrize(("limit", "rows"), [(1e30, 2), (2.1, 2), (0.9, 1), (0.55, 1), (0.45, 0), (1e-9, 0)])
def test_rows_tried_take_the_time_there_is(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, limit: float, rows: int
) -> None:
    """In units of the limit at which a row takes two seconds at the share that is expected."""
    run = load_run(make_run()).value
    row = trained_flops_per_token(run.model) * run.model.max_seq_len
    assert _rows_to_try(run, run.train.micro_batch_size, limit * row / (2 * estimate.POOR_SHARE)) == rows


@pytest.mark.parametrize(("steps", "every", "save"), [(20, 5, 5), (20, 6, 8), (21, 4, 10), (3, 5, 7)])
@pytest.mark.parametrize("done", [0, 2, 8])
def test_validations_to_come_are_those_of_the_loop(
    make_run: MakeRun, steps: int, every: int, save: int, done: int
) -> None:
    changes = {"train.max_steps": steps, "eval.interval": every, "checkpoint.interval": save}
    run = load_run(make_run(changes | {"scheduler.warmup_steps": 1})).value
    due = {step for step in range(1, steps + 1) if step % every == 0 or step % save == 0 or step == steps}
    assert _validations(run, min(done, steps)) == sum(step > done for step in due)


def test_parts_of_what_is_needed_add_up() -> None:
    assert Needed(1, 2, 3, 4, 5, 6).total == 21


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny 8 x 1 fp32", "demo 8 x 1 bf16", "11m 4 x 1 fp32", "33m 2 x 1 bf16"])
def test_formula_is_within_a_tenth_of_the_peak_of_a_whole_process(name: str) -> None:
    found = runpy.run_path(str(ROOT / "scripts" / "benchmarks" / "memory.py"))["measure"](name)
    assert found.estimated == pytest.approx(found.measured, rel=0.1)
