"""Compiled blocks: whether they are worth it, and a trial before anything depends on them.

Compiling fuses the element-wise work between matrix products. It costs seconds to a minute at the start of a run, less
when the graphs of an earlier one are still kept. All blocks share one graph; attention and the head are operators that
it calls (`cyberslm.model.causal`, `cyberslm.training.cross_entropy`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from cyberslm.data.loader import Batch
from cyberslm.model.config import GATED, CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.sizes import flops_per_token
from cyberslm.training.config import TrainConfig
from cyberslm.training.loss import Loss

WORTH_OPERATIONS, WORTH_SECONDS = 2e14, 600
"""What ``compile: auto`` compiles for: some ten minutes on two cores, by the steps of the run or by its time budget."""


def is_worth_compiling(config: CyberSLMConfig, train: TrainConfig, *, native: bool = False) -> bool:
    """Whether the run is long enough, and the library in C++ (``native``) leaves the compiler something to fuse.

    A function of settings and of whether there is the library, so that each start on one machine decides alike.
    """
    if native and config.norm == "rms" and config.activation in GATED and not (config.dropout or config.attn_dropout):
        return False
    if train.max_seconds is not None and train.max_seconds < WORTH_SECONDS:
        return False
    tokens = train.max_steps * train.global_batch_size * config.max_seq_len
    return flops_per_token(config, config.max_seq_len, training=True) * tokens >= WORTH_OPERATIONS


def compile_and_try(
    model: CyberSLM, loss: Loss, batch: Batch, autocast: Callable[[], AbstractContextManager]
) -> str | None:
    """Compile the blocks and run one forward and backward pass; return what failed, None if nothing did.

    Where flex attention for documents fails, the rest is compiled without it; where that fails too, ``model`` is as it
    was. Gradients are dropped, and the random state is as before.
    """
    model.train()
    failed = None
    if batch.docs is not None and model.takes_flex:
        model.compile_blocks(flex=True)
        if (failed := _try(model, loss, batch, autocast)) is None:
            return None
    model.compile_blocks()
    if (worse := _try(model, loss, batch, autocast)) is None:
        return failed
    model.compile_blocks(on=False)
    return worse


def _try(model: CyberSLM, loss: Loss, batch: Batch, autocast: Callable[[], AbstractContextManager]) -> str | None:
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            with autocast():
                objective = loss(model, batch.to(model.device)).objective
            objective.backward()
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    finally:
        model.zero_grad(set_to_none=True)
    return None
