"""What counts as an identifier, kind by kind, as automata that read bytes one at a time.

An identifier is made of core bytes and of joiners, which belong to it only when core follows: the dots of a domain, the
hyphens of a CVE id, the punctuation that may end a URL. It is the longest such run, so that no part of it is judged
alone, and it stays one however it goes on. Where its spelling stands against the allowed ones is a node of a trie:

    CLEAR   no identifier here             DONE    one that is allowed
    OPEN    the beginning of an allowed    WRONG   nothing that follows can make it allowed

Everything is ASCII and byte-wise; other bytes belong to URLs only. Defanged spellings (``[.]``, ``(dot)``, ``[://]``)
are read as what they stand for. `find` gives the identifiers of a finished text by regular expressions, in linear time:
a second opinion that the automata must share (tests).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple

DEAD = -1
_WORD = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_")
_ALNUM = _WORD - {ord("_")}
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")
_DIGITS = frozenset(b"0123456789")
_HEX = frozenset(b"0123456789abcdef")
_LABEL = _WORD | {ord("-")}
_LOCAL = _ALNUM | frozenset(b"._%+-")
_URL_ENDS = frozenset(range(0x21)) | frozenset(b"\x7f\"'<>`\\|{}^")
_URL_JOINS = frozenset(b".,;:!?()[]")
_DOT, _COLON, _AT, _HYPHEN = ord("."), ord(":"), ord("@"), ord("-")
HASH_DIGITS = 32
MAX_VALUE_BYTES = 2048

DEFANGED = {
    b"[.]": b".",
    b"(.)": b".",
    b"[dot]": b".",
    b"(dot)": b".",
    b"[@]": b"@",
    b"(@)": b"@",
    b"[at]": b"@",
    b"(at)": b"@",
    b"[:]": b":",
    b"[://]": b"://",
}
_DEFANGED = re.compile(b"|".join(map(re.escape, DEFANGED)), re.IGNORECASE)
HELD = frozenset(spelt[:end] for spelt in DEFANGED for end in range(1, len(spelt)))


class Status(IntEnum):
    """Of the text so far, were it to end here."""

    CLEAR = 0
    DONE = 1
    OPEN = 2
    WRONG = 3


class Reading(NamedTuple):
    """Where an automaton is: its own ``phase``, whether an identifier has begun, and the trie's nodes after the last
    core byte and after the joiners behind it."""

    phase: tuple[int, ...] = ()
    begun: bool = False
    last: int = DEAD
    now: int = DEAD


START = Reading()


class Trie:
    """The allowed values of one kind."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.ends: set[int] = set()
        for value in values:
            node = 0
            for byte in value:
                if byte not in self.children[node]:
                    self.children[node][byte] = len(self.children)
                    self.children.append({})
                node = self.children[node][byte]
            self.ends.add(node)

    def walk(self, node: int, byte: int) -> int:
        return self.children[node].get(byte, DEAD) if node != DEAD else DEAD

    def status(self, at: Reading) -> Status:
        if not at.begun:
            return Status.CLEAR
        if at.last in self.ends:
            return Status.DONE
        return Status.OPEN if at.now != DEAD and self.children[at.now] else Status.WRONG


Step = Callable[[Reading, int, Trie], Reading | None]


class Kind(NamedTuple):
    """One kind of identifier. ``step`` gives None where the byte ends what was read, so that it is read anew."""

    name: str
    step: Step
    pattern: re.Pattern[bytes]
    folds_case: bool = True
    keep: Callable[[bytes], bytes | None] = lambda value: value


def _core(at: Reading, byte: int, trie: Trie, phase: tuple[int, ...], *, begun: bool) -> Reading:
    node = trie.walk(at.now, byte)
    return Reading(phase, at.begun or begun, node, node)


def _join(at: Reading, byte: int, trie: Trie, phase: tuple[int, ...]) -> Reading:
    return Reading(phase, at.begun, at.last, trie.walk(at.now, byte))


def _begin(byte: int, trie: Trie, phase: tuple[int, ...]) -> Reading:
    node = trie.walk(0, byte)
    return Reading(phase, False, node, node)


def _cve(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (n,) n bytes of "cve-" read; (5,) in digits; (6,) behind their hyphen."""
    place = at.phase[0] if at.phase else 0
    if place == 0:
        return _begin(byte, trie, (1,)) if byte == ord("c") else START
    if place < 4:
        return _core(at, byte, trie, (place + 1,), begun=False) if byte == b"cve-"[place] else None
    if byte in _DIGITS:
        return _core(at, byte, trie, (5,), begun=True)
    return _join(at, byte, trie, (6,)) if place == 5 and byte == _HYPHEN else None


def _ipv4(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (parts up to four, behind a dot)."""
    if not at.phase:
        return _begin(byte, trie, (1, 0)) if byte in _DIGITS else START
    parts, dotted = at.phase
    if byte in _DIGITS:
        parts = min(4, parts + dotted)
        return _core(at, byte, trie, (parts, 0), begun=parts == 4)
    return _join(at, byte, trie, (parts, 1)) if byte == _DOT and not dotted else None


def _domain(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (label: 0 the first one, 1 behind a dot, 2 one letter, 3 a qualified or other label)."""
    if not at.phase:
        return _begin(byte, trie, (0,)) if byte in _ALNUM else START
    (label,) = at.phase
    if byte in _LABEL:
        after = (0, 2 if byte in _LETTERS else 3, 3, 3)[label]
        return _core(at, byte, trie, (after,), begun=label == 2)
    return _join(at, byte, trie, (1,)) if byte == _DOT and label != 1 else None


def _hash(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (digits, up to 32)."""
    if byte not in _HEX:
        return None if at.phase else START
    if not at.phase:
        return _begin(byte, trie, (1,))
    count = min(HASH_DIGITS, at.phase[0] + 1)
    return _core(at, byte, trie, (count,), begun=count == HASH_DIGITS)


def _email(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (0,) before the @; (1,) behind it."""
    if not at.phase:
        return _begin(byte, trie, (0,)) if byte in _ALNUM else START
    (side,) = at.phase
    if side == 0 and byte in _LOCAL:
        return _core(at, byte, trie, (0,), begun=False)
    if side == 1 and byte in _WORD:
        return _core(at, byte, trie, (1,), begun=True)
    if byte == _AT or (side == 1 and byte in (_DOT, _HYPHEN)):
        return _join(at, byte, trie, (1,))
    return None


def _url(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (0,) scheme; (1,) (2,) (3,) so much of "://" read; (4,) the rest."""
    lower = byte | 0x20 if 0x41 <= byte <= 0x5A else byte
    if not at.phase:
        return _begin(byte, trie, (0,)) if lower in _ALNUM else START
    (place,) = at.phase
    if place == 0 and lower in _ALNUM:
        return _core(at, byte, trie, (0,), begun=False)
    if place < 3:
        return _join(at, byte, trie, (place + 1,)) if byte == b"://"[place] else None
    if byte in _URL_ENDS:
        return None
    if byte in _URL_JOINS:
        return _join(at, byte, trie, (place,))
    return _core(at, byte, trie, (4,), begun=True)


_IN_WORD = Reading((0, 0, 0, 0))


def _ipv6(at: Reading, byte: int, trie: Trie) -> Reading | None:
    """Phases: (colons up to six, or seven with a double one; ends in a colon; has a digit; is a candidate)."""
    colons, colon, digit, candidate = at.phase or (0, 0, 0, 1)
    if not candidate:
        return _IN_WORD if byte in _WORD else START
    if byte in _HEX:
        phase = (colons, 0, 1, 1)
    elif byte == _COLON:
        phase = (7 if colon else max(colons, min(6, colons + 1)), 1, digit, 1)
    elif byte == _DOT and at.phase:
        phase = (colons, 0, digit, 1)
    elif byte in _WORD:
        return _IN_WORD
    else:
        return None if at.phase else START
    if not at.phase:
        return _begin(byte, trie, phase)
    if byte == _DOT or (byte == _COLON and not colon):
        return _join(at, byte, trie, phase)
    return _core(at, byte, trie, phase, begun=phase[0] >= 6 and phase[2] == 1)


def _qualified(value: bytes) -> bytes | None:
    return value if any(len(label) > 1 and label[0] in _LETTERS for label in value.split(b".")[1:]) else None


def _trimmed_url(value: bytes) -> bytes | None:
    value = value.rstrip(bytes(_URL_JOINS))
    return value if value.partition(b"://")[2] else None


def _trimmed_ipv6(value: bytes) -> bytes | None:
    while value and (value[-1] == _DOT or (value[-1] == _COLON and value[-2:] != b"::")):
        value = value[:-1]
    body = value.rstrip(b".")
    compressed = b"::" in body
    many = re.match(rb"(?:[0-9a-f.]*:){6}", body) and body[-1:] != b":"
    return value if (compressed or many) and _HEX & set(value) else None


def _addressed(value: bytes) -> bytes | None:
    return value if b"@" in value else None


def _four_parts(value: bytes) -> bytes | None:
    return value if value.count(b".") >= 3 else None


_CVE = rb"cve-[0-9]++(?:-[0-9]++)*+"
_IPV4 = rb"[0-9]++(?:\.[0-9]++)*+"
_IPV6 = rb"(?<![0-9a-z_])[0-9a-f:][0-9a-f:.]*+"
_DOMAIN = rb"[a-z0-9][a-z0-9_-]*+(?:\.[a-z0-9_-]++)*+"
_HASH = rb"[0-9a-f]{32,}+"
_EMAIL = rb"[a-z0-9][a-z0-9._%+-]*+(?:@[@.-]*+[a-z0-9_](?:[@.-]*+[a-z0-9_])*)?"
_URL = rb"[A-Za-z0-9]++(?:://[^\x00-\x20\x7f\"'<>`\\|{}^]*+)?"

KINDS = {
    kind.name: kind
    for kind in (
        Kind("cve", _cve, re.compile(_CVE)),
        Kind("ipv4", _ipv4, re.compile(_IPV4), keep=_four_parts),
        Kind("ipv6", _ipv6, re.compile(_IPV6), keep=_trimmed_ipv6),
        Kind("domain", _domain, re.compile(_DOMAIN), keep=_qualified),
        Kind("hash", _hash, re.compile(_HASH)),
        Kind("email", _email, re.compile(_EMAIL), keep=_addressed),
        Kind("url", _url, re.compile(_URL), folds_case=False, keep=_trimmed_url),
    )
}


def refang(text: bytes) -> bytes:
    """Defanged spellings as what they stand for."""
    return _DEFANGED.sub(lambda found: DEFANGED[found[0].lower()], text)


def find(kind: Kind, text: bytes) -> set[bytes]:
    """The identifiers of a kind in a text, canonical: refanged, and in lower case where case means nothing."""
    plain = refang(text)
    found = (kind.keep(match[0]) for match in kind.pattern.finditer(plain.lower() if kind.folds_case else plain))
    return {value for value in found if value is not None}


class IdentifierAutomaton:
    """Reads the bytes of a text for one kind; a state is what is held of a defanged spelling, and a `Reading`.

    ``step`` gives None where an identifier would come about that isn't allowed and can't become so; ``final`` says
    whether the text may end.
    """

    def __init__(self, kind: Kind, values: Iterable[bytes]) -> None:
        self._kind = kind
        self._trie = Trie(value for value in values if len(value) <= MAX_VALUE_BYTES)
        self.start: tuple[bytes, Reading] = (b"", START)

    def step(self, state: tuple[bytes, Reading], byte: int) -> tuple[bytes, Reading] | None:
        after, wrong = self._advance(state, byte)
        return None if wrong or self._status(after) is Status.WRONG else after

    def follow(self, state: tuple[bytes, Reading], byte: int) -> tuple[bytes, Reading]:
        """`step` in a text that is given and may hold anything."""
        return self._advance(state, byte)[0]

    def final(self, state: tuple[bytes, Reading]) -> bool:
        return self._status(state) in (Status.CLEAR, Status.DONE)

    def leads(self, state: tuple[bytes, Reading]) -> set[int]:
        """Bytes that may lead on to an allowed identifier, where the text may not end."""
        held, at = state
        bytes_on = set(self._trie.children[at.now]) if at.now != DEAD else set()
        return bytes_on | {spelt[len(held)] for spelt in DEFANGED if held and spelt.startswith(held.lower())}

    def _advance(self, state: tuple[bytes, Reading], byte: int) -> tuple[tuple[bytes, Reading], bool]:
        """The state after a byte, and whether what was held made something wrong come about before it."""
        held, at = state
        held += bytes([byte])
        wrong = False
        while held and held.lower() not in HELD:
            plain = DEFANGED.get(held.lower(), b"")
            at, broken = self._read(at, plain or held[:1])
            held = b"" if plain else held[1:]
            wrong |= broken
        return (held, at), wrong

    def _read(self, at: Reading, data: bytes) -> tuple[Reading, bool]:
        """The reading after some bytes, and whether one of them made or broke off an identifier wrongly."""
        wrong = False
        for byte in data.lower() if self._kind.folds_case else data:
            before, after = at, self._kind.step(at, byte, self._trie)
            at = self._kind.step(START, byte, self._trie) or START if after is None else after
            broken = before.begun and (after is None or not at.begun) and before.last not in self._trie.ends
            wrong |= broken or self._trie.status(at) is Status.WRONG
        return at, wrong

    def _status(self, state: tuple[bytes, Reading]) -> Status:
        """As if what is held came to nothing, or else as the beginning of what it may become."""
        held, at = state
        plain, wrong = self._read(at, held)
        if not wrong:
            return self._trie.status(plain)
        ways = (DEFANGED[spelt] for spelt in DEFANGED if held and spelt.startswith(held.lower()))
        return Status.WRONG if all(self._read(at, way)[1] for way in ways) else Status.OPEN
