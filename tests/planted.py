"""A labelled set made at run time: values of 23 kinds in many contexts, and near-misses that must stay.

``redaction_contexts.tsv`` has a template a line: the set it belongs to, the kind of value, or ``not:`` and the kind of
thing that only looks like one, and the text, in which ``<value>`` stands for the planted value and marks such as <h40>,
<d5> and <uuid> for fresh hexadecimal digits, digits and so on. Rules were tuned on the set ``tuned`` only; ``held-out``
was written afterwards. No secret stands whole in any file: formats are put together from parts here.
"""

from __future__ import annotations

import base64
import json
import random
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
WORDS = ("river", "stone", "orange", "window", "candle", "rocket", "garden", "silver", "thunder", "pepper", "monkey")
NAMES = ("jdoe", "asmith", "m.mueller", "lchen", "karl.berg", "tnguyen", "olga_p", "rpatel", "bwayne2", "hans-peter")
PLACEHOLDERS = (
    *("<your-password>", "${DB_PASS}", "changeme", "{{ vault_password }}", "$PASSWORD", "********", "%DB_PASSWORD%"),
    *(
        "your_password_here",
        "null",
        "os.environ['DB_PASS']",
        "[REDACTED]",
        "xxxxxxxx",
        "getpass.getpass()",
        "REPLACE_ME",
    ),
)
MARK = re.compile(r"<(?:([hHdab])(\d+)|n(\d+)-(\d+)|(uuid|UUID|placeholder))>")
ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\"}


class Sample(NamedTuple):
    """A text, and the places of the values planted in it (none for a near-miss)."""

    kind: str
    text: str
    value: str


def pick(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(length))


def mixed(rng: random.Random, alphabet: str, length: int) -> str:
    """Random characters with at least two digits and two letters."""
    while True:
        value = pick(rng, alphabet, length)
        if sum(c.isdigit() for c in value) >= 2 and sum(c.isalpha() for c in value) >= 2:
            return value


def password(rng: random.Random) -> str:
    style = rng.randrange(10)
    word = rng.choice(WORDS)
    if style < 3:
        return mixed(rng, ALNUM, rng.randint(8, 16))
    if style < 6:
        return mixed(rng, ALNUM + "!#%*-_+=?.^", rng.randint(8, 20)).strip("!#%*-_+=?.^") + rng.choice(["7", "x", "!"])
    if style < 8:
        return word.capitalize() + str(rng.randint(1, 2030)) + rng.choice(["", "!", "#", "?!"])
    if style == 8:
        return "-".join(rng.sample(WORDS, 3)) + str(rng.randint(1, 99))
    return word + rng.choice(WORDS)


def b64(data: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


def jwt(rng: random.Random) -> str:
    head = {"alg": rng.choice(["HS256", "RS256", "ES256"]), "typ": "JWT"}
    return ".".join(
        [b64(head), b64({"sub": pick(rng, HEX, 12), "iat": rng.randrange(10**9)}), pick(rng, ALNUM + "-_", 43)]
    )


def pem(rng: random.Random) -> str:
    name = rng.choice(["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "DSA "]) + "PRIVATE KEY"
    lines = [pick(rng, ALNUM + "+/", 64) for _ in range(rng.randint(3, 12))] + [pick(rng, ALNUM, 30) + "=="]
    return "\n".join(["-----BEGIN " + name + "-----", *lines, "-----END " + name + "-----"])


def card(rng: random.Random) -> str:
    prefix, length = rng.choice(
        [("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("34", 15), ("37", 15), ("6011", 16), ("3530", 16)]
    )
    body = prefix + pick(rng, string.digits, length - len(prefix) - 1)
    check = next(d for d in string.digits if luhn(body + d))
    digits = body + check
    separator = rng.choice(["", " ", "-"])
    cuts = (0, 4, 10, 15) if length == 15 else (0, 4, 8, 12, 16)
    return separator.join(digits[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


def luhn(digits: str) -> bool:
    total = 0
    for index, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if index % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def iban(rng: random.Random) -> str:
    country, length = rng.choice([("DE", 22), ("GB", 22), ("FR", 27), ("NL", 18), ("ES", 24), ("CH", 21)])
    bank = "".join(rng.sample(string.ascii_uppercase, 4)) if country in ("GB", "NL") else ""
    body = bank + pick(rng, string.digits, length - 4 - len(bank))
    number = int("".join(str(int(c, 36)) for c in body + country + "00"))
    plain = f"{country}{98 - number % 97:02}{body}"
    return plain if rng.random() < 0.5 else " ".join(plain[i : i + 4] for i in range(0, length, 4))


def phone(rng: random.Random) -> str:
    def d(length: int) -> str:
        return pick(rng, "23456789", length)

    return rng.choice(
        [
            f"+49 {d(3)} {d(7)}",
            f"+1 {d(3)} {d(3)} {d(4)}",
            f"+44 20 {d(4)} {d(4)}",
            f"+33{d(9)}",
            f"({d(3)}) {d(3)}-{d(4)}",
            f"{d(3)}-{d(3)}-{d(4)}",
            f"+1-{d(3)}-{d(3)}-{d(4)}",
            f"+41 {d(2)} {d(3)} {d(2)} {d(2)}",
            f"0{d(3)}-{d(7)}",
            f"+353 (0) {d(2)} {d(3)} {d(4)}",
        ]
    )


def ipv4(rng: random.Random) -> str:
    def o() -> int:
        return rng.randint(1, 254)

    return rng.choice(
        [
            f"10.{rng.randint(0, 60)}.{o()}.{o()}",
            f"172.{rng.randint(16, 26)}.{o()}.{o()}",
            f"192.168.{rng.randint(0, 190)}.{o()}",
        ]
    )


def ipv6(rng: random.Random) -> str:
    def h() -> str:
        return f"{rng.randrange(1, 65536):x}"

    return rng.choice(
        [
            f"fd{pick(rng, HEX, 2)}:{h()}:{h()}::{h()}",
            f"fe80::{h()}:{h()}:{h()}:{h()}",
            f"fd00:{h()}:{h()}:{h()}:{h()}:{h()}:{h()}:{h()}",
        ]
    )


def host(rng: random.Random) -> str:
    name = rng.choice(["web", "db", "dc", "srv-fin", "jump", "mail", "git", "vpn", "ws-hr"]) + rng.choice(
        ["01", "2", "-a", "17", ""]
    )
    return name + rng.choice(
        [".corp.acme.com", ".acme.com", ".hq.internal", ".prod.corp", ".office.lan", ".ad.intra", ".site2.local"]
    )


def mac(rng: random.Random) -> str:
    pairs = ["00", *(pick(rng, HEX, 2) for _ in range(4)), rng.choice(HEX) + "b"]
    style = rng.randrange(4)
    if style == 0:
        return "".join(pairs[0:2]) + "." + "".join(pairs[2:4]) + "." + "".join(pairs[4:6])
    text = ("-" if style == 1 else ":").join(pairs)
    return text.upper() if style == 2 else text


VALUES: dict[str, Callable[[random.Random], str]] = {
    "aws-id": lambda r: "AK" + "IA" + pick(r, string.ascii_uppercase + "234567", 16),
    "aws-secret": lambda r: mixed(r, ALNUM + "+/", 38) + "k9",
    "github": lambda r: r.choice(["gh" + "p_", "gh" + "s_", "gh" + "o_"]) + pick(r, ALNUM, 36),
    "slack": lambda r: (
        "xo" + r.choice(["xb-", "xp-"]) + f"{pick(r, '123456789', 11)}-{pick(r, '123456789', 12)}-{pick(r, ALNUM, 24)}"
    ),
    "google": lambda r: "AI" + "za" + pick(r, ALNUM + "-_", 34) + "Q",
    "stripe": lambda r: r.choice(["sk", "rk"]) + "_li" + "ve_" + pick(r, ALNUM, 24),
    "bearer": lambda r: mixed(r, ALNUM + "-_", r.randint(30, 60)) + "a1",
    "jwt": jwt,
    "pem": pem,
    "api-key": lambda r: mixed(r, r.choice([ALNUM, HEX]), r.choice([24, 32, 40])),
    "url-password": lambda r: mixed(r, ALNUM + "!.-_~", 10) + "x",
    "config-password": password,
    "command-password": lambda r: mixed(r, ALNUM + "!.-_", 9) + "x",
    "connection-password": lambda r: mixed(r, ALNUM + "!.-_#", 11) + "x",
    "mail": lambda r: (
        r.choice(NAMES)
        + "@"
        + r.choice(["acme.com", "corp.acme.com", "gmail.com", "partner-bank.de", "mail.partner.co.uk"])
    ),
    "user-path": lambda r: r.choice(NAMES),
    "ipv4": ipv4,
    "ipv6": ipv6,
    "host": host,
    "mac": mac,
    "card": card,
    "phone": phone,
    "iban": iban,
}


def templates(*, held_out: bool) -> dict[str, list[str]]:
    """The templates of a set by kind."""
    found: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "redaction_contexts.tsv").read_text(encoding="utf-8").splitlines():
        which, kind, text = line.split("\t")
        if (which == "held-out") == held_out:
            found.setdefault(kind, []).append(re.sub(r"\\[nrt\\]", lambda match: ESCAPES[match[0]], text))
    return found


def planted(*, seed: int, held_out: bool, count: int = 50) -> list[Sample]:
    """``count`` samples of each kind of value."""
    rng = random.Random(seed)
    texts = templates(held_out=held_out)
    samples = []
    for kind, make in VALUES.items():
        for index in range(count):
            value = make(rng)
            text = texts[kind][index % len(texts[kind])]
            samples.append(Sample(kind, text.replace("<value>", value), value))
    return samples


def near_misses(*, seed: int, held_out: bool, count: int = 50) -> list[Sample]:
    """``count`` texts of each kind of thing that looks like a secret and is none."""
    rng = random.Random(seed)
    kinds = {kind: texts for kind, texts in templates(held_out=held_out).items() if kind.startswith("not:")}
    return [
        Sample(kind, _miss(rng, kind, texts[i % len(texts)]), "") for kind, texts in kinds.items() for i in range(count)
    ]


def _miss(rng: random.Random, kind: str, template: str) -> str:
    while True:
        text = MARK.sub(lambda mark: _fresh(rng, mark), template)
        if kind != "not:bad-card" or not any(luhn(digits) for digits in re.findall(r"\d{13,}", text)):
            return text


def _fresh(rng: random.Random, mark: re.Match[str]) -> str:
    letter, length, low, high, word = mark.groups()
    if low:
        return str(rng.randint(int(low), int(high)))
    if word == "placeholder":
        return rng.choice(PLACEHOLDERS)
    if word:
        text = str(uuid.UUID(int=rng.getrandbits(128)))
        return text if word == "uuid" else text.upper()
    if letter == "b":
        return base64.b64encode(rng.randbytes(int(length))).decode()
    return pick(rng, {"h": HEX, "H": HEX.upper(), "d": string.digits, "a": ALNUM}[letter], int(length))


class Quality(NamedTuple):
    """Values found whole over values planted; finds that touch a value over all finds; both also by kind."""

    recall: float
    precision: float
    recall_of: dict[str, float]
    false_of: Counter[str]
    missed: list[Sample]
    wrong: list[tuple[Sample, str]]


def measure(
    find: Callable[[str], Iterable[tuple[int, int]]], planted: Iterable[Sample], misses: Iterable[Sample]
) -> Quality:
    hits: Counter[str] = Counter()
    planted_of: Counter[str] = Counter()
    false: Counter[str] = Counter()
    missed, wrong, right = [], [], 0
    for sample in (*planted, *misses):
        at = sample.text.find(sample.value) if sample.value else -1
        end = at + len(sample.value)
        spans = list(find(sample.text))
        if sample.value:
            planted_of[sample.kind] += 1
            covered = all(any(a <= i < b for a, b in spans) for i in range(at, end))
            hits[sample.kind] += covered
            if not covered:
                missed.append(sample)
        for a, b in spans:
            if sample.value and a < end and b > at:
                right += 1
            else:
                false[sample.kind] += 1
                wrong.append((sample, sample.text[a:b]))
    total = sum(planted_of.values())
    return Quality(
        recall=sum(hits.values()) / total,
        precision=right / max(1, right + sum(false.values())),
        recall_of={kind: hits[kind] / number for kind, number in planted_of.items()},
        false_of=false,
        missed=missed,
        wrong=wrong,
    )
