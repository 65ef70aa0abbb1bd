"""Llama 3's rotary scaling as GGUF has it: not its settings but a factor for each channel pair, and back.

The factors don't name their settings, so candidates are tried: those of the published Llama 3 models, and what this
package notes beside the factors when it writes them. Whatever a note says, the factors decide.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cyberslm.errors import ConfigError
from cyberslm.interop.container import Value
from cyberslm.model.config import RopeScaling
from cyberslm.model.rope import scaled_frequencies

PUBLISHED = (8192, 1.0, 4.0)
"""Trained length, low and high frequency factor of Llama 3.1 and its successors."""

_NOTES = ("cyberslm.rope.original_max_seq_len", "cyberslm.rope.low_freq_factor", "cyberslm.rope.high_freq_factor")
_CLOSE = 1e-5


def factors_of_scaling(scaling: RopeScaling, head_dim: int, base: float) -> np.ndarray:
    """What llama.cpp divides each pair's frequency by, fp32 ``(head_dim / 2,)``."""
    plain, _ = scaled_frequencies(head_dim, base, None)
    scaled, _ = scaled_frequencies(head_dim, base, scaling)
    return (plain / scaled).numpy().astype(np.float32)


def notes_of_scaling(scaling: RopeScaling) -> dict[str, object]:
    """Keys and values that let `scaling_of_factors` find the settings again."""
    found = (scaling.original_max_seq_len, scaling.low_freq_factor, scaling.high_freq_factor)
    return dict(zip(_NOTES, found, strict=True))


def scaling_of_factors(
    factors: np.ndarray, head_dim: int, base: float, noted: Mapping[str, Value], *, where: str
) -> RopeScaling:
    """The llama3 settings that give these factors. Raises `ConfigError` when none do that are known."""
    if factors.shape != (head_dim // 2,):
        raise ConfigError(f"{where} has shape {list(factors.shape)}, heads {head_dim} wide ask for {head_dim // 2}")
    largest = float(factors.max()) if np.isfinite(factors).all() else 0.0
    for length, low, high in (PUBLISHED, tuple(noted.get(key) for key in _NOTES)):
        try:
            scaling = RopeScaling(
                type="llama3",
                factor=float(f"{largest:.6g}"),
                original_max_seq_len=length,  # type: ignore[arg-type]
                low_freq_factor=float(f"{low:.6g}"),
                high_freq_factor=float(f"{high:.6g}"),
            )
        except (ConfigError, ValueError, TypeError):
            continue
        if np.allclose(factors_of_scaling(scaling, head_dim, base), factors, rtol=_CLOSE, atol=0):
            return scaling
    raise ConfigError(
        f"{where}: these factors are not those of a known llama3 scaling, the only kind that can be imported"
    )
