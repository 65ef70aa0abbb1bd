from __future__ import annotations

import ipaddress
import json
import re

import pytest

from cyberslm.text.plots import report_chart
from cyberslm.text.probes import indicators, round_trip_probes
from cyberslm.text.report import measure
from cyberslm.text.tokenizer import SentencePieceTokenizer

FORMS = {
    "CVE id": r"CVE-(19|20)\d\d-\d{4,}",
    "MD5": r"[0-9a-f]{32}",
    "SHA-256": r"[0-9a-f]{64}",
    "domain": r"[a-z]+\.[a-z-]+\d*\.[a-z]+",
    "URL": r"https?://\S+\?\S+",
    "e-mail": r"\S+@\S+\.\S+",
    "Windows path": r"C:\\[\w\\]+\.\w+",
    "Unix path": r"/[\w/.-]+",
    "registry key": r"HK\w+\\SOFTWARE\\.+",
    "Sigma rule": r"(?s)title: .*detection:.*condition: selection\n.*",
    "YARA rule": r"(?s)rule \w+\n\{\n.*condition:.*\}\n",
}


def test_indicators_have_the_form_of_their_kind_and_never_change() -> None:
    made = indicators()
    assert made == indicators()
    assert set(made) == set(FORMS) | {"IPv4", "IPv6"}
    for kind, form in FORMS.items():
        assert all(re.fullmatch(form, text) for text in made[kind]), kind
    for kind, version in (("IPv4", 4), ("IPv6", 6)):
        assert {ipaddress.ip_address(text).version for text in made[kind]} == {version}
    assert all(len(set(strings)) > 40 for strings in made.values())


def test_figures_are_those_of_counting_by_hand(tokenizer: SentencePieceTokenizer) -> None:
    passages = ["one two  three\n", "caf\u00e9 \U0001f600"]
    report = measure("mine", tokenizer, {"a": passages, "b": passages[:1]})
    tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in passages]
    size = [len(text.encode()) for text in passages]
    assert report.sources["a"] == (sum(size), 5, sum(tokens), 0, sum(size) / sum(tokens), sum(tokens) / 5)
    assert report.sources["b"].tokens == tokens[0]
    hashes = indicators()["SHA-256"]
    expected = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in hashes) / len(hashes)
    assert report.indicators["SHA-256"].tokens == pytest.approx(expected)
    assert report.indicators["SHA-256"].bytes_per_token == pytest.approx(64 / expected)
    assert (report.probes, report.probes_not_restored) == (len(round_trip_probes()), ())


def test_use_counts_learned_pieces_only(tokenizer: SentencePieceTokenizer) -> None:
    learned = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) > 1]
    text = " the" * 10
    used = set(tokenizer.encode(text, add_special_tokens=False)) & set(learned)
    report = measure("x", tokenizer, {"a": [text]})
    assert report.use is not None
    assert report.use.learned == len(learned)
    assert report.use.unused == pytest.approx(1 - len(used) / len(learned))
    assert report.use.rare == report.use.unused
    assert measure("x", tokenizer, {"a": [" the" * 9]}).use.rare == 1
    assert measure("x", tokenizer, {}).use is None


class Folding(SentencePieceTokenizer):
    """Loses runs of spaces and everything beyond ASCII."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        folded = re.sub(" +", " ", text.encode("ascii", "ignore").decode())
        return super().encode(folded, add_special_tokens=add_special_tokens)


def test_what_does_not_come_back_is_counted_and_named(tokenizer: SentencePieceTokenizer) -> None:
    folding = Folding(tokenizer.content)
    report = measure("f", folding, {"a": ["plain", "two  spaces", "caf\u00e9"]})
    assert report.sources["a"].not_restored == 2
    assert "'  two'" in report.probes_not_restored
    assert all(probe.isascii() for probe in report.probes_not_restored)


def test_report_is_plain_json(tokenizer: SentencePieceTokenizer) -> None:
    data = json.loads(json.dumps(measure("m", tokenizer, {"a": ["x y"]}).to_json()))
    assert data["sources"]["a"]["words"] == 2
    assert data["indicators"]["URL"]["tokens"] > 1
    assert set(data["use"]) == {"learned", "unused", "rare"}


@pytest.mark.parametrize("sources", [{}, {"a": ["x"]}, {"n" * 90: ["x"], "b": ["y"]}])
def test_chart_is_a_png_of_any_number_of_sources(tokenizer: SentencePieceTokenizer, sources: dict) -> None:
    reports = [measure(name, tokenizer, sources) for name in ("one", "a/very/long/" * 9, "three")]
    assert report_chart(reports).startswith(b"\x89PNG")
