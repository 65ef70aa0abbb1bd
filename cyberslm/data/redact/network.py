"""What names a machine: private and public addresses, MACs, internal host names, and domains when a policy wants them.

Loopback, link-local metadata, broadcast, multicast, documentation addresses and the private ranges' own names
(10.0.0.0/8) say nothing about anybody and are kept. A four-part number after the word version is a version.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from cyberslm.data.redact.pseudonyms import PRIVATE_SUFFIXES, is_private, is_private4, refang
from cyberslm.data.redact.scan import START, Scan, Span, find_all, words

_DOT = r"(?:\.|\[\.\]|\(\.\))"
_IPV4 = re.compile(START + rf"(?<![.\]])(?:[0-9]{{1,3}}{_DOT}){{3}}[0-9]{{1,3}}(?![A-Za-z0-9]|{_DOT}[0-9])")
_IPV4_ANY = re.compile(r"[0-9]{1,3}(?:\.|\[\.\]|\(\.\))[0-9]")
_IPV4_PRIVATE = re.compile(r"1(?:0|72|92)(?=[.\[(])")
_VERSION = re.compile(r"(?:version|ver|release|build|firmware|rev)[\"']?[ :=.]{0,3}[\"'v]?$|[=<>~!]=\s?$", re.I)
_PACKAGE = re.compile(r"[A-Za-z]-$")
_RANGE_NAMES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
_IPV6 = re.compile(r"(?<![\w:.])(?<![\w]%)[0-9A-Fa-f]{1,4}:[0-9A-Fa-f:]{1,36}(?:\.[0-9]{1,3}){0,3}", re.A)
_IPV6_PRIVATE = re.compile(r"f(?:[cd][0-9a-f]{2}|e[89ab][0-9a-f]):")
_IPV6_ANY = re.compile(r"(?<![\w:])[0-9a-f]{1,4}:[0-9a-f:]")
_MAC_CORE = re.compile(r"[:-](?=[0-9a-f]{2}[:-][0-9a-f]{2}[:-])")
_MAC = re.compile(
    r"(?<![A-Za-z0-9])(?<![^A-Za-z0-9][0-9A-Fa-f]{2}[:-])(?:[0-9A-Fa-f]{2}(?P<s>[:-])[0-9A-Fa-f]{2}(?:(?P=s)[0-9A-Fa-f]{2}){4}(?![\w-]|:[0-9A-Fa-f])"
    r"|[0-9A-Fa-f]{4}\.[0-9A-Fa-f]{4}\.[0-9A-Fa-f]{4}(?![\w-]|\.\w))",
    re.A,
)
_MAC_DOTTED = re.compile(r"\.[0-9a-f]{4}\.[0-9a-f]{4}")
_KNOWN_MACS = re.compile(
    r"(?:00){6}|(?:ff){6}|01005e.{6}|3333.{8}|0180c2.{6}|001122334455|aabbccddeeff|0123456789ab|deadbeef....|112233445566|1234567890ab"
)
_LABELS = re.compile(r"[a-z0-9_-]{1,63}(?:(?:\.|\]\.\[|\)\.\()[a-z0-9_-]{1,63}){0,8}", re.I)
_PRIVATE = tuple(
    re.compile(
        re.escape(dot)
        + "(?:"
        + "|".join(suffix[1:].replace(".", re.escape(dot)) for suffix in PRIVATE_SUFFIXES)
        + r")(?![\w-])"
    )
    for dot in (".", "[.]")
)
_NEXT_LABEL = re.compile(r"(?:\.|\[\.\])\w")
_CODE_ROOTS = words(
    "self this cls threading window os sys java javax com org net io module package app document _thread"
)
_KNOWN_HOSTS = frozenset(
    {"host.docker.internal", "metadata.google.internal", "gateway.docker.internal", "cluster.local"}
)
_UNC = re.compile(
    r"(?:(?<=[\s\"'=(,;`])|\A)\\\\(?:\\\\)?(?P<host>[A-Za-z][\w-]{1,62})\\{1,2}(?P<share>[\w$-]{1,64})", re.A
)
_SHARES = (
    "$",
    "sysvol",
    "netlogon",
    "share",
    "shared",
    "shares",
    "public",
    "users",
    "data",
    "home",
    "backup",
    "backups",
)
_SYSLOG = re.compile(
    r"\n?(?:<\d{1,3}>\d? ?)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.:+Z-]{0,14}) "
    r"(?P<host>[A-Za-z][\w-]{1,62}) [\w./()-]{1,48}(?:\[\d{1,10}\])?:? ",
    re.A,
)
_NO_HOSTS = words(
    "info warn warning error debug trace fatal critical notice emerg alert localhost server device registry host"
)
_KEYED_HOST = re.compile(
    r"(?:host_?name|computer_?name|workstation(?:_?name)?|machine_?name|server_?name|src_?host|dst_?host|dest_?host|host)[\"']?"
    r"[ \t]{0,3}[=:][ \t]{0,3}[\"']?(?P<host>[A-Za-z][A-Za-z0-9-]{1,62})(?![\w.(-]|://)",
    re.I | re.A,
)
_URL_HOST = re.compile(r"://(?:[^\s/@\"'<>]{0,200}@)?(?P<host>[\w-]{1,63}(?:\.[\w-]{1,63}){1,8})")


def private_addresses(scan: Scan) -> Iterator[Span]:
    """Addresses of RFC 1918, fc00::/7 and fe80::/10."""
    for start, end, number in _ipv4(scan, _IPV4_PRIVATE):
        if is_private4(number):
            yield Span(start, end, "private-ipv4")
    for start, end, address in _ipv6(scan, _IPV6_PRIVATE):
        if is_private(address):
            yield Span(start, end, "private-ipv6")


def public_addresses(scan: Scan) -> Iterator[Span]:
    """All other unicast addresses that can be routed; not those of documentation."""
    for start, end, number in _ipv4(scan, _IPV4_ANY):
        address = ipaddress.IPv4Address(number)
        if address.is_global and not address.is_multicast:
            yield Span(start, end, "public-ipv4")
    for start, end, address6 in _ipv6(scan, _IPV6_ANY):
        if address6.is_global and not address6.is_multicast:
            yield Span(start, end, "public-ipv6")


def _ipv4(scan: Scan, beginning: re.Pattern[str]) -> Iterator[tuple[int, int, int]]:
    """Valid IPv4 addresses where a pattern says that one may begin."""
    text = scan.text
    for candidate in beginning.finditer(text):
        at = candidate.start()
        found = _IPV4.match(text, at)
        if found is None or _is_version(text, at) or text.startswith(_RANGE_NAMES, at):
            continue
        octets = refang(found[0]).split(".")
        if all(octet == "0" or octet[0] != "0" for octet in octets) and max(map(int, octets)) < 256:
            yield at, found.end(), int.from_bytes(map(int, octets), "big")


def _ipv6(scan: Scan, beginning: re.Pattern[str]) -> Iterator[tuple[int, int, ipaddress.IPv6Address]]:
    """Valid IPv6 addresses where a pattern says that one may begin, but no networks such as fe80::/10."""
    text = scan.text
    for candidate in beginning.finditer(scan.low):
        at = candidate.start()
        found = _IPV6.match(text, at)
        if found is None:
            continue
        plain = found[0].rstrip(".")
        plain = plain if plain.endswith("::") else plain.rstrip(":")
        with suppress(ValueError):
            address = ipaddress.IPv6Address(plain)
            if int(address) & (1 << 112) - 1 or not text.startswith("/", at + len(plain)):
                yield at, at + len(plain), address


def _is_version(text: str, at: int) -> bool:
    before = text[max(0, at - 16) : at]
    return bool(_VERSION.search(before) or _PACKAGE.search(before))


def mac_addresses(scan: Scan) -> Iterator[Span]:
    """Six pairs with one kind of separator, or three dotted groups of four; not broadcast, multicast and examples."""
    text, low = scan.text, scan.low
    places = [found.start() - 2 for found in _MAC_CORE.finditer(low)]
    places += [found.start() - 4 for found in _MAC_DOTTED.finditer(low)]
    done = 0
    for at in sorted(places):
        found = _MAC.match(text, at) if at >= done else None
        if not found:
            continue
        done = found.end()
        digits = "".join(filter(str.isalnum, found[0].lower()))
        decimal = digits.isdigit() and found["s"] != ":"
        if not decimal and not _KNOWN_MACS.fullmatch(digits):
            yield Span(at, done, "mac")


def internal_hosts(domains: Iterable[str], names: Iterable[str]) -> Callable[[Scan], Iterator[Span]]:
    """A rule that finds the host names of an organisation and those below private top-level domains."""
    own = tuple(spelt for domain in domains for spelt in {domain.lower(), domain.lower().replace(".", "[.]")})
    bare = tuple(name.lower() for name in names)

    def find(scan: Scan) -> Iterator[Span]:
        yield from _dotted(scan, own)
        yield from _bare(scan, bare)

    return find


def _dotted(scan: Scan, own: tuple[str, ...]) -> Iterator[Span]:
    text, low, done = scan.text, scan.low, 0
    places: list[tuple[int, int, int | None]]
    places = [(at, at + len(domain), _own_start(scan, at)) for domain in own for at in find_all(low, (domain,))]
    places += [(found.start(), found.end(), None) for pattern in _PRIVATE for found in pattern.finditer(low)]
    for at, end, start in sorted(places, key=lambda place: (place[0], -place[1])):
        after = text[end : end + 1]
        if at < done or start == -1 or after.isalnum() or after in ("-", "_") or _continues(text, end):
            continue
        if start is None:
            start = scan.back(at, _LABELS, 254)
            if start == at or not _is_host(scan, start, at, end):
                continue
        done = end
        if low[start:end] not in _KNOWN_HOSTS and not refang(low[start:end]).endswith("svc.cluster.local"):
            yield Span(start, end, "internal-host")


def _continues(text: str, end: int) -> bool:
    """Whether another label follows, so that what ends here is no top-level domain."""
    return _NEXT_LABEL.match(text, end) is not None


def _own_start(scan: Scan, at: int) -> int:
    """Where the name that ends in an own domain at ``at`` begins; -1 when another word ends in it."""
    text = scan.text
    dot = 1 if text.endswith(".", 0, at) else 3 if text.endswith("[.]", 0, at) else 0
    start = scan.back(at - dot, _LABELS, 254) if dot else at
    if dot and start < at - dot:
        return start
    before = text[max(0, at - 1) : at]
    return -1 if before.isalnum() or before in ("-", "_") else at


def _is_host(scan: Scan, start: int, at: int, end: int) -> bool:
    """Whether labels before a private top-level domain are a host and not an attribute or a file."""
    text = scan.text
    labels = refang(text[start:at]).split(".")
    before, after = text[max(0, start - 8) : start], text[end : end + 1]
    if labels[0].lower() in _CODE_ROOTS or after == "(" or before.endswith((".", "$", "import ", "\nfrom ")):
        return False
    if before.endswith(("//", "@", "\\\\")):
        return True
    if before.endswith(("/", "\\")):
        return False
    return len(labels) > 1 or any(character.isdigit() or character == "-" for character in labels[0])


def _bare(scan: Scan, names: tuple[str, ...]) -> Iterator[Span]:
    """Names without a domain: given ones as whole words, and those in UNC paths, syslog headers and host= fields."""
    text, low = scan.text, scan.low
    for name in names:
        for at in find_all(low, (name,)):
            around = text[max(0, at - 1) : at] + text[at + len(name) : at + len(name) + 1]
            if not any(character.isalnum() or character in "_-" for character in around):
                yield Span(at, at + len(name), "internal-host")
    for found in _bare_matches(scan):
        if found["host"].lower() not in _NO_HOSTS:
            yield Span(found.start("host"), found.end("host"), "internal-host")


def _bare_matches(scan: Scan) -> Iterator[re.Match[str]]:
    text = scan.text
    for at in find_all(text, ("\\\\",)):
        found = _UNC.match(text, at)
        if found and (_is_numbered(found["host"]) or found["share"].lower().endswith(_SHARES)):
            yield found
    for at in (0, *find_all(text, ("\n",))):
        if found := _SYSLOG.match(text, at):
            yield found
    for at in scan.anchors(("host", "computer", "workstation", "machine", "server")):
        if (
            not text[max(0, at - 1) : at].isalpha()
            and (found := _KEYED_HOST.match(text, at))
            and _is_numbered(found["host"])
        ):
            yield found


def _is_numbered(host: str) -> bool:
    return any(map(str.isdigit, host)) and any(map(str.isalpha, host))


def public_domains(scan: Scan) -> Iterator[Span]:
    """Hosts of URLs; whether they are internal is for the stronger class to say."""
    for at in find_all(scan.text, ("://",)):
        found = _URL_HOST.match(scan.text, at)
        if found and found["host"].rpartition(".")[2].isalpha():
            yield Span(found.start("host"), found.end("host"), "public-domain")
