from __future__ import annotations

import pytest

from cyberslm.generation.engine import Engine
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer

LINES = [
    f"CVE-20{10 + n % 15}-{1000 + 37 * n} lets 10.0.{n}.{n * 7 % 256} reach evil{n}.com over https://a{n}.org/x?q={n};"
    f' {{"verdict": "malicious", "confidence": {n}}} file {n * 0x9E3779B97F4A7C15 % 2**128:032x} from b{n}@corp.net'
    for n in range(200)
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES, TokenizerConfig(vocab_size=800, shrink=True)).tokenizer


@pytest.fixture(scope="session")
def untrained(tokenizer: Tokenizer) -> Engine:
    """A tiny network as it is made: every token about as likely as any other."""
    config = CyberSLMConfig(
        vocab_size=tokenizer.vocab_size + 6,
        hidden_dim=32,
        num_layers=1,
        num_heads=2,
        ffn_hidden_dim=48,
        max_seq_len=2048,
    )
    return Engine(CyberSLM(config, seed=5).eval(), tokenizer)
