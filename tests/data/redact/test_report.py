"""Settings, keys and reports: every mistake is named, and no value is in anything that is written or shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from planted import planted

from cyberslm.data.redact import RedactConfig, RedactionReport, Redactor, finding_lines, load_key
from cyberslm.errors import ConfigError, CyberSLMError

KEY = b"a-key-that-must-not-be-seen-anywhere"
CONFIG = RedactConfig(internal_domains=("acme.com",))


def test_no_value_and_no_key_is_in_any_output_error_or_repr() -> None:
    redactor = Redactor(CONFIG, KEY)
    report = RedactionReport()
    seen = [repr(redactor), repr(redactor._pseudonyms)]
    samples = planted(seed=50, held_out=False, count=12)
    for sample in samples:
        redacted = redactor.redact(sample.text)
        report.add(redacted)
        seen += [repr(redacted.findings), *finding_lines(redacted, "notes.txt"), repr(redacted.standins)]
    seen += [repr(report), json.dumps(report.summary()), *report.digest_lines()]
    shown = "\n".join(seen)
    assert [sample for sample in samples if sample.value in shown] == []
    assert KEY.decode() not in shown


def test_every_find_is_a_json_line_with_place_class_and_digest() -> None:
    redacted = Redactor(CONFIG, KEY).redact("x\nfrom 10.1.2.3\n")
    (line,) = finding_lines(redacted, "logs/a.log", line=100)
    digest = Redactor(CONFIG, KEY).digest("private-ipv4", "10.1.2.3")
    place = {"file": "logs/a.log", "line": 101}
    assert json.loads(line) == place | {"class": "private_ips", "kind": "private-ipv4", "digest": digest}


def test_reports_merge_to_the_same_in_any_order() -> None:
    redactor = Redactor(CONFIG, KEY)
    results = [redactor.redact(s.text) for s in planted(seed=51, held_out=True, count=4)]
    whole, first, second = RedactionReport(), RedactionReport(), RedactionReport()
    for index, result in enumerate(results):
        whole.add(result)
        (first if index % 3 else second).add(result)
    second.merge(first)
    assert second == whole
    assert whole.documents == len(results)
    assert list(second.digest_lines()) == sorted(whole.digest_lines())


def test_digests_of_spellings_of_one_value_agree() -> None:
    redactor = Redactor(CONFIG, KEY)
    assert redactor.digest("card", "4539 1488 0343 6467") == redactor.digest("card", "4539148803436467")
    assert redactor.digest("mac", "00:1A:2B:3C:4D:5E") == redactor.digest("mac", "001a.2b3c.4d5e")
    assert redactor.digest("private-ipv4", "10[.]0[.]0[.]5") == redactor.digest("private-ipv4", "10.0.0.5")


def test_a_key_file_lasts_and_a_drawn_key_does_not(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"  0123456789abcdef0123456789abcdef\n")
    kept = load_key(RedactConfig(key_file=str(tmp_path / "key")))
    assert kept.secret == b"0123456789abcdef0123456789abcdef"
    assert kept.lasting
    drawn = load_key(RedactConfig())
    assert not drawn.lasting
    assert drawn.secret != load_key(RedactConfig()).secret
    assert "0123456789" not in repr(kept)


@pytest.mark.parametrize(
    ("content", "words"), [(b"short", "fewer than 16"), (b"x" * 5000, "more than 4096"), (None, "can't be read")]
)
def test_a_bad_key_file_is_named_with_the_fix(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"key_file: .*{words}.*openssl rand"):
        load_key(RedactConfig(key_file=str(path)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"internal_domains": (".acme.com",)}, "internal_domains: '.acme.com'"),
        ({"internal_host_names": ("a.b",)}, "internal_host_names: 'a.b'"),
        ({"allow": ("",)}, "allow: an empty value"),
        ({"private_blocks": ("10.0.0.0/12",)}, "private_blocks: 1 given"),
        ({"private_blocks": ("10.0.0.0/8", "172.27.0.0/16", "192.168.192.0/19")}, "private_blocks: 10.0.0.0/8"),
        ({"private_blocks": ("x", "172.27.0.0/16", "192.168.192.0/19")}, "private_blocks: 'x'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, tuple[str, ...]], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        RedactConfig(**settings)


def test_asking_for_detect_secrets_without_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "detect_secrets.plugins", None)
    with pytest.raises(CyberSLMError, match=r"cyberslm\[data\]"):
        Redactor(RedactConfig(detect_secrets=True), KEY)
