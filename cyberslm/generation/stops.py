"""`StopStrings`: finds where a text ends, as it arrives in parts, and lets no part of a stop string out.

Each stop string runs its own Knuth-Morris-Pratt automaton, whose state is the longest beginning of the string that the
text ends with. So the longest state of all is what must be held back, and a string is found at the character that
completes it, whatever parts the text comes in. The first to be complete ends the text; of several at one character, the
longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that may be shown now, and whether a stop string ended it."""

    text: str
    stopped: bool = False


class StopStrings:
    """``stops`` are not empty; without any, text passes through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> Released:
        """Take more text. After a stop nothing more is asked for."""
        if not self._automata:
            return Released(text)
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            found = [automaton.length for automaton in self._automata if automaton.complete(character)]
            if found:
                self._held = ""
                return Released(held[: end - max(found)], stopped=True)
        unsafe = max(automaton.state for automaton in self._automata)
        self._held = held[len(held) - unsafe :]
        return Released(held[: len(held) - unsafe])

    def finish(self) -> str:
        """What was held back, when the text ends otherwise."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, word: str) -> None:
        self.word, self.length, self.state = word, len(word), 0
        self._borders = [0] * len(word)
        border = 0
        for place in range(1, len(word)):
            while border and word[place] != word[border]:
                border = self._borders[border - 1]
            border += word[place] == word[border]
            self._borders[place] = border

    def complete(self, character: str) -> bool:
        """Go on by one character; whether the word is complete."""
        while self.state and self.word[self.state] != character:
            self.state = self._borders[self.state - 1]
        self.state += self.word[self.state] == character
        return self.state == self.length
