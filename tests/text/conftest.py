from __future__ import annotations

import argparse
import inspect
import json
import pydoc_data.topics
import textwrap

import pytest

from cyberslm.text.tokenizer import SentencePieceTokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer

AWKWARD = [
    "",
    " ",
    "  two leading",
    "trailing two  ",
    "a  b   c\td\t\te\nf\r\ng\rh\n\n\n",
    "\0 and \x01\x1b[31m\x7f\x85",
    "\u2581 \u2581\u2581x \u25811\u25810",
    "\ufdd0 \ufdd0\ufdd00\ufdd01 \ufdd0\u2581",
    "\u2585\ufffd\ufeffbom\ufeff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u202eevil\u202c \u0301e\u0301 \uac00\u1112\u1161",
    "\u65e5\u672c\u8a9e\u306e\u6587 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \U0010ffff\ue000",
    "<pad><unk><bos><eos> <s> </s> <0x0A> <|system|>",
    "rule x { strings: $a = { 4D 5A ?? 90 } condition: $a }",
    "0000000: 4d5a 9000 0300 0000  MZ......",
]


@pytest.fixture(scope="session")
def awkward() -> list[str]:
    return list(AWKWARD)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    code = [inspect.getsource(module) for module in (argparse, json, textwrap)]
    return [*pydoc_data.topics.topics.values(), *code, "\t\tindented\n\n\t\twith tabs\n" * 50]


@pytest.fixture(scope="session")
def tokenizer(documents: list[str]) -> SentencePieceTokenizer:
    return train_tokenizer(documents, TokenizerConfig(vocab_size=2000)).tokenizer
