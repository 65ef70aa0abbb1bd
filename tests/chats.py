"""Tokenizers with each kind of chat tokens, and conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.messages import Message

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml_tokenizer(documents: list[str], folder: Path) -> HuggingFaceTokenizer:
    """A small byte-level tokenizer with the control tokens and roles of SmolLM2."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=CHATML_TOKENS,
    )
    library.train_from_iterator(documents[:60], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(library.to_str())
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    settings = {**names, "unk_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": False}))
    return HuggingFaceTokenizer.from_file(folder / "tokenizer.json")


def said(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    turns = tuple(Message(roles[number % 2], content) for number, content in enumerate(contents))
    return turns if system is None else (Message("system", system), *turns)


def as_dicts(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    return [message._asdict() for message in messages]
