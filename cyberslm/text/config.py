"""The ``tokenizer:`` section of a run: one tokenizer is trained on the training split, or a given one is used.

Three kinds of pieces are fixed before anything is learned, in this order of ids: four control pieces (pad, unk, bos,
eos) and the markers of ``control_pieces``, which no text can ever become; the symbols of ``protected``, which text
always becomes; and the 256 bytes, which spell whatever is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cyberslm.config import PathStr
from cyberslm.errors import ConfigError
from cyberslm.text.codec import ESCAPE, SPACE_MARK

CHAT_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tool_call|>", "<|end|>")
"""Who speaks next, a call that the assistant makes, and the end of a turn."""

SECURITY_SYMBOLS = (
    *("CVE-", "CWE-", "CAPEC-", "GHSA-", "HKLM\\", "HKCU\\", "HKEY_LOCAL_MACHINE\\", "HKEY_CURRENT_USER\\"),
    *("://", "hxxp", "[.]", "[:]", "[@]"),
)
"""A preset for ``protected``: identifiers that security text is full of, registry roots, and defanging marks."""

ROLES = ("<pad>", "<unk>", "<bos>", "<eos>")
MAX_VOCAB = 1_000_000
MAX_SYMBOLS = 1_000
MAX_SYMBOL_CHARS = 64

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_UNFIT = re.compile(f"[\\s\0\u2585\ud800-\udfff{SPACE_MARK}{ESCAPE}]")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens: one tokenizer is trained on the training split, or a given one is used."""

    path: PathStr | None = None
    """An existing tokenizer.model or Hugging Face tokenizer.json, or a folder with one; null trains one."""

    lossless: bool = True
    """Refuse a given tokenizer that can't give back every text exactly; false takes it and warns what is lost."""

    model_type: Literal["bpe", "unigram"] = "bpe"
    """How the pieces are found: bpe joins frequent neighbours, unigram keeps the likeliest pieces of many."""

    vocab_size: int = 32_000
    """Number of pieces to train, including the control pieces, the protected symbols and 256 bytes."""

    control_pieces: tuple[str, ...] = CHAT_MARKERS
    """Chat and tool markers that get the ids after <eos>; programs insert them, text that spells one can't."""

    protected: tuple[str, ...] = ()
    """Symbols such as CVE- that are always one token of their own, wherever they stand in a text."""

    character_coverage: float = 0.9995
    """Share of the text's characters that get a piece of their own (0.98 to 1); rarer ones are spelled in bytes."""

    digits: Literal["single", "triple", "free"] = "single"
    """Most digits in a token: single = 1, so that numbers and hashes are spelled uniformly, triple = 3, free = any."""

    max_piece_length: int = 16
    """Longest piece in characters (1 to 512)."""

    add_bos: bool | None = None
    """Begin every document and prompt with <bos>; null = yes when training, else the given tokenizer's rule."""

    shrink: bool = False
    """Take the largest workable vocabulary when the text can't support vocab_size, instead of stopping."""

    max_train_bytes: int = 64_000_000
    """Most UTF-8 bytes to train on (25 bytes of memory each); from more text, evenly spread passages are taken."""

    def __post_init__(self) -> None:
        self._check_symbols()
        limits = (
            ("vocab_size", self.fixed_pieces, MAX_VOCAB),
            ("character_coverage", 0.98, 1),
            ("max_piece_length", 1, 512),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}: {value} is outside {low} to {high:,}")
        if self.max_train_bytes < 1:
            raise ConfigError(f"max_train_bytes: {self.max_train_bytes} is less than 1")
        if self.path is not None and not self.path:
            raise ConfigError("path: is empty; give a path, or null to train a tokenizer")

    @property
    def fixed_pieces(self) -> int:
        """Pieces that are there whatever the text: roles, markers, symbols and bytes."""
        return len(ROLES) + len(self.control_pieces) + len(self.protected) + 256

    def _check_symbols(self) -> None:
        seen = set(ROLES)
        for name in ("control_pieces", "protected"):
            symbols = getattr(self, name)
            if len(symbols) > MAX_SYMBOLS:
                raise ConfigError(f"{name}: has {len(symbols):,} entries; the limit is {MAX_SYMBOLS:,}")
            for symbol in symbols:
                if not 1 <= len(symbol) <= MAX_SYMBOL_CHARS:
                    raise ConfigError(
                        f"{name}: {symbol!r:.80} has {len(symbol)} characters, outside 1 to {MAX_SYMBOL_CHARS}"
                    )
                if _UNFIT.search(symbol) or _BYTE_PIECE.fullmatch(symbol):
                    raise ConfigError(
                        f"{name}: {symbol!r} holds white space or a character that SentencePiece reserves"
                    )
                if symbol in seen:
                    raise ConfigError(f"{name}: {symbol!r} is there twice or already a control piece")
                seen.add(symbol)
