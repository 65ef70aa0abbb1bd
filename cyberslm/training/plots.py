"""The loss curve of a run as a PNG, drawn from its `metrics.jsonl`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def loss_curve(records: Sequence[dict], *, title: str) -> bytes:
    """PNG of training loss (each step, and smoothed), validation loss and learning rate over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [r for r in records if r.get("type") == "train" and isinstance(r.get("loss"), int | float)]
    validation = [r for r in records if r.get("type") == "validation" and isinstance(r.get("loss"), int | float)]
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = [r["step"] for r in train]
    axes.plot(steps, [r["loss"] for r in train], color="#b8c4d6", linewidth=0.8, label="train, each step")
    axes.plot(steps, _smooth([r["loss"] for r in train]), color="#1f4e8c", linewidth=1.6, label="train, smoothed")
    if validation:
        axes.plot(
            [r["step"] for r in validation],
            [r["loss"] for r in validation],
            color="#c8501e",
            marker="o",
            markersize=3.5,
            linewidth=1.4,
            label="validation",
        )
        best = min(validation, key=lambda r: r["loss"])
        axes.annotate(
            f"best {best['loss']:.3f} ({best['bits_per_byte']:.3f} bits/byte)",
            (0.02, 0.03),
            xycoords="axes fraction",
            fontsize=9,
            color="#c8501e",
        )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title=title)
    axes.grid(visible=True, alpha=0.25)
    rates = axes.twinx()
    rates.plot(steps, [r["lr"] for r in train], color="#7a9a3a", linewidth=1.0, linestyle=":", label="learning rate")
    rates.set_ylabel("learning rate")
    rates.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *rates.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right", frameon=False, fontsize=9)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    smoothed, mean, mass = [], 0.0, 0.0
    for value in values:
        mean, mass = weight * mean + (1 - weight) * value, weight * mass + 1 - weight
        smoothed.append(mean / mass)
    return smoothed
