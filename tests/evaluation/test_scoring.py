"""Bulk log-likelihoods against one token at a time, one text at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import InputError
from cyberslm.evaluation import scoring
from cyberslm.evaluation.scoring import rolling_windows, score_endings, score_texts, token_losses_of, token_spans
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.use import load
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.training import cross_entropy

VOCABULARY, CONTEXT = 37, 12


def network(**changes: object) -> CyberSLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    model = CyberSLM(CyberSLMConfig(**sizes, ffn_hidden_dim=24, max_seq_len=CONTEXT, **changes), seed=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return model


@torch.no_grad()
def one_by_one(model: CyberSLM, ids: Sequence[int]) -> list[float]:
    """Each id's loss from a pass of its own, with the context that the windows promise."""
    losses, half = [], model.max_seq_len // 2
    for at in range(1, len(ids)):
        start = 0
        while at - start > model.max_seq_len:
            start += max(1, half)
        logits = model(torch.tensor([ids[start:at]]))[0, -1].double()
        losses.append(float(logits.logsumexp(0) - logits[ids[at]]))
    return losses


VARIANTS = [{}, {"sliding_window": 4}, {"logit_softcap": 3.0}, {"tie_weights": False}]
SEQUENCES = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40), min_size=1, max_size=7)


@settings(deadline=None, max_examples=40)
@given(sequences=SEQUENCES, batch_tokens=st.integers(1, 60), variant=st.sampled_from(VARIANTS))
def test_bulk_equals_one_pass_for_each_token(
    sequences: list[list[int]], batch_tokens: int, variant: dict[str, object]
) -> None:
    model = network(**variant)
    found = token_losses_of(model, sequences, batch_tokens=batch_tokens)
    for ids, losses in zip(sequences, found, strict=True):
        assert losses.dtype == torch.float64
        assert losses.tolist() == pytest.approx(one_by_one(model, ids), abs=1e-5)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), batch_tokens=st.integers(1, 200))
def test_endings_of_a_shared_beginning_equal_whole_sequences(data: st.DataObject, batch_tokens: int) -> None:
    model = network()
    token = st.integers(0, VOCABULARY - 1)
    questions = []
    for _ in range(data.draw(st.integers(1, 4))):
        beginning = data.draw(st.lists(token, min_size=1, max_size=8))
        endings = data.draw(st.lists(st.lists(token, min_size=1, max_size=4), min_size=1, max_size=4))
        questions.append([beginning + ending for ending in endings])
    found = score_endings(model, questions, batch_tokens=batch_tokens)
    for sequences, scores in zip(questions, found, strict=True):
        lengths = {len(ids) - score.num_tokens for ids, score in zip(sequences, scores, strict=True)}
        (shared,) = lengths
        assert shared >= 1
        assert len({tuple(ids[:shared]) for ids in sequences}) == 1
        for ids, score in zip(sequences, scores, strict=True):
            assert score.loss_sum == pytest.approx(sum(one_by_one(model, ids)[shared - 1 :]), abs=2e-5)


def test_one_alternative_may_begin_another() -> None:
    model = network()
    short, long = score_endings(model, [[[1, 2, 3], [1, 2, 3, 4]]])[0]
    assert (short.num_tokens, long.num_tokens) == (1, 2)
    assert long.loss_sum - short.loss_sum == pytest.approx(one_by_one(model, [1, 2, 3, 4])[-1], abs=1e-5)


@pytest.mark.parametrize(
    ("question", "words"),
    [([], "not 0 to 0"), ([[1]], "not 1 to 1"), ([[1] * 14], "2 to 13 tokens"), ([[1, 2], [2, 2]], "the same token")],
)
def test_alternatives_that_cant_be_compared_are_refused(question: list[list[int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        score_endings(network(), [question])


@given(length=st.integers(0, 300), context=st.integers(1, 40))
def test_windows_score_each_token_once_with_half_a_context_before_it(length: int, context: int) -> None:
    scored = []
    for start, stop, fresh in rolling_windows(length, context):
        assert 0 < stop - start <= context
        for at in range(fresh, stop):
            scored.append(at)
            assert at - start + 1 >= min(at + 1, context / 2)
    assert scored == list(range(length))


@pytest.fixture(scope="module")
def opened(trained: Path) -> tuple[CyberSLM, Tokenizer]:
    engine = load(trained / "run", device="cpu")
    return engine.model, engine.tokenizer


TEXTS = ["", "a", "The class statement é 水 \u2581 \ufdd0", "The " * 200, "x\n" * 3, "🙂🙂"]


def test_texts_are_scored_as_documents_of_training(opened: tuple[CyberSLM, Tokenizer]) -> None:
    model, tokenizer = opened
    for with_end in (True, False):
        found = score_texts(model, tokenizer, TEXTS, with_end=with_end, batch_tokens=50)
        for text, score in zip(TEXTS, found, strict=True):
            ids = tokenizer.encode_documents([text])[0].tolist()
            losses = one_by_one(model, ids if with_end else ids[:-1])
            assert score.num_tokens == len(losses)
            assert score.num_bytes == len(text.encode())
            assert score.loss_sum == pytest.approx(sum(losses), abs=1e-5 * max(1, len(losses)))
            assert score.max_loss == pytest.approx(max(losses, default=0.0), abs=1e-5)
            assert score.bits_per_byte == pytest.approx(score.loss_sum / math.log(2) / max(1, len(text.encode())))


def test_surprises_are_the_tokens_of_least_likelihood_with_their_characters(
    opened: tuple[CyberSLM, Tokenizer],
) -> None:
    model, tokenizer = opened
    text = "The class statement é 水 and \u2581 CVE-2024-1234"
    (score,) = score_texts(model, tokenizer, [text], surprises=5)
    assert [found.bits for found in score.surprises] == sorted((found.bits for found in score.surprises), reverse=True)
    assert score.surprises[0].bits == pytest.approx(score.max_bits)
    ids = tokenizer.encode_documents([text])[0].tolist()
    losses = one_by_one(model, ids)
    worst = max(range(len(losses)), key=losses.__getitem__)
    spans = token_spans(text, ids[1:-1], tokenizer)
    assert score.surprises[0][1:] == spans[worst]
    assert "".join(text[start:end] for start, end in dict.fromkeys(spans)) == text
    assert spans[-1] == (len(text), len(text))


def test_spans_are_left_out_where_the_tokens_spell_another_text(opened: tuple[CyberSLM, Tokenizer]) -> None:
    _, tokenizer = opened
    assert token_spans("a text", tokenizer.encode("another", add_special_tokens=False), tokenizer) == []


def test_the_head_never_holds_a_whole_batch_of_logits(
    opened: tuple[CyberSLM, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = opened
    before = score_texts(model, tokenizer, TEXTS)
    monkeypatch.setattr(cross_entropy, "CHUNK", 3 * model.config.vocab_size)
    monkeypatch.setattr(cross_entropy, "PIECE", 2 * model.config.vocab_size)
    largest = 0
    normaliser = cross_entropy._normaliser

    def watched(logits: torch.Tensor, softmax: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, logits.numel())
        return normaliser(logits, softmax)

    monkeypatch.setattr(cross_entropy, "_normaliser", watched)
    after = score_texts(model, tokenizer, TEXTS)
    assert largest == 2 * model.config.vocab_size
    for one, other in zip(before, after, strict=True):
        assert one.loss_sum == pytest.approx(other.loss_sum, abs=1e-4)


def test_scoring_leaves_mode_and_random_state(opened: tuple[CyberSLM, Tokenizer]) -> None:
    model, tokenizer = opened
    model.train()
    state = torch.get_rng_state()
    score_texts(model, tokenizer, ["a text"])
    score_endings(model, [[[1, 2], [1, 3]]])
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    model.eval()


@pytest.mark.parametrize("wrong", [{"surprises": -1}, {"batch_tokens": 0}])
def test_numbers_out_of_range_are_refused(opened: tuple[CyberSLM, Tokenizer], wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        score_texts(*opened, ["a"], **wrong)


def test_batches_are_of_like_length_and_fit_the_budget() -> None:
    windows = sorted(
        (scoring._Window(n, 0, size, 0) for n, size in enumerate([3, 9, 9, 1, 5, 12])), key=lambda w: -w.stop
    )
    batches = [[w.length for w in batch] for batch in scoring._batches(windows, 18)]
    assert batches == [[12], [9, 9], [5, 3, 1]]
