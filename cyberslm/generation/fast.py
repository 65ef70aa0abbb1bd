"""Give a model its fast decoding step, without ever waiting for it unless asked to.

The plain network answers until the step is there: at once where an earlier process has built it (`native.build`), else
after a build in the background, which begins only when a process turns out to decode more than a handful of tokens. The
switch falls between two tokens and both write to the same cache. Where a step can't be built there is one warning, and
everything goes on as before.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cyberslm.errors import CyberSLMError
from cyberslm.generation.config import DecodingConfig
from cyberslm.generation.mirror import NativeStep, why_not
from cyberslm.model.cache import KVCache
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import set_precision
from cyberslm.native.build import BuildError, build_library, find_compiler, kept_library

HANDFUL = 16
"""Steps of the plain network before a library is built in the background."""


def prepare(model: CyberSLM, config: DecodingConfig, *, threads: int | None = None) -> None:
    """Make ``model`` decode as ``config`` says, with torch's number of threads unless told otherwise.

    ``fast: on`` waits for the step, and raises `BuildError` or `ConfigError` where there can't be one. Afterwards
    matrices may be changed in place, but not replaced.
    """
    model.use_step(None)
    model.use_native(on=False)
    if config.precision != "auto":
        set_precision(model, config.precision)
    if config.fast == "off" or (config.fast == "auto" and why_not(model) is not None):
        return
    step = _Pending(model, torch.get_num_threads() if threads is None else threads)
    if config.fast == "on":
        step.build()
    model.use_step(step)


class _Pending:
    """The step as the model calls it: None as long as the plain network has to answer."""

    def __init__(self, model: CyberSLM, threads: int) -> None:
        self._model, self._threads = model, threads
        self._step: NativeStep | None = None
        self._library: ctypes.CDLL | None = None
        self._failure: CyberSLMError | None = None
        self._worker: threading.Thread | None = None
        self._plain_steps = 0
        try:
            self._compiler: Path | None = find_compiler()
        except BuildError as error:
            self._compiler, self._failure = None, error
        else:
            self._library = kept_library(self._compiler)
        model.use_native(on=self._library is not None)

    def __call__(self, tokens_N: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor | None:
        if self._step is None and not self._is_ready():
            return None
        if self._step is None or not self._step.takes(cache):
            return None
        return self._step(tokens_N, cache, counts)

    def build(self) -> None:
        """Have the library now."""
        if self._failure is None and self._library is None:
            self._make()
        if self._failure is not None:
            raise self._failure
        self._open()

    def _is_ready(self) -> bool:
        if self._library is not None and self._failure is None:
            self._open()
            return True
        self._plain_steps += 1
        if self._plain_steps < HANDFUL or (self._worker is not None and self._worker.is_alive()):
            return False
        if self._failure is not None:
            warnings.warn(f"decoding goes on without the compiled step: {self._failure}", stacklevel=2)
            self._model.use_step(None)
        elif self._worker is None:
            self._worker = threading.Thread(target=self._make, name="cyberslm-build")
            self._worker.start()
        return False

    def _make(self) -> None:
        try:
            if self._compiler is not None:
                self._library = build_library(self._compiler)
        except (CyberSLMError, OSError) as error:
            self._failure = error if isinstance(error, CyberSLMError) else BuildError(str(error))

    def _open(self) -> None:
        if self._step is None and self._library is not None:
            self._model.use_native()  # it may have been built in between
            self._step = NativeStep(self._model, self._library, threads=self._threads)
