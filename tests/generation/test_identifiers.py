from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.generation.identifiers import HELD, KINDS, IdentifierAutomaton, find

FRAGMENTS = [  # pieces of identifiers, of what only resembles them and of what ends them
    *"aefxz019.:-_@/[]()% ,;!'\"\n",
    *("cve-", "CVE-2024-3400", "CVE-2024-", "10.0.0.1", "10.0.0.12", "evil.com", "evil", ".co", ".uk", "e.g.", "[.]"),
    *("(dot)", "[at]", "[:]", "[://]", "http://", "hxxps://", "https", "bob@", "@x.org", "fe80::1", "2001:db8::", "::"),
    *(
        "a" * 31,
        "0123456789abcdef" * 2,
        "0123456789abcdef" * 4,
        "12:34:56",
        "1:2:3:4:5:6:7:8",
        "\u00e9",
        "\u20ac",
        "/a_(b)",
    ),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)


def read(kind: str, allowed: set[bytes], text: bytes) -> str:
    """How an automaton takes a text: "refused", "unfinished" or "taken"."""
    automaton = IdentifierAutomaton(KINDS[kind], allowed)
    state = automaton.start
    for byte in text:
        state = automaton.step(state, byte)
        if state is None:
            return "refused"
    return "taken" if automaton.final(state) else "unfinished"


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("cve", "see cve-2024-3400-based, CVE-2021-44228.", {"cve-2024-3400", "cve-2021-44228"}),
        ("ipv4", "10.0.0.1, v1.2.3.4 and 1[.]2(.)3.4 but 1.2.3", {"10.0.0.1", "1.2.3.4"}),
        ("ipv4", "1.3.6.1.4.1", {"1.3.6.1.4.1"}),
        (
            "ipv6",
            "fe80::1%eth0 ::1 2001:db8:0:0:0:0:0:1 at 12:34:56, std::x",
            {"fe80::1", "::1", "2001:db8:0:0:0:0:0:1"},
        ),
        ("domain", "Evil[.]com, e.g. www.a-b.co.uk. 3.5 U.S. cmd.exe", {"evil.com", "www.a-b.co.uk", "cmd.exe"}),
        ("hash", "D41D8CD98F00B204E9800998ECF8427E deadbeef", {"d41d8cd98f00b204e9800998ecf8427e"}),
        ("email", "<bob.s@corp.com>, al[at]x[.]org, @user", {"bob.s@corp.com", "al@x.org"}),
        ("url", "(https://a.com/B?c=1). hxxps[://]b[.]com/A_(b), ://x", {"https://a.com/B?c=1", "hxxps://b.com/A_(b"}),
    ],
)
def test_identifiers_that_a_text_holds(kind: str, text: str, found: set[str]) -> None:
    assert find(KINDS[kind], text.encode()) == {value.encode() for value in found}


@pytest.mark.parametrize("kind", list(KINDS))
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_a_text_that_is_its_own_source_is_taken(kind: str, text: str) -> None:
    data = text.encode()
    assert read(kind, find(KINDS[kind], data), data) == "taken"


@pytest.mark.parametrize("kind", list(KINDS))
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_without_a_source_just_the_texts_without_identifiers_are_taken(kind: str, text: str) -> None:
    data = text.encode()
    beginnings = [data, *(data[:end] for end in range(len(data)) if not data[:end].lower().endswith(tuple(HELD)))]
    assert (read(kind, set(), data) == "taken") == (not any(find(KINDS[kind], beginning) for beginning in beginnings))


@pytest.mark.parametrize("kind", list(KINDS))
@given(source=TEXTS, text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_what_is_taken_holds_identifiers_of_the_source_alone(kind: str, source: str, text: str) -> None:
    allowed = find(KINDS[kind], source.encode())
    if read(kind, allowed, text.encode()) == "taken":
        assert find(KINDS[kind], text.encode()) <= allowed
