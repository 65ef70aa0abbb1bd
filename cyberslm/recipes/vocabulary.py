"""New tokens for a base: its tokenizer with them, rows of embedding and head, and how those alone are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cyberslm import files
from cyberslm.errors import ConfigError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.text.extend import extended
from cyberslm.text.tokenizer import Tokenizer

KIND = "cyberslm-tokenizer"
ROWS = ("embed_tokens.weight", "lm_head.weight")
"""Parameters that have a row for each token; the second is not there where they are tied."""


def write_extended(base: Tokenizer, tokens: Sequence[str], target: Path) -> None:
    """Publish the ``base``'s tokenizer with more ``tokens`` as a folder, unless it is there."""
    tokenizer = extended(base, tokens)

    def fill(staging: object) -> dict[str, object]:
        tokenizer.save(str(staging))
        return {"kind": KIND, "tokenizer_sha256": tokenizer.sha256}

    if files.looks_published(target) and files.verify(target).get("tokenizer_sha256") == tokenizer.sha256:
        return
    files.publish(target, fill, replace=True)


@torch.no_grad()
def extend_rows(model: CyberSLM, config: CyberSLMConfig, tokenizer: Tokenizer, tokens: Sequence[str]) -> CyberSLM:
    """The model with a row for each new token, the mean of the rows of the pieces that ``tokenizer`` spells it with.

    Rows that the base had beyond its tokenizer's are used first.
    """
    other = CyberSLM(config, device="meta")
    weights = model.state_dict()
    for name in ROWS:
        if name in weights:
            weights[name] = _with_rows(weights[name], config.vocab_size, tokenizer, tokens)
    other.load_state_dict(weights, strict=True, assign=True)
    other.rope.to_empty(device=model.device)
    other.rope.reset()
    return other


def with_words(model: CyberSLM, own: Tokenizer, wanted: Tokenizer) -> CyberSLM:
    """A model for the ``wanted`` tokenizer, which is its ``own`` or that with more tokens, as a run began with it.

    Raises `ConfigError` where it is another.
    """
    if wanted.sha256 == own.sha256:
        return model
    tokens = [wanted.token_bytes(n).decode("utf-8", "replace") for n in range(own.vocab_size, wanted.vocab_size)]
    if not tokens or extended(own, tokens).sha256 != wanted.sha256:
        raise ConfigError("its tokenizer isn't the base's, nor that with more tokens")
    rows = max(model.config.vocab_size, wanted.vocab_size)
    return extend_rows(model, replace(model.config, vocab_size=rows), own, tokens)


def train_new_rows(model: CyberSLM, *, first: int) -> None:
    """Train rows from ``first`` on of an embedding and head that are frozen: the others get a gradient of 0.

    AdamW without decay then leaves those exactly as they are.
    """
    for parameter in (model.embed_tokens.weight, model.head_weight):
        if not parameter.requires_grad:
            parameter.requires_grad_()
            parameter.register_hook(lambda gradient: _only_from(gradient, first))


def _only_from(gradient: Tensor, first: int) -> Tensor:
    kept = gradient.clone()
    kept[:first] = 0
    return kept


def _with_rows(weight: Tensor, rows: int, tokenizer: Tokenizer, tokens: Sequence[str]) -> Tensor:
    grown = weight.new_zeros(rows, weight.shape[1])
    grown[: weight.shape[0]] = weight
    for number, token in enumerate(tokens, tokenizer.vocab_size):
        grown[number] = weight[tokenizer.encode(token, add_special_tokens=False)].mean(0)
    return grown
