"""What a run would do, without training: sizes, steps, and the first batch as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cyberslm.config import Loaded, dump
from cyberslm.data.loader import IGNORE, Batch
from cyberslm.model.sizes import activation_bytes, cache_bytes_per_token, flops_per_token
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import Say, describe, ensure_prepared, fit_model, row_loader
from cyberslm.recipes.machine import cpu_threads, on_this_machine
from cyberslm.recipes.train import header
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.training.trackers import short

SHOWN_ROWS = 2
SHOWN_TOKENS = 96


def check(loaded: Loaded[TrainRun], say: Say) -> Iterator[str]:
    """Lines for people: the resolved configuration, sizes, and what the first batch looks like. Data are prepared."""
    run, device = on_this_machine(loaded.value)
    prepared = ensure_prepared(run, say)
    tokenizer = prepared.tokenizer
    run = replace(run, model=fit_model(run.model, tokenizer, given=loaded.given))
    loader = row_loader(run, prepared, prepared.train)
    yield "# resolved configuration"
    yield dump(run).rstrip()
    yield ""
    yield from describe(prepared)
    with cpu_threads(run.threads):
        yield from header(run, loader, device)
    targets = prepared.train.num_tokens - 1
    yield f"tokens: {run.train.global_batch_size * run.model.max_seq_len:,} per step, {targets:,} per epoch"
    yield from _costs(run)
    yield ""
    yield from _show(loader.batch(0), tokenizer)


def _costs(run: TrainRun) -> Iterator[str]:
    """What the network costs by the formulas of `cyberslm.model.sizes`, as if all of it were fp32."""
    config, rows = run.model, min(run.train.micro_batch_size, run.train.global_batch_size)
    weights, length = 4 * config.num_parameters, config.max_seq_len
    kept = activation_bytes(config, rows, length)
    yield (
        f"memory, fp32 by formula: weights {short(weights, 'B')}, with gradients and AdamW {short(4 * weights, 'B')};"
        f" activations of {rows} rows {short(kept, 'B')}"
    )
    flops = flops_per_token(config, length, training=True) * run.train.global_batch_size * length
    cache = cache_bytes_per_token(config) * length
    yield f"arithmetic: {short(flops, 'FLOP')} per step; cache of one full context when generating {short(cache, 'B')}"


def _show(batch: Batch, tokenizer: Tokenizer) -> Iterator[str]:
    """The first rows as text, tokens apart by |, targets that aren't learned in brackets."""
    trained = int((batch.targets != IGNORE).sum())
    yield f"first batch: {batch.targets.shape[0]} rows, {trained:,} trained tokens; | between tokens, [] not trained"
    for row in range(min(SHOWN_ROWS, batch.targets.shape[0])):
        shown = []
        for token, target in zip(batch.input_ids[row, 1:].tolist(), batch.targets[row].tolist(), strict=False):
            text = _spell(token, tokenizer)
            shown.append(text if target != IGNORE else f"[{text}]")
        yield f"row {row}: " + "|".join(shown[:SHOWN_TOKENS]) + (" ..." if len(shown) > SHOWN_TOKENS else "")


def _spell(token: int, tokenizer: Tokenizer) -> str:
    if token in tokenizer.control_ids:
        return tokenizer.piece(token)
    return tokenizer.token_bytes(token).decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")
