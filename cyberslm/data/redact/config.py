"""The ``data.redact:`` section: what happens to each class of value, and the key that makes pseudonyms.

A class is a group of kinds (``KINDS``), such as the tokens of a dozen services, and has one policy. Classes are listed
from the most severe to the least: where two values overlap, the more severe class names the find.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cyberslm.config import PathStr
from cyberslm.errors import ConfigError

Policy = Literal["keep", "pseudonymise", "remove"]

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096
_DOMAIN = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63}){0,8}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{1,62}")
_RANGES = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))

KINDS: Mapping[str, tuple[str, ...]] = {
    "private_keys": ("private-key",),
    "tokens": (
        "aws-key",
        "github-token",
        "gitlab-token",
        "slack-token",
        "google-key",
        "stripe-key",
        "service-token",
        "jwt",
        "bearer-token",
        "keyed-secret",
        "detect-secrets",
    ),
    "passwords": ("url-password", "password", "command-password"),
    "cards": ("card",),
    "ibans": ("iban",),
    "mail": ("mail",),
    "phones": ("phone",),
    "users": ("user",),
    "private_ips": ("private-ipv4", "private-ipv6"),
    "macs": ("mac",),
    "internal_hosts": ("internal-host",),
    "public_ips": ("public-ipv4", "public-ipv6"),
    "public_domains": ("public-domain",),
}
"""Kinds of each class, most severe class first."""

CLASS_OF: Mapping[str, str] = {kind: name for name, kinds in KINDS.items() for kind in kinds}


@dataclass(frozen=True, kw_only=True)
class RedactConfig:
    """Which values leave the text and what stands in their place."""

    private_keys: Policy = "remove"
    """PEM and PuTTY private keys: keep, pseudonymise (a stand-in of the same shape) or remove (a marker is left)."""
    tokens: Policy = "remove"
    """Keys and tokens of services, bearer tokens, JWTs, and secrets assigned to names such as api_key."""
    passwords: Policy = "remove"
    """Passwords in URLs, connection strings, settings, log lines, command lines and sentences."""
    cards: Policy = "pseudonymise"
    """Payment card numbers; the stand-in has the same length and fails the Luhn check."""
    ibans: Policy = "pseudonymise"
    """Bank account numbers (IBAN); the stand-in keeps the country and has the impossible check digits 00."""
    mail: Policy = "pseudonymise"
    """Mail addresses; the domain is kept or replaced as internal_hosts and public_domains say."""
    phones: Policy = "pseudonymise"
    """Phone numbers; the stand-in keeps the layout and begins with 999."""
    users: Policy = "pseudonymise"
    """User names in paths such as /home/NAME; the same name in a mail address gets the same stand-in."""
    private_ips: Policy = "pseudonymise"
    """Addresses of RFC 1918, fc00::/7 and fe80::/10; a /24 or /64 stays together inside private_blocks."""
    macs: Policy = "pseudonymise"
    """MAC addresses; the stand-in is locally administered and begins with 0a:5c."""
    internal_hosts: Policy = "pseudonymise"
    """Names below internal_domains, .internal, .local and their like, in UNC paths, syslog headers, host= fields."""
    public_ips: Policy = "keep"
    """All other routable addresses; they are indicators, so they are kept unless this says otherwise."""
    public_domains: Policy = "keep"
    """Host names in URLs and mail addresses that are not internal; they are indicators as well."""
    key_file: PathStr | None = None
    """File of 16 or more secret bytes that makes pseudonyms equal over runs; null draws a key for one run."""
    internal_domains: tuple[str, ...] = ()
    """Domains of the organisation, such as corp.acme.com; they and all names below them are internal hosts."""
    internal_host_names: tuple[str, ...] = ()
    """Bare names of machines, such as web01, to replace wherever they stand as a whole word."""
    allow: tuple[str, ...] = ()
    """Values to leave as they are, whatever their class; letter case does not matter."""
    private_blocks: tuple[str, ...] = ("10.176.0.0/12", "172.27.0.0/16", "192.168.192.0/19")
    """Where pseudonyms of 10/8, 172.16/12 and 192.168/16 lie; name blocks you do not use, as they count as redacted."""
    detect_secrets: bool = False
    """Also ask the detectors of the detect-secrets package (extra `data`), at about a third of the speed."""

    def __post_init__(self) -> None:
        for domain in self.internal_domains:
            if not _DOMAIN.fullmatch(domain.lower()):
                raise ConfigError(
                    f"internal_domains: {domain!r} is no domain; write it without dots around, as acme.com"
                )
        for name in self.internal_host_names:
            if not _HOST.fullmatch(name):
                raise ConfigError(f"internal_host_names: {name!r} is no bare host name of 2 to 63 letters and digits")
        if "" in self.allow:
            raise ConfigError("allow: an empty value would allow nothing; remove it")
        self._check_blocks()

    def policy(self, kind: str) -> Policy:
        """The policy for a kind of value."""
        policy: Policy = getattr(self, CLASS_OF[kind])
        return policy

    def _check_blocks(self) -> None:
        if len(self.private_blocks) != len(_RANGES):
            raise ConfigError(
                f"private_blocks: {len(self.private_blocks)} given; it needs one each of 10/8, 172.16/12, 192.168/16"
            )
        for text, whole in zip(self.private_blocks, _RANGES, strict=True):
            try:
                block = ipaddress.IPv4Network(text)
            except ValueError as error:
                raise ConfigError(f"private_blocks: {text!r} is no IPv4 network such as {whole}: {error}") from error
            if not block.subnet_of(whole) or not whole.prefixlen < block.prefixlen <= 24:
                raise ConfigError(f"private_blocks: {text} must be a part of {whole} with a prefix of at most 24")


class RedactionKey(NamedTuple):
    """The secret that makes pseudonyms and digests; ``lasting`` is False when it was drawn for this run only."""

    secret: bytes
    lasting: bool

    def __repr__(self) -> str:
        return f"RedactionKey(lasting={self.lasting})"


def load_key(config: RedactConfig) -> RedactionKey:
    """The bytes of ``key_file`` without white space around them, or a random key. Raises ConfigError."""
    if config.key_file is None:
        return RedactionKey(secrets.token_bytes(32), lasting=False)
    where = f"key_file: {config.key_file}"
    try:
        with Path(config.key_file).open("rb") as stream:
            secret = stream.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where} can't be read: {error.strerror}; make it with: openssl rand -hex 32") from error
    if len(secret) > MAX_KEY_BYTES:
        raise ConfigError(f"{where} has more than {MAX_KEY_BYTES} bytes; make one with: openssl rand -hex 32")
    if len(secret.strip()) < MIN_KEY_BYTES:
        raise ConfigError(f"{where} has fewer than {MIN_KEY_BYTES} bytes; make one with: openssl rand -hex 32")
    return RedactionKey(secret.strip(), lasting=True)
