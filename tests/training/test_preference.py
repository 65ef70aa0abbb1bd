"""DPO: the formula, its gradient, batches cut anywhere, and bookkeeping of pairs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from cyberslm.data.loader import IGNORE, PADDING, Batch
from cyberslm.errors import ConfigError, InputError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.loss import Score, join, measure
from cyberslm.training.preference import PreferenceConfig, answer_log_probs, count_pairs, preference_loss

V = 23


def tiny(**changes: object) -> CyberSLM:
    sizes = {
        "vocab_size": V,
        "hidden_dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "ffn_hidden_dim": 24,
        "max_seq_len": 40,
    }
    return CyberSLM(CyberSLMConfig(**sizes | changes), seed=1).double()


def documents(count: int = 8, seed: int = 0) -> list[tuple[list[int], int]]:
    """Ids and where the answer begins; every two share their prompt."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        if number % 2 == 0:
            prompt = torch.randint(V, (3,), generator=generator).tolist()
        answer = torch.randint(V, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator).tolist()
        found.append((prompt + answer, len(prompt)))
    return found


def batch_of(found: list[tuple[list[int], int]], per_row: int, reference: list[float]) -> Batch:
    """Rows of ``per_row`` documents, padded."""
    rows = [found[at : at + per_row] for at in range(0, len(found), per_row)]
    length = max(sum(len(ids) - 1 for ids, _ in row) for row in rows)
    inputs, targets = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), IGNORE)
    docs, kept = torch.full((len(rows), length), PADDING), torch.zeros(len(rows), per_row, dtype=torch.float64)
    for line, row in enumerate(rows):
        at = 0
        for number, (ids, start) in enumerate(row):
            here = slice(at, at + len(ids) - 1)
            inputs[line, here], docs[line, here] = torch.tensor(ids[:-1]), number
            targets[line, at + start - 1 : at + len(ids) - 1] = torch.tensor(ids[start:])
            kept[line, number] = reference[line * per_row + number]
            at += len(ids) - 1
    return Batch(inputs, targets, docs, reference=kept)


def log_prob(model: CyberSLM, ids: list[int], start: int) -> Tensor:
    """Token by token, from whole logits of one document."""
    shares = model(torch.tensor([ids]))[0].log_softmax(-1)
    return torch.stack([shares[at - 1, ids[at]] for at in range(start, len(ids))]).sum()


def oracle(model: CyberSLM, found: list, reference: list[float], config: PreferenceConfig) -> Tensor:
    """The formula of the paper, pair by pair."""
    total = torch.zeros(())
    for at in range(0, len(found), 2):
        gained = []
        for place in (at, at + 1):
            ids, start = found[place]
            size = len(ids) - start if config.length == "mean" else 1
            gained.append((log_prob(model, ids, start) - reference[place]) / size)
        good = torch.sigmoid(config.beta * (gained[0] - gained[1]))
        total = total - (1 - config.label_smoothing) * good.log() - config.label_smoothing * (1 - good).log()
    return total


REFERENCE = [-3.0, -1.5, -8.0, -2.0, -0.5, -4.0, -6.0, -6.5]
CONFIGS = [
    PreferenceConfig(),
    PreferenceConfig(beta=0.7, label_smoothing=0.2),
    PreferenceConfig(beta=2.0, length="mean"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "smoothed", "mean"])
@pytest.mark.parametrize("changes", [{}, {"tie_weights": False, "logit_softcap": 5.0}], ids=["tied", "untied capped"])
@pytest.mark.parametrize("per_row", [2, 4, 8])
def test_loss_and_gradient_are_those_of_the_formula(config, changes, per_row):
    model, found = tiny(**changes), documents()
    output = preference_loss(model, batch_of(found, per_row, REFERENCE), config=config)
    wanted = oracle(model, found, REFERENCE, config)
    assert output.num_tokens == 4
    torch.testing.assert_close(output.loss_sum, wanted.detach())
    names, weights = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(output.objective, weights)
    theirs = torch.autograd.grad(wanted, weights)
    for name, mine, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=name)


def test_chunks_of_the_head_do_not_change_the_loss(monkeypatch):
    model, found = tiny(), documents()
    whole = preference_loss(model, batch_of(found, 4, REFERENCE), config=CONFIGS[0])
    monkeypatch.setattr("cyberslm.training.cross_entropy.CHUNK", V * 3)
    cut = preference_loss(model, batch_of(found, 4, REFERENCE), config=CONFIGS[0])
    torch.testing.assert_close(cut.loss_sum, whole.loss_sum)
    (one,), (other,) = (torch.autograd.grad(each.objective, [model.embed_tokens.weight]) for each in (whole, cut))
    torch.testing.assert_close(one, other)


def test_a_model_that_is_its_own_reference_has_margin_0_and_loss_log_2():
    model, found = tiny(), documents()
    with torch.no_grad():
        reference = [log_prob(model, *each).item() for each in found]
        output = preference_loss(model, batch_of(found, 4, reference), config=CONFIGS[0])
    assert output.loss_sum.item() == pytest.approx(4 * math.log(2), rel=1e-5)
    assert output.pairs is not None
    assert output.pairs[0].item() == pytest.approx(0, abs=1e-4)
    assert output.pairs[2].item() == pytest.approx(-sum(reference[::2]), rel=1e-5)


def test_log_probabilities_of_documents_are_those_of_each_alone():
    model, found = tiny(), documents()
    sums, counts = answer_log_probs(model, batch_of(found, 4, REFERENCE), documents=4)
    for number, (ids, start) in enumerate(found):
        assert sums[number // 4, number % 4].item() == pytest.approx(log_prob(model, ids, start).item(), rel=1e-5)
        assert counts[number // 4, number % 4] == len(ids) - start


def test_a_batch_without_anything_to_learn_gives_zeros():
    model, batch = tiny(), batch_of(documents(), 4, REFERENCE)
    nothing = batch._replace(targets=torch.full_like(batch.targets, IGNORE))
    output = preference_loss(model, nothing, config=CONFIGS[0])
    output.objective.backward()
    assert (output.loss_sum.item(), int(output.num_tokens), count_pairs(nothing)) == (0, 0, 0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_pair_with_one_side_left_out_does_not_count():
    batch = batch_of(documents(), 4, REFERENCE)
    batch.targets[0][batch.docs[0] == 1] = IGNORE
    assert count_pairs(batch) == 3
    assert preference_loss(tiny(), batch, config=CONFIGS[0]).num_tokens == 3


def test_a_score_of_pairs_says_margin_share_and_bits_of_the_chosen():
    model, batch = tiny(), batch_of(documents(), 4, REFERENCE)
    parts = [batch.rows(0, 1), batch.rows(1, 2)]
    score = measure(model, parts, torch.ones(V, dtype=torch.int64), partial(preference_loss, config=CONFIGS[0]))
    whole = preference_loss(model, batch, config=CONFIGS[0])
    assert whole.pairs is not None
    assert score.num_tokens == 4
    assert score.loss == pytest.approx(whole.loss_sum.item() / 4, rel=1e-5)
    assert score.ranking["reward_margin"] == pytest.approx(whole.pairs[0].item() / 4, rel=1e-4)
    assert score.ranking["accuracy"] == whole.pairs[1].item() / 4
    chosen = sum(len(ids) - start for ids, start in documents()[::2])
    assert score.bits_per_byte == pytest.approx(whole.pairs[2].item() / math.log(2) / chosen, rel=1e-5)
    assert Score.from_json(score.to_json()) == score
    assert join([score, score]).ranking == pytest.approx(score.ranking)


def test_what_is_missing_is_named():
    batch = batch_of(documents(), 4, REFERENCE)
    with pytest.raises(InputError, match="log-probabilities"):
        preference_loss(tiny(), batch._replace(reference=None), config=CONFIGS[0])
    with pytest.raises(InputError, match="isolated"):
        preference_loss(tiny(), batch._replace(docs=None), config=CONFIGS[0])


@pytest.mark.parametrize("options", [{"beta": 0}, {"beta": 1e4}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}])
def test_settings_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        PreferenceConfig(**options)
