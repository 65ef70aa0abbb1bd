from __future__ import annotations

import torch

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training import probe
from cyberslm.training.config import TrainConfig
from cyberslm.training.optim import OptimizerConfig, build_optimizer
from cyberslm.training.probe import STEPS, Speed, measure_speed
from cyberslm.training.schedule import SchedulerConfig
from cyberslm.training.trainer import Plan

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)


class Rows:
    """Eight rows a step, of which half the targets count."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def batch(self, step: int, *, rank: int, world: int, passed: int) -> Batch:
        self.steps.append(step)
        ids = torch.randint(4, 40, (8, 16), generator=torch.Generator().manual_seed(step))
        targets = ids.clone()
        targets[:, 8:] = IGNORE
        return Batch(ids, targets)


def measured(rows: Rows, seconds: float = 60.0) -> Speed:
    model = CyberSLM(CONFIG)
    plan = Plan(
        config=TrainConfig(max_steps=1, micro_batch_size=8, global_batch_size=32, max_bad_steps=1),
        seed=0,
        schedule=SchedulerConfig(),
        until=1,
        validate_every=1,
        save_every=1,
    )
    return measure_speed(plan, model, build_optimizer(model, OptimizerConfig()), rows, rows=2, seconds=seconds)


def test_a_few_steps_of_the_rows_asked_for_are_made() -> None:
    rows = Rows()
    speed = measured(rows)
    assert rows.steps == list(range(STEPS))
    assert (speed.rows, speed.tokens) == (2, 2 * 8)
    assert speed.pass_seconds > 0
    assert speed.update_seconds > 0


def test_no_step_begins_after_the_time_is_up() -> None:
    rows = Rows()
    assert measured(rows, seconds=0.0).pass_seconds > 0
    assert rows.steps == [0]


def test_random_state_of_the_caller_stays() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    measured(Rows())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_step_of_a_run_follows_from_its_rows() -> None:
    speed = Speed(rows=2, pass_seconds=0.5, update_seconds=0.25, tokens=100)
    assert speed.step_seconds(8) == 2.25
    assert speed.tokens_per_second(8) == 400 / 2.25


def test_warming_up_does_not_count(monkeypatch) -> None:
    times = iter([9.0, 3.0, 2.0, 4.0])

    def train(plan, model, optimizer, loader, state, hooks) -> None:
        for step in range(STEPS):
            hooks.update = 0.5
            hooks.record({"type": "train", "step": step + 1, "seconds": next(times), "step_tokens": 10 + step})

    monkeypatch.setattr(probe, "train", train)
    assert measured(Rows()) == (2, 1.5, 0.5, 12.0)
