"""Stand-ins for values: keyed, consistent, of the same shape, and recognisable as stand-ins.

A stand-in is drawn from HMAC-SHA-256 of the normalised value, so it is equal in every file and can't be undone, nor
checked against a guess, without the key. Each shape has a reserved space that no real value uses: names ``user-`` and
``host-`` plus hexadecimal digits, domains below ``.example`` (RFC 2606), MACs ``0a:5c:``, phone numbers ``999``, cards
that fail Luhn, IBANs with check digits 00, secrets with the word REDACTED, addresses in reserved blocks.

Invariant: ``known(kind, fake(kind, value))`` holds for every value, and what is known is left alone: that makes
redaction idempotent. Host parts of addresses go through a prefix-preserving permutation in the manner of Crypto-PAn
(Xu et al. 2002) that never flips along all zeros or all ones, so that .0, .1, .254 and .255 keep their roles.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable
from itertools import count
from typing import Final

from cyberslm.data.redact.config import CLASS_OF, RedactConfig

MARK: Final = "REDACTED"
_MARKER = re.compile(r"\[redacted:[a-z0-9-]{1,20}\]")
_USER = re.compile(r"user-[0-9a-f]{10}")
_HOST = re.compile(r"host-[0-9a-f]{10}", re.I)
_SEPARATORS = re.compile(r"[^0-9A-Za-z]+")
_TOKEN_PREFIX = re.compile(
    r"gh[pousr]_|github_pat_|gl[a-z]{2,4}-|xox[a-z]-|xapp-|[srp]k_(?:live|test)_|sk-|A[KSBC][IC]A|AIza|eyJ|npm_|pypi-|hf_|SG\."
)
_DEFANGED = re.compile(r"[\[(]([.@:])[\])]")
_MAC_PREFIX = "0a5c"
_ULA = int(ipaddress.IPv6Address("fd5c:7e1d::"))
_DOCUMENTATION = int(ipaddress.IPv6Address("2001:db8::"))
_LINK_LOCAL = ipaddress.IPv6Network("fe80::/10")
_LINK_MARK = 0x5C7E
PRIVATE_SUFFIXES = (
    *(".internal", ".local", ".corp", ".lan", ".intra", ".intranet", ".private", ".localdomain", ".home.arpa"),
)


def refang(text: str) -> str:
    """``10[.]0[.]0[.]5`` -> ``10.0.0.5``, the way indicators are written so that nobody clicks them."""
    return _DEFANGED.sub(r"\1", text) if "[" in text or "(" in text else text


def normal(kind: str, value: str) -> str:
    """The spelling that all spellings of a value share."""
    cls = CLASS_OF[kind]
    if cls in ("cards", "ibans", "phones", "macs"):
        return _SEPARATORS.sub("", value).lower()
    if cls in ("mail", "users", "private_ips", "public_ips", "internal_hosts", "public_domains"):
        return refang(value).lower()
    return value


def luhn(digits: str) -> int:
    """The Luhn sum modulo 10; 0 for a valid number."""
    doubled = (int(digit) * (1 + index % 2) for index, digit in enumerate(reversed(digits)))
    return sum(value - 9 * (value > 9) for value in doubled) % 10


class Pseudonyms:
    """Makes and recognises stand-ins under one key. Holds no state beyond key and settings."""

    def __init__(self, config: RedactConfig, key: bytes) -> None:
        self._key = key
        blocks = tuple(map(ipaddress.IPv4Network, config.private_blocks))
        # By first octet: the first /24 of the block and how many bits count its /24s.
        self._blocks = {
            block.network_address.packed[0]: (int(block.network_address) >> 8, 24 - block.prefixlen) for block in blocks
        }
        self._suffixes = (*("." + name.lower() for name in config.internal_domains), *PRIVATE_SUFFIXES)
        self._public_domains = config.public_domains
        self._public_ips = config.public_ips
        self._hosts = config.internal_hosts
        self._ips = config.private_ips
        self._fakes: dict[str, Callable[[str], str]] = {
            "private_keys": self._private_key,
            "tokens": self._token,
            "passwords": self.secret,
            "cards": self._card,
            "ibans": self._iban,
            "mail": self._mail,
            "phones": self._phone,
            "users": self._user,
            "private_ips": self.address,
            "public_ips": self.address,
            "macs": self._mac,
            "internal_hosts": self._host,
            "public_domains": self._domain,
        }

    def __repr__(self) -> str:
        return "Pseudonyms(...)"

    def digest(self, kind: str, value: str) -> str:
        """Keyed 128-bit digest of a normalised value: 32 hexadecimal digits."""
        return self._hmac("digest", normal(kind, value))[:16].hex()

    def fake(self, kind: str, value: str) -> str:
        """The stand-in for a value."""
        return self._fakes[CLASS_OF[kind]](value)

    def known(self, kind: str, value: str) -> bool:
        """Whether a value is a stand-in or a marker already."""
        cls = CLASS_OF[kind]
        if cls in ("private_keys", "tokens", "passwords"):
            return MARK in value or bool(_MARKER.search(value))
        plain = refang(value)
        if cls == "mail":
            local, _, host = plain.rpartition("@")
            return bool(_USER.fullmatch(local)) and self._host_known(host)
        if cls == "users":
            return bool(_USER.fullmatch(value))
        if cls in ("internal_hosts", "public_domains"):
            return plain.lower().endswith(".example") or bool(_HOST.fullmatch(plain))
        if cls in ("private_ips", "public_ips"):
            return self._address_known(plain)
        if cls == "phones":
            return normal(kind, value).startswith("999")
        return cls == "macs" and normal(kind, value).startswith(_MAC_PREFIX)

    def is_internal(self, host: str) -> bool:
        """Whether a host name is an internal domain or lies below one."""
        return ("." + host.lower()).endswith(self._suffixes)

    def secret(self, value: str, prefix: str = "") -> str:
        """A stand-in for any text: REDACTED, then keyed letters and digits."""
        noise = self._hmac("secret", value).hex() + self._hmac("more", value).hex()
        head = prefix + MARK
        return head + noise[: max(8, min(len(value) - len(head), 64))]

    def address(self, value: str) -> str:
        """A stand-in address in its reserved block; raises ValueError when the value is no address."""
        plain = refang(value)
        if ":" in plain:
            return self._address6(ipaddress.IPv6Address(plain))
        number = int(ipaddress.IPv4Address(plain))
        net, host = number >> 8, number & 255
        base, bits = self._blocks[number >> 24] if is_private4(number) else (240 << 16, 20)
        subnet = base + int.from_bytes(self._hmac("net4", str(net))[:4], "big") % (1 << bits)
        fake = str(ipaddress.IPv4Address(subnet << 8 | self._permute(f"host4/{net}", host, octets=1)))
        return _like_address(value, fake)

    def _hmac(self, purpose: str, value: str) -> bytes:
        message = f"{purpose}\0{value}".encode("utf-8", "surrogatepass")
        return hmac.digest(self._key, message, hashlib.sha256)

    def _digits(self, purpose: str, value: str) -> Callable[[], int]:
        """A source of keyed bytes without end."""
        blocks = (self._hmac(f"{purpose}/{index}", value) for index in count())
        stream = (byte for block in blocks for byte in block)
        return lambda: next(stream)

    def _permute(self, purpose: str, number: int, *, octets: int) -> int:
        """A prefix-preserving permutation: one HMAC holds the 255 flips of an octet's tree."""
        size = 8 * octets
        result = 0
        for at in range(octets):
            octet = number >> (size - 8 * at - 8) & 255
            above = number >> (size - 8 * at)
            flips = self._hmac(f"{purpose}/{at}", str(above))
            for bit in range(7, -1, -1):
                depth = 8 * at + 7 - bit
                prefix = number >> (size - depth)
                node = 1 << (7 - bit) | octet >> (bit + 1)
                straight = prefix in (0, (1 << depth) - 1)
                flip = 0 if straight else flips[node >> 3] >> (node & 7) & 1
                result = result << 1 | ((octet >> bit & 1) ^ flip)
        return result

    def _address6(self, address: ipaddress.IPv6Address) -> str:
        net, host = int(address) >> 64, int(address) & (1 << 64) - 1
        if address in _LINK_LOCAL:
            marked = _LINK_MARK << 48 | self._permute("link6", host & (1 << 48) - 1, octets=6)
            return str(ipaddress.IPv6Address(0xFE80 << 112 | marked))
        base = _ULA if address.packed[0] >> 1 == 0x7E else _DOCUMENTATION
        subnet = int.from_bytes(self._hmac("net6", str(net))[:4], "big")
        return str(ipaddress.IPv6Address(base | subnet << 64 | self._permute(f"host6/{net}", host, octets=8)))

    def _address_known(self, plain: str) -> bool:
        if ":" not in plain:
            number = int(ipaddress.IPv4Address(plain))
            base, bits = self._blocks.get(number >> 24, (0, 0))
            return number >> 28 == 15 or (base > 0 and number >> (8 + bits) == base >> bits)
        address = ipaddress.IPv6Address(plain)
        number = int(address)
        if address in _LINK_LOCAL:
            return number >> 48 & 0xFFFF == _LINK_MARK
        return number >> 96 in (_ULA >> 96, _DOCUMENTATION >> 96)

    def _name(self, kind: str, name: str) -> str:
        return f"{kind}-{self._hmac(kind, name.lower())[:5].hex()}"

    def _user(self, value: str) -> str:
        return self._name("user", value.partition("+")[0])

    def _mail(self, value: str) -> str:
        local, _, host = refang(value).rpartition("@")
        return f"{self._user(local)}@{self._fake_host(host)}"

    def _fake_host(self, host: str) -> str:
        if self._host_known(host):
            return host
        try:
            return self.address(host)
        except ValueError:
            return self._host(host) if self.is_internal(host) else self._domain(host)

    def _host_known(self, host: str) -> bool:
        """Whether the host of a mail address stays as it is, be it a stand-in or by policy."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            policy = self._hosts if self.is_internal(host) else self._public_domains
            return policy == "keep" or self.known("internal-host", host)
        policy = self._ips if is_private(address) else self._public_ips
        return policy == "keep" or self._address_known(host)

    def _host(self, value: str) -> str:
        """``web01`` -> ``host-...``, ``web01.corp.acme.com`` -> ``host-....net-....example``."""
        host = refang(value).lower()
        if "." not in host:
            return self._name("host", host)
        dotted = "." + host
        suffix = max((s for s in self._suffixes if dotted.endswith(s)), key=len, default="")
        labels = dotted.removesuffix(suffix).strip(".").split(".") if suffix else host.split(".")
        names = [self._name("host", label) for label in labels if label]
        if suffix in PRIVATE_SUFFIXES and len(names) > 1:
            names[-1] = self._name("net", labels[-1] + suffix)
        else:
            names.append(self._name("net", suffix))
        return ".".join(names) + ".example"

    def _domain(self, value: str) -> str:
        """Two labels stand for the registered domain, so hosts of one domain stay together."""
        labels = refang(value).lower().split(".")
        names = [self._name("host", label) for label in labels[:-2]]
        return ".".join([*names, self._name("net", ".".join(labels[-2:]))]) + ".example"

    def _mac(self, value: str) -> str:
        digits = iter(_MAC_PREFIX + self._hmac("mac", normal("mac", value))[:4].hex())
        fake = "".join(next(digits) if character.isalnum() else character for character in value)
        return fake.upper() if value.upper() == value else fake

    def _card(self, value: str) -> str:
        plain = normal("card", value)
        byte = self._digits("card", plain)
        digits = plain[0] + "".join(str(byte() % 10) for _ in plain[1:])
        if luhn(digits) == 0:
            digits = digits[:-1] + str((int(digits[-1]) + 1 + byte() % 9) % 10)
        return _fill(value, digits)

    def _phone(self, value: str) -> str:
        plain = normal("phone", value)
        byte = self._digits("phone", plain)
        return _fill(value, "999" + "".join(str(byte() % 10) for _ in plain[3:]))

    def _iban(self, value: str) -> str:
        plain = normal("iban", value)
        byte = self._digits("iban", plain)
        rest = (str(byte() % 10) if c.isdigit() else chr(65 + byte() % 26) for c in plain[4:])
        return _fill(value, plain[:2].upper() + "00" + "".join(rest))

    def _token(self, value: str) -> str:
        found = _TOKEN_PREFIX.match(value)
        return self.secret(value, found[0] if found else "")

    def _private_key(self, value: str) -> str:
        lines = [line for line in value.splitlines() if "-----" in line]
        body = MARK + self._hmac("private-key", value).hex()[:56]
        single = len(lines) < 2 or not lines[0].startswith("-----BEGIN") or MARK in lines[0]
        return self.secret(value) if single else "\n".join([lines[0].strip(), body, lines[-1].strip()])


def is_private4(number: int) -> bool:
    """Whether an IPv4 address belongs to RFC 1918."""
    return number >> 24 == 10 or number >> 20 == 0xAC1 or number >> 16 == 0xC0A8


def is_private(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address belongs to RFC 1918, fc00::/7 or fe80::/10."""
    number = int(address)
    if address.version == 6:
        return number >> 121 == 0x7E or number >> 118 == 0x3FA
    return is_private4(number)


def _fill(value: str, digits: str) -> str:
    """Letters and digits of ``value`` replaced in their order, separators kept."""
    fresh = iter(digits)
    return "".join(next(fresh) if character.isalnum() else character for character in value)


def _like_address(value: str, fake: str) -> str:
    """Defanged when the value is."""
    found = _DEFANGED.search(value)
    return fake.replace(".", found[0]) if found else fake
