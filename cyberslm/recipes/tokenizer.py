"""The tokenizer of a run: the given one, or one trained on the training split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from cyberslm import files
from cyberslm.config import differences
from cyberslm.data.prepare import Texts
from cyberslm.errors import ConfigError, TokenizerError
from cyberslm.text.config import TokenizerConfig
from cyberslm.text.hf import CONFIG_FILE, NAMES_FILE
from cyberslm.text.tokenizer import Tokenizer, open_tokenizer, saved_rules, tokenizer_file
from cyberslm.text.train import train_tokenizer
from cyberslm.training.trackers import short

Say = Callable[[str], None]


def tokenizer_settings(config: TokenizerConfig) -> dict[str, object]:
    """What decides a tokenizer: the given file's hash and the rule for <bos>, or else all that training depends on."""
    if config.path is None:
        settings = {key: value for key, value in asdict(config).items() if key not in ("path", "lossless")}
        return settings | {
            "add_bos": config.add_bos is not False,
            "control_pieces": list(config.control_pieces),
            "protected": list(config.protected),
        }
    try:
        file = tokenizer_file(config.path)
        saved = saved_rules(file.parent).add_bos
    except TokenizerError as error:
        raise ConfigError(f"tokenizer.path: {error}") from error
    if config.add_bos is not None and saved not in (None, config.add_bos):
        raise ConfigError(
            f"tokenizer.add_bos is {config.add_bos} and {config.path} was saved with {saved}: leave it out"
        )
    settings = {"sha256": files.sha256_file(file), "add_bos": saved if config.add_bos is None else config.add_bos}
    beside = [file.parent / name for name in (NAMES_FILE, CONFIG_FILE)]
    if file.suffix == ".json" and any(path.is_file() for path in beside):
        digests = "".join(files.sha256_file(path) for path in beside if path.is_file())
        settings["names_sha256"] = hashlib.sha256(digests.encode()).hexdigest()
    return settings


def make_tokenizer(config: TokenizerConfig, texts: Texts, say: Say) -> Tokenizer:
    """Open the given tokenizer, or train one on the texts and say what it was made from."""
    if config.path is not None:
        return _given(config, say)
    trained = train_tokenizer(texts(), config)
    report = trained.report
    cut = f", cut at {report.reserved:,} reserved characters" if report.reserved else ""
    say(
        f"tokenizer: {report.vocab_size:,} pieces from {short(report.bytes_used, 'B')} of {short(report.bytes, 'B')}"
        f" in {report.documents:,} documents{cut}"
    )
    return trained.tokenizer


def _given(config: TokenizerConfig, say: Say) -> Tokenizer:
    path = Path(config.path or "")
    unused = sorted(set(differences(TokenizerConfig(), config)) - {"path", "add_bos", "lossless"})
    if unused:
        say(f"warning: tokenizer.path is given, so nothing is trained and {', '.join(unused)} have no effect")
    tokenizer = open_tokenizer(path, add_bos=config.add_bos, lossless=config.lossless)
    if tokenizer.losses:
        say(f"warning: tokenizer.path: {path} is used although it isn't exact: {'; '.join(tokenizer.losses)}")
    return tokenizer
