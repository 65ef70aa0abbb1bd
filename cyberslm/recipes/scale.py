"""One dial, ``scale``, for the size of a run: a number of parameters, or a time. All other sizes follow from it.

    parameters   as given; in a time as many as its operations can train: 6 N (20 N) = time x rate
    tokens       20 a parameter (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556)
    shape        64 wide a head, two layers a head, feed-forward 8/3 of the width: the reference model's proportions
    step         0.292 C^0.327 tokens for C operations in all (DeepSeek-AI 2024, https://arxiv.org/abs/2401.02954)
    rates        those of the sweep in docs/lab.md at width 192, falling as 1 / width (Yang et al. 2022,
                 https://arxiv.org/abs/2203.03466); the embeddings' stays

What the user gives stays, and the rest is derived around it: all of it is a function of what is given, and of the
threads where a time is, so every start derives the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cyberslm.errors import ConfigError
from cyberslm.model.config import CyberSLMConfig

HEAD = 64
LAYERS_PER_HEAD = 2
TOKENS_PER_PARAMETER = 20
BASE_WIDTH, BASE_RATE, EMBEDDING_RATE = 192, 2e-3, 1e-2
RATES = {"fp32": 5e10, "bf16": 1e11}
"""Operations of training per second and thread that a time counts on: two thirds of what the lab's machine does."""
GPU_RATE = 1e14
"""The same for a GPU: a quarter of the bf16 products of an A100's data sheet."""
VOCABULARIES = ((1e6, 1_024), (2e6, 2_048), (6e6, 4_096), (15e6, 8_192), (30e6, 16_000), (math.inf, 32_000))
LENGTHS = ((5e6, 256), (2e7, 512), (math.inf, 1_024))
LEAST, MOST = 2e5, 2e9
MISS = 0.09
"""How far from the target, as a share, proportions decide."""
MOST_LAYERS = 512

_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)([kMB]?)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class Dial:
    """A target number of parameters, or seconds."""

    parameters: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, text: str) -> Dial:
        """Raises `ConfigError` for what is neither, such as ``10m``, which could be both."""
        if (found := _TIME.fullmatch(text)) is not None:
            dial = cls(seconds=float(found[1]) * _UNITS[found[2]])
        elif (found := _PARAMETERS.fullmatch(text)) is not None:
            dial = cls(parameters=float(found[1]) * _UNITS[found[2]])
        else:
            both = f" ({text[:-1]}M is parameters, {text[:-1]}min is a time)" if text.endswith("m") else ""
            raise ConfigError(f"scale must be parameters such as 33M or a time such as 10min or 2h, not {text!r}{both}")
        if dial.parameters is not None and not LEAST <= dial.parameters <= MOST:
            raise ConfigError(f"scale must be from 200k to 2B parameters, not {text}")
        if dial.seconds is not None and not 10 <= dial.seconds <= 1e8:
            raise ConfigError(f"scale must be a time from 10s to 1000d, not {text}")
        return dial

    def target(self, operations_per_second: float) -> float:
        """The number of parameters."""
        if self.parameters is not None:
            return self.parameters
        operations = (self.seconds or 0.0) * operations_per_second
        return min(MOST, max(LEAST, math.sqrt(operations / (6 * TOKENS_PER_PARAMETER))))


def derive(dial: Dial, given: Mapping[str, object], *, rate: float) -> dict[str, object]:
    """Settings by dotted key for those that ``given`` lacks; ``given`` has the values of the keys that the user gave.

    ``rate``: operations of training per second, which a time counts on.
    """
    target = dial.target(rate)
    own: dict[str, object] = {}

    def settle(key: str, value: object) -> object:
        """The given value, or else this one, which is then one of those derived."""
        if key in given:
            return given[key]
        own[key] = value
        return value

    vocabulary = _step(VOCABULARIES, target)
    if not {"tokenizer.path", "model.vocab_size"} & given.keys():
        vocabulary = int(str(settle("tokenizer.vocab_size", vocabulary)))
    vocabulary = int(str(given.get("model.vocab_size") or vocabulary))
    length = int(str(settle("model.max_seq_len", _step(LENGTHS, target))))
    shape = _shape(
        target, vocabulary, {k.removeprefix("model."): v for k, v in given.items() if k.startswith("model.")}
    )
    for key in ("hidden_dim", "num_layers", "num_heads", "ffn_hidden_dim", "qk_norm"):
        settle(f"model.{key}", getattr(shape, key))
    parameters = shape.num_parameters
    tokens = TOKENS_PER_PARAMETER * parameters
    step = 0.292 * (6 * parameters * tokens) ** 0.327
    rows = int(str(settle("train.global_batch_size", max(1, round(step / length)))))
    settle("train.micro_batch_size", max(1, min(rows, 4096 // length)))
    if dial.seconds is not None:
        settle("train.max_time", f"{max(1, round(dial.seconds))}s")
        steps = None
    else:
        steps = int(str(settle("train.max_steps", max(20, round(tokens / (rows * length))))))
        settle("eval.interval", max(10, steps // 20))
        settle("checkpoint.interval", max(10, steps // 20))
    settle("scheduler.warmup_steps", 50 if steps is None else max(1, min(500, steps // 50)))
    for key, value in (("name", "wsd"), ("decay_fraction", 0.4), ("min_lr_ratio", 0.05)):
        settle(f"scheduler.{key}", value)
    hidden_rate = round(BASE_RATE * BASE_WIDTH / shape.hidden_dim, 7)
    if settle("optimizer.name", "muon") == "muon":
        settle("optimizer.muon_lr", hidden_rate)
        settle("optimizer.lr", EMBEDDING_RATE)
    else:
        settle("optimizer.lr", hidden_rate)
    return own


def _step(table: tuple[tuple[float, int], ...], target: float) -> int:
    return next(value for limit, value in table if target < limit)


def _shape(target: float, vocabulary: int, given: Mapping[str, object]) -> CyberSLMConfig:
    """The shape of about ``target`` parameters whose layers are nearest to two a head, around what is given."""
    widths = [int(str(given["hidden_dim"]))] if "hidden_dim" in given else range(HEAD, 65 * HEAD, HEAD)
    found: list[tuple[float, float, CyberSLMConfig]] = []
    for width in widths:
        heads = next(n for n in range(max(1, width // HEAD), 0, -1) if width % (2 * n) == 0)
        inner = max(HEAD, HEAD * round(width * 8 / 3 / HEAD))
        sizes = {"vocab_size": vocabulary, "hidden_dim": width, "num_heads": heads, "ffn_hidden_dim": inner}

        def shape(layers: int, sizes: Mapping[str, int] = sizes) -> CyberSLMConfig:
            return CyberSLMConfig(**{"qk_norm": True, **sizes, "num_layers": layers, **given})  # type: ignore[arg-type]

        one, two = shape(1).num_parameters, shape(2).num_parameters
        layers = round((target - one) / max(1, two - one)) + 1
        config = shape(min(max(1, layers), MOST_LAYERS))
        miss = abs(math.log(config.num_parameters / target))
        form = abs(math.log(config.num_layers / (LAYERS_PER_HEAD * width / HEAD)))
        found.append((max(0.0, miss - MISS), form, config))
    return min(found, key=lambda each: each[:2])[2]
