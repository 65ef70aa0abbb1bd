"""Text cut into passages, and an even sample of them that fits a byte limit however long the stream turns out to be."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

PASSAGE_CHARS = 2048
_GOLDEN = 0x9E3779B97F4A7C15


class PassageSample:
    """The passages of a stream that fit ``limit`` bytes, spread evenly over it.

    Passage ``i`` has the phase ``i * golden ratio mod 1``, whose smallest values are evenly spread over ``i`` at every
    cut-off; the smallest phases that fit are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int, str, int]] = []
        self._seen = 0
        self._cutoff = 1 << 64
        self.bytes_seen = 0
        self.bytes_used = 0

    def add(self, text: str) -> None:
        """Offer the passages of a document (valid Unicode)."""
        for passage in _passages(text):
            self._offer(passage, len(passage.encode()))

    def passages(self) -> list[str]:
        """What is kept, in the order of the stream."""
        return [passage for _, _, passage, _ in sorted(self._heap, key=lambda item: item[1])]

    def _offer(self, passage: str, size: int) -> None:
        self.bytes_seen += size
        phase = self._seen * _GOLDEN % (1 << 64)
        self._seen += 1
        if phase >= self._cutoff:
            return
        heapq.heappush(self._heap, (-phase, self._seen, passage, size))
        self.bytes_used += size
        while self.bytes_used > self._limit and len(self._heap) > 1:
            last = heapq.heappop(self._heap)
            self._cutoff = -last[0]
            self.bytes_used -= last[3]


def _passages(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PASSAGE_CHARS:
        end = _border(text, start, start + PASSAGE_CHARS)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _border(text: str, start: int, end: int) -> int:
    """The last place before ``end`` where a run of newlines, or else of spaces, begins; or else ``end``."""
    for mark in "\n ":
        at = text.rfind(mark, start + 1, end)
        while at > start and text[at - 1] == mark:
            at -= 1
        if at > start:
            return at
    return end
