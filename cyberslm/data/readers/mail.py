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

from cyberslm.data.readers.encodings import decode_declared
from cyberslm.data.readers.html import html_text
from cyberslm.data.readers.place import BAD_RECORD, NO_TEXT, Place, Texts, Unreadable
from cyberslm.data.readers.streams import CHUNK, whole
from cyberslm.data.readers.text import too_long

ATTACHMENT = "mail attachment"
MAX_PARTS = 1000
MAX_DEPTH = 50

_QUOTED_FROM = re.compile(rb">+From ")


def read_eml(stream: io.BufferedReader, place: Place) -> Texts:
    """The message as one document."""
    yield from _texts(whole(stream, place.config, "a mail"), 1, place)


def read_mbox(stream: io.BufferedReader, place: Place) -> Texts:
    """The messages, each with the line of its "From " line."""
    for data, line in _messages(stream, place):
        if data is None:
            place.bad(too_long("a mail", place), reason=BAD_RECORD, line=line, fix="mend or remove it")
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


def _texts(data: bytes, line: int, place: Place) -> Texts:
    try:
        message = email.message_from_bytes(data, policy=compat32)
        parts = list(_leaves(message))
        head = [f"{name.title()}: {value}" for name in place.config.mail_headers if (value := _header(message, name))]
        body = _body(parts, line, place)
    except (MessageError, RecursionError):
        place.bad("not a mail that can be read", reason=BAD_RECORD, line=line, fix="mend or remove it")
        return
    except Unreadable as error:
        place.bad(error.problem, reason=error.reason, line=line, fix="set data.encodings, mend or remove it")
        return
    yield "\n\n".join(part for part in ("\n".join(head), body) if part), line


def _leaves(message: Message, depth: int = 0) -> Iterator[Message]:
    """The parts that hold something; a message attached whole is one."""
    payload = message.get_payload()
    if message.get_content_maintype() != "multipart" or not isinstance(payload, list):
        yield message
        return
    if depth >= MAX_DEPTH or len(payload) > MAX_PARTS:
        raise Unreadable(f"a mail of over {MAX_PARTS:,} parts, or {MAX_DEPTH} within each other", reason=BAD_RECORD)
    for part in payload:
        if isinstance(part, Message):
            yield from _leaves(part, depth + 1)


def _body(parts: list[Message], line: int, place: Place) -> str:
    inline = [part for part in parts if part.get_content_disposition() != "attachment"]
    plain = [part for part in inline if part.get_content_type() == "text/plain"]
    html = [part for part in inline if part.get_content_type() == "text/html"]
    texts = [_decoded(part, place) for part in plain]
    if not any(text.strip() for text in texts):
        texts = [html_text(_decoded(part, place)) for part in html]
    for _ in range(len(parts) - len(plain) - len(html)):
        place.skip(ATTACHMENT, line)
    return "\n\n".join(text.strip("\r\n") for text in texts if text.strip())


def _decoded(part: Message, place: Place) -> str:
    payload = part.get_payload(decode=True)
    data = payload if isinstance(payload, bytes) else b""
    text = decode_declared(data, part.get_content_charset(), place.config.encodings)
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
    text = "".join(
        word if isinstance(word, str) else decode_declared(word, charset, ("latin-1",)) or "" for word, charset in words
    )
    return " ".join(text.split())
