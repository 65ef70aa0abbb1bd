"""Estimates before work: memory by formula, speed by a short probe, time to finish, room on the disk; what won't fit.

A run is refused only where it is certain: weights and moments alone above all memory there is. Everything else is a
warning with settings that would fit, as formulas are exact to some per cent and other programs come and go.

Of several processes each estimates for itself, at the same time and without a word to the others; the first one's
counts. Memory is a process's, against its share of a machine that it has neighbours on; rates are those of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from cyberslm.checkpoint.steps import list_steps
from cyberslm.data.prepare import Prepared
from cyberslm.errors import ConfigError
from cyberslm.model.lora import MARK
from cyberslm.model.model import CyberSLM
from cyberslm.model.sizes import trained_flops_per_token
from cyberslm.native import heap
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import bytes_per_id, row_loader
from cyberslm.recipes.finetune import FinetuneRun, has_adapters
from cyberslm.recipes.folder import free_bytes, space_needed
from cyberslm.recipes.machine import autocast, loss_scale, products, wants_compiling
from cyberslm.recipes.origin import Origin, moving, origin_of
from cyberslm.recipes.replay import validated_apart
from cyberslm.training import hardware
from cyberslm.training.config import NO_LIMIT
from cyberslm.training.distributed import Dist
from cyberslm.training.limits import product_rates
from cyberslm.training.loss import measure, next_token_loss
from cyberslm.training.memory import Batch, Fitting, Frozen, Needed, fitting, needed
from cyberslm.training.optim import build_optimizer
from cyberslm.training.probe import Speed, measure_speed
from cyberslm.training.trackers import clock, count, short
from cyberslm.training.trainer import Plan

PROBE_SECONDS = 8.0
BUSY_SECONDS = 0.1
BUSY = 0.3
"""Cores of other programs from which on their load is worth a word."""
POOR_SHARE = 0.2
"""Share of the limit that a pass is expected to reach at the least, for the choice of how many rows to try."""
GiB = 1 << 30


@dataclass(frozen=True)
class Room:
    """Memory of the device: all that the process may have, alone or as its share, and what of it is free now."""

    device: str
    total: int
    available: int


@dataclass(frozen=True)
class Estimate:
    """What a run needs and how long it takes; the parts that were not measured are None."""

    batch: Batch
    needed: Needed
    room: Room | None
    limit: float | None
    """Operations per second of matrix products in the run's precision, of all processes."""
    speed: Speed | None = None
    validation_seconds: float = 0.0
    """Of one validation."""
    busy: float = 0.0
    """Cores that other programs kept busy at the time."""
    processes: int = 1


def needed_memory(run: TrainRun, dist: Dist) -> Needed:
    """Memory of each process."""
    return needed(run.row_shape, _batch(run, dist), **_precision(run))


def room(dist: Dist) -> Room | None:
    if dist.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(dist.device)
        return Room(torch.cuda.get_device_name(dist.device), total, free)
    found, parts = hardware.memory(), dist.neighbours
    if found is None:
        return None
    name = "this machine" if parts == 1 else f"each of {parts} processes of this machine"
    return Room(name, found.total // parts, found.available // parts)


def refuse_too_large(run: TrainRun, dist: Dist) -> None:
    """Stop a run whose weights and moments alone are more than all memory there is."""
    there, certain = room(dist), needed_memory(run, dist).certain
    if there is not None and certain > there.total:
        raise ConfigError(
            f"model: {run.model.num_parameters:,} parameters with the optimizer's state need {_gib(certain)} and"
            f" {there.device} has {_gib(there.total)}: lower model.hidden_dim, model.num_layers or model.vocab_size"
        )


def estimate(run: TrainRun, origin: Origin, prepared: Prepared, dist: Dist, *, probe: bool) -> Estimate:
    """Memory always; with ``probe`` speed too.

    Not where the run would not fit, one row alone takes too long, or the weights are to be cut up over ranks.
    """
    batch, device = _batch(run, dist), dist.device
    need, there = needed_memory(run, dist), room(dist)
    if not run.logging.probe:
        return Estimate(batch, need, there, None, processes=dist.world)
    busy = (hardware.busy_cores(BUSY_SECONDS) or 0.0) if dist.world == 1 else 0.0  # the others are no other programs
    own = product_limit(run, batch.rows, device)
    limit, rows = own * dist.world, _rows_to_try(run, batch.rows, own)
    fits = there is None or need.total <= there.available
    if not (probe and fits and rows and batch.shards == 1):
        return Estimate(batch, need, there, limit, busy=busy, processes=dist.world)
    plan = Plan(
        config=run.train,
        seed=run.seed,
        schedule=run.scheduler,
        until=run.train.max_steps,
        validate_every=run.eval.interval,
        save_every=run.checkpoint.interval,
        autocast=autocast(run.precision, device),
        loss=partial(next_token_loss, z_loss=run.train.z_loss),
        loss_scale=loss_scale(run),
    )
    model = origin.outline(device)
    model.use_native(on=run.native is True)
    loader = row_loader(run, prepared, prepared.train)
    speed = measure_speed(
        plan,
        model,
        build_optimizer(model, run.optimizer, products=products(run)),
        loader,
        rows=rows,
        seconds=PROBE_SECONDS / 2,
    )
    validation = _validation_seconds(run, prepared, model, plan.autocast) / dist.world
    return Estimate(batch, need, there, limit, speed, validation, busy, dist.world)


def product_limit(run: TrainRun, rows: int, device: torch.device) -> float:
    """The rate of matrix products of the run's shape and precision in this process, in about half a second."""
    tokens = rows * run.seq_len
    rates = product_rates(
        device,
        products(run),
        rows=min(tokens, 8192),
        width=run.model.hidden_dim,
        inner=run.model.ffn_hidden_dim,
        seconds=0.1,
    )
    return rates.limit


def share_of_limit(run: TrainRun, limit: float) -> float:
    """What a token a second is of the limit: throughput times this is the share of it that is used."""
    return _flops_per_token(run) / limit


def _rows_to_try(run: TrainRun, most: int, limit: float) -> int:
    """Rows of which four passes should fit into the probe; one where at least two of it do; else none."""
    each = _flops_per_token(run) * run.seq_len / (POOR_SHARE * limit)
    return min(most, max(int(PROBE_SECONDS / 4 / each), int(each <= PROBE_SECONDS / 2)))


def _validation_seconds(run: TrainRun, prepared: Prepared, model: CyberSLM, autocast: Callable) -> float:
    """One validation, from its first batch; the first pass warms up."""
    if prepared.validation is None:
        return 0.0
    loader = row_loader(run, prepared, prepared.validation)
    rows = min(run.train.micro_batch_size, run.eval.max_rows or run.train.micro_batch_size)
    batch = next(iter(loader.sequential(rows)))
    spent = []
    with autocast():
        for _ in range(2):
            started = time.perf_counter()
            measure(model, [batch], bytes_per_id(prepared.tokenizer))
            spent.append(time.perf_counter() - started)
    apart = len(validated_apart(run, prepared))
    total = min(apart * run.eval.max_rows or loader.rows_per_epoch, loader.rows_per_epoch)
    return spent[-1] * total / batch.input_ids.shape[0]


def lines(run: TrainRun, found: Estimate) -> Iterator[str]:
    """The estimate for people."""
    yield from _memory_lines(run, found)
    yield f"disk: {short(space_needed(run), 'B')} for checkpoints and final/, {short(free_bytes(run), 'B')} free"
    yield from _speed_lines(run, found)


def figures(run: TrainRun, found: Estimate) -> dict[str, object]:
    """The estimate for machines."""
    figures: dict[str, object] = {
        "flops_per_token": _flops_per_token(run),
        "estimated_memory": found.needed.total,
    }
    if found.limit is not None:
        figures["limit_flops_per_second"] = found.limit
    if found.speed is not None:
        figures["estimated_tokens_per_second"] = _tokens_per_second(run, found.speed, found.processes)
    return figures


def _memory_lines(run: TrainRun, found: Estimate) -> Iterator[str]:
    need, there = found.needed, found.room
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in need._asdict().items() if size)
    whose = "" if found.processes == 1 else " of each process"
    free = "" if there is None else f", {_gib(there.available)} free of {_gib(there.total)}"
    yield f"memory: {_gib(need.total)} at the peak{whose}{free} ({parts})"
    if there is None or need.total <= there.available:
        return
    smaller = fitting(run.row_shape, found.batch, **_precision(run), available=there.available)
    where = "of the GPU" if run.device == "cuda" else "of memory"
    yield f"warning: will not fit: needs {_gib(need.total)} of {_gib(there.available)} {where}; {_advice(run, smaller)}"


def _advice(run: TrainRun, smaller: Fitting | None) -> str:
    if smaller is None:
        return "no batch is small enough: lower model.hidden_dim, model.num_layers or model.vocab_size"
    keys = [f"train.micro_batch_size={smaller.rows}"]
    if smaller.tokens < run.seq_len:
        key = "train.seq_len" if isinstance(run, FinetuneRun) else "model.max_seq_len"
        keys.append(f"{key}={smaller.tokens}")
    return f"{' '.join(keys)} would need {_gib(smaller.total)}"


def _speed_lines(run: TrainRun, found: Estimate) -> Iterator[str]:
    if found.limit is None:
        return
    products = f"{short(found.limit, 'FLOP/s')} of {run.precision} products"
    if found.speed is None:
        best = 1 / share_of_limit(run, found.limit)
        yield f"speed: not measured; the limit of {products} is {best:,.0f} tokens/s at the very best"
        return
    rate = _tokens_per_second(run, found.speed, found.processes)
    share = rate * share_of_limit(run, found.limit)
    yield (
        f"speed: {rate:,.0f} tokens/s, {share:.0%} of the limit of {products} (measured here with"
        f" {count(found.speed.rows, 'row')}{_each(found)})"
    )
    if found.busy > BUSY:
        yield f"warning: other programs keep {found.busy:.1f} cores busy: the speed holds only as long as they do"
    if run.train.max_steps == NO_LIMIT:
        yield f"time: {run.train.max_time} (train.max_time)"
        return
    done = _steps_done(run)
    left = run.train.max_steps - done
    training = left * found.speed.step_seconds(run.train.global_batch_size / found.processes)
    checks = _validations(run, done) * found.validation_seconds
    yield f"time: about {clock(training + checks)} for {left:,} steps, {clock(checks)} of it validation"


def _each(found: Estimate) -> str:
    alone = found.processes == 1
    return "" if alone else f" in each of {found.processes} processes at once, without what they send to each other"


def _tokens_per_second(run: TrainRun, speed: Speed, processes: int) -> float:
    """Of all processes, each with its part of the rows."""
    return processes * speed.tokens_per_second(run.train.global_batch_size / processes)


def _steps_done(run: TrainRun) -> int:
    steps = list_steps(run.folder / "checkpoints")
    return min(steps[-1].step, run.train.max_steps) if steps else 0


def _validations(run: TrainRun, done: int) -> int:
    """Validations after step ``done``: at both intervals, and at the end."""
    first, second, last = run.eval.interval, run.checkpoint.interval, run.train.max_steps

    def until(step: int) -> int:
        return step // first + step // second - step // math.lcm(first, second) + (step == last and not regular)

    regular = last % first == 0 or last % second == 0
    return until(last) - until(done)


def _batch(run: TrainRun, dist: Dist) -> Batch:
    """The largest part of a step that a process has."""
    own = -(-run.train.global_batch_size // dist.world)
    rows = min(run.train.micro_batch_size, own)
    shards = dist.world if dist.strategy == "fsdp" else 1
    return Batch(
        rows,
        several=own > rows,
        recompute=run.train.activation_checkpointing,
        native=run.native is True,
        compiled=wants_compiling(run, dist),
        shards=shards,
    )


def _precision(run: TrainRun) -> dict:
    """What `needed` and `fitting` ask of the run besides its shape: AdamW keeps two moments of each weight."""
    trained, frozen = _parameters(run)
    return {
        "optimizer": 8 * trained,
        "frozen": frozen,
        "bf16": run.precision != "fp32",
        "device": "heap" if run.device == "cpu" and heap.is_taken() else run.device,
    }


def _parameters(run: TrainRun) -> tuple[int, Frozen | None]:
    """How many parameters are trained, and what a frozen base keeps in memory."""
    trained, frozen, _ = moving(run)
    if not frozen:
        return trained, None
    outline = origin_of(run).outline()
    blocks = {name for name, each in outline.layers.named_parameters() if each.requires_grad}
    lora = run.lora if isinstance(run, FinetuneRun) and all(MARK in name for name in blocks) else None
    head = outline.head_weight
    use: Literal["cast", "taken"] = "taken" if head.dtype == products(run) else "cast"
    return trained, Frozen(trained, frozen, lora, "learned" if head.requires_grad else use)


def _flops_per_token(run: TrainRun) -> float:
    return trained_flops_per_token(run.row_shape, frozen=has_adapters(run))


def _gib(number: float) -> str:
    return f"{number / GiB:.2f} GiB"
