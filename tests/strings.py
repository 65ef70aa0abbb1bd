"""Strings to compare tokenizers on, and what equal means."""

from __future__ import annotations

import random

from cyberslm.text.tokenizer import Tokenizer

ALPHABETS = [" ", "0", "A", "-", "ab", "01", "a ", " \n\t", "aab", "=-", "/\\", "abc", "0123456789abcdef", "<eos>"]


def varied(documents: list[str], count: int) -> list[str]:
    """Deterministic strings of text, code, hex, base64-like runs, URLs, emoji, CJK and control spellings."""
    rng = random.Random(0)
    text = "".join(documents)
    strings: list[str] = []
    while len(strings) < count:
        at = rng.randrange(len(text) - 200)
        alphabet = rng.choice([*ALPHABETS, "\u65e5\u672c\u8a9e ", "\U0001f600\U0001f44d\u200d", "\u2581\ufdd001 "])
        strings += [
            text[at : at + rng.randint(1, 200)],
            "".join(rng.choices(alphabet, k=rng.randint(1, 60))),
            f"https://host.example/{rng.randbytes(6).hex()}?q=%20a&b={rng.randint(0, 10**9)} ",
            f"  {rng.randbytes(12).hex(' ')}  |{rng.choice(['<eos>', '<pad>', '<s>'])}|\r\n",
        ]
    return strings


def assert_equal(ours: Tokenizer, theirs: object, strings: list[str]) -> None:
    encoded = theirs(strings)["input_ids"]  # type: ignore[operator]
    bare = theirs(strings, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    for text, with_special, without in zip(strings, encoded, bare, strict=True):
        assert with_special == ours.encode(text), ascii(text)
        assert without == ours.encode(text, add_special_tokens=False), ascii(text)
        assert theirs.decode(with_special, skip_special_tokens=True) == text  # type: ignore[attr-defined]
        assert ours.decode(with_special) == text
