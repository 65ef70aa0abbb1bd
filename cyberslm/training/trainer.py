"""The training loop.

Exactness: step ``n`` trains on rows that are a function of (seed, n) alone, its dropout is drawn from a seed made of
(seed, n) alone, and its rate is a function of n. Whatever else the loop decides from what it sees is recorded in
`TrainState`. So a resumed run repeats the same bits, and validation or samples between steps can't change them. Losses
are summed over trained tokens and divided once per optimizer step.

A step is judged by its loss and gradient before its update: what is wrong with it reaches no weight, moment or mean.

On several ranks each makes its part of a step. Whatever decides (losses, the norm, the clock, what the hooks want) is
exchanged first, so that all decide alike and each rank's `TrainState` is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from cyberslm.data.loader import IGNORE, Batch, RowLoader
from cyberslm.errors import TrainingError
from cyberslm.model.model import CyberSLM
from cyberslm.training.budget import Budget
from cyberslm.training.config import TrainConfig
from cyberslm.training.distributed import Dist
from cyberslm.training.ema import WeightMean
from cyberslm.training.faults import Measured, Verdict, improved, judge, stop_if_hopeless
from cyberslm.training.loss import Loss, Score, count_targets, next_token_loss, ranking
from cyberslm.training.optim import set_rates
from cyberslm.training.schedule import SchedulerConfig, share_of_peak
from cyberslm.training.shards import whole
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import Record


class Hooks(Protocol):
    """What the loop asks of the outside; recipes composes it."""

    def record(self, record: Record) -> None: ...
    def validate(self, state: TrainState) -> Score | None: ...
    def save(self, state: TrainState, score: Score | None) -> None: ...
    def should_save(self) -> bool: ...
    def should_stop(self) -> bool: ...
    def go_back(self, step: int) -> TrainState:
        """Put weights, moments and mean as they were after ``step``, a multiple of ``save_every``; return its state."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the loop is to do, worked out before it starts."""

    config: TrainConfig
    schedule: SchedulerConfig
    seed: int
    until: int
    """Last step of this call; the run's last is ``config.max_steps``, or what a time budget allows."""
    validate_every: int
    save_every: int
    autocast: Callable[[], AbstractContextManager] = nullcontext
    loss: Loss = next_token_loss
    count: Callable[[Batch], int] = count_targets
    """What the summed loss is divided by: trained tokens, or what else the loss is a sum of."""
    mean: WeightMean | None = None
    """The running mean of the weights, moved after every update."""
    clock: Callable[[], float] = time.perf_counter
    dist: Dist = field(default_factory=Dist)
    holding: Callable[[], AbstractContextManager] = nullcontext
    """Context of all micro-batches but the last: ranks exchange gradients once a step."""


def train(
    plan: Plan, model: CyberSLM, optimizer: torch.optim.Optimizer, loader: RowLoader, state: TrainState, hooks: Hooks
) -> TrainState:
    """Train from ``state.step`` to ``plan.until``, to the run's end or until the hooks ask to stop; save at each.

    Which steps are validated depends on their number alone, so an interruption leaves no trace in the results.
    Raises `TrainingError` after too many bad steps in a row or rollbacks; the last checkpoint is then still good.
    """
    model.train()
    pauses = plan.validate_every, plan.save_every
    budget = Budget(
        plan.config,
        warmup_steps=plan.schedule.warmup_steps,
        pauses=pauses,
        clock=lambda: plan.dist.each(plan.clock())[0][0],  # the first rank's counts for all
    )
    with _own_random_state():
        stopping = False
        while state.step < plan.until and not state.is_over(plan.config) and not stopping:
            verdict = _train_step(plan, model, optimizer, loader, state, hooks)
            if verdict == "rollback":
                state = _go_back(plan, loader, state, hooks)
                continue
            if (decision := budget.after_step(state)) is not None:
                hooks.record({"type": "plan", "step": state.step, "total": decision.total, "seconds": decision.seconds})
            stopping = _after_step(plan, state, hooks)
            budget.after_pause(state)
    return state


def _after_step(plan: Plan, state: TrainState, hooks: Hooks) -> bool:
    """Validate and save where the step's number, the run's end or the hooks ask for it; whether to stop now."""
    scheduled = state.step % plan.save_every == 0 or state.is_over(plan.config)
    score = _validate(plan, state, hooks) if scheduled or state.step % plan.validate_every == 0 else None
    stopping, saving = (any(asked) for asked in plan.dist.each(hooks.should_stop(), hooks.should_save()))
    if stopping or saving or scheduled or state.is_over(plan.config) or state.step in (plan.until, state.best_step):
        hooks.save(state, score)
    return stopping


def _train_step(
    plan: Plan, model: CyberSLM, optimizer: torch.optim.Optimizer, loader: RowLoader, state: TrainState, hooks: Hooks
) -> Verdict:
    """Make the next step, unless its verdict is to go back: ``state`` then still has the step before."""
    started = time.perf_counter()
    step = state.step + 1
    rates = set_rates(optimizer, share_of_peak(step, plan.schedule, state.plan(plan.config)))
    dist = plan.dist
    torch.manual_seed(_step_seed(plan.seed, step, dist.rank))
    batch = loader.batch(step - 1, rank=dist.rank, world=dist.world, passed=state.passed_rows)
    tokens, counts, rows = dist.each(count_targets(batch), plan.count(batch), batch.targets.shape[0])
    num_tokens, number = int(sum(tokens)), int(sum(counts))
    passes = math.ceil(max(rows) / plan.config.micro_batch_size)
    mine = _accumulate(plan, model, _micro_batches(plan, batch, passes), number)
    *sums, (norm, *_) = dist.each(*mine, _clip(model, plan.config.grad_clip))
    loss_sum, *pairs = map(math.fsum, sums)
    measured = Measured(loss_sum / max(1, number), norm, number)
    verdict, usual = judge(measured, state, plan.config)
    if verdict == "train":
        optimizer.step()
        if plan.mean is not None:
            plan.mean.update(step - state.bad_steps)
    optimizer.zero_grad(set_to_none=True)
    if usual is not None:
        hooks.record({"type": "spike", "step": step, "loss": measured.loss, "median": usual, "verdict": verdict})
    if verdict == "rollback":
        return verdict
    state.step = step
    state.tokens += num_tokens
    seconds = time.perf_counter() - started
    hooks.record(
        {
            "type": "train",
            "step": step,
            "loss": measured.loss,
            "lr": next(iter(rates.values())),
            "grad_norm": norm,
            "step_tokens": num_tokens,
            "tokens": state.tokens,
            "skipped": state.bad_steps,
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
        }
        | (ranking(pairs, number) if pairs else {})
        | ({f"lr/{name}": rate for name, rate in rates.items()} if len(set(rates.values())) > 1 else {})
    )
    stop_if_hopeless(measured, state, plan.config)
    return verdict


def _go_back(plan: Plan, loader: RowLoader, state: TrainState, hooks: Hooks) -> TrainState:
    """The state after the last scheduled checkpoint, from which the rows up to the spike are passed over.

    Checkpoints that validations or signals asked for don't count, so that a repeated run goes back to the same step.
    """
    if state.rollbacks >= plan.config.max_rollbacks:
        raise TrainingError(
            f"step {state.step + 1}: another loss spike after {state.rollbacks} rollbacks (train.max_rollbacks): lower"
            " optimizer.lr, raise train.spike_factor or train.max_rollbacks, or use on_spike: skip"
        )
    spike = state.step + 1
    target = state.step // plan.save_every * plan.save_every
    back = hooks.go_back(target)
    back.spikes, back.rollbacks, back.seconds = state.spikes, state.rollbacks + 1, state.seconds
    back.passed_rows = state.passed_rows + loader.first_row(spike) - loader.first_row(target)
    hooks.record(
        {
            "type": "rollback",
            "step": target + 1,
            "spike": spike,
            "rollbacks": back.rollbacks,
            "passed_rows": back.passed_rows,
        }
    )
    return back


def _micro_batches(plan: Plan, batch: Batch, count: int) -> list[Batch]:
    """``count`` parts of this rank's rows: as many as the rank with the most rows needs, since all make each pass.

    Past its own rows a rank takes one that it learns nothing from.
    """
    size = plan.config.micro_batch_size
    nothing = batch.rows(0, 1)._replace(targets=torch.full_like(batch.targets[:1], IGNORE))
    parts = [batch.rows(first, first + size) for first in range(0, batch.targets.shape[0], size)]
    return parts + [nothing] * (count - len(parts))


def _accumulate(plan: Plan, model: CyberSLM, parts: list[Batch], number: int) -> list[float]:
    """Add up gradients of the mean loss over all ranks' trained tokens or pairs.

    Returns this rank's summed loss, and behind it `LossOutput.pairs` where there are any.
    """
    total = torch.zeros(1, dtype=torch.float64, device=model.device)
    divisor = max(1, number) / plan.dist.world  # ranks take the mean of their gradients
    for index, part in enumerate(parts, 1):
        with plan.holding() if index < len(parts) else nullcontext():
            with plan.autocast():
                output = plan.loss(model, part.to(model.device))
            (output.objective / divisor).backward()
        seen = output.loss_sum.detach().view(1)
        total = total + (seen if output.pairs is None else torch.cat((seen, output.pairs)))
    return total.tolist()


def _clip(model: nn.Module, limit: float) -> float:
    """Scale gradients down to the norm ``limit``; return the norm they had."""
    gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    if limit > 0 and torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm.item()


def _validate(plan: Plan, state: TrainState, hooks: Hooks) -> Score | None:
    started = time.perf_counter()
    score = hooks.validate(state)
    if score is None:
        return None
    best = improved(score.loss, state, plan.config)
    hooks.record(
        {
            "type": "validation",
            "step": state.step,
            "loss": score.loss,
            **(score.ranking or {"perplexity": score.perplexity}),
            "bits_per_byte": score.bits_per_byte,
            "best": best,
            "seconds": time.perf_counter() - started,
        }
        | {f"loss/{name}": part.loss for name, part in score.by_source.items()}
        | {f"bits_per_byte/{name}": part.bits_per_byte for name, part in score.by_source.items()}
    )
    return score


def _step_seed(seed: int, step: int, rank: int) -> int:
    """A different stream of random numbers for every step and rank, whatever happened before it."""
    return (seed * 1_000_003 + step + (rank << 48)) % (1 << 63)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Give the caller its global random state back afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
