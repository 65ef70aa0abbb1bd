"""New tokens for a base: its tokenizer with them, rows of embedding and head, and how those alone are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cyberslm import files
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.finetune import FinetuneRun, base_tokenizer
from cyberslm.text.extend import extended
from cyberslm.text.tokenizer import Tokenizer

KIND = "cyberslm-tokenizer"


def write_extended(run: FinetuneRun) -> None:
    """The base's tokenizer with the run's new tokens, where ``run.tokenizer.path`` says."""
    if run.extend_vocab is None:
        return
    tokenizer = extended(base_tokenizer(run), run.extend_vocab.read())

    def fill(staging: object) -> dict[str, object]:
        tokenizer.save(str(staging))
        return {"kind": KIND, "tokenizer_sha256": tokenizer.sha256}

    target = run.folder / "tokenizer"
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
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = _with_rows(weights[name], config.vocab_size, tokenizer, tokens)
    other.load_state_dict(weights, strict=True, assign=True)
    other.rope.to_empty(device=model.device)
    other.rope.reset()
    return other


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
