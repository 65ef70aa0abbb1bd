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
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.sizes import flops_per_token
from cyberslm.training.loss import Loss

WORTH_COMPILING = 2e14
"""Operations of a run from which ``compile: auto`` compiles: some ten minutes on two cores."""


def is_worth_compiling(config: CyberSLMConfig, *, tokens: int) -> bool:
    """Whether training on ``tokens`` is long enough; a function of the run alone, so that each start decides alike."""
    return flops_per_token(config, config.max_seq_len, training=True) * tokens >= WORTH_COMPILING


def compile_and_try(
    model: CyberSLM, loss: Loss, batch: Batch, autocast: Callable[[], AbstractContextManager]
) -> str | None:
    """Compile the blocks and run one forward and backward pass; else leave them as they were and return why.

    Gradients are dropped, and the random state is as before.
    """
    model.train()
    model.compile_blocks()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            with autocast():
                objective = loss(model, batch.to(model.device)).objective
            objective.backward()
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        model.compile_blocks(on=False)
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    finally:
        model.zero_grad(set_to_none=True)
    return None
