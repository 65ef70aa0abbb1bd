"""Redaction as a function: idempotent, linear, silent about values, settled on overlaps, safe to send to workers."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import near_misses, planted

from cyberslm.data.redact import CLASS_OF, RedactConfig, Redactor
from cyberslm.errors import InputError

KEY = bytes(range(32))
CLASSES = tuple(dict.fromkeys(CLASS_OF.values()))
DEFAULT = Redactor(RedactConfig(internal_domains=("acme.com",), internal_host_names=("bastion",)), KEY)
PSEUDONYMISE = Redactor(RedactConfig(internal_domains=("acme.com",), **dict.fromkeys(CLASSES, "pseudonymise")), KEY)
REMOVE = Redactor(RedactConfig(internal_domains=("acme.com",), **dict.fromkeys(CLASSES, "remove")), KEY)
REDACTORS = {"default": DEFAULT, "pseudonymise": PSEUDONYMISE, "remove": REMOVE}
PASSWORD = "Winter" + "2024!x"

SAMPLES = [s.text for held in (False, True) for s in planted(seed=40, held_out=held, count=15)]
SAMPLES += [s.text for held in (False, True) for s in near_misses(seed=41, held_out=held, count=6)]
PIECES = [
    "password=",
    "password: ",
    "pwd",
    "token ",
    "api_key=",
    "://",
    "://u:",
    "@",
    "a@b",
    ".lan",
    ".acme.com",
    "10.",
    "10.1.2.3",
    "192.168.1.9",
    "fd00::1",
    "fe80::",
    "+49 171 ",
    "(212) 555-",
    "4539 1488 0343 6467",
    "00:1a:2b:3c:4d:5e",
    "/home/",
    "/Users/",
    "C:\\Users\\",
    "\\\\srv1\\x$",
    "Bearer ",
    "eyJ",
    "-----BEGIN RSA PRIVATE KEY-----",
    "-----END RSA PRIVATE KEY-----",
    "DE89370400440532013000",
    "REDACTED",
    "[redacted:password]",
    "user-0123456789",
    "host-0123456789.example",
    "999-999-9999",
    "\u200b",
    "\u202e",
    "\n",
    "\r\n",
    " ",
    '"',
    "'",
    "=",
    ":",
    ".",
    "-",
    ",",
    ";",
    "\\",
    "\\n",
    "x",
    "7",
    "Aa1!Bb2@Cc3#",
    "jdoe",
]


@pytest.mark.parametrize("name", REDACTORS)
@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(SAMPLES), st.text(max_size=6)), max_size=14))
def test_redacting_twice_is_redacting_once(name: str, parts: list[str]) -> None:
    once = REDACTORS[name].redact("".join(parts))
    twice = REDACTORS[name].redact(once.text)
    assert twice.text == once.text
    assert twice.findings == ()


@pytest.mark.parametrize("name", REDACTORS)
def test_redacting_every_planted_text_twice_is_redacting_it_once(name: str) -> None:
    for text in SAMPLES:
        once = REDACTORS[name].redact(text)
        assert REDACTORS[name].redact(once.text) == (once.text, (), REDACTORS[name].redact(once.text).standins)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(SAMPLES)), max_size=10))
def test_findings_lie_in_the_original_in_order_on_their_lines(parts: list[str]) -> None:
    text = "".join(parts)
    findings = PSEUDONYMISE.redact(text).findings
    for finding in findings:
        assert 0 <= finding.start < finding.end <= len(text)
        assert finding.line == text.count("\n", 0, finding.start) + 1
    assert [f.start for f in findings] == sorted(f.start for f in findings)


def test_a_line_that_reads_otherwise_after_its_neighbour_changed_is_looked_at_again() -> None:
    """A plus at the start of a line is a diff's only while the line above is; a removed PEM block ends that."""
    text = "-----BEGIN PRIVATE KEY-----\n" + "A1b2" * 16 + "\n-----END PRIVATE KEY-----\n+33399458533"
    once = REMOVE.redact(text).text
    assert REMOVE.redact(once).text == once == "[redacted:private-key]\n[redacted:phone]"


def test_line_numbers_hold_for_windows_line_ends() -> None:
    findings = DEFAULT.redact(f"a\r\nb\r\npassword={PASSWORD}\r\nx 10.1.2.3\r\n").findings
    assert [(f.kind, f.line) for f in findings] == [("password", 3), ("private-ipv4", 4)]
    assert DEFAULT.redact(f"password={PASSWORD}\r\n").text == "password=[redacted:password]\r\n"


@pytest.mark.parametrize("hidden", ["\u200b", "\u2060", "\u202e", "\u2066", "\u00ad", "\ufeff"])
def test_invisible_characters_do_not_hide_a_secret(hidden: str) -> None:
    """A zero-width mark inside a key is covered by the find; one outside stays, as it may be evidence."""
    key = "AK" + "IA" + "QWERTYUIOPASDFGH"
    split = hidden.join([key[:6], key[6:9], key[9:]])
    redacted = DEFAULT.redact(f"a{hidden}b key {split} end")
    assert redacted.text == f"a{hidden}b key [redacted:aws-key] end"
    assert redacted.findings[0].digest == DEFAULT.digest("aws-key", key)


def test_a_password_beside_a_marker_is_found() -> None:
    text = DEFAULT.redact(f"[redacted:password] pwd={PASSWORD}").text
    assert text == "[redacted:password] pwd=[redacted:password]"


def test_lone_surrogates_and_empty_text_pass() -> None:
    assert DEFAULT.redact("") == ("", (), {})
    redacted = DEFAULT.redact(f"\ud800 password={PASSWORD}\udc00 \ud83d")
    assert redacted.text == "\ud800 password=[redacted:password] \ud83d"


def test_overlapping_finds_become_one_of_the_more_severe_kind() -> None:
    token = "gh" + "p_" + "a1B2" * 9
    redacted = DEFAULT.redact(f'password = "x {token} y"')
    assert redacted.text == 'password = "[redacted:github-token]"'
    assert [f.kind for f in redacted.findings] == ["github-token"]


def test_a_password_in_a_url_leaves_its_host_to_the_host_rule() -> None:
    text = PSEUDONYMISE.redact(f"postgres://app:{PASSWORD}@db.acme.com:5432/x").text
    assert text.startswith("postgres://app:REDACTED")
    assert text.endswith(".example:5432/x")


def test_policies_are_per_class() -> None:
    text = f"10.1.2.3 jdoe@gmail.com password={PASSWORD}"
    kept = Redactor(RedactConfig(private_ips="keep", mail="remove", passwords="keep"), KEY).redact(text)
    assert kept.text == f"10.1.2.3 [redacted:mail] password={PASSWORD}"
    public = Redactor(RedactConfig(public_ips="pseudonymise", public_domains="remove"), KEY)
    text = public.redact("8.8.8.8 8.8.8.9 2606:4700::1 https://bad.top/x").text.split()
    assert text[0].rpartition(".")[0] == text[1].rpartition(".")[0]
    assert int(text[0].split(".")[0]) >= 240
    assert text[2].startswith("2001:db8:")
    assert text[3] == "https://[redacted:public-domain]/x"


def test_allowed_values_stay() -> None:
    redactor = Redactor(RedactConfig(allow=("Soc@Vendor.com", "10.1.2.3")), KEY)
    assert redactor.redact("soc@vendor.com 10.1.2.3").text == "soc@vendor.com 10.1.2.3"


def test_own_domains_are_found_defanged_and_at_their_end_only() -> None:
    text = "web[.]acme[.]com acme.com .acme.com notacme.com acme.com.evil.ru"
    assert REMOVE.redact(text).text == (
        "[redacted:internal-host] [redacted:internal-host] .[redacted:internal-host] notacme.com acme.com.evil.ru"
    )


def test_given_host_names_go_as_whole_words() -> None:
    text = DEFAULT.redact("on Bastion, not bastions").text
    assert text.startswith("on host-")
    assert text.endswith(", not bastions")


def test_addresses_of_the_reserved_block_are_counted_not_hidden() -> None:
    redacted = DEFAULT.redact("10.176.1.1 and 10.1.1.1")
    assert redacted.text.startswith("10.176.1.1 and 10.1")
    assert redacted.standins == {"private-ipv4": 1}


def test_a_copy_for_a_worker_and_threads_give_the_same() -> None:
    text = "\n".join(SAMPLES)
    expected = DEFAULT.redact(text)
    assert copy.deepcopy(DEFAULT).redact(text) == expected
    with ThreadPoolExecutor(4) as pool:
        assert all(result == expected for result in pool.map(DEFAULT.redact, [text] * 4))


def test_a_document_gives_the_same_stand_ins_alone_and_in_company() -> None:
    alone = [PSEUDONYMISE.redact(text).text for text in SAMPLES]
    random.Random(1).shuffle(order := list(range(len(SAMPLES))))
    assert [PSEUDONYMISE.redact(SAMPLES[i]).text for i in order] == [alone[i] for i in order]


def test_a_short_key_is_refused_without_being_shown() -> None:
    with pytest.raises(InputError, match="16 bytes") as caught:
        Redactor(RedactConfig(), b"tooshortsecret")
    assert "tooshort" not in str(caught.value)


ADVERSARIAL = [
    "-----BEGIN RSA PRIVATE KEY-----",
    "-----BEGIN ",
    "AKIA",
    "a@",
    "a@a.",
    "://a:",
    "://a:b@",
    "eyJ",
    "eyJaaaaaa.aaaaaaa.",
    "password=",
    'password: "',
    "password is ",
    "pass",
    "api_key=",
    "token=a_a_",
    "secret=AaAaAaAaAaAa",
    "1",
    "1 ",
    "10.1.",
    "4111 ",
    "+1",
    "+1 ",
    "0171 ",
    "aa:",
    "fe80:",
    "fd00:",
    "\\",
    "/home/",
    "\\Users\\a ",
    "a.lan",
    ".lan.",
    "host=",
    "xoxb-",
    "sk-",
    "pypi-Ag-",
    "bearer ",
    "GB82 WEST ",
    "mysql -",
    "curl -u a",
    "PuTTY-User-Key-File-2: a\n",
    "a\n",
    "a\u200b",
    "(212) ",
    "password='\\",
    "<password>",
    ":$6$",
    "1:AA",
    "[at]",
    "a[at]b[.]",
    "acme.com",
    "a.acme.com",
    "password,",
    "pass_pass-",
    "Nov 30 00:00:00 a b",
    "net use ",
    "password for a a",
]


@pytest.mark.parametrize("seed", ADVERSARIAL, ids=repr)
def test_hostile_repetition_ends(seed: str) -> None:
    """100 kB that invite backtracking; quadratic time would take hours, linear time a tenth of a second."""
    for text in (seed * (100_000 // len(seed)), "x" + seed * (100_000 // len(seed)) + "!"):
        once = DEFAULT.redact(text).text
        assert DEFAULT.redact(once).text == once


def test_a_line_of_ten_megabytes_is_searched_to_its_end() -> None:
    text = "lorem ipsum dolor " * 560_000 + f"password={PASSWORD}"
    assert DEFAULT.redact(text).text.endswith(" password=[redacted:password]")
