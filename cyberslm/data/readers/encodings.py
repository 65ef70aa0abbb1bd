"""Bytes to text, strictly: no byte is dropped, replaced or guessed at.

UTF-8 is tried first, as other text is hardly ever valid UTF-8 by chance; then the encodings that a setting or the
document itself names. Those must extend ASCII, so that line ends are found before the encoding is known. Names come
from untrusted mail and pages: codecs that aren't character sets (punycode, unicode_escape, zip ...) are unknown here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache

_ASCII = bytes(range(128))
_REFUSED = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"})
_SHIFTING = ("iso2022", "utf-16", "utf-32")
_NAME_CHARS = 40


def decode(data: bytes, encodings: Iterable[str]) -> str | None:
    """Text of ``data`` by the first of UTF-8 and ``encodings`` that fits, or None."""
    for encoding in ("utf-8", *encodings):
        try:
            return data.decode(encoding)
        except UnicodeError:
            continue
    return None


def decode_declared(data: bytes, declared: str | None, encodings: Iterable[str]) -> str | None:
    """As ``decode``, with the encoding that a document says it has, if that is known, before all others."""
    if declared is not None and is_charset(declared):
        try:
            return data.decode(declared)
        except UnicodeError:
            pass
    return decode(data, encodings)


@lru_cache(maxsize=256)
def keeps_ascii(name: str) -> bool:
    """Whether a codec is known and reads every ASCII byte as itself."""
    try:
        if len(name) > _NAME_CHARS or codecs.lookup(name).name in _REFUSED:
            return False
        return _ASCII.decode(name) == _ASCII.decode("ascii")
    except (LookupError, ValueError):
        return False


def is_charset(name: str) -> bool:
    """Whether a name, which may come from an untrusted document, is a character set that is safe to decode with."""
    if keeps_ascii(name):
        return True
    try:
        return len(name) <= _NAME_CHARS and codecs.lookup(name).name.startswith(_SHIFTING)
    except (LookupError, ValueError):
        return False
