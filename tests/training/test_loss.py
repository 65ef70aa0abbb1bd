from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch

from cyberslm.data.loader import IGNORE, Batch, RowLoader
from cyberslm.data.shards import ShardWriter
from cyberslm.data.store import TokenStore
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training import native as in_cpp
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
    assert output.objective.item() - output.loss_sum.item() == pytest.approx(0.01 * right, rel=1e-4)
    assert torch.equal(output.loss_sum, next_token_loss(model, rows).loss_sum)
    assert next_token_loss(model, batch(ignored=1.0), z_loss=0.01).objective == 0


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


DOCUMENTS = [[2, 7, 9, 3], [2, 30, 31, 32, 33, 3], [2, 5, 3], [2, *range(4, 30), 3], [2, 8, 3], [2, *range(9, 24), 3]]


@pytest.mark.parametrize(("layout", "seq_len"), [("pack", 32), ("concat", 64)])
@pytest.mark.parametrize("bos", [True, False])
def test_isolated_rows_cost_what_their_documents_cost_alone(
    tmp_path: Path, layout: str, seq_len: int, bos: bool
) -> None:
    """G29 (trl#784): packed documents saw each other, counted positions on and predicted across the border."""
    documents = [ids if bos else ids[1:] for ids in DOCUMENTS]
    with ShardWriter(tmp_path, "train", vocab_size=40, tokenizer_sha256="00" * 32) as writer:
        for ids in documents:
            writer.add(np.array(ids), text_bytes=1)
    store = TokenStore.open(tmp_path, "train", tokenizer_sha256="00" * 32, vocab_size=40)
    loader = RowLoader(store, seq_len=seq_len, batch_rows=1, seed=0, pad_id=0, layout=layout, isolate=True)
    models = [CyberSLM(replace(CONFIG, max_seq_len=64), seed=1) for _ in range(2)]
    together = [next_token_loss(models[0], each) for each in loader.sequential(3)]
    alone = [next_token_loss(models[1], Batch(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))) for ids in documents]
    assert loader.rows_per_epoch < len(documents)
    for outputs in (together, alone):
        sum(output.objective for output in outputs).backward()
    assert sum(int(o.num_tokens) for o in together) == sum(int(o.num_tokens) for o in alone)
    assert sum(o.loss_sum.item() for o in together) == pytest.approx(sum(o.loss_sum.item() for o in alone), abs=1e-4)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_a_document_does_not_feel_what_is_packed_beside_it() -> None:
    model = CyberSLM(CONFIG, seed=1).eval()
    docs = torch.tensor([[0] * 6 + [1] * 10])
    ids = torch.randint(4, 40, (1, 16), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, :6] = 5
    targets = ids.masked_fill(docs == 0, IGNORE)
    losses = [next_token_loss(model, Batch(each, targets, docs)).loss_sum.item() for each in (ids, other)]
    assert losses[0] == losses[1]
    assert losses[0] != next_token_loss(model, Batch(ids, targets)).loss_sum.item()


def test_parts_of_the_sources_add_up_to_the_same_total() -> None:
    model, lengths = CyberSLM(CONFIG, seed=1), torch.arange(40) % 5
    batches = [batch(seed=seed) for seed in range(3)]
    owners = torch.tensor([0, 4, 4])[:, None].expand(3, 16).clone()
    owners[1, :5] = 0
    marked = [
        batches[0]._replace(sources=torch.zeros(3, 16, dtype=torch.int64)),
        batches[1]._replace(sources=owners),
        batches[2]._replace(sources=torch.full((3, 16), 4)),
    ]
    plain, score = measure(model, batches, lengths), measure(model, marked, lengths, name=lambda n: f"source {n}")
    assert (score.loss_sum, score.num_tokens, score.num_bytes) == (plain.loss_sum, plain.num_tokens, plain.num_bytes)
    assert plain.by_source == {}
    assert set(score.by_source) == {"source 0", "source 4"}
    for number in (0, 4):
        part = score.by_source[f"source {number}"]
        targets = [each.targets.masked_fill(each.sources != number, IGNORE) for each in marked]
        sums = [
            oracles.cross_entropy(model(each.input_ids), wanted) for each, wanted in zip(marked, targets, strict=True)
        ]
        assert part.num_tokens == sum(count for _, count in sums)
        assert part.loss_sum == pytest.approx(sum(total for total, _ in sums), rel=1e-5)
        assert part.num_bytes == sum(int(lengths[wanted[wanted != IGNORE]].sum()) for wanted in targets)
    assert sum(part.num_tokens for part in score.by_source.values()) == score.num_tokens


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_a_model_in_cpp_has_its_loss_in_cpp_too(
    z_loss: float, monkeypatch: pytest.MonkeyPatch, native_cache: Path
) -> None:
    calls = []
    real = in_cpp.softmax_loss
    monkeypatch.setattr(in_cpp, "softmax_loss", lambda *a, **k: calls.append(1) or real(*a, **k))
    model, rows = CyberSLM(CONFIG, seed=1), batch()
    found = []
    for on in (False, True):
        model.use_native(on=on)
        output = next_token_loss(model, rows, z_loss=z_loss)
        found.append((*output[:2], *torch.autograd.grad(output.objective, list(model.parameters()))))
        assert calls == [1] * on
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-5)
