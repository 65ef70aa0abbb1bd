"""Passwords whose place gives them away: in a URL, at a known command's option, as a crypt hash, after Basic.

Each command is a row of a table: the words that announce it and the pattern up to its password, bounded so that a long
line costs no more than a short one.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

from cyberslm.data.redact.passwords import PLACEHOLDER
from cyberslm.data.redact.scan import Scan, Span

_MIN_PASSWORD = 3
_URL = re.compile(r"://[^\s/:@\"'<>`]{0,128}:(?P<value>[^\s/\"'<>`]{1,256}+)")
_COMMANDS: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (anchors, re.compile(pattern + r"(?P<q>[\"']?)(?P<value>(?:(?!(?P=q)[\s\"'])[^\s\"'`|;&]){1,256}+)", re.I))
    for anchors, pattern in (
        (("mysql", "mariadb"), r"(?:mysql|mariadb)[\w-]{0,20}[^\n|;]{0,300}?\s-p(?=[^\s])"),
        (("sshpass",), r"sshpass\s+-p\s?"),
        (
            ("curl ", "wget "),
            r"\w+[^\n|;]{0,400}?\s(?:-[a-zA-Z]{0,6}u|--user|--proxy-user)[ =]?[\"']?[^\s:\"'@]{1,64}:",
        ),
        (("redis-cli",), r"redis-cli[^\n|;]{0,200}?\s-a\s"),
        ((" login ",), r" login [^\n|;]{0,200}?\s-p[ =]"),
        (("ldap",), r"ldap(?:search|modify|add|delete|whoami|passwd)[^\n|;]{0,300}?\s-w\s?"),
        (("net user",), r"net user\s[\"']?[\w.-]{1,40}[\"']?\s(?!/)"),
        (("net use ",), r"net use\s[^\n]{0,120}?\\\\[^\s]{1,120}\s(?=[^\n]{1,100}/user)(?!/)"),
        (("net use ",), r"net use\s[^\n]{0,200}?/user:[^\s]{1,80}\s(?!/)"),
        (("smbclient", "rpcclient"), r"\w+[^\n]{0,200}?\s-U\s?[\"']?[^\s%\"']{1,64}%"),
        (("securestring",), r"securestring\s+(?:-string\s+)?(?=[\"'])"),
        (
            ("evil-winrm", "crackmapexec", "netexec", "nxc ", "xfreerdp", "rdesktop"),
            r"[\w-]+[^\n|;]{0,300}?\s(?:-p |/p:)",
        ),
        (("htpasswd",), r"htpasswd\s+-\w*b\w*\s+[^\s]{1,200}\s+[^\s]{1,64}\s+"),
    )
)
_SHADOW = re.compile(r":\$(?:[1256y]|2[aby])\$(?P<tail>[./A-Za-z0-9$=,]{20,200}+)")
_BASIC = re.compile(r"basic[ \t]{1,4}(?P<value>[A-Za-z0-9+/]{8,512}+={0,2})", re.I)


def url_passwords(scan: Scan) -> Iterator[Span]:
    """The password of ``scheme://user:password@host``."""
    for at in scan.anchors(("://",)):
        found = _URL.match(scan.text, at)
        if not found:
            continue
        cut = found["value"].rfind("@")
        value = found["value"][: max(cut, 0)]
        if len(value) >= _MIN_PASSWORD and not PLACEHOLDER.fullmatch(value):
            yield Span(found.start("value"), found.start("value") + cut, "url-password")


def command_passwords(scan: Scan) -> Iterator[Span]:
    """Passwords that a known command takes as an option or an operand."""
    for anchors, pattern in _COMMANDS:
        for at in scan.anchors(anchors):
            found = pattern.match(scan.text, at)
            if found is None or PLACEHOLDER.fullmatch(found["value"]):
                continue
            start, end = found.span("value")
            is_option = found["value"].startswith("-") and scan.text[start - 1].isspace()
            if not is_option and not found["value"].startswith(("/", "*")):
                yield Span(start, end, "command-password")


def stored_passwords(scan: Scan) -> Iterator[Span]:
    """Crypt hashes as in a shadow file, and the base64 of ``user:password`` after Basic."""
    for at in scan.anchors((":$",)):
        if found := _SHADOW.match(scan.text, at):
            yield Span(at + 1, found.end(), "password")
    for at in scan.anchors(("basic",)):
        found = _BASIC.match(scan.text, at)
        if found and _is_pair(found["value"]):
            yield Span(found.start("value"), found.end("value"), "password")


def _is_pair(value: str) -> bool:
    try:
        pair = base64.b64decode(value + "=" * (-len(value) % 4)).decode()
    except (binascii.Error, ValueError):
        return False
    return ":" in pair and pair.isprintable()
