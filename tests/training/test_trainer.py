from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.errors import ConfigError, IntegrityError, TrainingError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.loss import Score, next_token_loss
from cyberslm.training.optim import OptimizerConfig, build_optimizer
from cyberslm.training.trainer import Plan, TrainConfig, TrainState, train

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)


class Rows:
    """Random rows as a function of the step; ``trained`` says how many targets of each row count."""

    def __init__(self, trained: Sequence[int] = (16, 16, 16, 16)) -> None:
        self.trained = trained

    def batch(self, step: int) -> Batch:
        ids = torch.randint(4, 40, (len(self.trained), 17), generator=torch.Generator().manual_seed(step))
        targets = ids[:, 1:].clone()
        for row, count in enumerate(self.trained):
            targets[row, count:] = IGNORE
        return Batch(ids[:, :-1].contiguous(), targets)


class Hooks:
    def __init__(self, losses: Sequence[float] | None = None, stop_after: int | None = None) -> None:
        self.records: list[dict] = []
        self.saves: list[tuple[int, float | None]] = []
        self.losses = None if losses is None else list(losses)
        self.stop_after = stop_after
        self.step = 0

    def record(self, record: dict) -> None:
        self.records.append(record)
        self.step = record["step"]

    def validate(self, state: TrainState) -> Score | None:
        return None if self.losses is None else Score(self.losses.pop(0), 1, 1)

    def save(self, state: TrainState, score: Score | None) -> None:
        self.saves.append((state.step, score and score.loss))

    def should_stop(self) -> bool:
        return self.stop_after is not None and self.step >= self.stop_after


def go(
    model: CyberSLM,
    hooks: Hooks,
    *,
    rows: Rows | None = None,
    state: TrainState | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **changes: object,
) -> TrainState:
    settings = {"max_steps": 6, "micro_batch_size": 4, "global_batch_size": 4} | changes
    every = settings.pop("every", 100)
    save_every = settings.pop("save_every", 100)
    loss: Callable = settings.pop("loss", next_token_loss)
    config = TrainConfig(**settings)
    plan = Plan(
        config=config,
        seed=1,
        rate=lambda step: 1e-2,
        until=config.max_steps,
        validate_every=every,
        save_every=save_every,
        loss=loss,
    )
    optimizer = optimizer or build_optimizer(model, OptimizerConfig())
    return train(plan, model, optimizer, rows or Rows(), state or TrainState(), hooks)


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulation_equals_one_big_batch(micro: int) -> None:
    """G33 (torchtune#1875): means of micro-batches gave short rows too much weight."""
    rows = Rows((1, 2, 10, 16))
    models = [CyberSLM(CONFIG, seed=1) for _ in range(2)]
    hooks = [Hooks(), Hooks()]
    for model, hook, size in zip(models, hooks, (4, micro), strict=True):
        go(model, hook, rows=rows, micro_batch_size=size, max_steps=1, grad_clip=0.0)
    for big, small in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(big, small, atol=1e-5, rtol=1e-4)
    assert hooks[0].records[0]["loss"] == pytest.approx(hooks[1].records[0]["loss"], abs=1e-6)
    assert hooks[0].records[0]["step_tokens"] == 29


def test_recorded_loss_and_norm_are_those_of_the_whole_step() -> None:
    model, rows = CyberSLM(CONFIG, seed=1), Rows((5, 9, 16, 1))
    batch = rows.batch(0)
    output = next_token_loss(model, batch)
    (output.objective / 31).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    hooks = Hooks()
    go(CyberSLM(CONFIG, seed=1), hooks, rows=rows, micro_batch_size=2, max_steps=1)
    assert hooks.records[0]["loss"] == pytest.approx(output.loss_sum.item() / 31, rel=1e-5)
    assert hooks.records[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_clipped_gradient_has_the_limit_as_norm() -> None:
    class Sees(torch.optim.SGD):
        norm = 0.0

        def step(self, *args: object) -> None:
            self.norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))

    model = CyberSLM(CONFIG, seed=1)
    optimizer = Sees(model.parameters(), lr=0.1)
    hooks = Hooks()
    go(model, hooks, optimizer=optimizer, grad_clip=0.01, max_steps=1)
    assert optimizer.norm == pytest.approx(0.01, rel=1e-3)
    assert hooks.records[0]["grad_norm"] > 0.1


def test_batch_without_a_trained_token_changes_nothing_and_is_counted() -> None:
    """G34: a batch with all labels ignored gave 0/0, which poisoned the weights."""
    model = CyberSLM(CONFIG, seed=1)
    before = [p.clone() for p in model.parameters()]
    hooks = Hooks()
    state = go(model, hooks, rows=Rows((0, 0, 0, 0)), max_steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert (state.bad_steps, state.tokens) == (2, 0)
    with pytest.raises(TrainingError, match="5 bad steps in a row .*no token to learn from"):
        go(model, hooks, rows=Rows((0, 0, 0, 0)), max_steps=9)


def poisoned(steps: set[int]) -> Callable:
    calls = iter(range(1, 100))

    def loss(model: CyberSLM, batch: Batch) -> object:
        output = next_token_loss(model, batch)
        return output._replace(objective=output.objective * math.inf) if next(calls) in steps else output

    return loss


def test_step_with_a_non_finite_gradient_is_skipped_and_counted() -> None:
    """G40 (torchtitan#916): a NaN gradient was applied and the ruined weights were saved."""
    model, hooks = CyberSLM(CONFIG, seed=1), Hooks()
    state = go(model, hooks, loss=poisoned({3}))
    assert (state.bad_steps, state.bad_in_a_row, state.step) == (1, 0, 6)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [record["skipped"] for record in hooks.records] == [0, 0, 1, 1, 1, 1]


def test_run_stops_after_too_many_bad_steps_and_saves_none_of_them() -> None:
    model, hooks = CyberSLM(CONFIG, seed=1), Hooks()
    with pytest.raises(TrainingError, match=r"step 5: .*3 steps in a row.*max_bad_steps"):
        go(model, hooks, loss=poisoned({3, 4, 5, 6}), max_bad_steps=3, save_every=10)
    assert hooks.saves == []
    assert all(p.isfinite().all() for p in model.parameters())


def test_best_score_is_kept_and_nan_never_wins() -> None:
    """G42 (mmsegmentation#2428): after a resume the first evaluation overwrote the best, or a NaN became it."""
    hooks = Hooks([1.5, math.nan, 0.9, 1.2])
    state = go(CyberSLM(CONFIG), hooks, state=TrainState(best_loss=1.0, best_step=0), max_steps=4, every=1)
    assert (state.best_loss, state.best_step) == (0.9, 3)
    marks = [record["best"] for record in hooks.records if record["type"] == "validation"]
    assert marks == [False, False, True, False]


def test_saved_are_the_scheduled_steps_the_best_and_the_last() -> None:
    hooks = Hooks([3.0, 4.0, 2.0, 5.0, 5.0])
    go(CyberSLM(CONFIG), hooks, max_steps=10, every=2, save_every=4)
    assert hooks.saves == [(2, 3.0), (4, 4.0), (6, 2.0), (8, 5.0), (10, 5.0)]


def test_stop_saves_once_and_leaves_no_trace_in_the_validations() -> None:
    hooks = Hooks([1.0] * 9, stop_after=3)
    state = go(CyberSLM(CONFIG), hooks, max_steps=8, every=2)
    assert state.step == 3
    assert hooks.saves == [(2, 1.0), (3, None)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_validation_does_not_change_the_training(dropout: float) -> None:
    """G16 (coRNN#1): evaluation used up the global random numbers, or left the model in eval mode."""
    config = CyberSLMConfig(**{**CONFIG.__dict__, "dropout": dropout})
    finals = []
    for every in (1, 100):
        model = CyberSLM(config, seed=1)
        hooks = Hooks([1.0] * 20)
        validate = hooks.validate

        def noisy(state: TrainState, validate: Callable = validate) -> Score | None:
            torch.rand(100)
            return validate(state)

        hooks.validate = noisy
        go(model, hooks, every=every, max_steps=8)
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_global_random_state_is_given_back() -> None:
    before = torch.random.get_rng_state()
    go(CyberSLM(CONFIG), Hooks(), max_steps=2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_state_survives_json_and_refuses_strangers() -> None:
    state = TrainState(step=5, tokens=9, best_loss=1.25, best_step=4)
    assert TrainState.from_json(state.to_json()) == state
    with pytest.raises(IntegrityError, match="train state"):
        TrainState.from_json({"step": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_steps", 0),
        ("micro_batch_size", 0),
        ("global_batch_size", -1),
        ("grad_clip", -0.5),
        ("max_bad_steps", 0),
        ("z_loss", -1.0),
    ],
)
def test_impossible_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainConfig(**{field: value})


def test_training_lowers_the_loss_of_rows_seen_again() -> None:
    class Same(Rows):
        def batch(self, step: int) -> Batch:
            return super().batch(0)

    hooks = Hooks()
    go(CyberSLM(CONFIG, seed=1), hooks, rows=Same(), max_steps=40)
    losses = [record["loss"] for record in hooks.records]
    assert losses[0] == pytest.approx(math.log(40), abs=0.15)
    assert losses[-1] < 0.5


def test_bf16_arithmetic_keeps_fp32_weights_that_small_updates_move() -> None:
    """G38 (speculators#765): with weights kept in bf16, updates below the rounding step vanished; gains stayed 1.0."""
    finals = []
    for autocast in (nullcontext, partial(torch.autocast, "cpu", dtype=torch.bfloat16)):
        model = CyberSLM(CONFIG, seed=1)
        before = [p.detach().clone() for p in model.parameters()]
        plan = Plan(
            config=TrainConfig(max_steps=20, micro_batch_size=4, global_batch_size=4),
            seed=1,
            rate=lambda step: 1e-4,
            until=20,
            validate_every=100,
            save_every=100,
            autocast=autocast,
        )
        train(plan, model, build_optimizer(model, OptimizerConfig()), Rows(), TrainState(), Hooks())
        assert all(p.dtype == torch.float32 for p in model.parameters())
        finals.append([(a != b).float().mean().item() for a, b in zip(before, model.parameters(), strict=True)])
        assert (model.norm.weight != 1).float().mean() > 0.99
    for fp32, bf16 in zip(*finals, strict=True):
        assert bf16 == pytest.approx(fp32, abs=0.01)


GOLDEN = [3.7061, 3.6408, 3.7179, 3.7154, 3.6318, 3.6207, 3.6818, 3.6668, 3.6405, 3.7049]
GOLDEN += [3.6643, 3.5765, 3.6978, 3.6456, 3.5392, 3.6048, 3.5814, 3.6922, 3.6604, 3.5507]


def test_twenty_steps_give_the_losses_they_always_gave() -> None:
    """Pins network, initial weights, loss, accumulation, clipping and AdamW together; a refactor must not move them."""
    hooks = Hooks()
    go(CyberSLM(CONFIG, seed=1), hooks, max_steps=20, micro_batch_size=2)
    assert [record["loss"] for record in hooks.records] == pytest.approx(GOLDEN, abs=2e-3)
