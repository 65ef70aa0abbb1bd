"""Made-up text for the tests of cleaning: prose, advisories of one template, logs, dumps, rules, and junk."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Sequence

from cyberslm.data.clean.config import StepConfig
from cyberslm.data.clean.entry import Entry
from cyberslm.data.clean.pipeline import Cleaned, Pipeline

SYLLABLES = re.findall(r"\w+", "ba re ti ko lu mea sin dor ven ta pra sho ni gul fer mo al es un ira wen tho cal ib")
PRODUCTS = ["Aruna Gateway", "Bolt Server", "Cedar Mail", "Delfi Proxy", "Ember Store", "Fjord Agent", "Glint Portal"]
FLAWS = ["a buffer overflow", "path traversal", "a use after free", "SQL injection", "an authentication bypass"]
LOG_MESSAGES = ["Accepted publickey for", "Failed password for", "session opened for user", "Connection closed by"]


def vocabulary(rng: random.Random, size: int = 2000) -> list[str]:
    """Pronounceable words, some of them names or numbers, used with falling frequency."""
    plain = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(size)]
    return [
        word.capitalize() if rng.random() < 0.08 else f"{word}{rng.randint(2, 99)}" if rng.random() < 0.04 else word
        for word in plain
    ]


def prose(rng: random.Random, words: Sequence[str], length: int) -> str:
    chosen = [words[int(len(words) * rng.random() ** 2.5)] for _ in range(length)]
    sentences, at = [], 0
    while at < length:
        size = rng.randint(6, 18)
        sentences.append(" ".join(chosen[at : at + size]).capitalize() + ".")
        at += size
    return "\n".join(" ".join(sentences[at : at + 3]) for at in range(0, len(sentences), 3))


def with_words_changed(rng: random.Random, words: Sequence[str], text: str, *, share: float) -> str:
    parts = text.split(" ")
    for at in rng.sample(range(len(parts)), round(share * len(parts))):
        parts[at] = rng.choice(words)
    return " ".join(parts)


def advisory(rng: random.Random) -> str:
    """Long words of every advisory of one vendor, and a few that differ."""
    product, flaw = rng.choice(PRODUCTS), rng.choice(FLAWS)
    cve = f"CVE-{rng.randint(2015, 2026)}-{rng.randint(1000, 99999)}"
    fixed = f"{rng.randint(1, 9)}.{rng.randint(0, 20)}.{rng.randint(0, 20)}"
    return (
        f"Security advisory {cve}\n\nThe maintainers have been told about {flaw} in {product}. Versions before {fixed} "
        "are affected. A remote attacker who can reach the service over the network may use this to run code with the "
        "rights of the service, to read data that belongs to other users, or to make the service unavailable.\n\n"
        "There is no known way around the problem. All users are asked to install the update from the usual place, to "
        "restart the service, and to look in the logs of the last weeks for requests that were refused or ended in "
        f"an error.\n\nThis advisory will be updated when more is known. Questions about {cve} go to the security team "
        "by mail, encrypted with the key that is printed at the end of every release announcement.\n"
    )


def log(rng: random.Random, lines: int = 120) -> str:
    def line() -> str:
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
        who = f"root from 203.0.113.{rng.randint(1, 254)} port {rng.randint(1024, 65535)} ssh2"
        daemon = f"host{rng.randint(1, 4)} sshd[{rng.randint(300, 40000)}]"
        return f"Nov {rng.randint(1, 30):2} {clock} {daemon}: {rng.choice(LOG_MESSAGES)} {who}"

    return "\n".join(line() for _ in range(lines))


def hexdump(data: bytes) -> str:
    rows = [data[at : at + 16] for at in range(0, len(data), 16)]
    return "\n".join(
        f"{at * 16:08x}  {row.hex(' ')}  |{''.join(chr(c) if 32 <= c < 127 else '.' for c in row)}|"
        for at, row in enumerate(rows)
    )


def yara(rng: random.Random) -> str:
    strings = "\n".join(f"        $s{at} = {{ {rng.randbytes(12).hex(' ').upper()} ?? }}" for at in range(8))
    return (
        f"rule sample_{rng.randint(1, 999)} : loader\n{{\n    meta:\n        score = 70\n    strings:\n{strings}\n"
        "        $u = /https?:\\/\\/[a-z0-9]{4,20}\\.top\\//\n    condition:\n"
        "        uint16(0) == 0x5A4D and 4 of ($s*) or $u\n}"
    )


def kept_by_default(rng: random.Random) -> dict[str, str]:
    """Odd text of the domain that must stay."""
    words = vocabulary(rng)
    return {
        "prose": prose(rng, words, 300),
        "short": "CWE-79: Cross-site scripting.",
        "log": log(rng),
        "log of one message": "\n".join(f"{at} kernel: eth0: link up" for at in range(1000, 1300)),
        "hexdump": hexdump(rng.randbytes(2000)),
        "hexdump of zeros": hexdump(bytes(512) + rng.randbytes(256)),
        "sha-256 list": "\n".join(rng.randbytes(32).hex() for _ in range(200)),
        "sha-512 list": "\n".join(rng.randbytes(64).hex() for _ in range(50)),
        "address list": "\n".join(f"198.51.100.{rng.randint(0, 255)}" for _ in range(300)),
        "random domains": "\n".join("".join(rng.choices("bcdfghjkzx", k=14)) + "[.]example" for _ in range(100)),
        "yara": yara(rng),
        "snort": "\n".join(
            f'alert tcp $EXTERNAL_NET any -> $HOME_NET {port} (msg:"x"; content:"|90 90 90|"; sid:{port}; rev:1;)'
            for port in range(8000, 8040)
        ),
        "sigma": "title: odd\nlogsource:\n  product: windows\ndetection:\n  pick:\n    Image|endswith: '\\x.exe'\n",
        "table": "\n".join(f"| {at:5} | {rng.random():.3f} | {'x' * (at % 9)} |" for at in range(60)),
        "separators": "\n".join(["=" * 70, "Title", "=" * 70, prose(rng, words, 40), "-" * 70]),
        "csv": "\n".join(",".join(str(rng.randint(0, 9999)) for _ in range(12)) for _ in range(80)),
        "json": '{"a": [{"b": "c", "d": null}, {"e": [1, 2, 3]}], "f": {"g": true}}',
        "stack trace": "\n".join(f"  at com.acme.Thing$Inner.run(Thing.java:{at})" for at in range(30)),
        "paths": "\n".join(f"/usr/lib/python3/dist-packages/Acme{at}/Some_Module2/__init__.py" for at in range(80)),
        "registry": "\n".join(rf"HKLM\Software\Microsoft\Windows\CurrentVersion\Run\Key{at}" for at in range(60)),
        "certificate in prose": prose(rng, words, 250) + "\n" + base64.b64encode(rng.randbytes(600)).decode(),
        "nop sled": "shellcode = '" + "A" * 100 + "' + payload\n" + prose(rng, words, 60),
        "chinese": "".join(chr(rng.randint(0x4E00, 0x5FFF)) for _ in range(600)),
        "chinese with links": "".join(
            "".join(chr(rng.randint(0x4E00, 0x5FFF)) for _ in range(30)) + f" https://a{at}.example/p kernel patch\n"
            for at in range(25)
        ),
        "names of functions": "wcstoimax, wcstoumax \\- convert a wide string\n" + "see wcstol and wcstoimax , \n" * 20,
        "polish": (
            "wszystkie systemy wymagaja natychmiastowej aktualizacji poniewaz przestepcy wykorzystuja znane bledy "
            "bezpieczenstwa aby przejac kontrole nad serwerami oraz stacjami roboczymi uzytkownikow "
        )
        * 2,
        "german": (
            "angreifer koennten diese schwachstelle ausnutzen und schadcode einschleusen weshalb administratoren "
            "dringend sicherheitsaktualisierungen installieren und saemtliche protokolldateien durchsuchen "
        )
        * 2,
        "c names": "strncpy(dst, src, n); memcpy(buf, ptr, len); wcsncpy(a, b, c); snprintf(out, size, fmt);\n" * 3,
    }


def junk(rng: random.Random) -> dict[str, str]:
    """What no model should read, and the reason by which it goes."""
    return {
        "wall of random characters": base64.encodebytes(rng.randbytes(6000)).decode(),
        "wall of random characters (one line)": base64.b64encode(rng.randbytes(30000)).decode(),
        "wall of random characters (hexadecimal)": rng.randbytes(20000).hex(),
        "keyboard noise": " ".join("".join(rng.choices("qwrtpsdfghjklzxcvbnmaeio", k=8)) for _ in range(120)),
        "few letters and digits": "".join(rng.choices("!@#$%^&*(){}[]<>?/|~ ", k=2000)),
        "one character repeated": "A" * 5000,
        "repeated words": "buy cheap watches now " * 400,
        "repeated lines": "Lorem nobody reads this line at all\n" * 200,
        "not decodable": "".join(rng.choices("\ufffd\x01\x02\x03abc", k=1000)),
    }  # fmt: skip


def steps(*names: str, **settings: object) -> list[StepConfig]:
    from cyberslm.data.clean import config

    kinds = {field: hint for field, hint in config.StepConfig.__annotations__.items()}
    made = [StepConfig(**{name: getattr(config, kinds[name].removesuffix(" | None"))()}) for name in names]
    return made + [StepConfig(**{name: value}) for name, value in settings.items()]


def run(pipeline: Pipeline, entries: Sequence[Entry], *, workers: int = 1) -> list[Cleaned]:
    pipeline.survey(lambda: entries, workers=workers)
    return list(pipeline.run(lambda: entries, workers=workers))
