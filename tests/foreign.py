"""Tiny random models of other libraries, as folders that those libraries wrote themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LENGTH = 64
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
BASE = {
    "vocab_size": 480,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def rope(kind: str, **settings: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5_000.0, **settings}}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SCALED)
YARN = rope("yarn", beta_fast=20.0, attention_factor=1.25, **SCALED)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama mha": ("Llama", {"num_key_value_heads": None}),
    "llama biases": ("Llama", {"attention_bias": True}),
    "llama all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("Llama", {"head_dim": 12}),
    "llama linear": ("Llama", rope("linear", factor=2.0)),
    "llama dynamic": ("Llama", rope("dynamic", factor=2.0) | {"max_position_embeddings": LENGTH // 2}),
    "llama yarn": ("Llama", rope("yarn", **SCALED)),
    "llama yarn given": ("Llama", YARN),
    "llama yarn mscale": ("Llama", rope("yarn", mscale=0.7, mscale_all_dim=1.3, **SCALED)),
    "llama llama3": ("Llama", LLAMA3),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral whole": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 biases": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
}


def cutting(kind: str) -> pre_tokenizers.PreTokenizer:
    """How models of that kind cut text into words."""
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        first, use_regex = pre_tokenizers.Digits(individual_digits=True), True
    else:
        digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[kind]
        first, use_regex = pre_tokenizers.Split(Regex(WORDS.replace("DIGITS", digits)), "isolated"), False
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([first, level])


def byte_level(documents: Iterable[str], kind: str = "smollm", *, vocab_size: int = 470) -> Library:
    """A byte-level BPE with the special tokens of SmolLM2 first, or after the vocabulary as Llama 3 has them."""
    library = Library(models.BPE())
    library.pre_tokenizer = cutting(kind)
    library.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    apart = kind == "llama-bpe"
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[] if apart else special,
    )
    library.train_from_iterator(documents, trainer)
    if apart:
        library.model.ignore_merges = True
        library.add_special_tokens(special)
    return library


def save_tokenizer(library: Library, folder: Path) -> None:
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2], unk_token=SPECIAL[0]
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def family_model(name: str) -> transformers.PreTrainedModel:
    """A model whose every parameter is random and large enough to matter."""
    kind, changes = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def save_family(name: str, folder: Path, library: Library, **options: object) -> transformers.PreTrainedModel:
    model = family_model(name)
    model.save_pretrained(folder, **options)
    save_tokenizer(library, folder)
    return model


def change(path: Path, **values: object) -> None:
    """Change keys of a JSON file; ``...`` takes one away."""
    data = json.loads(path.read_text())
    for key, value in values.items():
        if value is ...:
            data.pop(key, None)
        else:
            data[key] = value
    path.write_text(json.dumps(data))
