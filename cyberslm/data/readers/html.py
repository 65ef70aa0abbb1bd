"""HTML to text, by resiliparse: block elements on lines of their own, lists marked, ``pre`` and ``code`` as they are.

Scripts and styles are left out; what is merely hidden stays, for hidden text is evidence in this domain. The encoding
is that of a byte order mark, or UTF-8, or what the page declares, or one of ``data.encodings``.
"""

from __future__ import annotations

import io
import re

from cyberslm.data.readers.encodings import decode, is_charset
from cyberslm.data.readers.place import NO_TEXT, Place, Texts, Unreadable
from cyberslm.data.readers.plain import refuse_binary
from cyberslm.data.readers.streams import whole
from cyberslm.data.readers.text import byte_order_mark
from cyberslm.errors import DataError

_DECLARED = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([A-Za-z0-9._:-]{1,40})""", re.IGNORECASE)
_DECLARED_WITHIN = 1 << 12
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_html(stream: io.BufferedReader, place: Place) -> Texts:
    """The page as one document."""
    refuse_binary(stream)
    data = whole(stream, place, "a page")
    mark, encoding = byte_order_mark(data)
    if encoding is not None:
        text = decode(data[len(mark) :], (encoding,)) if encoding == "utf-8" else _by_mark(data[len(mark) :], encoding)
    else:
        text = decode(data, _encodings(data, place))
    if text is None:
        raise Unreadable("not UTF-8, nor what the page declares; set data.encodings", reason=NO_TEXT, line=1)
    yield html_text(text), 1


def html_text(markup: str) -> str:
    """The text of HTML, its title above it. Raises DataError when the library for it is not installed."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLTree
    except ImportError:
        raise DataError("reading HTML needs resiliparse: pip install 'cyberslm[data]'") from None
    tree = HTMLTree.parse(_SURROGATE.sub("\ufffd", markup))
    text = str(extract_plain_text(tree, preserve_formatting=True, alt_texts=False, main_content=False)).strip("\n")
    title = " ".join((tree.title or "").split())
    return f"{title}\n\n{text}" if title and text.split("\n", 1)[0].strip() != title else text


def _encodings(data: bytes, place: Place) -> tuple[str, ...]:
    declared = _DECLARED.search(data[:_DECLARED_WITHIN])
    name = declared[1].decode("ascii") if declared else ""
    return (name, *place.config.encodings) if is_charset(name) else place.config.encodings


def _by_mark(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return None
