"""Made-up text to judge a tokenizer by: indicators of each kind, and strings that tokenizers are known to lose.

Everything is drawn from a seeded generator, so that two tokenizers, machines or days are measured on the same strings.
Addresses and names are from the ranges kept for documentation (RFC 2606, 3849, 5737).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

INDICATORS_PER_KIND = 64

_WORDS = (
    *("agent", "backup", "client", "config", "driver", "install", "loader", "login", "mail", "office", "portal"),
    *("report", "server", "service", "setup", "share", "system", "token", "update", "upload", "user", "worker"),
)
_ENDS = ("com", "net", "org", "example", "test")
_NETS = ("192.0.2", "198.51.100", "203.0.113")


def indicators() -> dict[str, tuple[str, ...]]:
    """Kind to strings of that kind, the same at every call."""
    rng = random.Random(20)
    return {kind: tuple(make(rng) for _ in range(INDICATORS_PER_KIND)) for kind, make in _KINDS.items()}


def round_trip_probes() -> tuple[str, ...]:
    """Short strings with white space, controls, marks, scripts and spellings of special tokens that must come back."""
    spaces = [
        f"{before}{gap}{after}"
        for gap in ("  ", "\t", "\n", "\r\n", " \n ", "   ")
        for before in ("", "a")
        for after in ("", "b")
    ]
    names = ("<s>", "</s>", "<pad>", "<unk>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|end|>", "<|im_start|>")
    spelled = [*names, "<|endoftext|>", "<0x41>", "[INST]", "<e\u200bos>"]
    marks = [
        "\u2581",
        " \u2581x",
        "\u25811",
        "\ufdd0",
        "\ufdd00\ufdd01",
        "\u2585",
        "\ufeffa",
        "\ufffd",
        "\0",
        "\x1b[31m",
    ]
    scripts = [
        "\u202eabc\u202c",
        "e\u0301 \u00e9",
        "p\u0430ypal",
        "\u65e5\u672c\u8a9e",
        "\u0645\u0631\u062d\u0628\u0627",
    ]
    joined = ["\U0001f468\u200d\U0001f4bb", "\u1112\u1161\u11ab", "\ufb01\u2460\uff21", "\U0010ffff"]
    dump = "00000010: 4d5a 9000 0300 0000  MZ......\n"
    return ("", " ", "  two", "two  ", *spaces, *spelled, *marks, *scripts, *joined, dump, "\tif x:\n\t\treturn  1\n")


def _number(rng: random.Random, digits: int) -> str:
    return f"{rng.randrange(10 ** (digits - 1), 10**digits)}"


def _cve(rng: random.Random) -> str:
    return f"CVE-{rng.randint(1999, 2026)}-{_number(rng, rng.choice((4, 5)))}"


def _ipv4(rng: random.Random) -> str:
    return f"{rng.choice(_NETS)}.{rng.randint(1, 254)}"


def _ipv6(rng: random.Random) -> str:
    return "2001:db8:" + ":".join(f"{rng.getrandbits(16):x}" for _ in range(6))


def _hex(size: int) -> Callable[[random.Random], str]:
    return lambda rng: rng.randbytes(size).hex()


def _domain(rng: random.Random) -> str:
    name = rng.choice(("-", "")).join(rng.sample(_WORDS, 2))
    return f"{rng.choice(('www', 'cdn', 'mail', rng.choice(_WORDS)))}.{name}{rng.randint(1, 99)}.{rng.choice(_ENDS)}"


def _url(rng: random.Random) -> str:
    path = "/".join(rng.sample(_WORDS, 2))
    return (
        f"{rng.choice(('http', 'https'))}://{_domain(rng)}/{path}.php?id={rng.getrandbits(32):x}&v={rng.randint(1, 20)}"
    )


def _windows_path(rng: random.Random) -> str:
    folder = rng.choice(("Windows\\System32", "ProgramData", f"Users\\{rng.choice(_WORDS)}\\AppData\\Local\\Temp"))
    return f"C:\\{folder}\\{rng.choice(_WORDS)}{_number(rng, 2)}.{rng.choice(('exe', 'dll', 'ps1', 'vbs'))}"


def _unix_path(rng: random.Random) -> str:
    folder = rng.choice(("/usr/local/bin", "/var/tmp", "/etc/cron.d", f"/home/{rng.choice(_WORDS)}/.config"))
    return f"{folder}/.{rng.choice(_WORDS)}-{rng.getrandbits(24):06x}{rng.choice(('', '.sh', '.so', '.py'))}"


def _registry_key(rng: random.Random) -> str:
    root = rng.choice(("HKLM", "HKCU", "HKEY_LOCAL_MACHINE"))
    place = rng.choice(
        ("Microsoft\\Windows\\CurrentVersion\\Run", f"Classes\\CLSID\\{{{uuid.UUID(int=rng.getrandbits(128))}}}")
    )
    return f"{root}\\SOFTWARE\\{place}\\{rng.choice(_WORDS).title()}"


def _mail(rng: random.Random) -> str:
    return f"{rng.choice(_WORDS)}.{rng.choice(_WORDS)}{rng.randint(1, 99)}@{_domain(rng)}"


def _sigma(rng: random.Random) -> str:
    tool, word, other = rng.sample(_WORDS, 3)
    lines = (
        f"title: {tool.title()} started from {word}",
        f"id: {uuid.UUID(int=rng.getrandbits(128))}",
        "status: experimental",
        "logsource:\n    category: process_creation\n    product: windows",
        f"detection:\n    selection:\n        Image|endswith: '\\{tool}.exe'",
        f"        CommandLine|contains:\n            - '-{word} '\n            - '/{other}'",
        f"    condition: selection\nlevel: {rng.choice(('low', 'medium', 'high'))}",
    )
    return "\n".join(lines) + "\n"


def _yara(rng: random.Random) -> str:
    tool, word = rng.sample(_WORDS, 2)
    lines = (
        f"rule {tool}_{word}_{_number(rng, 3)}\n{{",
        f'    meta:\n        hash = "{rng.randbytes(32).hex()}"',
        f'    strings:\n        $a = "{word}.{rng.choice(_ENDS)}" ascii wide nocase',
        f"        $b = {{ {rng.randbytes(8).hex(' ').upper()} ?? }}",
        f"    condition:\n        uint16(0) == 0x5A4D and filesize < {rng.randint(1, 900)}KB and all of them\n}}",
    )
    return "\n".join(lines) + "\n"


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "CVE id": _cve,
    "IPv4": _ipv4,
    "IPv6": _ipv6,
    "MD5": _hex(16),
    "SHA-256": _hex(32),
    "domain": _domain,
    "URL": _url,
    "e-mail": _mail,
    "Windows path": _windows_path,
    "Unix path": _unix_path,
    "registry key": _registry_key,
    "Sigma rule": _sigma,
    "YARA rule": _yara,
}
