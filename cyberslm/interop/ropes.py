"""Llama 3's rotary scaling as GGUF has it: not its settings but a factor for each channel pair, and back.

A pair that turns ``t`` times within the trained context keeps ``k = (t - low) / (high - low)`` of its frequency,
clamped to 0 .. 1, and has the rest divided: ``1 / factor_i = k + (1 - k) / factor``. So the factors fix the line k(t);
of (trained length, low, high) one may be scaled freely, unless the file names the length.
"""

from __future__ import annotations

import math

import numpy as np

from cyberslm.errors import ConfigError
from cyberslm.interop.container import Value
from cyberslm.model.config import RopeScaling
from cyberslm.model.rope import scaled_frequencies

USUAL_LENGTH = 8192
_CLOSE = 1e-5


def factors_of_scaling(scaling: RopeScaling, head_dim: int, base: float) -> np.ndarray:
    """What llama.cpp divides each pair's frequency by, fp32 ``(head_dim / 2,)``."""
    plain, _ = scaled_frequencies(head_dim, base, None)
    scaled, _ = scaled_frequencies(head_dim, base, scaling)
    return (plain / scaled).numpy().astype(np.float32)


def scaling_of_factors(
    factors: np.ndarray, head_dim: int, base: Value, trained: Value | None, *, where: str
) -> RopeScaling:
    """The llama3 settings that give these factors. Raises `ConfigError` when none do."""
    if not isinstance(base, float | int) or factors.shape != (head_dim // 2,):
        raise ConfigError(f"{where} has shape {list(factors.shape)}, heads {head_dim} wide ask for half as many")
    factors = factors.astype(np.float64)
    if not np.isfinite(factors).all() or factors.min() < 1 - _CLOSE:
        raise ConfigError(f"{where} holds factors below 1 or not finite, which no llama3 scaling has")
    for candidate in _candidates(factors, head_dim, float(base), trained):
        found = factors_of_scaling(candidate, head_dim, float(base))
        if np.allclose(found, factors, rtol=_CLOSE, atol=0):
            return candidate
    raise ConfigError(f"{where}: these factors are not those of a llama3 scaling, the only kind that can be imported")


def _candidates(factors: np.ndarray, head_dim: int, base: float, trained: Value | None) -> list[RopeScaling]:
    factor = float(f"{factors.max():.6g}")
    length = trained if isinstance(trained, int) and not isinstance(trained, bool) and trained > 0 else None
    found = [] if length else [_llama3(factor, USUAL_LENGTH, 1.0, 4.0)]
    if length:
        found.append(_llama3(factor, length, 1.0, 4.0))
    between = (factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4))
    if factor > 1 and between.sum() >= 2:
        plain = scaled_frequencies(head_dim, base, None)[0].numpy()
        kept = (1 / factors - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit((plain / (2 * math.pi))[between], kept[between], 1)
        # kept = (length * turns per token - low) / (high - low)
        low_per_span = -offset
        if length is None:
            span = 1 / low_per_span if low_per_span > 0 else 0.0
            length = round(slope * span)
        span = length / slope if slope > 0 else 0.0
        low = low_per_span * span
        found.append(_llama3(factor, length, float(f"{low:.5g}"), float(f"{low + span:.5g}")))
    return [scaling for scaling in found if scaling is not None]


def _llama3(factor: float, length: int, low: float, high: float) -> RopeScaling | None:
    try:
        return RopeScaling(
            type="llama3", factor=factor, original_max_seq_len=length, low_freq_factor=low, high_freq_factor=high
        )
    except ConfigError:
        return None
