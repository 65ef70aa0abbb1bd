"""fp16: what overflows is skipped and counted apart, what would underflow is not lost, and all of it is resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cyberslm.data.loader import Batch
from cyberslm.errors import TrainingError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.config import TrainConfig
from cyberslm.training.ema import WeightMean
from cyberslm.training.loss import LossOutput, Score, next_token_loss
from cyberslm.training.loss_scale import FLOOR, LossScale
from cyberslm.training.optim import OptimizerConfig, build_optimizer
from cyberslm.training.schedule import SchedulerConfig
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import Record
from cyberslm.training.trainer import Plan, train

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)
TOKENS = 4 * 16
fp16 = partial(torch.autocast, "cpu", dtype=torch.float16)


@settings(deadline=None, max_examples=60)
@given(overflows=st.lists(st.booleans(), max_size=40), grows_after=st.integers(1, 5), power=st.integers(5, 20))
def test_scale_is_that_of_torchs_scaler(overflows: list[bool], grows_after: int, power: int) -> None:
    start = 2.0**power
    theirs = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=grows_after)
    own, state = LossScale(start=start, grows_after=grows_after), TrainState()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in overflows:
        if own.of(state) == FLOOR:
            break  # torch's goes on below 1
        assert own.of(state) == theirs.get_scale()
        theirs.scale(weight.sum()).backward()
        weight.grad = torch.full_like(weight, math.inf if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        own.move(state, overflowed=overflowed)
    else:
        assert (own.of(state), state.steps_at_scale) == (theirs.get_scale(), theirs._get_growth_tracker())


class Rows:
    def first_row(self, step: int) -> int:
        return step * 4

    def batch(self, step: int, *, rank: int = 0, world: int = 1, passed: int = 0) -> Batch:
        ids = torch.randint(4, 40, (4, 17), generator=torch.Generator().manual_seed(step + passed))
        ids = ids[4 * rank // world : 4 * (rank + 1) // world]
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


class Hooks:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def validate(self, state: TrainState) -> Score | None:
        return None

    def save(self, state: TrainState, score: Score | None) -> None:
        pass

    def should_save(self) -> bool:
        return False

    def should_stop(self) -> bool:
        return False

    def go_back(self, step: int) -> TrainState:
        raise AssertionError


class Went(NamedTuple):
    state: TrainState
    records: list[Record]
    weights: list[Tensor]


def go(state: TrainState | None = None, *, mean: bool = False, **changes: object) -> Went:
    model, hooks = CyberSLM(CONFIG, seed=1), Hooks()
    plan: dict = {
        "config": TrainConfig(max_steps=6, micro_batch_size=2, global_batch_size=4),
        "schedule": SchedulerConfig(name="constant", warmup_steps=0),
        "seed": 1,
        "until": 6,
        "validate_every": 100,
        "save_every": 100,
        "autocast": fp16,
        "loss_scale": LossScale(),
        "mean": WeightMean(model, 0.9) if mean else None,
    }
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    state = train(Plan(**plan | changes), model, optimizer, Rows(), state or TrainState(), hooks)
    weights = [p.detach().clone() for p in model.parameters()]
    if mean and plan["mean"] is not None:
        with plan["mean"].applied():
            weights += [p.detach().clone() for p in model.parameters()]
    return Went(state, hooks.records, weights)


def test_losses_are_those_of_fp32() -> None:
    own = [record["loss"] for record in go().records]
    plain = [record["loss"] for record in go(autocast=nullcontext, loss_scale=None).records]
    assert own == pytest.approx(plain, rel=2e-3)
    assert own != plain


def test_gradient_is_clipped_and_recorded_without_the_scale() -> None:
    """G37: the clip was applied to scaled gradients."""
    seen = []
    for scale in (1.0, 1024.0):
        model = CyberSLM(CONFIG, seed=1)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        optimizer.register_step_pre_hook(
            lambda *_, model=model: seen.append([p.grad.clone() for p in model.parameters()])
        )
        hooks = Hooks()
        plan = Plan(
            config=TrainConfig(max_steps=1, micro_batch_size=2, global_batch_size=4, grad_clip=0.1),
            schedule=SchedulerConfig(name="constant", warmup_steps=0),
            seed=1,
            until=1,
            validate_every=9,
            save_every=9,
            loss_scale=LossScale(start=scale),
        )
        train(plan, model, optimizer, Rows(), TrainState(), hooks)
        seen[-1].append(torch.tensor(hooks.records[0]["grad_norm"]))
    for plain, scaled in zip(*seen, strict=True):
        assert torch.equal(plain, scaled)
    norm = torch.stack([grad.norm() for grad in seen[0][:-1]]).norm().item()
    assert norm == pytest.approx(0.1, rel=1e-4)
    assert seen[0][-1] > 0.5


def overflowing(limit: float) -> Callable[[CyberSLM, Batch], LossOutput]:
    """A loss whose gradient overflows where the scale is above ``limit``."""

    def loss(model: CyberSLM, batch: Batch) -> LossOutput:
        output = next_token_loss(model, batch)

        def tell(grad: Tensor) -> Tensor:
            return grad * math.inf if grad.item() * TOKENS > limit else grad

        objective = output.objective * 1.0
        objective.register_hook(tell)
        return output._replace(objective=objective)

    return loss


def test_overflows_halve_the_scale_count_apart_and_reach_no_weight_or_mean() -> None:
    config = TrainConfig(max_steps=6, max_bad_steps=2, micro_batch_size=2, global_batch_size=4)
    first = go(loss=overflowing(2.0**13), config=config, mean=True)
    used = [record["loss_scale"] for record in first.records]
    assert used == [2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**13, 2.0**13]
    assert [record["overflows"] for record in first.records] == [1, 2, 3, 3, 3, 3]
    assert (first.state.overflows, first.state.bad_steps, first.state.bad_in_a_row) == (3, 0, 0)
    assert first.state.steps_at_scale == 3
    without = go(TrainState(step=3, overflows=3, loss_scale=2.0**13), mean=True)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, without.weights, strict=True))


def test_gradient_that_is_not_finite_at_the_lowest_scale_is_a_bad_step_and_ends_the_run() -> None:
    with pytest.raises(TrainingError, match="step 8: loss or gradient was not finite 5 steps in a row"):
        go(
            loss=overflowing(0.0),
            loss_scale=LossScale(start=8.0),
            config=TrainConfig(max_steps=99, micro_batch_size=2, global_batch_size=4),
            until=99,
        )


def test_loss_that_is_not_finite_is_a_bad_step_at_any_scale() -> None:
    def broken(model: CyberSLM, batch: Batch) -> LossOutput:
        output = next_token_loss(model, batch)
        return output._replace(objective=output.objective * math.nan, loss_sum=output.loss_sum * math.nan)

    with pytest.raises(TrainingError, match="step 5: loss or gradient was not finite"):
        go(loss=broken)


def test_scale_grows_after_enough_steps() -> None:
    used = [record["loss_scale"] for record in go(loss_scale=LossScale(start=4.0, grows_after=2)).records]
    assert used == [4, 4, 8, 8, 16, 16]


def test_other_precisions_have_no_scale() -> None:
    went = go(loss_scale=None, autocast=nullcontext)
    assert went.state.loss_scale is None
    assert "loss_scale" not in went.records[0]
