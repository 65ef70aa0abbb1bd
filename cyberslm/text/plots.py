"""Tokenizer reports side by side as a PNG: bytes per token of each source, tokens per indicator of each kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cyberslm.errors import ConfigError
from cyberslm.text.report import TokenizerReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1f4e8c", "#c8501e", "#7a9a3a", "#8a5aa8", "#b08a2e", "#4a8f94", "#777777")


def report_chart(reports: Sequence[TokenizerReport]) -> bytes:
    """A PNG; raises ConfigError when matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'cyberslm[plots]'") from None
    sources, kinds = list(reports[0].sources), list(reports[0].indicators)
    rows = (len(kinds) + len(sources)) * (len(reports) + 1)
    figure = Figure(figsize=(9, min(40, 2.2 + 0.17 * rows)), dpi=120, layout="constrained")
    heights = [len(sources), len(kinds)] if sources else [len(kinds)]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    if sources:
        costs = [[report.sources[source].bytes_per_token for source in sources] for report in reports]
        _bars(
            axes[0],
            [_short(source) for source in sources],
            costs,
            "bytes per token (more = shorter sequences)",
            "{:.2f}",
        )
    tokens = [[report.indicators[kind].tokens for kind in kinds] for report in reports]
    _bars(axes[-1], kinds, tokens, "tokens per indicator (fewer = shorter sequences)", "{:.1f}")
    names = [f"{_short(report.name)} ({report.vocab_size:,} pieces)" for report in reports]
    figure.legend(axes[-1].containers, names, loc="outside upper center", ncols=min(2, len(names)), frameon=False)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _bars(axes: Axes, labels: Sequence[str], values: Sequence[Sequence[float]], title: str, form: str) -> None:
    """Groups of horizontal bars, one bar per tokenizer, the first on top."""
    thickness = 0.8 / len(values)
    for place, row in enumerate(values):
        at = [group + (place - (len(values) - 1) / 2) * thickness for group in range(len(labels))]
        bars = axes.barh(at, row, height=thickness * 0.92, color=_COLOURS[place % len(_COLOURS)])
        axes.bar_label(bars, labels=[form.format(value) for value in row], padding=3, fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    axes.set_xlabel(title)
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _short(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else "..." + text[3 - limit :]
