"""Networks of every variant, small, for tests that draw them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

WIDTH, CONTEXT, VOCABULARY = 24, 48, 40


@st.composite
def variants(draw: st.DrawFn) -> CyberSLMConfig:
    """Networks of one or two layers that differ in everything that attention depends on."""
    heads, layers = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    return CyberSLMConfig(
        vocab_size=VOCABULARY,
        hidden_dim=WIDTH,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0])),
        head_dim=draw(st.sampled_from([4, 6])),
        key_dim=draw(st.sampled_from([None, 4, 10])),
        attn_scale=draw(st.sampled_from(["head_dim", "key_dim"])),
        ffn_hidden_dim=16,
        max_seq_len=CONTEXT,
        qk_norm=draw(st.booleans()),
        bias=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, None, 1, 3, (4, 0)[:layers]])),
        rope_layout=draw(st.sampled_from(["half", "interleaved"])),
        rope_base=draw(st.sampled_from([100.0, 10_000.0])),
    )


def weighted(config: CyberSLMConfig, seed: int) -> CyberSLM:
    """A network whose every parameter, biases and gains too, is random and large enough to matter."""
    model, generator = CyberSLM(config, seed=seed).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * spread if parameter.ndim == 1 else 0.2 * spread)
    return model
