from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyberslm.errors import DataError

REPEATED = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


PAGE = b"""<!doctype html><title>Advisory &amp; more</title><style>p {}</style><script>var x = "no";</script>
<h1>Heading</h1><p>One <b>bo</b>ld
 line.<p>Two<br>lines<ul><li>a<li>b</ul><div hidden>hidden</div>
<pre>rule x {
    strings:
        $a = "b"   &lt;y&gt;
}</pre><table><tr><td>k<td>v</table>"""


def test_html_becomes_text_that_keeps_its_blocks_and_code(read):
    (text,) = read("a.html", PAGE).texts
    assert text.startswith("Advisory & more\n\nHeading\n\nOne bold line.\n\nTwo\nlines\n")
    assert 'rule x {\n    strings:\n        $a = "b"   <y>\n}' in text
    assert "hidden" in text
    assert "var x" not in text
    assert "p {}" not in text


@given(text=st.text("ab <>&;\"'\u00e9\u96ea\n", min_size=1).filter(str.strip))
@REPEATED
def test_any_text_survives_in_pre(read, text):
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    assert read("a.html", f"<pre>x\n{escaped}\nx</pre>").texts == [f"x\n{text}\nx"]


@pytest.mark.parametrize(
    "data",
    [
        b"<p>caf\xc3\xa9",
        b"\xff\xfe" + "<p>caf\u00e9".encode("utf-16-le"),
        b'<meta charset="iso-8859-1"><p>caf\xe9',
        b'<meta http-equiv="Content-Type" content="text/html; charset=windows-1252"><p>caf\xe9',
        b'<meta charset="iso-8859-1"><p>caf\xc3\xa9',
    ],
)
def test_pages_are_read_as_utf_8_or_as_they_declare(read, data):
    assert read("a.html", data).texts == ["caf\u00e9"]


def test_a_page_in_no_known_encoding_is_told_and_one_that_is_too_long_too(read):
    with pytest.raises(DataError, match=r"a\.html:1: not UTF-8, nor what the page declares; set data\.encodings"):
        read("a.html", b"<p>caf\xe9")
    assert read("a.html", b"<p>caf\xe9", encodings=("cp1252",)).texts == ["caf\u00e9"]
    with pytest.raises(DataError, match="a page of more than 1,024 bytes"):
        read("a.html", b"<p>" + b"x" * 1024, max_document_bytes=1024)


def test_deep_html_neither_crashes_nor_takes_for_ever(read):
    assert read("a.html", "<div>" * 100_000 + "x").texts == ["x"]
