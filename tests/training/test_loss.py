from __future__ import annotations

import math

import oracles
import pytest
import torch

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.loss import measure, next_token_loss

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)


def batch(rows: int = 3, ignored: float = 0.3, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 40, (rows, 17), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORE
    return Batch(ids[:, :-1].contiguous(), targets)


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_loss_is_the_sum_over_trained_tokens(ignored: float) -> None:
    model = CyberSLM(CONFIG, seed=1)
    rows = batch(ignored=ignored)
    output = next_token_loss(model, rows)
    total, count = oracles.cross_entropy(model(rows.input_ids), rows.targets)
    assert output.loss_sum.item() == pytest.approx(total, abs=1e-3, rel=1e-5)
    assert int(output.num_tokens) == count


def test_loss_of_bf16_logits_is_summed_in_fp32() -> None:
    """G41: a loss computed in bf16 is rounded to three digits."""
    model = CyberSLM(CONFIG, seed=1)
    rows = batch(ignored=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = next_token_loss(model, rows)
        logits = model(rows.input_ids)
    assert logits.dtype == torch.bfloat16
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.item() == pytest.approx(oracles.cross_entropy(logits.float(), rows.targets)[0], rel=1e-5)


def test_z_loss_is_the_squared_log_normaliser_of_trained_tokens() -> None:
    model, rows = CyberSLM(CONFIG, seed=1), batch()
    output = next_token_loss(model, rows, z_loss=0.01)
    right = sum(
        torch.logsumexp(row, 0).item() ** 2
        for row, target in zip(model(rows.input_ids).flatten(0, 1), rows.targets.flatten(), strict=True)
        if target != IGNORE
    )
    assert output.penalty_sum.item() == pytest.approx(0.01 * right, rel=1e-5)
    assert torch.equal(output.loss_sum, next_token_loss(model, rows).loss_sum)
    assert next_token_loss(model, batch(ignored=1.0), z_loss=0.01).penalty_sum == 0


def test_score_counts_nats_tokens_and_bytes() -> None:
    model = CyberSLM(CONFIG, seed=1).train()
    lengths = torch.arange(40) % 5
    batches = [batch(seed=1), batch(seed=2)]
    score = measure(model, batches, lengths)
    sums = [oracles.cross_entropy(model(b.input_ids), b.targets) for b in batches]
    targets = torch.cat([b.targets[b.targets != IGNORE] for b in batches])
    assert score.num_tokens == len(targets)
    assert score.num_bytes == int(lengths[targets].sum())
    assert score.loss_sum == pytest.approx(sum(total for total, _ in sums), rel=1e-5)
    assert score.loss == pytest.approx(score.loss_sum / score.num_tokens)
    assert score.bits_per_byte == pytest.approx(score.loss_sum / math.log(2) / score.num_bytes)
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert model.training
