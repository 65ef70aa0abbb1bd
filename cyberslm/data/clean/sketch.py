"""MinHash sketches (Broder 1997, by datasketch) and the exact comparison that every reported pair has passed.

A sketch holds the band keys of locality-sensitive hashing (Leskovec, Rajaraman and Ullman, chapter 3) and the words as
numbers, four bytes each, so that a candidate pair is compared by the true Jaccard similarity of its word shingles, not
by an estimate. A shingle's second occurrence is another element, so tables of few values don't all look alike.

Similar is not the same. Advisories come from templates, so two of them may share nine words in ten and yet be about
different things. ``compare`` therefore looks at what was swapped. Two texts are of one *template*, not copies, if each
names a catalogue number (a CVE, a bulletin, a hash) that the other never mentions; if a quarter of the swapped words
are identifiers of equal shape, such as versions; or if more than half of them on both sides are identifiers, names, or
words that one side repeats and the other lacks (a third, if there are such identifiers among them). In texts that are
full of names and numbers anyway it takes more: twice their usual share.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cyberslm.data.clean import words
from cyberslm.errors import ConfigError

if TYPE_CHECKING:
    from datasketch import MinHash

# Shingles hashed at once: 8,192 x 128 permutations x 4 bytes stay in a processor's cache.
_CHUNK = 1 << 13
# A text with a smaller share of distinct shingles is a table of few values; copies of it are found if they are equal.
_DIVERSITY = 0.3
# Where nearly every word is a name or a number, as in a list of hosts, swapped ones say nothing about a template.
_ALL_NAMES = 0.8
_GOLDEN = 0x9E3779B97F4A7C15
# A pair at the threshold becomes a candidate with at least this probability.
_FOUND = 0.98

IDENTITIES = 4

Verdict = Literal["copy", "template", "different"]


class Sketch(NamedTuple):
    """``bands``: uint64 keys; ``words``: uint32; ``identities``: uint32, equal for texts that name the same things."""

    bands: bytes
    words: bytes
    identities: bytes


class Bands(NamedTuple):
    number: int
    rows: int


def bands_for(threshold: float, permutations: int) -> Bands:
    """As many rows a band as still find a pair at ``threshold`` with probability 0.98. Raises ConfigError."""
    for rows in range(permutations, 0, -1):
        number = permutations // rows
        if 1 - (1 - threshold**rows) ** number >= _FOUND:
            return Bands(number, rows)
    raise ConfigError(
        f"permutations: {permutations} are too few to find pairs at threshold {threshold}; raise permutations to 128"
    )


class Sketcher:
    """Text -> sketch, a pure function that can be sent to a worker. Raises ConfigError without the ``data`` extra."""

    def __init__(self, *, threshold: float, shingle_words: int, permutations: int, min_words: int) -> None:
        self.bands = bands_for(threshold, permutations)
        self._shingle_words = shingle_words
        self._min_words = max(min_words, shingle_words)
        self._numbers = words.Numbers(words.marked_number)
        self._minhash = _new_minhash(self.bands.number * self.bands.rows)

    def sketch(self, text: str) -> Sketch | None:
        """None for a text with too few words to be judged by its words."""
        numbers = words.numbers_of(text, words.TOKEN, self._numbers, np.uint32)
        if numbers.size < self._min_words:
            return None
        shingles = shingles_of(numbers, self._shingle_words)
        if shingles.distinct < max(self._min_words - self._shingle_words + 1, _DIVERSITY * shingles.all.size):
            return None
        minhash = self._minhash.copy()
        for start in range(0, shingles.all.size, _CHUNK):
            minhash.update_batch((shingles.all[start : start + _CHUNK] >> np.uint64(32)).tolist())
        rows = minhash.hashvalues.reshape(self.bands).astype(np.uint64)
        return Sketch(words.combined(rows.T).tobytes(), numbers.tobytes(), _identities(numbers).tobytes())


def _identities(numbers: words.Words) -> words.Words:
    """``IDENTITIES`` min-hashes of the catalogue numbers, or where there are none of the other identifiers."""
    kinds = words.kinds(numbers)
    telling = numbers[kinds == words.CATALOGUE]
    if not telling.size:
        telling = numbers[kinds == words.IDENTIFIER]
    if not telling.size:
        return np.zeros(IDENTITIES, np.uint32)
    salted = telling.astype(np.uint64)[None, :] + (np.arange(IDENTITIES, dtype=np.uint64)[:, None] << np.uint64(32))
    return (words.mixed(salted).min(axis=1) >> np.uint64(32)).astype(np.uint32)


class Comparable:
    """A text prepared for ``compare``."""

    def __init__(self, numbers: words.Words, shingle_words: int) -> None:
        self.words = numbers
        self._shingle_words = shingle_words
        self.catalogue = frozenset(numbers[words.kinds(numbers) == words.CATALOGUE].tolist())

    @functools.cached_property
    def shingles(self) -> words.Hashes:
        """Sorted, each once."""
        return np.sort(shingles_of(self.words, self._shingle_words).all)


class Shingles(NamedTuple):
    all: words.Hashes
    """One for each place; those that are equal are told apart by their occurrence."""
    distinct: int


def shingles_of(numbers: words.Words, shingle_words: int) -> Shingles:
    plain = words.windows(words.without_marks(numbers).astype(np.uint64), shingle_words)
    order = np.argsort(plain, kind="stable")
    is_first = np.ones(plain.size, bool)
    is_first[1:] = plain[order[1:]] != plain[order[:-1]]
    places = np.arange(plain.size)
    occurrence = places - np.maximum.accumulate(np.where(is_first, places, 0))
    plain[order] += occurrence.astype(np.uint64) * np.uint64(_GOLDEN)
    return Shingles(words.mixed(plain), int(is_first.sum()))


def compare(one: Comparable, other: Comparable, *, threshold: float, templates: bool) -> Verdict:
    """Whether two texts are near copies, made from one template (when ``templates``), or simply different.

    Candidates that name different catalogue numbers are not compared any further.
    """
    if templates and not one.catalogue <= other.catalogue and not other.catalogue <= one.catalogue:
        return "template"
    small, large = sorted((one.shingles.size, other.shingles.size))
    if small < threshold * large:
        return "different"
    shared = np.intersect1d(one.shingles, other.shingles, assume_unique=True).size
    if shared < threshold * (small + large - shared):
        return "different"
    return "template" if templates and _is_template(one.words, other.words) else "copy"


def _is_template(one: words.Words, other: words.Words) -> bool:
    both = np.concatenate((one, other))
    order = np.argsort(both, kind="stable")
    keys = words.without_marks(both[order])
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    ends = np.append(starts[1:], keys.size)
    last = both[order[ends - 1]]
    mine = np.add.reduceat((order < one.size).astype(np.int64), starts)
    theirs = ends - starts - mine
    sides = [_Side(mine, theirs, last), _Side(theirs, mine, last)]
    swapped = min(side.surplus for side in sides)
    alike = int(np.minimum(sides[0].shapes, sides[1].shapes).sum())
    telling = min(side.telling for side in sides)
    usual = float((words.kinds(both) >= words.NAME).mean())
    if swapped == 0 or usual > _ALL_NAMES:
        return False
    beyond_usual = min(2 * usual, 0.9)
    return (
        alike >= max(1 / 4, beyond_usual) * swapped
        or telling > max(1 / 2, beyond_usual) * swapped
        or (alike > 0 and telling >= max(1 / 3, beyond_usual) * swapped)
    )


class _Side:
    """What one text has beyond the other: ``mine`` and ``theirs`` count each of ``distinct`` words."""

    def __init__(self, mine: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], distinct: words.Words) -> None:
        only_here, kinds = (mine > 0) & (theirs == 0), words.kinds(distinct)
        self.surplus = int(np.maximum(mine - theirs, 0).sum())
        self.telling = int(mine[only_here & ((kinds >= words.NAME) | (mine > 1))].sum())
        identifiers = only_here & (kinds >= words.IDENTIFIER)
        self.shapes = np.bincount(words.shapes(distinct[identifiers]), mine[identifiers], minlength=words.NUM_SHAPES)


def _new_minhash(permutations: int) -> MinHash:
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise ConfigError("near_duplicates needs datasketch; install it with: pip install 'cyberslm[data]'") from error
    return MinHash(num_perm=permutations, hashfunc=int, scheme="affine32")
