"""Stand-ins: recognisable, keyed, consistent, of the same shape; addresses keep their networks."""

from __future__ import annotations

import ipaddress
import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data.redact import CLASS_OF, RedactConfig, Redactor
from cyberslm.data.redact.pseudonyms import Pseudonyms, luhn

KEY = bytes(range(32))
ALL = {name: "pseudonymise" for name in dict.fromkeys(CLASS_OF.values())}
CONFIG = RedactConfig(internal_domains=("acme.com",), **ALL)
FAKES = Pseudonyms(CONFIG, KEY)
REDACTOR = Redactor(CONFIG, KEY)
OCTET = st.integers(0, 255)
NAME = st.from_regex(r"[a-z][a-z0-9._-]{0,12}[a-z0-9]", fullmatch=True)

WORD = st.from_regex(r"[a-z][a-z0-9]{1,8}", fullmatch=True)


def ipv6(first: int, last: int) -> st.SearchStrategy[str]:
    return st.integers(first, last).map(lambda number: str(ipaddress.IPv6Address(number)))


VALUES = st.one_of(
    st.tuples(st.just("private-ipv4"), st.builds("10.{}.{}.{}".format, OCTET, OCTET, OCTET)),
    st.tuples(st.just("private-ipv4"), st.builds("192.168.{}.{}".format, OCTET, OCTET)),
    st.tuples(st.just("private-ipv4"), st.builds("172.{}.{}.{}".format, st.integers(16, 31), OCTET, OCTET)),
    st.tuples(st.just("private-ipv6"), ipv6(0xFC << 120, (0xFE << 120) - 1)),
    st.tuples(st.just("private-ipv6"), ipv6(0xFE80 << 112, (0xFE80 << 112) + (1 << 64) - 1)),
    st.tuples(st.just("public-ipv4"), st.builds("{}.{}.{}.{}".format, st.integers(1, 9), OCTET, OCTET, OCTET)),
    st.tuples(st.just("public-ipv6"), ipv6(0x2A << 120, (0x2B << 120) - 1)),
    st.tuples(st.just("user"), NAME),
    st.tuples(st.just("mail"), st.builds("{}@{}.com".format, NAME, st.sampled_from(["acme", "x.acme", "gmail"]))),
    st.tuples(st.just("mail"), st.builds("{}@10.1.{}.{}".format, NAME, OCTET, OCTET)),
    st.tuples(st.just("internal-host"), st.builds("{}{}".format, WORD, st.sampled_from(["", ".acme.com", ".a.lan"]))),
    st.tuples(st.just("public-domain"), st.builds("{}.evil.ru".format, WORD)),
    st.tuples(st.just("mac"), st.binary(min_size=6, max_size=6).map(lambda octets: octets.hex(":"))),
    st.tuples(st.just("phone"), st.builds("+{} {}".format, st.integers(1, 98), st.integers(10**6, 10**9))),
    st.tuples(st.sampled_from(["password", "jwt", "aws-key", "private-key"]), st.text(min_size=1)),
)


@settings(deadline=None, max_examples=300)
@given(VALUES)
def test_a_stand_in_is_known_and_shows_nothing_of_the_value(item: tuple[str, str]) -> None:
    kind, value = item
    fake = FAKES.fake(kind, value)
    assert FAKES.known(kind, fake)
    assert fake == FAKES.fake(kind, value)
    if not FAKES.known(kind, value):
        assert fake != value


def test_another_key_gives_other_stand_ins() -> None:
    other = Pseudonyms(CONFIG, bytes(32))
    for kind, value in [
        ("user", "jdoe"),
        ("private-ipv4", "10.1.2.77"),
        ("mac", "00:1a:2b:3c:4d:5e"),
        ("password", "x"),
    ]:
        assert FAKES.fake(kind, value) != other.fake(kind, value)
        assert FAKES.digest(kind, value) != other.digest(kind, value)


def test_a_private_subnet_stays_together_and_in_its_range() -> None:
    block = ipaddress.IPv4Network("10.176.0.0/12")
    fakes = [ipaddress.IPv4Address(FAKES.fake("private-ipv4", f"10.20.30.{i}")) for i in range(256)]
    assert len({int(fake) >> 8 for fake in fakes}) == 1
    assert len(set(fakes)) == 256
    assert all(fake in block for fake in fakes)
    assert [int(fakes[i]) & 255 for i in (0, 1, 254, 255)] == [0, 1, 254, 255]
    assert [int(fake) & 255 for fake in fakes] != list(range(256))
    assert FAKES.fake("private-ipv4", "172.20.3.9").startswith("172.27.")
    assert ipaddress.ip_address(FAKES.fake("private-ipv4", "192.168.3.9")) in ipaddress.IPv4Network("192.168.192.0/19")


def test_hosts_that_share_a_prefix_share_one_of_the_same_length() -> None:
    real = [3, 70, 77, 130, 131, 200]
    fake = [int(FAKES.fake("private-ipv4", f"10.20.30.{host}").rsplit(".", 1)[1]) for host in real]
    for (a, x), (b, y) in combinations(zip(real, fake, strict=True), 2):
        assert (a ^ b).bit_length() == (x ^ y).bit_length()


def test_an_ipv6_network_of_64_bits_stays_together() -> None:
    fakes = [ipaddress.IPv6Address(FAKES.fake("private-ipv6", f"fd12:3456:7:8::{i:x}")) for i in (1, 2, 0xABC)]
    assert len({int(fake) >> 64 for fake in fakes}) == 1
    assert len(set(fakes)) == 3
    assert str(fakes[0]).endswith("::1")


def test_shapes_are_kept() -> None:
    text = "mac 00-1A-2B-3C-4D-5E or 001a.2b3c.4d5e, card 4539 1488 0343 6467, +49 (0) 171 234567, "
    text += "DE89 3704 0044 0532 0130 00"
    new = REDACTOR.redact(text).text
    assert re.sub(r"[0-9A-Za-z]", "x", new) == re.sub(r"[0-9A-Za-z]", "x", text)
    mac = re.search(r"mac (\S+)", new)
    assert mac is not None
    assert mac[1].startswith("0A-5C-")
    assert int(mac[1][:2], 16) & 3 == 2
    card = re.search(r"card ([\d ]+)", new)
    assert card is not None
    assert luhn(card[1].replace(" ", "")) != 0
    assert " DE00 " in new


def test_a_user_is_the_same_person_in_path_and_mail() -> None:
    new = REDACTOR.redact("/home/jdoe/x C:\\Users\\JDoe\\y mail JDoe@acme.com, jdoe+lists@gmail.com").text
    assert len(set(re.findall(r"user-[0-9a-f]{10}", new))) == 1
    assert new.count("user-") == 4


def test_a_host_is_the_same_with_and_without_its_domain() -> None:
    new = REDACTOR.redact("host=web01 and web01.acme.com and db01.acme.com").text
    first, second, third = re.findall(r"host-[0-9a-f]{10}(?:\.net-[0-9a-f]{10}\.example)?", new)
    assert second.startswith(first + ".")
    assert second.split(".")[1] == third.split(".")[1]


def test_tokens_keep_prefix_and_length() -> None:
    token = "gh" + "p_" + "a1B2" * 9
    new = REDACTOR.redact(f"use {token}").text.split()[1]
    assert new.startswith("gh" + "p_REDACTED")
    assert len(new) == len(token)


@pytest.mark.parametrize("digits", range(60))
def test_a_fake_card_fails_luhn(digits: int) -> None:
    fake = FAKES.fake("card", f"45391488034{digits:05d}")
    assert luhn(fake) != 0
    assert fake[0] == "4"
