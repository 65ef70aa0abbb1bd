"""Private keys and the tokens of services, found by the fixed beginnings that their makers gave them.

A token's pattern is matched only where its literal prefix stands. A JWT must have a header that decodes to JSON with
``alg``; a private key needs a body, so that documentation which shows just the BEGIN line keeps it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from operator import itemgetter

from cyberslm.data.redact.scan import END, START, Scan, Span, find_all

_MAX_KEY_CHARS = 1 << 16
_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_BORDER = re.compile(r"-----(?:BEGIN |(END )[A-Z0-9 ]{1,60}-----)")
_OPEN_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s:,.]|\\[nrt]){0,65536}+")
_BODY = re.compile(r"[A-Za-z0-9+/=]{16}")
_PUTTY = re.compile(
    r"PuTTY-User-Key-File-\d: [\w-]{1,40}\r?\n(?:[\w-]{1,30}: ?[^\n]{0,200}\n|[A-Za-z0-9+/=]{1,80}\r?\n){2,400}"
)


def _pattern(body: str) -> re.Pattern[str]:
    return re.compile(START + body, re.A)


_Service = tuple[str, tuple[str, ...], re.Pattern[str]]
_SERVICES: tuple[_Service, ...] = (
    ("aws-key", ("AKIA", "ASIA", "ABIA", "ACCA"), _pattern(r"A[KSBC][IC]A[A-Z0-9]{16}" + END)),
    ("github-token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), _pattern(r"gh[pousr]_[A-Za-z0-9]{36,255}+")),
    ("github-token", ("github_pat_",), _pattern(r"github_pat_[A-Za-z0-9_]{36,255}+")),
    (
        "gitlab-token",
        ("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glsoat-"),
        _pattern(r"gl[a-z]{2,4}-[\w.-]{20,255}+"),
    ),
    (
        "slack-token",
        ("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xoxe."),
        _pattern(r"xox[abeoprs](?:\.xox[abp])?-[A-Za-z0-9-]{10,255}+"),
    ),
    ("slack-token", ("xapp-",), _pattern(r"xapp-\d-[A-Za-z0-9-]{10,255}+")),
    (
        "slack-token",
        ("hooks.slack.com/services/",),
        re.compile(r"hooks\.slack\.com/services/T\w{6,20}/B\w{6,20}/\w{16,40}"),
    ),
    ("google-key", ("AIza",), _pattern(r"AIza[\w-]{35}(?![\w-])")),
    ("google-key", ("GOCSPX-",), _pattern(r"GOCSPX-[\w-]{24,40}+")),
    ("google-key", ("ya29.",), _pattern(r"ya29\.[\w-]{20,2048}+")),
    ("stripe-key", ("k_live_", "k_test_"), re.compile(r"k_(?:live|test)_[A-Za-z0-9]{16,255}+")),
    ("stripe-key", ("whsec_",), _pattern(r"whsec_[A-Za-z0-9+/=]{24,100}+")),
    ("service-token", ("npm_",), _pattern(r"npm_[A-Za-z0-9]{36}" + END)),
    ("service-token", ("pypi-",), _pattern(r"pypi-Ag[\w-]{50,1000}+")),
    (
        "service-token",
        ("sk-",),
        _pattern(r"sk-(?:proj-|ant-|svcacct-|or-)?(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{32,255}+"),
    ),
    ("service-token", ("SG.",), _pattern(r"SG\.[\w-]{16,32}\.[\w-]{32,64}+")),
    ("service-token", ("hf_",), _pattern(r"hf_[A-Za-z0-9]{30,60}+")),
    ("service-token", ("dop_v1_", "doo_v1_", "dor_v1_"), _pattern(r"do[opr]_v1_[0-9a-f]{64}")),
    ("service-token", ("shpat_", "shpss_", "shpca_"), _pattern(r"shp[a-z]{2}_[0-9a-fA-F]{32}")),
    ("service-token", ("hvs.", "hvb."), _pattern(r"hv[sb]\.[\w-]{24,300}+")),
    ("service-token", ("dapi",), _pattern(r"dapi[0-9a-f]{32}(?:-\d)?" + END)),
    ("service-token", ("sq0csp-", "sq0atp-", "sq0idp-"), _pattern(r"sq0(?:csp|atp|idp)-[\w-]{22,60}+")),
    ("service-token", ("-us",), re.compile(r"-us\d{1,2}" + END)),
    ("service-token", (":AA",), re.compile(r":AA[\w-]{32,34}(?![\w-])")),
    ("service-token", ("AGE-SECRET-KEY-",), _pattern(r"AGE-SECRET-KEY-1[A-Z0-9]{58}")),
    ("service-token", ("AKC",), _pattern(r"AKC[a-zA-Z0-9]{60,80}" + END)),
    ("service-token", ("SK", "AC"), _pattern(r"(?:SK|AC)[0-9a-f]{32}" + END)),
    ("service-token", ("sig=",), re.compile(r"(?<=[?&]sig=)[A-Za-z0-9%+/]{40,120}={0,2}")),
)
# Prefixes that end in a rare mark are looked for at that mark, all at once; the others one by one.
_PREFIXES = tuple((prefix, row) for row in _SERVICES for prefix in row[1])
_GATES = tuple(
    (re.compile(re.escape(mark) + "(?:" + "|".join(f"(?<={re.escape(prefix)})" for prefix, _ in rows) + ")"), rows)
    for mark in "_-."
    if (rows := tuple(item for item in _PREFIXES if item[0].endswith(mark)))
)
_UNGATED = tuple(item for item in _PREFIXES if item[0][-1] not in "_-.")
# What stands before an anchor that is not the beginning of its token, read backwards.
_BEFORE = {
    "k_": re.compile(r"[srp](?![A-Za-z0-9])"),
    "-us": re.compile(r"[0-9a-f]{32}(?![A-Za-z0-9])"),
    ":AA": re.compile(r"[0-9]{8,10}(?![A-Za-z0-9])"),
}
_JWT = re.compile(r"(?<![\w-])eyJ[\w-]{6,8192}+\.[\w-]{6,65536}+(?:\.[\w-]{0,8192}+){1,3}", re.A)
_BEARER = re.compile(r"(?:bearer|token|basic|apikey)(?: |%20|\t){1,4}([A-Za-z0-9._~+/=-]{16,4096}+)", re.I)
_BEARER_HEADER = re.compile(r"authorization[\"']?\s{0,4}[:=,]\s{0,4}[\"']?\s{0,2}$", re.I)
_MIXED = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])")


def private_keys(scan: Scan) -> Iterator[Span]:
    """PEM blocks from BEGIN to END, cut ones to the end of their base64, and PuTTY key files."""
    text = scan.text
    done = 0
    for at in find_all(text, ("-----BEGIN ",)):
        found = _BEGIN.match(text, at)
        if at < done or not found:
            continue
        border = _BORDER.search(text, found.end(), found.end() + _MAX_KEY_CHARS)
        if border and border[1]:
            done = border.end()
        else:
            body = _OPEN_BODY.match(text, found.end())
            done = found.end() + len(body[0].rstrip()) if body else found.end()
        if _BODY.search(text, found.end(), done):
            yield Span(at, done, "private-key")
    for at in find_all(text, ("PuTTY-User-Key-File-",)):
        if putty := _PUTTY.match(text, at):
            yield Span(at, at + len(putty[0].rstrip()), "private-key")


def service_tokens(scan: Scan) -> Iterator[Span]:
    """Tokens with a prefix of their service."""
    text, done = scan.text, 0
    for at, (kind, _, pattern) in sorted(_prefixed(text), key=itemgetter(0)):
        found = pattern.match(text, at) if at >= done else None
        if found and not text.endswith("EXAMPLE", at, found.end()):
            start = _token_start(scan, at)
            if start is not None:
                done = found.end()
                yield Span(start, done, kind)


def _prefixed(text: str) -> Iterator[tuple[int, _Service]]:
    """Where a prefix of a service stands."""
    for gate, rows in _GATES:
        for found in gate.finditer(text):
            for prefix, row in rows:
                if text.endswith(prefix, 0, found.end()):
                    yield found.end() - len(prefix), row
    for prefix, row in _UNGATED:
        yield from ((at, row) for at in find_all(text, (prefix,)))


def _token_start(scan: Scan, at: int) -> int | None:
    """Where a token begins whose anchor is not its beginning; None when what must precede the anchor does not."""
    for anchor, before in _BEFORE.items():
        if scan.text.startswith(anchor, at):
            start = scan.back(at, before, 40)
            return start if start < at else None
    return at


def jwts(scan: Scan) -> Iterator[Span]:
    """JSON web tokens, signed or encrypted, whose header is JSON with ``alg``."""
    done = 0
    for at in find_all(scan.text, ("eyJ",)):
        if at < done:
            continue
        if (found := _JWT.match(scan.text, at)) and _is_header(scan.text[at : scan.text.index(".", at)]):
            done = found.end()
            yield Span(at, done, "jwt")


def _is_header(part: str) -> bool:
    try:
        header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and "alg" in header


def bearer_tokens(scan: Scan) -> Iterator[Span]:
    """What follows ``Bearer``, and ``Basic`` or ``token`` in an Authorization header."""
    for at in scan.anchors(("bearer", "basic", "token", "apikey")):
        found = _BEARER.match(scan.text, at)
        if not found or not _MIXED.match(found[1]):
            continue
        header = _BEARER_HEADER.search(scan.text, max(0, at - 40), at)
        if header or (scan.low.startswith("bearer", at) and len(set(found[1])) > 8):
            yield Span(found.start(1), found.end(1), "bearer-token")
