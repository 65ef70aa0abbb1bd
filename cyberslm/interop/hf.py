"""From a Hugging Face folder to the parts of a model folder. Nothing in it is run, and no pickle is opened.

Weights are read from safetensors alone, tensor by tensor, after names and shapes have been held against the settings.
Names in an index stay inside the folder; so do links, except into the blobs of the library's own cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cyberslm.checkpoint.folder import CHAT_TEMPLATE, GENERATION, WEIGHTS, Extras, ModelParts
from cyberslm.checkpoint.hf import HEAD, disk_name
from cyberslm.errors import ConfigError, IntegrityError, TokenizerError
from cyberslm.interop.settings import Json, config_of
from cyberslm.interop.source import Source, check_tensors, file_records
from cyberslm.model.config import CyberSLMConfig
from cyberslm.text import hf as twin
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
LARGEST_JSON = 16 << 20
TYPES = ("F32", "F16", "BF16", "F64")

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DERIVED = re.compile(r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LICENCE = re.compile(r"^license(?:_name|_link)?:[^\S\n]*(\S.{0,200})$", re.MULTILINE)


class _Held(NamedTuple):
    file: str
    shape: tuple[int, ...]
    type: str


class _Weights:
    """The tensors of the folder's safetensors files: what they are called and shaped, and each when asked for."""

    def __init__(self, folder: Path) -> None:
        self.files = _weight_files(folder)
        self._archives = {name: _open(folder, name) for name in self.files}
        self.held: dict[str, _Held] = {}
        for file, archive in self._archives.items():
            for name in archive.keys():  # noqa: SIM118 (not a mapping)
                if name in self.held:
                    raise ConfigError(f"{folder}: tensor {name!r:.120} is in {self.held[name].file} and in {file}")
                part = archive.get_slice(name)
                if not _DERIVED.fullmatch(name):
                    self.held[name] = _Held(file, tuple(part.get_shape()), part.get_dtype())
        for name, held in self.held.items():
            if held.type not in TYPES:
                raise ConfigError(
                    f"{folder / held.file}: tensor {name} is of type {held.type}; {', '.join(TYPES)} can be read"
                )

    def tensor(self, name: str) -> Tensor:
        held = self.held[name]
        return self._archives[held.file].get_tensor(name).to(torch.float32)


def read_source(folder: Path) -> Source:
    """Open a folder. Raises `ConfigError` or `TokenizerError` naming what can't be expressed here or is missing, and
    `IntegrityError` for a damaged file."""
    settings = _json(folder, "config.json")
    tokenizer = _tokenizer(folder)
    roles = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("pad", "bos", "eos")}
    config = config_of(settings, roles, where=str(folder / "config.json"))
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(f"{folder}: {tokenizer.vocab_size:,} tokens and {config.vocab_size:,} rows of the embedding")
    weights = _Weights(folder)
    shapes = {name: held.shape for name, held in weights.held.items()}
    head = f"{HEAD}weight"
    if config.tie_weights and head in shapes:
        _check_tied(weights, shapes.pop(head), folder)
    check_tensors(config, shapes, str(folder))
    generation = _json(folder, GENERATION) if (folder / GENERATION).exists() else {}
    extras = Extras(_template(folder), _stops(config, settings, generation, folder))
    parts = ModelParts(config, lambda name: weights.tensor(disk_name(name)), tokenizer, extras)
    return Source(parts, _record(folder, weights))


def _inside(folder: Path, name: str) -> Path:
    """The file of that name. Raises `ConfigError` when it is a link that leaves the folder."""
    path = folder / name
    real, base = path.resolve(), folder.resolve()
    blobs = base.parent.parent / "blobs"
    cached = base.parent.name == "snapshots" and real.parent == blobs
    if not (real.is_relative_to(base) or cached):
        raise ConfigError(f"{path} is a link that leaves the folder: put the file itself there")
    return path


def _json(folder: Path, name: str) -> Json:
    path = _inside(folder, name)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
        if len(data) > LARGEST_JSON:
            raise IntegrityError(f"{path} is larger than {LARGEST_JSON:,} bytes")
        value = json.loads(data)
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {name}: it is no Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path} does not hold an object")
    return value


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        listed = _json(folder, INDEX).get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) and listed else []
        if wrong := next((name for name in names if not isinstance(name, str) or not _PLAIN.fullmatch(name)), None):
            raise ConfigError(
                f"{folder / INDEX} names {wrong!r:.120}, which is no plain .safetensors name in the folder"
            )
        if not names:
            raise IntegrityError(f"{folder / INDEX} lists no files")
        return names
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is opened, and is not read here: ask for"
            " safetensors, or convert it on a machine that you can lose"
        )
    raise ConfigError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def _open(folder: Path, name: str) -> safe_open:
    path = _inside(folder, name)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error


def _check_tied(weights: _Weights, shape: tuple[int, ...], folder: Path) -> None:
    embedding = disk_name("embed_tokens.weight")
    same = embedding in weights.held and weights.held[embedding].shape == shape
    if not same or not torch.equal(weights.tensor(embedding), weights.tensor(f"{HEAD}weight")):
        raise ConfigError(
            f"{folder}: tie_word_embeddings is true (or left out) and lm_head.weight differs from the embedding: say"
            " which of the two holds"
        )


def _tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json, as transformers takes it; the SentencePiece model where the two are twins of this package."""
    for name in (twin.MODEL_FILE, twin.JSON_FILE, twin.CONFIG_FILE, twin.NAMES_FILE):
        _inside(folder, name)
    model, listed = folder / twin.MODEL_FILE, folder / twin.JSON_FILE
    if not listed.is_file():
        if model.is_file():
            return SentencePieceTokenizer.from_file(model, add_bos=_saved_bos(folder), lossless=False)
        raise ConfigError(f"{folder} has no tokenizer.json and no tokenizer.model")
    if model.is_file():
        try:
            pieces = SentencePieceTokenizer.from_file(model, add_bos=_saved_bos(folder))
            if pieces.twin_files().get(twin.JSON_FILE) == listed.read_text(encoding="utf-8"):
                return pieces
        except (TokenizerError, ValueError):
            pass
    return HuggingFaceTokenizer.from_file(listed, lossless=False)


def _saved_bos(folder: Path) -> bool | None:
    found = _json(folder, twin.CONFIG_FILE).get("add_bos_token") if (folder / twin.CONFIG_FILE).exists() else None
    return found if isinstance(found, bool) else None


def _template(folder: Path) -> str | None:
    """``chat_template.jinja``, else the template in the tokenizer's settings, the default of several."""
    if (folder / CHAT_TEMPLATE).exists():
        path = _inside(folder, CHAT_TEMPLATE)
        data = path.read_bytes()[: LARGEST_JSON + 1]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise IntegrityError(f"{path} is not UTF-8") from None
    found = _json(folder, twin.CONFIG_FILE).get("chat_template") if (folder / twin.CONFIG_FILE).exists() else None
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _stops(config: CyberSLMConfig, settings: Json, generation: Json, folder: Path) -> tuple[int, ...]:
    """Every id that the settings end an answer with, besides the tokenizer's."""
    found: list[object] = []
    for source in (generation, settings):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    for index in found:
        if type(index) is not int or not 0 <= index < config.vocab_size:
            raise ConfigError(f"{folder}: eos_token_id {index!r:.40} is no id below {config.vocab_size:,}")
    return tuple(i for i in dict.fromkeys(found) if isinstance(i, int) and i != config.eos_token_id)


def _record(folder: Path, weights: _Weights) -> dict[str, object]:
    settings = ("config.json", GENERATION, twin.JSON_FILE, twin.MODEL_FILE, twin.CONFIG_FILE, CHAT_TEMPLATE, INDEX)
    notes = [name for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "README.md") if (folder / name).is_file()]
    present = [name for name in (*settings, *notes) if (folder / name).is_file()]
    types: dict[str, int] = {}
    for held in weights.held.values():
        types[held.type] = types.get(held.type, 0) + 1
    return {
        "kind": "huggingface",
        "files": file_records([_inside(folder, name) for name in (*present, *weights.files)]),
        "tensor_types": dict(sorted(types.items())),
        "weights": f"as in the files ({', '.join(sorted(types))})",
        "says": _licence(folder),
    }


def _licence(folder: Path) -> Mapping[str, str]:
    """What the front matter of README.md says of the licence."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    with _inside(folder, path.name).open("rb") as file:
        text = file.read(1 << 16).decode("utf-8", "replace")
    front = text.split("\n---", 1)[0] if text.startswith("---") else ""
    found = _LICENCE.search(front)
    return {"license": found[1].strip()} if found else {}
