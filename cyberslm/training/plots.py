"""The curves of runs as a PNG, drawn from their `metrics.jsonl`: loss, learning rate and throughput, one x axis.

One run shows training and validation in different colours, and its sources where validation has several; several runs
have a colour each. Nothing is cut off: a step whose loss is not finite leaves a gap, and where the runs of one figure
differ in length the axis holds the longest.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Axis = Literal["step", "tokens", "time"]

_COLOURS = ("#1f4e8c", "#c8501e", "#4f8a2f", "#8a5aa8", "#b08a2e", "#2f8f94", "#b23a6b", "#666666")
_VALIDATION = "#c8501e"
_MOST_SOURCES = 6
_LATER, _LOW, _ENOUGH = 0.4, 0.3, 20
"""The later part begins at this share of the axis, must lie below this share of the height, and have so many points."""
_STEPS, _TOKENS = "optimizer step", "tokens trained on"
_LOOK = ("color", "alpha", "linewidth", "linestyle", "marker", "markersize")
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


class _Series(NamedTuple):
    """Where points lie on the x axis, and the records they are of."""

    x: list[float]
    records: list[dict]

    def values(self, key: str) -> list[float]:
        return [_number(record.get(key)) for record in self.records]


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def curves(runs: Mapping[str, Sequence[dict]], *, x: Axis = "step", bits_per_byte: bool = False) -> bytes:
    """PNG of the records of ``runs``, by name.

    ``x`` is the optimizer step, the tokens trained on, or the time spent in steps and validations. With
    ``bits_per_byte`` the upper panel has validation alone, in that unit, which doesn't depend on the tokenizer.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), dpi=120, layout="constrained")
    panels: Sequence[Axes] = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1, 1])
    placed = {name: _place(records, x) for name, records in runs.items()}
    size, unit = _unit(placed.values(), x)
    key = "bits_per_byte" if bits_per_byte else "loss"
    for index, (name, found) in enumerate(placed.items()):
        train, validation = (part._replace(x=[at / size for at in part.x]) for part in found)
        colour = _COLOURS[index % len(_COLOURS)]
        if not bits_per_byte:
            _training_loss(panels[0], train, colour, "train" if len(runs) == 1 else "")
        if len(runs) == 1:
            _validation(panels[0], validation, key, _VALIDATION, "validation")
            _by_source(panels[0], validation, key)
        else:
            _validation(panels[0], validation, key, colour, name)
        panels[1].plot(train.x, train.values("lr"), color=colour, linewidth=1.2)
        speed = train.values("tokens_per_second")
        panels[2].plot(train.x, speed, color=colour, linewidth=0.6, alpha=0.3)
        panels[2].plot(train.x, _smooth(speed), color=colour, linewidth=1.2)
    what = "validation" if bits_per_byte else "loss" if len(runs) == 1 else "loss (dots: validation)"
    _finish(panels, unit, f"{what}, {'bits per byte' if bits_per_byte else 'nats per token'}")
    if len(runs) == 1:
        panels[0].set_title(next(iter(runs)))
    _magnify(panels[0], unit)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _training_loss(panel: Axes, train: _Series, colour: str, name: str) -> None:
    loss = train.values("loss")
    panel.plot(train.x, loss, color=colour, linewidth=0.7, alpha=0.3, label=name and f"{name}, each step")
    panel.plot(train.x, _smooth(loss), color=colour, linewidth=1.5, label=name and f"{name}, smoothed")


def _validation(panel: Axes, validation: _Series, key: str, colour: str, name: str) -> None:
    values = validation.values(key)
    best = min((record for record in validation.records if _is_loss(record)), key=lambda r: r["loss"], default=None)
    if best is not None:
        name += f", best {best['loss']:.3f} ({best['bits_per_byte']:.3f} bits/byte) at step {best['step']:,}"
    size = 3.5 if len(values) <= 60 else 0
    panel.plot(validation.x, values, color=colour, marker="o", markersize=size, linewidth=1.4, label=name)


def _by_source(panel: Axes, validation: _Series, key: str) -> None:
    prefix = f"{key}/"
    names = list(dict.fromkeys(key for record in validation.records for key in record if key.startswith(prefix)))
    for index, name in enumerate(names[:_MOST_SOURCES]):
        colour = _COLOURS[2 + index % (len(_COLOURS) - 2)]
        label = f"  of {_short(name.removeprefix(prefix))}"
        panel.plot(validation.x, validation.values(name), color=colour, linewidth=0.9, linestyle="--", label=label)


def _finish(panels: Sequence[Axes], unit: str, what: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for panel, name in zip(panels, (what, "learning rate", "tokens/s"), strict=True):
        panel.set_ylabel(name)
        panel.grid(visible=True, alpha=0.25)
        panel.margins(x=0.01)
    for panel in panels[1:]:
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    panels[2].yaxis.set_major_formatter(EngFormatter(sep=""))
    panels[2].set_xlabel(unit)
    _number_x(panels[2], unit)
    panels[0].legend(loc="upper right", frameon=False, fontsize=9)


def _magnify(panel: Axes, unit: str) -> None:
    """The later part once more and larger, where it lies so low that the room above it is free."""
    low, high = panel.get_ylim()
    left, right = panel.get_xlim()
    start = left + _LATER * (right - left)
    points = [(line, np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)) for line in panel.lines]
    later = np.concatenate([y[(x >= start) & ~np.isnan(y)] for _, x, y in points]) if points else np.empty(0)
    if later.size < _ENOUGH or later.max() > low + _LOW * (high - low):
        return
    inset = panel.inset_axes((_LATER, 0.4, 0.97 - _LATER, 0.34))
    for line, x, y in points:
        look = {name: getattr(line, f"get_{name}")() for name in _LOOK}
        inset.plot(x, y, **look)
    room = 0.05 * float(np.ptp(later)) or 0.01
    inset.set(xlim=(start, right), ylim=(later.min() - room, later.max() + room))
    inset.tick_params(labelsize=8)
    inset.grid(visible=True, alpha=0.25)
    _number_x(inset, unit)


def _number_x(panel: Axes, unit: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=unit == _STEPS))
    if unit in (_STEPS, _TOKENS):
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def _place(records: Sequence[dict], x: Axis) -> tuple[_Series, _Series]:
    """Training and validation records with their places; a validation lies where its step does."""
    train, validation = _Series([], []), _Series([], [])
    spent = tokens = 0.0
    for record in records:
        if record.get("type") not in ("train", "validation"):
            continue
        spent += _number(record.get("seconds"), absent=0.0)
        tokens = _number(record.get("tokens"), absent=tokens)
        part = train if record["type"] == "train" else validation
        part.x.append({"step": float(record["step"]), "tokens": tokens, "time": spent}[x])
        part.records.append(record)
    return train, validation


def _unit(placed: Iterable[tuple[_Series, _Series]], x: Axis) -> tuple[float, str]:
    if x != "time":
        return 1.0, _STEPS if x == "step" else _TOKENS
    longest = max((at for pair in placed for part in pair for at in part.x), default=0.0)
    return next(((size, name) for size, name in _UNITS if longest >= 2 * size), _UNITS[-1])


def _number(value: object, absent: float = math.nan) -> float:
    """The number of a record; NaN, which leaves a gap, for one that is not finite (written by its name)."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else absent


def _is_loss(record: dict) -> bool:
    return not math.isnan(_number(record.get("loss"))) and not math.isnan(_number(record.get("bits_per_byte")))


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean of the values around each, a fortieth of all; of fewer at the beginning, so that it doesn't lag there."""
    reach, last = max(2, len(values) // 80), len(values) - 1
    sums = list(accumulate((0.0 if math.isnan(value) else value for value in values), initial=0.0))
    counts = list(accumulate((not math.isnan(value) for value in values), initial=0))
    smoothed = []
    for at, value in enumerate(values):
        first, end = at - min(reach, at), min(at + min(reach, at), last) + 1
        smoothed.append(value if math.isnan(value) else (sums[end] - sums[first]) / (counts[end] - counts[first]))
    return smoothed


def _short(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else "..." + text[3 - limit :]
