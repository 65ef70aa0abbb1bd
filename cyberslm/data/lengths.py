"""How long the documents of a split are, in tokens: quantiles, a coarse histogram for a terminal, and a PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cyberslm.data.store import Ints, TokenStore
from cyberslm.errors import ConfigError

CHUNK = 1 << 20
_COLOURS = ("#1f4e8c", "#c8501e", "#7a9a3a", "#8a5aa8", "#b08a2e", "#4a8f94", "#777777")


class Lengths(NamedTuple):
    """Documents, tokens, and the tokens of the shortest, median, mean, 95th percentile and longest document."""

    documents: int
    tokens: int
    shortest: int
    median: int
    mean: float
    p95: int
    longest: int

    @classmethod
    def of(cls, sizes: Ints) -> Lengths:
        low, middle, high, top = (int(value) for value in np.quantile(sizes, [0, 0.5, 0.95, 1], method="nearest"))
        return cls(sizes.size, int(sizes.sum()), low, middle, float(sizes.mean()), high, top)


def document_sizes(store: TokenStore) -> Ints:
    """Tokens of every document, ``(num_documents,)``; 8 bytes each."""
    count = store.num_documents
    ends = np.concatenate([store.ends(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)])
    return np.diff(ends, prepend=0)


def bins(sizes: Ints) -> list[tuple[int, int, int]]:
    """(from, below, documents) for lengths of 1, 2 to 3, 4 to 7 and so on."""
    powers = np.bincount(np.log2(np.maximum(sizes, 1)).astype(np.int64))
    return [(1 << power, 2 << power, int(count)) for power, count in enumerate(powers)]


def length_chart(sizes: Mapping[str, Ints], *, row: int | None = None) -> bytes:
    """Histograms of document lengths by source as a PNG, a mark at ``row`` tokens. ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'cyberslm[plots]'") from None
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    low, top = min(int(each.min()) for each in sizes.values()), max(int(each.max()) for each in sizes.values())
    edges = np.unique(np.geomspace(max(1, low), top + 1, 48).astype(np.int64))
    for place, (name, each) in enumerate(sizes.items()):
        label = f"{name}: {each.size:,} documents, {int(each.sum()):,} tokens"
        axes.hist(each, bins=list(edges), histtype="step", linewidth=1.6, color=_COLOURS[place % 7], label=label)
    if row is not None:
        axes.axvline(row, color="#999999", linestyle="--", linewidth=1, label=f"a row of {row:,} tokens")
    axes.set_xscale("log")
    plain, none = FuncFormatter(lambda value, _: f"{value:,.0f}"), NullFormatter()
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_formatter(plain if top < 10 * low else none)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()
