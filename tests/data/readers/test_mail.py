from __future__ import annotations

import pytest

from cyberslm.errors import DataError

MAIL = b"""From: =?utf-8?q?J=C3=B6?= <j@example.org>
Subject: =?iso-8859-1?q?caf=E9?=
 =?utf-8?b?IOKCrA==?= today
Date: Mon, 1 Jan 2024 00:00:00 +0000
Content-Type: multipart/mixed; boundary=B

--B
Content-Type: multipart/alternative; boundary=C

--C
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

caf=E9 is a lo=
ng line

--C
Content-Type: text/html

<p>html
--C--
--B
Content-Type: application/pdf
Content-Disposition: attachment; filename=x.pdf

secret
--B
Content-Type: message/rfc822

Subject: inner

inner
--B--
"""


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_mail_gives_its_plain_text_below_the_wanted_headers(read, ends):
    found = read("a.eml", MAIL.replace(b"\n", ends))
    assert found.texts == ["Subject: caf\u00e9 \u20ac today\n\ncaf\u00e9 is a long line"]
    assert found.counts.skipped == {"mail attachment": 2}
    found = read("a.eml", MAIL, mail_headers=("from", "date", "x-none"))
    assert found.texts[0].startswith("From: J\u00f6 <j@example.org>\nDate: Mon, 1 Jan 2024 00:00:00 +0000\n\ncaf\u00e9")
    assert read("a.eml", MAIL, mail_headers=()).texts == ["caf\u00e9 is a long line"]


def test_mail_without_plain_text_gives_its_html(read):
    mail = b"Subject: s\nContent-Type: text/html; charset=utf-8\n\n<p>only <b>html</b>"
    assert read("a.eml", mail).texts == ["Subject: s\n\nonly html"]


@pytest.mark.parametrize("charset", ["punycode", "unicode_escape", "zip", "no-such", "idna"])
def test_mail_is_never_decoded_by_a_codec_that_is_no_character_set(read, charset):
    mail = f"Content-Type: text/plain; charset={charset}\n\n\\x41 caf".encode()
    assert read("a.eml", mail + b"\xc3\xa9").texts == ["\\x41 caf\u00e9"]
    with pytest.raises(DataError, match="neither UTF-8 nor the one it declares"):
        read("a.eml", mail + b"\xe9")


@pytest.mark.parametrize(
    "mail",
    [
        b"Content-Type: text/plain; x*1*=a; x*0*=b; x*=c; charset*0=u\n\nbody",
        b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (i, i) for i in range(1500)),
        b"Content-Type: multipart/mixed; boundary=b\n\n" + b"--b\n\nx\n" * 1500,
    ],
)
def test_hostile_mail_is_bad_input_not_a_crash(read, mail):
    found = read("a.eml", mail, on_bad_input="skip")
    assert (found.texts, found.counts.skipped) == ([], {"bad record": 1})


def test_an_mbox_is_cut_at_from_lines_after_blank_ones_and_quoting_is_undone(read):
    box = (
        b"From a Mon\nSubject: one\n\nbody\nFrom here on\n>From quoted\n>>From twice\n\n"
        + b"From b Tue\nSubject: two\n\ncaf\xe9\n\nFrom c\n\nthree\n"
    )
    with pytest.raises(DataError, match=r"a\.mbox:9: a mail in an encoding"):
        read("a.mbox", box)
    found = read("a.mbox", box, on_bad_input="skip")
    assert found.texts == ["Subject: one\n\nbody\nFrom here on\nFrom quoted\n>From twice", "three"]
    assert found.lines == [1, 14]


def test_a_mail_beyond_the_limit_costs_itself_alone(read):
    box = b"From a\n\none\n\nFrom b\n\n" + b"x" * 600_000 + b"\n\nFrom c\n\nthree\n"
    with pytest.raises(DataError, match=r"a\.mbox:5: a mail of more than 1,024 bytes"):
        read("a.mbox", box, max_document_bytes=1024)
    found = read("a.mbox", box, max_document_bytes=1024, on_bad_input="skip")
    assert (found.texts, found.lines) == (["one", "three"], [1, 9])


def test_an_mbox_that_does_not_begin_with_a_from_line_is_told(read):
    with pytest.raises(DataError, match=r'a\.mbox:2: no "From " line'):
        read("a.mbox", b"\nhello\n\nFrom a\n\nx")
