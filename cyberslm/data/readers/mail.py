"""Mail: one message (eml) or many (mbox), each a document of chosen headers and its text.

The text is that of the text/plain parts, or of the HTML parts where there are none; the rest is counted, not read. A
message in an mbox begins at a "From " line after a blank one (RFC 4155); one level of ``>From`` quoting is undone.
"""

from __future__ import annotations

import binascii
import email
import io
import re
from collections.abc import Iterator
from email.errors import MessageError
from email.header import decode_header
from email.message import Message
from email.policy import compat32
from typing import NamedTuple

from cyberslm.data.readers.encodings import decode_declared
from cyberslm.data.readers.html import html_text
from cyberslm.data.readers.place import BAD_RECORD, NO_TEXT, Place, Texts, Unreadable
from cyberslm.data.readers.streams import CHUNK, whole

ATTACHMENT = "mail attachment"
MAX_PARTS = 1000
MAX_DEPTH = 50

_QUOTED_FROM = re.compile(rb">+From ")


def read_eml(stream: io.BufferedReader, place: Place) -> Texts:
    """The message as one document."""
    yield from _texts(whole(stream, place, "a mail"), 1, place)


def read_mbox(stream: io.BufferedReader, place: Place) -> Texts:
    """The messages, each with the line of its "From " line."""
    for data, line in _messages(stream, place):
        if data is None:
            place.bad_stream(place.too_long("a mail", line))
        else:
            yield from _texts(data, line, place)


def _messages(stream: io.BufferedReader, place: Place) -> Iterator[tuple[bytes | None, int]]:
    """The bytes of each message, None for one that is too long, and its line."""
    held: list[bytes] = []
    size, line, start = 0, 0, 0
    blank, whole_line = True, True
    try:
        while raw := stream.readline(CHUNK):
            line += whole_line
            if whole_line and blank and raw.startswith(b"From "):
                if start:
                    yield _kept(held, size, place), start
                held, size, start = [], 0, line
            elif not start:
                if raw.strip():
                    raise Unreadable('no "From " line at the beginning, which an mbox has', line=line)
            else:
                size += len(raw)
                if size <= place.config.max_document_bytes:
                    held.append(raw[1:] if whole_line and _QUOTED_FROM.match(raw) else raw)
            blank = whole_line and not raw.strip(b"\r\n")
            whole_line = raw.endswith(b"\n")
    except Unreadable as error:
        error.line = line if error.line is None else error.line
        raise
    if start:
        yield _kept(held, size, place), start


def _kept(held: list[bytes], size: int, place: Place) -> bytes | None:
    return b"".join(held) if size <= place.config.max_document_bytes else None


class _Part(NamedTuple):
    kind: str
    attached: bool
    charset: str | None
    data: bytes


class _Mail(NamedTuple):
    headers: list[str]
    parts: list[_Part]


def _texts(data: bytes, line: int, place: Place) -> Texts:
    try:
        mail = _parsed(data, place.config.mail_headers)
        body = _body(mail.parts, line, place)
    except Unreadable as error:
        place.bad(error.problem, reason=error.reason, line=line, fix="set data.encodings, mend or remove it,")
        return
    yield "\n\n".join(part for part in ("\n".join(mail.headers), body) if part), line


def _parsed(data: bytes, headers: tuple[str, ...]) -> _Mail:
    try:
        message = email.message_from_bytes(data, policy=compat32)
        parts = [
            _Part(part.get_content_type(), part.get_content_disposition() == "attachment", *_content(part))
            for part in _leaves(message)
        ]
        named = [(name.title(), _header(message, name)) for name in headers]
    except Unreadable:
        raise
    except (MessageError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # The library reads hostile headers and nesting with each of these.
        raise Unreadable(f"not a mail that can be read: {type(error).__name__}", reason=BAD_RECORD) from None
    return _Mail([f"{name}: {value}" for name, value in named if value], parts)


def _content(part: Message) -> tuple[str | None, bytes]:
    # Without `decode` the library would decode with whatever codec the part names.
    payload = part.get_payload(decode=True)
    return part.get_content_charset(), payload if isinstance(payload, bytes) else b""


def _leaves(message: Message, depth: int = 0) -> Iterator[Message]:
    """The parts that hold something; a message attached whole is one."""
    if not message.is_multipart() or message.get_content_maintype() != "multipart":
        yield message
        return
    payload = message.get_payload()
    if depth >= MAX_DEPTH or len(payload) > MAX_PARTS:
        raise Unreadable(f"a mail of over {MAX_PARTS:,} parts, or {MAX_DEPTH} within each other", reason=BAD_RECORD)
    for part in payload:
        if isinstance(part, Message):
            yield from _leaves(part, depth + 1)


def _body(parts: list[_Part], line: int, place: Place) -> str:
    plain = [part for part in parts if part.kind == "text/plain" and not part.attached]
    html = [part for part in parts if part.kind == "text/html" and not part.attached]
    texts = [_decoded(part, place) for part in plain]
    if not any(text.strip() for text in texts):
        texts = [html_text(_decoded(part, place)) for part in html]
    for _ in range(len(parts) - len(plain) - len(html)):
        place.skip(ATTACHMENT, line)
    return "\n\n".join(text.strip("\r\n") for text in texts if text.strip())


def _decoded(part: _Part, place: Place) -> str:
    text = decode_declared(part.data, part.charset, place.config.encodings)
    if text is None:
        raise Unreadable("a mail in an encoding that is neither UTF-8 nor the one it declares", reason=NO_TEXT)
    return text


def _header(message: Message, name: str) -> str:
    """A header as text on one line; words in an encoding that isn't known are left as they were sent."""
    value = str(message.get(name, ""))
    try:
        words = decode_header(value)
    except (MessageError, binascii.Error):
        words = [(value, None)]
    text, before = "", None
    for word, charset in words:
        # White space between two encoded words is no text (RFC 2047, 6.2); between others it is, and was stripped.
        text += "" if before and charset else " "
        text += word if isinstance(word, str) else decode_declared(word, charset, ("latin-1",)) or ""
        before = charset
    return " ".join(text.split())
