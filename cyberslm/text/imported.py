"""A Hugging Face ``tokenizer.json`` in use, through the ``tokenizers`` library (extra ``interop``).

The library encodes; decoding is our own table of bytes, as for every tokenizer here. Special tokens are switched off
for text, so that text which spells one stays text. ``hfjson`` says which files are accepted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cyberslm.errors import ConfigError, TokenizerError
from cyberslm.text import hf
from cyberslm.text.basics import checked_id, id_dtype, read_file, save_files
from cyberslm.text.codec import Spelling, StreamDecoder, mend
from cyberslm.text.hfjson import MAX_JSON_BYTES, ImportedModel, cuts_like_qwen2, read_json, with_bos_rule

_MAX_SETTINGS_BYTES = 4 << 20


class HuggingFaceTokenizer:
    """A byte-pair ``tokenizer.json``; immutable. Public names are those of ``SentencePieceTokenizer``."""

    def __init__(self, model: ImportedModel, *, add_bos: bool | None = None, lossless: bool = True) -> None:
        if lossless and model.losses:
            raise TokenizerError(
                f"it doesn't keep text exactly: {'; '.join(model.losses)}; train one with cyberslm, or take it as it is"
                " with tokenizer.lossless: false"
            )
        if add_bos and "bos_token" not in model.names:
            raise TokenizerError("it has no <bos>: leave out add_bos, or set it to false")
        model = with_bos_rule(model, add_bos=model.add_bos if add_bos is None else add_bos)
        self.model = model
        """What the file says."""
        self._library = _library_tokenizer(model)
        self.add_bos = model.add_bos
        self.losses = model.losses
        self.vocab_size = len(model.pieces)
        self.control_ids = model.control_ids
        self.pad_id, self.unk_id = model.roles["pad_token"], model.roles["unk_token"]
        self.bos_id, self.eos_id = model.roles["bos_token"], model.roles["eos_token"]
        self.spelling = Spelling(model.escaped, model.prefix, self.bos_id)
        self.sha256 = hashlib.sha256(model.content).hexdigest()

    @classmethod
    def from_file(cls, path: str | Path, *, add_bos: bool | None = None, lossless: bool = True) -> HuggingFaceTokenizer:
        """From a ``tokenizer.json``; a ``tokenizer_config.json`` beside it names its special tokens.

        Raises TokenizerError when it is damaged, of an unknown kind or, when asked for, not lossless.
        """
        path = Path(path)
        content = read_file(path, limit=MAX_JSON_BYTES)
        try:
            return cls(read_json(content, _settings(path.parent)), add_bos=add_bos, lossless=lossless)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @cached_property
    def cuts_like_qwen2(self) -> bool:
        """Whether it cuts text into words as Qwen2's does."""
        return cuts_like_qwen2(self.model.content)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, ``<bos>`` first when the tokenizer adds it; lone surrogates count as U+FFFD."""
        ids = self._encode([text])[0]
        return [self.bos_id, *ids] if add_special_tokens and self.add_bos else ids

    def encode_documents(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """Ids of each text between ``<bos>`` (when added) and ``<eos>``: uint16, or uint32 beyond 65,536 pieces.

        With more than one thread the library takes its own number (RAYON_NUM_THREADS).
        """
        if isinstance(texts, str) or num_threads < 1:
            raise TokenizerError(f"encode_documents needs a list of texts and 1 or more threads, not {num_threads}")
        together = [texts] if num_threads > 1 else [[text] for text in texts]
        prefix, dtype = [self.bos_id] if self.add_bos else [], id_dtype(self.vocab_size)
        encoded = (ids for batch in together for ids in self._encode(batch))
        return [np.array([*prefix, *ids, self.eos_id], dtype=dtype) for ids in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: control ids give nothing, bytes that are not UTF-8 give U+FFFD. Raises TokenizerError."""
        return self.spelling.decode(self.token_bytes, ids)

    def stream_decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder that takes one id at a time; ``after`` are the ids that those to come continue."""
        return StreamDecoder(self.token_bytes, self.spelling, after=after)

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that an id stands for; empty for a control id and an id without a piece."""
        return self.model.table[checked_id(token, self.vocab_size)]

    def piece(self, token: int) -> str:
        """The vocabulary entry of an id, as the file spells it."""
        return self.model.pieces[checked_id(token, self.vocab_size)]

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and its two settings files into a folder, made when missing. Raises StorageError."""
        settings = hf.settings_files(self.model.names, add_bos=self.add_bos, lossless=not self.losses)
        contents = {hf.JSON_FILE: self.model.content, **{name: text.encode() for name, text in settings.items()}}
        save_files(folder, contents)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            if not isinstance(text, str):
                raise TokenizerError(f"a text to encode must be a str, not {type(text).__name__}")
        whole = [mend(text).text for text in texts]
        return [found.ids for found in self._library.encode_batch_fast(whole, add_special_tokens=False)]


def _library_tokenizer(model: ImportedModel) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "tokenizer.path: a tokenizer.json needs the tokenizers library: pip install 'cyberslm[interop]'"
        ) from None
    try:
        library = tokenizers.Tokenizer.from_buffer(model.content)
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise TokenizerError(f"the tokenizers library refuses it: {str(error)[:200]}") from None
    library.encode_special_tokens = True
    for index, name in enumerate(model.pieces):
        if name and library.token_to_id(name) != index:
            raise TokenizerError(f"the tokenizers library gives piece {index} the id {library.token_to_id(name)}")
    return library


def _settings(folder: Path) -> dict[str, object]:
    """Special tokens by role and the rule for <bos>, as the files beside a tokenizer.json name them."""
    found: dict[str, object] = {}
    for name in (hf.NAMES_FILE, hf.CONFIG_FILE):
        path = folder / name
        if not path.is_file():
            continue
        try:
            data = json.loads(read_file(path, limit=_MAX_SETTINGS_BYTES))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{name} beside it is not JSON: {str(error)[:120]}") from None
        if isinstance(data, dict):
            found |= {key: value for key, value in data.items() if value is not None}
    return found
