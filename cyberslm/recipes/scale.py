"""One dial, ``scale``, for the size of a run: a number of parameters, or a time. All other sizes follow from it.

    parameters   as given; in a time as many as its operations can train: 6 N (20 N) = time x rate
    tokens       20 a parameter (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556)
    shape        64 wide a head, two layers a head, feed-forward 8/3 of the width: the reference model's proportions
    step         0.292 C^0.327 tokens for C operations in all (DeepSeek-AI 2024, https://arxiv.org/abs/2401.02954)
    rates        those of the sweep in docs/lab.md at width 192, falling as 1 / width (Yang et al. 2022,
                 https://arxiv.org/abs/2203.03466; for Muon that is the careful side of the 1 / sqrt(width) that
                 Yang et al. 2023, https://arxiv.org/abs/2310.17813, would allow); the embeddings' stays

What the user gives stays, and the rest is derived around it. All of it is a function of what is given and, for a time,
of a rate of operations; a larger dial never gives fewer parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple, TypeVar, cast

from cyberslm.errors import ConfigError
from cyberslm.model.config import GATED, CyberSLMConfig

T = TypeVar("T")

HEAD = 64
LAYERS_PER_HEAD = 2
TOKENS_PER_PARAMETER = 20
MOST_EPOCHS = 4
"""Text that is repeated more often teaches little (Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264)."""
BASE_WIDTH, BASE_RATE, EMBEDDING_RATE = 192, 2e-3, 1e-2
ORIGINAL_MUON_RATE = 0.02
"""Of Muon's own step (muon_adjust: original), whose size already follows the shape of a matrix."""
RATES = {"fp32": 4e10, "bf16": 7.5e10, "fp16": 4e10}
"""Operations of training (6 a parameter and token) per second and thread that a time counts on: what models of 3 M and
more reach on two threads of the lab's machine, whole steps measured by `cyberslm check` (docs/lab.md). fp16, which was
not measured, counts as fp32."""
GPU_RATE = 1e14
"""The same for a GPU, not measured: a third of the bf16 products of an A100's data sheet."""
VOCABULARIES = ((1e6, 1_024), (2e6, 2_048), (6e6, 4_096), (15e6, 8_192), (30e6, 16_000), (math.inf, 32_000))
LENGTHS = ((5e6, 256), (2e7, 512), (math.inf, 1_024))
ROW_TOKENS = 4_096
"""Tokens that go through the network at a time."""
LEAST, MOST = 2e5, 2e9
WIDEST, MOST_LAYERS = 64 * HEAD, 512

_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)([kMB]?)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class Dial:
    """A target number of parameters, or seconds."""

    parameters: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: str | int) -> Dial:
        """Raises `ConfigError` for what is neither, such as ``10m``, which could be both."""
        text = str(value)
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

    ``rate``: operations of training per second, which a time counts on. Raises `ConfigError` where no shape has what is
    given.
    """
    run, target = _Settings(given), dial.target(rate)
    shape, length = _model(run, target), run.settle("model.max_seq_len", _step(LENGTHS, target))
    tokens = planned_tokens(shape)
    step = 0.292 * (6 * shape.num_parameters * tokens) ** 0.327
    rows = max(1, run.settle("train.global_batch_size", max(1, round(step / length))))
    run.settle("train.micro_batch_size", max(1, min(rows, ROW_TOKENS // length)))
    steps = max(20, round(tokens / (rows * length)))
    if dial.seconds is None or run.settle("train.max_time", f"{round(dial.seconds)}s") is None:
        steps = run.settle("train.max_steps", steps)
    else:
        steps = min(steps, cast(int, given.get("train.max_steps", steps)))
    run.settle("eval.interval", max(10, steps // 20))
    run.settle("checkpoint.interval", max(10, steps // 20))
    run.settle("scheduler.warmup_steps", max(0, min(max(1, steps // 50), 500, steps - 1)))
    for key, value in (("name", "wsd"), ("decay_fraction", 0.4), ("min_lr_ratio", 0.05)):
        run.settle(f"scheduler.{key}", value)
    _rates(run, shape.hidden_dim)
    return run.own


def planned_tokens(model: CyberSLMConfig) -> int:
    """Tokens that train a model well."""
    return TOKENS_PER_PARAMETER * model.num_parameters


class _Settings:
    """What is given, and what has been settled besides."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given, self.own = given, dict[str, object]()

    def settle(self, key: str, value: T) -> T:
        """The given value, or else this one, which is then one of those derived."""
        if key in self.given:
            return cast(T, self.given[key])
        self.own[key] = value
        return value


def _rates(run: _Settings, width: int) -> None:
    hidden = float(f"{BASE_RATE * BASE_WIDTH / width:.3g}")
    if run.settle("optimizer.name", "muon") == "muon":
        own_step = run.given.get("optimizer.muon_adjust") == "original"
        run.settle("optimizer.muon_lr", ORIGINAL_MUON_RATE if own_step else hidden)
        run.settle("optimizer.lr", EMBEDDING_RATE)
    else:
        run.settle("optimizer.lr", hidden)


def _step(table: Sequence[tuple[float, int]], target: float) -> int:
    return next(value for limit, value in table if target < limit)


def _model(run: _Settings, target: float) -> CyberSLMConfig:
    """The network, with its vocabulary, whose sizes are settled."""
    names = {field.name for field in fields(CyberSLMConfig)}
    given = {name: run.given[f"model.{name}"] for name in names if f"model.{name}" in run.given}
    vocabulary, within = _step(VOCABULARIES, target), (0.0, math.inf)
    if not {"tokenizer.path", "model.vocab_size"} & run.given.keys():
        if not given and "tokenizer.vocab_size" not in run.given:
            limits = [0.0, *(limit for limit, _ in VOCABULARIES)]
            within = next((low, high) for low, high in pairwise(limits) if target < high)
        vocabulary = run.settle("tokenizer.vocab_size", vocabulary)
    try:
        shape = _shape(target, {"qk_norm": True, "vocab_size": vocabulary, **given}, within)
    except ConfigError as error:
        raise ConfigError(f"model.{error}") from error
    for key in ("hidden_dim", "num_layers", "num_heads", "ffn_hidden_dim", "qk_norm"):
        run.settle(f"model.{key}", getattr(shape, key))
    return shape


class _Width(NamedTuple):
    """All networks of one width: they differ in their layers."""

    settings: Mapping[str, object]
    first: int
    """Parameters with one layer."""
    each: int
    """Parameters of one more."""
    layers: int
    """How many are in proportion, or given."""

    def parameters(self, layers: int) -> int:
        return self.first + (layers - 1) * self.each


def _shape(target: float, given: Mapping[str, object], within: tuple[float, float]) -> CyberSLMConfig:
    """The shape of about ``target`` parameters whose layers are about two a head, around what is given.

    Networks are ordered into one ladder, of which a target takes the nearest rung: from each width come those between
    the means with its neighbours' proportioned ones, and of all those of a size ``within`` limits, if there are any.
    """
    widths = _widths(given)
    borders = [(a.parameters(a.layers) + b.parameters(b.layers)) / 2 for a, b in pairwise(widths)]
    rungs: list[tuple[bool, float, int, _Width]] = []
    for width, low, high in zip(widths, [0.0, *borders], [*borders, math.inf], strict=True):
        for layers in (width.layers,) if "num_layers" in given else range(1, MOST_LAYERS + 1):
            size = width.parameters(layers)
            if low <= size < high:
                outside = not within[0] <= size < within[1]
                rungs.append((outside, abs(math.log(size / target)), layers, width))
    _, _, layers, width = min(rungs, key=lambda rung: rung[:2])
    return CyberSLMConfig(**{"num_layers": layers, **width.settings})  # type: ignore[arg-type]


def _widths(given: Mapping[str, object]) -> list[_Width]:
    """Every width that goes with what is given; raises `ConfigError` with the reason if none does."""
    found, problem = list[_Width](), ""
    for width in _possible_widths(given):
        share = 8 / 3 if given.get("activation", "swiglu") in GATED else 4
        inner = max(HEAD, HEAD * round(width * share / HEAD))
        sizes = {"hidden_dim": width, "num_heads": _heads(width, given), "ffn_hidden_dim": inner, **given}
        layers = max(1, cast(int, given.get("num_layers", round(LAYERS_PER_HEAD * width / HEAD))))
        try:
            one, two = (
                CyberSLMConfig(**{**sizes, "num_layers": n}).num_parameters  # type: ignore[arg-type]
                for n in (1, 2)
            )
        except ConfigError as error:
            problem = problem or str(error)
            continue
        found.append(_Width(sizes, one, two - one, layers))
    if not found:
        raise ConfigError(problem)
    return found


def _possible_widths(given: Mapping[str, object]) -> Iterator[int]:
    if "hidden_dim" in given:
        yield cast(int, given["hidden_dim"])
    else:
        step = math.lcm(2 * max(1, cast(int, given["num_heads"])), 16) if "num_heads" in given else HEAD
        yield from range(step, max(step, WIDEST) + 1, step)


def _heads(width: int, given: Mapping[str, object]) -> int:
    """About one for 64 of the width: a multiple of key and value heads, and of even width unless that is given."""
    groups, own = max(1, cast(int, given.get("num_kv_heads") or 1)), given.get("head_dim")
    if own is not None:
        return max(groups, width // max(1, cast(int, own)) // groups * groups)
    wanted = max(groups, width // HEAD)
    return next((n for n in range(wanted, groups - 1, -1) if n % groups == 0 and width % (2 * n) == 0), groups)
