"""The training loop, and `TrainState`, all that a run carries from step to step besides weights and moments.

Exactness: step ``n`` trains on rows that are a function of (seed, n) alone, its dropout is drawn from a seed made of
(seed, n) alone, and its rate is a function of n. So a resumed run repeats the same bits, and validation or samples
between steps can't change them. Losses are summed over trained tokens and divided once per optimizer step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Protocol

import torch
from torch import Tensor, nn

from cyberslm.data.loader import IGNORE, Batch, RowLoader
from cyberslm.errors import ConfigError, IntegrityError, TrainingError
from cyberslm.model.model import CyberSLM
from cyberslm.training.loss import Loss, Score, next_token_loss
from cyberslm.training.trackers import Record


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How many steps, and how many rows in each."""

    max_steps: int = 1000
    """Optimizer steps of the whole run."""

    micro_batch_size: int = 8
    """Rows in one forward and backward pass; lower it when memory is short, only rounding changes."""

    global_batch_size: int = 8
    """Rows in one optimizer step; above micro_batch_size, gradients are accumulated."""

    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0 = off."""

    z_loss: float = 0.0
    """Weight of the squared log normaliser of the softmax, added to what is trained but not to the reported loss."""

    max_bad_steps: int = 5
    """Stop after this many steps in a row with a non-finite gradient or no token to learn from; each is skipped."""

    def __post_init__(self) -> None:
        limits = {
            "max_steps": 1 << 40,
            "micro_batch_size": 1 << 20,
            "global_batch_size": 1 << 20,
            "max_bad_steps": 1 << 20,
        }
        for name, most in limits.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from 1 to {most:,}, not {getattr(self, name)}")
        for name in ("grad_clip", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0 and finite, not {getattr(self, name)}")


@dataclass
class TrainState:
    """Where a run stands. The next step is ``step + 1``; the position in the data follows from it."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on so far."""
    bad_steps: int = 0
    """Steps skipped for a non-finite gradient, in all ..."""
    bad_in_a_row: int = 0
    """... and just now."""
    best_loss: float | None = None
    """Lowest validation loss so far ..."""
    best_step: int | None = None
    """... and its step."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, object]) -> TrainState:
        if set(value) != {field.name for field in fields(cls)}:
            raise IntegrityError(f"train state holds {sorted(value)}, which is not what this version writes")
        return cls(**value)  # type: ignore[arg-type]


class Hooks(Protocol):
    """What the loop asks of the outside; recipes composes it."""

    def record(self, record: Record) -> None: ...
    def validate(self, state: TrainState) -> Score | None: ...
    def save(self, state: TrainState, score: Score | None) -> None: ...
    def should_stop(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the loop is to do, worked out before it starts."""

    config: TrainConfig
    seed: int
    rate: Callable[[int], float]
    """Learning rate of a step, counted from 1."""
    until: int
    """Last step of this call; the run's last is ``config.max_steps``."""
    validate_every: int
    save_every: int
    autocast: Callable[[], AbstractContextManager] = nullcontext
    loss: Loss = next_token_loss


def train(
    plan: Plan, model: CyberSLM, optimizer: torch.optim.Optimizer, loader: RowLoader, state: TrainState, hooks: Hooks
) -> TrainState:
    """Train from ``state.step`` to ``plan.until`` or until the hooks ask to stop; save at the end of either.

    Which steps are validated depends on their number alone, so an interruption leaves no trace in the results.
    Raises `TrainingError` after too many non-finite steps in a row; the last checkpoint is then still good.
    """
    model.train()
    with _own_random_state():
        stopping = False
        while state.step < plan.until and not stopping:
            _train_step(plan, model, optimizer, loader, state, hooks)
            scheduled = state.step % plan.save_every == 0 or state.step == plan.config.max_steps
            score = _validate(state, hooks) if scheduled or state.step % plan.validate_every == 0 else None
            stopping = hooks.should_stop()
            if scheduled or stopping or state.step in (plan.until, state.best_step):
                hooks.save(state, score)
    return state


def _train_step(
    plan: Plan, model: CyberSLM, optimizer: torch.optim.Optimizer, loader: RowLoader, state: TrainState, hooks: Hooks
) -> None:
    started = time.perf_counter()
    step = state.step + 1
    rate = plan.rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed(_step_seed(plan.seed, step))
    batch = loader.batch(step - 1)
    num_tokens = int((batch.targets != IGNORE).sum())
    loss_sum = _accumulate(plan, model, batch, num_tokens)
    norm = _clip(model, plan.config.grad_clip)
    good = math.isfinite(norm) and num_tokens > 0
    if good:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state.step = step
    state.tokens += num_tokens
    state.bad_in_a_row = 0 if good else state.bad_in_a_row + 1
    state.bad_steps += 0 if good else 1
    seconds = time.perf_counter() - started
    hooks.record(
        {
            "type": "train",
            "step": step,
            "loss": loss_sum / max(1, num_tokens),
            "lr": rate,
            "grad_norm": norm,
            "step_tokens": num_tokens,
            "tokens": state.tokens,
            "skipped": state.bad_steps,
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
        }
    )
    if state.bad_in_a_row >= plan.config.max_bad_steps:
        if num_tokens == 0:
            raise TrainingError(
                f"step {step}: the last of {state.bad_in_a_row} bad steps in a row (train.max_bad_steps) had no token"
                " to learn from: raise train.global_batch_size or model.max_seq_len"
            )
        raise TrainingError(
            f"step {step}: the gradient was not finite {state.bad_in_a_row} steps in a row (train.max_bad_steps);"
            " nothing of it was saved. Lower optimizer.lr, lengthen scheduler.warmup_steps or use precision: fp32"
        )


def _accumulate(plan: Plan, model: CyberSLM, batch: Batch, num_tokens: int) -> float:
    """Add up gradients of the mean loss over all trained tokens of the step; return the summed loss."""
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for first in range(0, batch.input_ids.shape[0], plan.config.micro_batch_size):
        part = batch.rows(first, first + plan.config.micro_batch_size).to(model.device)
        with plan.autocast():
            output = plan.loss(model, part)
        (output.objective / max(1, num_tokens)).backward()
        total += output.loss_sum.detach()
    return total.item()


def _clip(model: nn.Module, limit: float) -> float:
    """Scale gradients down to the norm ``limit``; return the norm they had."""
    gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if limit > 0 and torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm.item()


def _validate(state: TrainState, hooks: Hooks) -> Score | None:
    started = time.perf_counter()
    score = hooks.validate(state)
    if score is None:
        return None
    best = math.isfinite(score.loss) and (state.best_loss is None or score.loss < state.best_loss)
    if best:
        state.best_loss, state.best_step = score.loss, state.step
    hooks.record(
        {
            "type": "validation",
            "step": state.step,
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "best": best,
            "seconds": time.perf_counter() - started,
        }
        | {f"loss/{name}": part.loss for name, part in score.by_source.items()}
        | {f"bits_per_byte/{name}": part.bits_per_byte for name, part in score.by_source.items()}
    )
    return score


def _step_seed(seed: int, step: int) -> int:
    """A different stream of random numbers for every step, whatever happened before it."""
    return (seed * 1_000_003 + step) % (1 << 63)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Give the caller its global random state back afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
