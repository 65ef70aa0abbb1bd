"""What a run would do, without training: sizes, steps, and the first batch as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cyberslm.config import Loaded, dump
from cyberslm.data.loader import IGNORE, RowLoader
from cyberslm.model.sizes import cache_bytes_per_token, flops_per_token
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import Say, describe, ensure_prepared, fit_model, row_loader
from cyberslm.recipes.estimate import estimate, lines, refuse_too_large
from cyberslm.recipes.header import header
from cyberslm.recipes.machine import cpu_threads, on_this_machine, with_native
from cyberslm.recipes.origin import origin_of
from cyberslm.recipes.shown import LEGEND, shown_row
from cyberslm.training.distributed import Dist
from cyberslm.training.trackers import short

SHOWN_ROWS = 2
SHOWN_TOKENS = 96


def check(loaded: Loaded[TrainRun], say: Say) -> Iterator[str]:
    """Lines for people: the resolved configuration, sizes, and what the first batch looks like. Data are prepared."""
    run, device = on_this_machine(loaded.value)
    prepared = ensure_prepared(run, say)
    tokenizer = prepared.tokenizer
    run = replace(run, model=fit_model(run.model, tokenizer, given=loaded.given))
    loader, origin = row_loader(run, prepared, prepared.train), origin_of(run)
    yield "# resolved configuration"
    yield dump(run).rstrip()
    yield ""
    yield from describe(prepared)
    alone = Dist(device=device)
    refuse_too_large(run, alone)
    run = with_native(run, alone, say)
    with cpu_threads(run.threads):
        yield from header(run, origin, loader, device)
        yield from lines(run, estimate(run, origin, prepared, alone, probe=True))
    yield f"tokens: {run.train.global_batch_size * run.seq_len:,} per step, {_per_epoch(loader):,} per epoch"
    yield from _costs(run)
    yield ""
    batch = loader.bordered(0)
    trained = int((batch.targets != IGNORE).sum())
    yield f"first batch: {batch.targets.shape[0]} rows, {trained:,} trained tokens; {LEGEND}"
    for row in range(min(SHOWN_ROWS, batch.targets.shape[0])):
        yield f"row {row}: {shown_row(loader, batch, row, tokenizer, limit=SHOWN_TOKENS)}"


def _costs(run: TrainRun) -> Iterator[str]:
    """What the network costs by the formulas of `cyberslm.model.sizes`."""
    config, length = run.model, run.seq_len
    flops = flops_per_token(config, length, training=True) * run.train.global_batch_size * length
    cache = cache_bytes_per_token(config) * length
    yield f"arithmetic: {short(flops, 'FLOP')} per step; cache of one full context when generating {short(cache, 'B')}"


def _per_epoch(loader: RowLoader) -> int:
    return loader.rows_per_epoch * loader.seq_len if loader.quotas else loader.usage.positions
