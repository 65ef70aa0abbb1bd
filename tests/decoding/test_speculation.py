from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.decoding.draft import Speculation
from cyberslm.decoding.loop import Batch, complete, decode
from cyberslm.decoding.request import Request, Step
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM

SIZES = {"vocab_size": 24, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "ffn_hidden_dim": 24, "max_seq_len": 64}
VARIANTS = {
    "plain": CyberSLMConfig(**SIZES),
    "window": CyberSLMConfig(**SIZES, sliding_window=7, num_kv_heads=1),
    "dynamic": CyberSLMConfig(**SIZES, rope_scaling=RopeScaling(type="dynamic", factor=2.0, original_max_seq_len=32)),
}
MODELS = {name: CyberSLM(config, seed=3).eval() for name, config in VARIANTS.items()}
for model in MODELS.values():
    with torch.no_grad():
        model.embed_tokens.weight.mul_(20)
WAYS = {"lookup": Speculation(lookup=True), "same model": Speculation(model=MODELS["plain"])}


class Counting(CyberSLM):
    """Counts forward passes."""

    passes = 0

    def features(self, *args: object, **kwargs: object) -> torch.Tensor:
        type(self).passes += 1
        return super().features(*args, **kwargs)  # type: ignore[arg-type]


def collected(steps: Sequence[Step]) -> dict[tuple[int, int], list[tuple]]:
    rows: dict[tuple[int, int], list[tuple]] = {}
    for step in steps:
        likelihood = step.likelihood and round(step.likelihood.logprob, 3)
        rows.setdefault((step.row, step.sample), []).append((step.token, step.finish, likelihood))
    return rows


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(WAYS)),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=1, max_size=3),
    st.sampled_from(
        [
            {},
            {"temperature": 0.7, "seed": 5, "top_p": 0.9},
            {"temperature": 1.5, "seed": 8, "n": 2, "logprobs": 1},
            {"repetition_penalty": 1.3, "no_repeat_ngram": 3},
            {"context": "slide", "sinks": 2, "max_new_tokens": 70},
            {"stop_ids": (2, 9), "min_new_tokens": 4},
        ]
    ),
)
def test_drafts_change_no_token(name: str, way: str, prompts: list[list[int]], wanted: dict) -> None:
    if name == "dynamic" and wanted.get("context") == "slide":
        return
    requests = [Request(prompt, SamplingParams(**{"max_new_tokens": 30, **wanted})) for prompt in prompts]
    plain = collected(list(decode(MODELS[name], requests)))
    assert collected(list(decode(MODELS[name], requests, speculation=WAYS[way]))) == plain


@pytest.mark.parametrize("way", ["lookup", "same model"])
def test_right_drafts_save_passes(way: str) -> None:
    model = Counting(VARIANTS["plain"], seed=3).eval()
    model.load_state_dict(MODELS["plain"].state_dict())
    request = Request([1, 2, 3, 1, 2, 3], SamplingParams(max_new_tokens=50))
    Counting.passes = 0
    plain = complete(model, [request])
    alone, Counting.passes = Counting.passes, 0
    (answer,) = [[step.token for step in decode(model, [request], speculation=WAYS[way])]]
    assert answer == plain[0][0]
    assert Counting.passes < 0.6 * alone


def test_rows_join_and_leave_between_drafted_steps() -> None:
    requests = [
        Request([1, 2, 1, 2, 1], SamplingParams(max_new_tokens=20)),
        Request([4], SamplingParams(max_new_tokens=5)),
        Request([3, 3, 3, 3], SamplingParams(max_new_tokens=12, temperature=1.0, seed=1)),
    ]
    alone = [complete(MODELS["plain"], [request])[0][0] for request in requests]
    batch, made = Batch(MODELS["plain"], speculation=WAYS["lookup"]), [[], [], []]
    batch.join(requests[0])
    for joining in (1, 2, None):
        for _ in range(2):
            for step in batch.step():
                made[step.row].append(step.token)
        if joining is not None:
            batch.join(requests[joining])
    while len(batch):
        for step in batch.step():
            made[step.row].append(step.token)
    assert made == alone


@torch.no_grad()
def test_sampled_tokens_with_drafts_follow_the_distribution() -> None:
    """Two tokens that a model guesses, over 1,600 seeds, against the model's own probabilities (chi-square)."""
    model, prompt, seeds = MODELS["plain"], [1, 2, 3, 4, 1, 2, 3], 1600
    counts, drafted = torch.zeros(24, 24), 0
    for start in range(0, seeds, 4):
        params = [
            SamplingParams(max_new_tokens=4, temperature=1.0, seed=seed, forced_ids=(4,))
            for seed in range(start, start + 4)
        ]
        batch, made = Batch(model, speculation=WAYS["same model"]), [[] for _ in params]
        for one in params:
            batch.join(Request(prompt, one))
        while len(batch):
            steps = batch.step()
            drafted += len(steps) - len({step.row for step in steps})
            for step in steps:
                made[step.row].append(step.token)
        for _, one, other, _ in made:
            counts[one, other] += 1
    assert drafted > seeds / 100
    first = model(torch.tensor([[*prompt, 4]]))[0, -1].softmax(-1)
    second = torch.stack([model(torch.tensor([[*prompt, 4, one]]))[0, -1].softmax(-1) for one in range(24)])
    expected = (first.unsqueeze(1) * second * seeds).flatten()
    common = expected >= 5
    observed = torch.cat((counts.flatten()[common], counts.flatten()[~common].sum().reshape(1)))
    wanted = torch.cat((expected[common], expected[~common].sum().reshape(1)))
    chi_square = float(((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
    freedom = len(wanted) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
