"""What a tokenizer costs and keeps: tokens for text and for indicators, texts that don't come back, idle pieces.

Only counts leave this module, never the text measured. Special tokens are not counted; a word is a run of characters
between white space, so that fertility can be compared between tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from cyberslm.text.probes import indicators, round_trip_probes
from cyberslm.text.tokenizer import Tokenizer

RARE = 10


class SourceCost(NamedTuple):
    """One source, encoded: fertility is tokens per word."""

    bytes: int
    words: int
    tokens: int
    not_restored: int
    bytes_per_token: float
    fertility: float


class IndicatorCost(NamedTuple):
    """Mean over the strings of one kind."""

    tokens: float
    bytes_per_token: float


class PieceUse(NamedTuple):
    """Learned pieces that the sources of the report use never, or fewer than 10 times, as shares of all of them."""

    learned: int
    unused: float
    rare: float


@dataclass(frozen=True, kw_only=True)
class TokenizerReport:
    """One tokenizer's figures. ``use`` is None without text; ``probes_not_restored`` are spelled in ASCII."""

    name: str
    sha256: str
    vocab_size: int
    losses: tuple[str, ...]
    sources: Mapping[str, SourceCost]
    indicators: Mapping[str, IndicatorCost]
    probes: int
    probes_not_restored: tuple[str, ...]
    use: PieceUse | None

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        rows = {
            "sources": {name: cost._asdict() for name, cost in self.sources.items()},
            "indicators": {kind: cost._asdict() for kind, cost in self.indicators.items()},
            "use": None if self.use is None else self.use._asdict(),
        }
        return asdict(self) | rows


def measure(name: str, tokenizer: Tokenizer, sources: Mapping[str, Sequence[str]]) -> TokenizerReport:
    """The report of one tokenizer on passages of text by source."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    costs = {source: _source(tokenizer, passages, counts) for source, passages in sources.items()}
    probes = round_trip_probes()
    lost = [text for text in probes if not _comes_back(tokenizer, text)]
    return TokenizerReport(
        name=name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        losses=tokenizer.losses,
        sources=costs,
        indicators={kind: _indicator(tokenizer, strings) for kind, strings in indicators().items()},
        probes=len(probes),
        probes_not_restored=tuple(map(ascii, lost)),
        use=_use(tokenizer, counts) if counts.any() else None,
    )


def _source(tokenizer: Tokenizer, passages: Sequence[str], counts: np.ndarray) -> SourceCost:
    size = words = tokens = lost = 0
    for passage in passages:
        ids = tokenizer.encode(passage, add_special_tokens=False)
        counts += np.bincount(ids, minlength=len(counts))
        size += len(passage.encode())
        words += len(passage.split())
        tokens += len(ids)
        lost += tokenizer.decode(ids) != passage
    return SourceCost(size, words, tokens, lost, size / max(1, tokens), tokens / max(1, words))


def _indicator(tokenizer: Tokenizer, strings: Sequence[str]) -> IndicatorCost:
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in strings)
    size = sum(len(text.encode()) for text in strings)
    return IndicatorCost(tokens / len(strings), size / max(1, tokens))


def _comes_back(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream_decoder()
    return text == tokenizer.decode(ids) == "".join([*map(stream.push, ids), stream.finish()])


def _use(tokenizer: Tokenizer, counts: np.ndarray) -> PieceUse:
    """Single bytes and control pieces are there in any case and don't count as learned."""
    learned = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) > 1]
    found = counts[learned]
    size = max(1, len(learned))
    return PieceUse(len(learned), float((found == 0).sum()) / size, float((found < RARE).sum()) / size)
