"""What a run would do, without training: sizes, steps, and the first batch as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from cyberslm.config import Loaded, dump
from cyberslm.data.loader import IGNORE, PADDING, Batch, RowLoader
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
    yield f"tokens: {run.train.global_batch_size * run.model.max_seq_len:,} per step, {_per_epoch(loader):,} per epoch"
    yield from _costs(run)
    yield ""
    across = loader.layout == "concat" and not loader.isolate
    yield from _show(loader.bordered(0), tokenizer, across=across)


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


def _per_epoch(loader: RowLoader) -> int:
    return loader.rows_per_epoch * loader.seq_len if loader.quotas else loader.usage.positions


def _show(batch: Batch, tokenizer: Tokenizer, *, across: bool) -> Iterator[str]:
    """The first rows as text; ``across``: a document's first token may be the target of the token before it."""
    trained = int((batch.targets != IGNORE).sum())
    yield (
        f"first batch: {batch.targets.shape[0]} rows, {trained:,} trained tokens; | between tokens, || between"
        " documents, [] not trained"
    )
    for row in range(min(SHOWN_ROWS, batch.targets.shape[0])):
        shown = list(islice(_tokens(batch.rows(row, row + 1), tokenizer, across=across), SHOWN_TOKENS + 1))
        more = " ..." if len(shown) > SHOWN_TOKENS else ""
        yield f"row {row}: " + "".join(shown[:SHOWN_TOKENS]).removeprefix("|") + more


def _tokens(batch: Batch, tokenizer: Tokenizer, *, across: bool) -> Iterator[str]:
    """Each token of one row behind its mark; the last of a document is often a target only, and no input."""
    inputs, targets, docs = (part[0].tolist() for part in batch[:3] if part is not None)
    length = len(docs) - docs.count(PADDING)
    for at in range(length):
        begins = at == 0 or docs[at] != docs[at - 1]
        learned = at > 0 and (across or not begins) and targets[at - 1] == inputs[at]
        text = _spell(inputs[at], tokenizer)
        yield ("||" if begins and at else "|") + (text if learned else f"[{text}]")
        shown = at + 1 < length and (across or docs[at + 1] == docs[at])
        if targets[at] != IGNORE and not shown:
            yield "|" + _spell(targets[at], tokenizer)


def _spell(token: int, tokenizer: Tokenizer) -> str:
    if token in tokenizer.control_ids:
        return tokenizer.piece(token)
    text = tokenizer.token_bytes(token).decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")
    return text.replace("|", "\\x7c")
