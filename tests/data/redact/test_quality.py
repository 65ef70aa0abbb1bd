"""Recall and precision on planted values, in contexts that the rules were and were not tuned on."""

from __future__ import annotations

import pytest
from planted import measure, near_misses, planted

from cyberslm.data.redact import RedactConfig, Redactor

KEY = bytes(range(32))
REDACTOR = Redactor(RedactConfig(internal_domains=("acme.com",)), KEY)


def find(text: str) -> list[tuple[int, int]]:
    return [(finding.start, finding.end) for finding in REDACTOR.redact(text).findings]


@pytest.mark.parametrize("held_out", [False, True], ids=["development", "held out"])
def test_recall_and_precision_reach_the_target(held_out: bool) -> None:
    seed = 20 if held_out else 10
    samples = planted(seed=seed, held_out=held_out)
    misses = near_misses(seed=seed + 1, held_out=held_out)
    assert len(samples) >= 20 * 50
    assert len(misses) >= 1000
    quality = measure(find, samples, misses)
    assert quality.recall >= 0.98, [sample.text for sample in quality.missed]
    assert quality.precision >= 0.95, quality.wrong
    assert min(quality.recall_of.values()) >= 0.9, quality.recall_of


def test_no_planted_value_is_left_in_the_text() -> None:
    samples = planted(seed=31, held_out=True, count=20)
    text = "\n".join(sample.text for sample in samples)
    redacted = REDACTOR.redact(text).text
    left = [sample for sample in samples if sample.value in redacted]
    # The bare login may also stand in a word of its own elsewhere, so paths are judged by their folder.
    assert [s for s in left if s.kind != "user-path"] == []


def test_indicators_are_kept() -> None:
    sha = "ab12" * 16
    text = (
        f"CVE-2024-3094 CWE-79 CAPEC-66 T1059.001 {sha} {sha[:32]} 8.8.8.8 185.220.101[.]5 "
        "hxxp://bad[.]top/x https://bad.top/y 2606:4700::1111 "
        "550e8400-e29b-41d4-a716-446655440000 HKLM\\Software\\Run "
        "C:\\Windows\\cmd.exe"
    )
    assert REDACTOR.redact(text) == (text, (), {})


@pytest.mark.parametrize(
    "text",
    [
        "password: <your-password>",
        "password=${DB_PASS}",
        "password: changeme",
        "PASS=$PASS",
        "pwd: ********",
        "admin@example.com",
        "AKIA" + "IOSFODNN7" + "EXAMPLE",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        "call 212-555-0199",
        "10.0.0.0/8",
        "127.0.0.1",
        "/home/ubuntu/x",
        "ff:ff:ff:ff:ff:ff",
    ],
)
def test_placeholders_and_documentation_are_kept(text: str) -> None:
    assert REDACTOR.redact(text).text == text


def test_detect_secrets_adds_what_only_it_knows() -> None:
    pytest.importorskip("detect_secrets")
    token = "M" + "aB3" * 8 + "." + "xY9_z1" + "." + "Q7w" * 9
    asked = Redactor(RedactConfig(detect_secrets=True), KEY)
    assert token in REDACTOR.redact(f"bot {token} x").text
    redacted = asked.redact(f"bot {token} x")
    assert redacted.text == "bot [redacted:detect-secrets] x"
    assert asked.redact(redacted.text).text == redacted.text
