"""Which format a name says and which the first bytes say.

The content decides where it is unmistakable (compressed, archives, Parquet); among text formats, which look alike, the
extension does. A name may carry one compression and the number of a rotated log: ``auth.log.2.gz`` is plain text.
"""

from __future__ import annotations

import re
from typing import Literal

Format = Literal["text", "html", "jsonl", "json", "csv", "tsv", "parquet", "mbox", "eml", "zip", "tar"]
Compression = Literal["gz", "xz", "zst", "bz2"]

SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".log": "text",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".mbox": "mbox",
    ".eml": "eml",
    ".zip": "zip",
    ".tar": "tar",
    ".tgz": "tar",
    ".txz": "tar",
    ".tbz2": "tar",
    ".tzst": "tar",
}
COMPRESSED_SUFFIXES = frozenset({".gz", ".xz", ".zst", ".bz2"})
ARCHIVES = frozenset({"zip", "tar"})
HEAD_BYTES = 8000

_ROTATED = re.compile(r"(?<=\.log)\.\d{1,4}$|(?<=\.txt)\.\d{1,4}$")
_BZ2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")
_COMPRESSIONS: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b\x08", "gz"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
)
# The fifth byte of a Parquet file begins a Thrift structure; text that begins with PAR1 has none.
_FORMATS: tuple[tuple[bytes, Format], ...] = ((b"PK\3\4", "zip"), (b"PK\5\6", "zip"), (b"PAR1\x15", "parquet"))


def named_format(name: str) -> Format | None:
    """The format that a file's name says, compression apart; None for a name that says none that is read."""
    return SUFFIXES.get(_suffix(_bare(name)))


def why_not_read(name: str) -> str | None:
    """Why a file in a folder or archive is passed over by its name, or None."""
    if name.startswith("."):
        return "hidden"
    if named_format(name) is not None:
        return None
    bare = _bare(name)
    suffix = _suffix(bare)
    packed = name[len(bare) :].lower()
    return f"extension {suffix}{packed}" if suffix or packed else "no extension"


def content_compression(head: bytes) -> Compression | None:
    """The compression that the first bytes show."""
    if _BZ2.match(head):
        return "bz2"
    return next((kind for magic, kind in _COMPRESSIONS if head.startswith(magic)), None)


def content_format(head: bytes) -> Format | None:
    """The format that the first bytes show beyond doubt; None leaves it to the name."""
    if head[257:262] == b"ustar":
        return "tar"
    return next((kind for magic, kind in _FORMATS if head.startswith(magic)), None)


def _bare(name: str) -> str:
    """The name without a compression's extension and without the number of a rotated log."""
    if _suffix(name) in COMPRESSED_SUFFIXES:
        name = name[: name.rindex(".")]
    return _ROTATED.sub("", name)


def _suffix(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f".{suffix.lower()}" if dot and stem else ""
