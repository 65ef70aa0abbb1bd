"""Logs made by a script, with anomalies planted among normal lines, and labelled alerts: material of the work commands.

Anomalies are built as normal lines are, so that their lengths don't give them away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

USERS = ("alice", "bob", "carol", "deploy", "backup")
HOSTS = ("web01", "web02", "db01", "mail01")
PAGES = ("/index.html", "/login", "/api/v1/items", "/static/app.js", "/health")
UNITS = ("nginx", "cron", "rsyslog", "postgres")
ODD_USERS = ("xq7zk", "wpadm", "r00t_", "zzuid")
ODD_PAGES = ("/..%2f..%2f", "/cgi-bin/;id", "/wp-l0gin", "/$%7Bjndi", "/?q='OR'1'")


def normal_line(rng: random.Random) -> str:
    """A line such as a healthy machine writes."""
    host, user = rng.choice(HOSTS), rng.choice(USERS)
    address = f"10.0.{rng.randrange(4)}.{rng.randrange(1, 255)}"
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}"
    return rng.choice(
        (
            f"{clock} {host} sshd: Accepted publickey for {user} from {address} port {rng.randrange(40000, 60000)}",
            f"{clock} {host} sshd: Disconnected from user {user} {address} port {rng.randrange(40000, 60000)}",
            f'{clock} {host} httpd: {address} "GET {rng.choice(PAGES)} HTTP/1.1" 200 {rng.randrange(100, 9999)}',
            f"{clock} {host} systemd: Started {rng.choice(UNITS)}.service",
            f"{clock} {host} cron: ({user}) CMD (/usr/bin/run-parts /etc/cron.hourly)",
        )
    )


def odd_line(rng: random.Random) -> str:
    """A line of the same make in which one thing is not usual."""
    line = normal_line(rng)
    for usual, odd in ((USERS, ODD_USERS), (PAGES, ODD_PAGES)):
        for word in usual:
            if f" {word} " in line or f"({word})" in line:
                return line.replace(word, rng.choice(odd))
    return line.replace("Started ", rng.choice(("Killed ", "Masked ", "Forged ")))


def log(lines: int, *, seed: int, every: int = 0) -> tuple[list[str], list[bool]]:
    """Lines and whether each is odd: one in ``every``, none for 0."""
    rng = random.Random(seed)
    odd = [bool(every) and number % every == every - 1 for number in range(lines)]
    return [odd_line(rng) if is_odd else normal_line(rng) for is_odd in odd], odd


PROMPT = "{text}; category: {label}."
ALERTS = {
    "phishing": ("mail with a link to a fake login page", "user gave the password to a fake site"),
    "malware": ("file drops a service and encrypts documents", "process injects code and calls home"),
    "scan": ("many ports were probed from one address", "sweep of the subnet for open services"),
}
SOURCES = ("sensor a", "sensor b", "mail gateway", "endpoint agent")


def alerts(number: int, *, seed: int, noise: float = 0.0) -> list[tuple[str, str]]:
    """Texts and their labels; a share of ``noise`` has another label."""
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        label = rng.choice(sorted(ALERTS))
        text = f"{rng.choice(SOURCES)}: {rng.choice(ALERTS[label])}, case {rng.randrange(1000)}"
        made.append((text, rng.choice(sorted(ALERTS)) if rng.random() < noise else label))
    return made


def area_under_curve(scores: Sequence[float], odd: Sequence[bool]) -> float:
    """The chance that an odd line scores above a normal one, ties by half: counted pair by pair."""
    high = [score for score, is_odd in zip(scores, odd, strict=True) if is_odd]
    low = [score for score, is_odd in zip(scores, odd, strict=True) if not is_odd]
    won = sum((one > other) + 0.5 * (one == other) for one in high for other in low)
    return won / (len(high) * len(low))
