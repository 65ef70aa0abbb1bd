"""The largest memory of a training process, by formula, and which smaller settings would fit.

    program + weights + optimizer + max(activations + loss + gradients so far, gradients) + gathered

Weights, gradients and the optimizer's state are known exactly, and kept activations too (`activation_bytes`). What
can't be derived is measured, and stands in `MEASURED`: what Python, torch and its libraries take, and how much more the
C library holds than was asked for, as blocks of a step don't fall into the gaps of the one before. The peak is where
the loss ends: a chunk of logits and the head's weights as they were used are there then, and gradients if an earlier
micro-batch of the step has left some. ``scripts/benchmarks/memory.py`` shows formula and truth side by side, to
be run again when the loss, the network or the allocator has changed.

Where weights, gradients and moments are cut up over ranks, each holds its share, and whole ones of some parts while
they are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import LoraConfig
from cyberslm.model.sizes import activation_bytes, adapted_activation_bytes, adapted_cast_bytes, cast_bytes
from cyberslm.training.cross_entropy import CHUNK


class Measured(NamedTuple):
    """``program`` bytes of an idle process; what activations take in all, a part of what they need."""

    program: int
    one: float
    """Where a step is one micro-batch."""
    several: float
    """Where gradients are accumulated over several."""


MEASURED = {
    "cpu": Measured(program=370 << 20, one=1.5, several=1.85),  # glibc 2.36, freed memory kept, huge pages
    "heap": Measured(program=370 << 20, one=1.15, several=1.2),  # the same with `cyberslm.native.heap`
    "cuda": Measured(program=600 << 20, one=1.1, several=1.1),  # a guess: not measured yet
}


class Needed(NamedTuple):
    """Bytes at the peak, by what they are for."""

    program: int
    weights: int
    optimizer: int
    gradients: int
    activations: int
    loss: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def certain(self) -> int:
        """What no setting of the batch can lower."""
        return self.weights + self.optimizer


class Batch(NamedTuple):
    """How a process makes a step: rows at a time, and whether there are several such micro-batches."""

    rows: int
    several: bool
    recompute: bool = False
    """Blocks keep their input alone and are computed again going backward."""
    shards: int = 1
    """Ranks that weights, gradients and moments are cut up over."""
    native: bool = False
    """Blocks work by the library in C++ (`CyberSLM.use_native`), which keeps less."""
    compiled: bool = False
    """They are one graph of torch's compiler, which keeps what it chooses."""


class Frozen(NamedTuple):
    """A base of which only a part is trained, or none but adapters."""

    trained: int
    """Parameters that are trained, fp32."""
    bytes: int
    """What the others take."""
    adapters: LoraConfig | None
    """Where they alone are trained of the blocks, which then keep less."""
    head: Literal["learned", "cast", "taken"]
    """What is made of the head's weight besides logits: a gradient, a copy in the dtype of the products, nothing."""


def needed(  # noqa: PLR0913
    config: CyberSLMConfig,
    batch: Batch,
    *,
    optimizer: int,
    bf16: bool,
    device: str = "cpu",
    tokens: int | None = None,
    frozen: Frozen | None = None,
) -> Needed:
    """Peak memory of training on rows of ``tokens`` (default ``max_seq_len``), on a ``device`` of `MEASURED`.

    ``optimizer``: bytes of the optimizer's state. ``bf16``: products are in it, or in fp16.
    """
    measured = MEASURED[device]
    length = config.max_seq_len if tokens is None else tokens
    trained = 4 * (config.num_parameters if frozen is None else frozen.trained)
    weights = trained + (0 if frozen is None else frozen.bytes)
    head = config.vocab_size * config.hidden_dim
    adapters, use = (None, "learned") if frozen is None else (frozen.adapters, frozen.head)
    casts = _cast_bytes(config, adapters) if bf16 else 0
    how = {"recompute": batch.recompute, "native": batch.native, "compiled": batch.compiled}
    kept = kept_bytes(config, batch.rows, length, bf16=bf16, adapters=adapters, **how)
    kept -= casts + (4 * head if adapters is None else 0)
    sure = casts + (4 * head if use == "learned" else 0)
    activations = sure + int(kept * (measured.several if batch.several else measured.one))
    copied = 0 if use == "taken" else head
    loss = (2 if bf16 else 4) * (min(CHUNK, batch.rows * length * config.vocab_size) + copied)
    weights, optimizer, trained = (-(-size // batch.shards) for size in (weights, optimizer, trained))
    gradients = trained if batch.several else max(0, trained - activations - loss)
    gathered = gathered_bytes(config) if batch.shards > 1 else 0
    return Needed(measured.program, weights, optimizer, gradients, activations, loss, gathered)


def kept_bytes(  # noqa: PLR0913
    config: CyberSLMConfig,
    rows: int,
    tokens: int,
    *,
    bf16: bool = False,
    recompute: bool = False,
    adapters: LoraConfig | None = None,
    native: bool = False,
    compiled: bool = False,
) -> int:
    """`activation_bytes`, also where blocks are computed again: then one block's and the inputs of all."""
    shape = replace(config, num_layers=1) if recompute else config
    how = {"bf16": bf16, "native": native, "compiled": compiled or recompute}
    if adapters is None:
        kept = activation_bytes(shape, rows, tokens, **how)
    else:
        kept = adapted_activation_bytes(shape, adapters, rows, tokens, **how)
    if not recompute:
        return kept
    casts = _cast_bytes(config, adapters) - _cast_bytes(shape, adapters) if bf16 else 0
    return kept + casts + config.num_layers * 4 * rows * tokens * config.hidden_dim


def _cast_bytes(config: CyberSLMConfig, adapters: LoraConfig | None) -> int:
    return cast_bytes(config) if adapters is None else adapted_cast_bytes(config, adapters)


def gathered_bytes(config: CyberSLMConfig) -> int:
    """Whole fp32 weights and gradients that a rank of many has at once at most: the last unit's, and two blocks'."""
    return 2 * 4 * replace(config, num_layers=min(2, config.num_layers)).num_parameters


class Fitting(NamedTuple):
    """Sizes that would fit, and what they need."""

    rows: int
    tokens: int
    total: int


def fitting(  # noqa: PLR0913
    config: CyberSLMConfig,
    batch: Batch,
    *,
    optimizer: int,
    bf16: bool,
    device: str,
    available: int,
    frozen: Frozen | None = None,
) -> Fitting | None:
    """The largest sizes below those of ``batch`` that need at most ``available``: fewer rows first, then shorter ones.

    None where one row of 16 tokens is too much: only a smaller model would fit.
    """
    for rows, tokens in _smaller(batch.rows, config.max_seq_len):
        sizes = batch._replace(rows=rows, several=batch.several or rows < batch.rows)
        shape = replace(config, max_seq_len=tokens)
        total = needed(shape, sizes, optimizer=optimizer, bf16=bf16, device=device, frozen=frozen).total
        if total <= available:
            return Fitting(rows, tokens, total)
    return None


def _smaller(rows: int, tokens: int) -> Iterator[tuple[int, int]]:
    while rows > 1:
        rows //= 2
        yield rows, tokens
    while tokens > 16:
        tokens //= 2
        yield 1, tokens
