from __future__ import annotations

import math

import oracles
import pytest
import torch

from cyberslm.errors import InputError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.rope import RotaryPositionEmbedding, apply_rope


def test_rotation_equals_complex_multiplication() -> None:
    x = torch.randn(1, 1, 6, 8)
    positions = [0, 1, 5, 17, 200, 999]
    got = apply_rope(x, RotaryPositionEmbedding(8, 1000)(torch.tensor(positions)))
    torch.testing.assert_close(got[0, 0].double(), oracles.rope(x[0, 0], positions, 10_000.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_table_stays_fp32_when_the_model_is_cast(cast: torch.dtype) -> None:
    """G07 (gpt-neox#1003): casting the model rounded the rotary table, and distant positions collapsed."""
    model = CyberSLM(CyberSLMConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, max_seq_len=4096)).to(cast)
    assert model.dtype == cast
    for position in (257, 1857, 4095):
        rotation = model.rope(torch.tensor([position]))
        assert rotation.cos.dtype == torch.float32
        for i in range(4):
            angle = position * 10_000.0 ** (-2 * i / 8)
            assert rotation.cos[0, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert rotation.sin[0, i + 4].item() == pytest.approx(math.sin(angle), abs=1e-6)
    assert model(torch.tensor([[1, 2, 3]])).dtype == cast


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16)
    table = RotaryPositionEmbedding(16, 2048)
    scores = [
        (apply_rope(q, table(torch.tensor([at + 7]))) * apply_rope(k, table(torch.tensor([at])))).sum()
        for at in (0, 1000, 2000)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("position", "named"), [(64, "64"), (65, "65"), (-1, "-1")])
def test_position_outside_the_table_is_an_error_that_names_it(position: int, named: str) -> None:
    """G08 (litgpt#556): positions past the table were wrapped or read out of bounds."""
    table = RotaryPositionEmbedding(8, 64)
    table(torch.tensor([63]))
    with pytest.raises(InputError, match=f"position {named} is outside .* 64 positions"):
        table(torch.tensor([0, position]))


def test_model_refuses_an_input_longer_than_its_context() -> None:
    model = CyberSLM(CyberSLMConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, max_seq_len=8))
    assert model(torch.ones(1, 8, dtype=torch.long)).shape == (1, 8, 20)
    with pytest.raises(InputError, match="position 8 is outside the rotary table of 8"):
        model(torch.ones(1, 9, dtype=torch.long))
