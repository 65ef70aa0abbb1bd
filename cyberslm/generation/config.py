"""How a model decodes: the precision of its weights, and whether a compiled step may be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cyberslm.errors import ConfigError
from cyberslm.model.checks import type_problems

AskedPrecision = Literal["auto", "fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Choices that change speed and memory, and with fewer bits the last digits of the logits."""

    precision: AskedPrecision = "auto"
    """Bits that weights are kept in while the model is used; auto = those of its folder."""

    fast: Literal["auto", "on", "off"] = "auto"
    """The compiled decoding step: auto = as soon as there is one, on = wait for it or fail, off = the plain network."""

    def __post_init__(self) -> None:
        if problems := type_problems(self):
            raise ConfigError("; ".join(problems))
