"""Rows that join, leave, share a prompt, are guided, forced or cut, each against the uncached loop."""

from __future__ import annotations

from collections.abc import Sequence

import oracles
import pytest
import torch
from networks import VOCABULARY, weighted

from cyberslm.decoding.guide import Guide
from cyberslm.decoding.loop import Batch, complete, decode
from cyberslm.decoding.request import Request, Step, fit
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

CONTEXT = 24
CONFIG = CyberSLMConfig(
    vocab_size=VOCABULARY, hidden_dim=24, num_layers=2, num_heads=2, ffn_hidden_dim=16, max_seq_len=CONTEXT
)
MODEL = weighted(CONFIG, 5)
PROMPTS = [[7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 31], [5, 5, 5, 5]]


def drain(batch: Batch) -> list[Step]:
    steps = []
    while len(batch):
        steps += batch.step()
    return steps


def answer(steps: Sequence[Step], row: int, sample: int = 0) -> list[int | None]:
    return [step.token for step in steps if (step.row, step.sample) == (row, sample)]


def alone(prompt: Sequence[int], params: SamplingParams | None = None, guide: Guide | None = None) -> list[Step]:
    batch = Batch(MODEL)
    batch.join(Request(prompt, params or SamplingParams(), guide))
    return drain(batch)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_row_that_joins_says_what_it_says_alone(late: int) -> None:
    params = [SamplingParams(max_new_tokens=6 + i, temperature=float(i % 2), seed=i) for i in range(4)]
    batch, steps = Batch(MODEL), []
    for prompt, one in zip(PROMPTS, params, strict=True):
        assert batch.join(Request(prompt, one)) == PROMPTS.index(prompt)
        for _ in range(late):
            steps += batch.step()
    steps += drain(batch)
    for row, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        wanted = answer(alone(prompt, one), 0)
        assert answer(steps, row) == wanted
        assert len(wanted) == 6 + row
        if one.greedy:
            assert wanted == oracles.greedy(MODEL, prompt, 6 + row)


def test_steps_come_in_the_order_of_rows_and_samples() -> None:
    batch = Batch(MODEL)
    batch.join(Request([1, 2], SamplingParams(max_new_tokens=5, temperature=1.0, n=2, seed=1)))
    batch.step()
    batch.join(Request([3], SamplingParams(max_new_tokens=2)))
    for steps in (batch.step(), batch.step()):
        assert [(step.row, step.sample) for step in steps] == [(0, 0), (0, 1), (1, 0)]
    assert [step.row for step in batch.step()] == [0, 0]


def test_samples_share_the_prompts_pass_and_the_first_is_the_only_one_without_the_others() -> None:
    fed: list[tuple[int, ...]] = []

    class Counting(CyberSLM):
        def features(self, input_ids: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
            fed.append(tuple(input_ids.shape))
            return super().features(input_ids, *args, **more)

    model = Counting(CONFIG)
    model.load_state_dict(MODEL.state_dict())
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=3)
    (answers,) = complete(model, [Request(PROMPTS[1], SamplingParams(max_new_tokens=4, temperature=1.0, seed=3, n=3))])
    assert fed == [(1, 9), (3, 1), (3, 1), (3, 1)]
    assert answers[0] == answer(alone(PROMPTS[1], params), 0)
    assert len({tuple(ids) for ids in answers}) == 3


def test_finish_reasons() -> None:
    first = oracles.greedy(MODEL, [7], 3)
    batch = Batch(MODEL, stop_ids=frozenset({first[1]}))
    batch.join(Request([7], SamplingParams(max_new_tokens=9)))
    assert drain(batch)[-1] == Step(0, first[1], "stop")
    assert alone([7], SamplingParams(stop_ids=[first[2]]))[-1] == Step(0, first[2], "stop")
    assert alone([7], SamplingParams(max_new_tokens=2))[-1] == Step(0, first[1], "length")
    last = alone([7])
    assert (len(last), last[-1].finish) == (CONTEXT - 1, "context")
    assert alone([7], SamplingParams(banned_ids=range(VOCABULARY))) == [Step(0, None, "blocked")]


def test_minimum_holds_back_stops_and_the_ban_is_lifted_for_stop_ids() -> None:
    first = oracles.greedy(MODEL, [7], 3)
    made = answer(alone([7], SamplingParams(stop_ids=[first[0]], min_new_tokens=4, max_new_tokens=8)), 0)
    assert first[0] not in made[:4]
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    allowed[first[0]] = False
    batch = Batch(MODEL, allowed=allowed)
    batch.join(Request([7], SamplingParams(max_new_tokens=4)))
    batch.join(Request([7], SamplingParams(stop_ids=[first[0]], max_new_tokens=4)))
    steps = drain(batch)
    assert first[0] not in answer(steps, 0)
    assert answer(steps, 1) == [first[0]]


def test_cancelled_rows_leave_and_the_others_go_on() -> None:
    batch = Batch(MODEL)
    for prompt in PROMPTS:
        batch.join(Request(prompt, SamplingParams(max_new_tokens=8)))
    steps = batch.step()
    assert batch.cancel(1) == [Step(1, None, "cancelled")]
    assert batch.cancel(1) == []
    late = batch.join(Request([9, 9], SamplingParams(max_new_tokens=3, temperature=1.0, n=2)))
    assert [step.sample for step in batch.cancel(late, 1)] == [1]
    assert len(batch) == 4
    steps += drain(batch)
    for row in (0, 2, 3):
        assert answer(steps, row) == oracles.greedy(MODEL, PROMPTS[row], 8)
    assert [step.sample for step in steps if step.row == late] == [0, 0, 0]
    assert len(batch) == 0
    assert batch.step() == []
    again = batch.join(Request([7], SamplingParams(max_new_tokens=2)))
    assert answer(drain(batch), again) == oracles.greedy(MODEL, [7], 2)


def test_request_cancelled_before_its_first_step_costs_nothing() -> None:
    batch = Batch(MODEL)
    batch.join(Request([1], SamplingParams(max_new_tokens=2)))
    assert batch.cancel(0) == [Step(0, None, "cancelled")]
    assert len(batch) == 0
    assert batch.step() == []


def test_newcomer_that_fails_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(MODEL)
    batch.join(Request([7], SamplingParams(max_new_tokens=5)))
    steps = batch.step()
    late = batch.join(Request([1, 2], SamplingParams(max_new_tokens=2)))
    with monkeypatch.context() as patch:
        patch.setattr(MODEL, "new_cache", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            batch.step()
    batch.cancel(late)
    assert answer(steps + drain(batch), 0) == oracles.greedy(MODEL, [7], 5)


class Script:
    """A guide that lets one text through, in pieces told by their first ids."""

    def __init__(self, script: Sequence[int], at: int = 0) -> None:
        self.script, self.at = list(script), at

    def allowed(self) -> torch.Tensor | None:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[self.script[self.at] : self.script[self.at] + 2] = True
        return mask

    def accept(self, token: int) -> None:
        assert token - self.script[self.at] in (0, 1)
        self.at += 1

    @property
    def done(self) -> bool:
        return self.at == len(self.script)

    def fork(self) -> Script:
        return Script(self.script, self.at)


def test_guide_decides_and_ends_its_row_alone() -> None:
    batch = Batch(MODEL)
    batch.join(Request([7], SamplingParams(max_new_tokens=6, temperature=1.0, seed=1, n=2), Script([3, 20, 33])))
    batch.join(Request([7], SamplingParams(max_new_tokens=6)))
    steps = drain(batch)
    for sample in range(2):
        made = answer(steps, 0, sample)
        assert [token - start in (0, 1) for token, start in zip(made, (3, 20, 33), strict=True)] == [True] * 3
    assert {step.finish for step in steps if step.row == 0} == {None, "stop"}
    assert answer(steps, 1) == oracles.greedy(MODEL, [7], 6)
    short = alone([7], SamplingParams(max_new_tokens=2), Script([3, 20, 33]))
    assert short[-1].finish == "length"


def test_forced_ids_begin_the_answer_and_count_as_made() -> None:
    made = answer(alone([7], SamplingParams(forced_ids=[4, 9], max_new_tokens=5)), 0)
    assert made == [4, 9, *oracles.greedy(MODEL, [7, 4, 9], 3)]


@pytest.mark.parametrize("sinks", [0, 1, 4, 17])
@pytest.mark.parametrize("length", [1, 20, CONTEXT, CONTEXT + 9])
def test_sliding_equals_the_text_without_what_was_forgotten(sinks: int, length: int) -> None:
    prompt = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    params = SamplingParams(context="slide", sinks=sinks, max_new_tokens=60)
    steps = alone(prompt, params)
    assert answer(steps, 0) == oracles.sliding_greedy(MODEL, prompt, 60, CONTEXT, sinks)
    assert steps[-1].finish == "length"


def test_row_slides_in_company_as_alone() -> None:
    batch = Batch(MODEL)
    params = SamplingParams(context="slide", max_new_tokens=50)
    batch.join(Request(PROMPTS[1], params))
    batch.step()
    batch.join(Request([7], SamplingParams(max_new_tokens=20)))
    batch.join(Request(PROMPTS[3], params))
    steps = drain(batch)
    assert answer(steps, 1) == oracles.greedy(MODEL, [7], 20)
    assert answer(steps, 2) == oracles.sliding_greedy(MODEL, PROMPTS[3], 50, CONTEXT, 4)


def test_prompt_cut_on_the_left_keeps_the_budget_exactly() -> None:
    prompt = list(range(30))
    params = SamplingParams(context="truncate-left", max_new_tokens=10)
    assert fit(prompt, params, CONTEXT) == (prompt[16:], 10, "length", 16)
    assert answer(alone(prompt, params), 0) == oracles.greedy(MODEL, prompt[16:], 10)
    assert fit([1], params, CONTEXT).truncated == 0
    assert fit(prompt, SamplingParams(context="truncate-left"), CONTEXT)[1:] == (12, "length", 18)


@pytest.mark.parametrize(
    ("prompt", "controls", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([1, VOCABULARY], {}, "prompt must hold ids from 0 to 39 .*, not 40"),
        ([-1], {}, "not -1"),
        ([1] * 20, {"max_new_tokens": 5}, "prompt's 20 tokens and max_new_tokens 5 do not fit .* of 24.* at most 4"),
        ([1], {"max_new_tokens": 10**9}, "1 tokens and max_new_tokens 1000000000 do not fit the model's context of 24"),
        ([1], {"max_new_tokens": 24, "context": "truncate-left"}, "24 leaves no room .* 1 tokens .* at most 23"),
        ([1], {"context": "slide", "sinks": 18}, "sinks must be below 18"),
        ([1], {"banned_ids": [40]}, "banned_ids must be ids from 0 to 39"),
        ([1], {"stop_ids": [99]}, "stop_ids must be ids from 0 to 39"),
        ([1], {"forced_ids": [40]}, "forced_ids must be ids from 0 to 39"),
        ([1], {"logit_bias": {40: 1.0}}, "logit_bias must be ids from 0 to 39"),
        ([1], {"forced_ids": [3]}, "forced_ids must be ids that can be made, not 3"),
        ([1] * 20, {"min_new_tokens": 5}, "min_new_tokens asks for 5 tokens .* 20 .* 24 leaves 4"),
        ([1] * 20, {"forced_ids": [1] * 5}, "forced_ids asks for 5 tokens"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(prompt: list[int], controls: dict, words: str) -> None:
    class Untouched(CyberSLM):
        def features(self, *_: object, **__: object) -> torch.Tensor:
            raise AssertionError("a forward pass")

    allowed = torch.arange(VOCABULARY) != 3
    request = Request(prompt, SamplingParams(**controls))
    with pytest.raises(GenerationError, match=words):
        decode(Untouched(CONFIG), [Request([1]), request], allowed=allowed)
    with pytest.raises(GenerationError, match=words):
        Batch(Untouched(CONFIG), allowed=allowed).join(request)


def test_beams_are_not_rows_of_a_batch() -> None:
    with pytest.raises(GenerationError, match="beams must be 1 to join a batch, not 2"):
        Batch(MODEL).join(Request([1], SamplingParams(beams=2)))


def test_damaged_model_is_named() -> None:
    broken = CyberSLM(CONFIG)
    with torch.no_grad():
        broken.norm.weight[0] = torch.nan
    for controls in ({}, {"temperature": 1.0}, {"beams": 2}):
        with pytest.raises(GenerationError, match="not finite: its weights are damaged"):
            complete(broken, [Request([1], SamplingParams(**controls))])


def test_model_keeps_its_mode_between_steps() -> None:
    model = CyberSLM(CONFIG).train()
    batch = Batch(model)
    batch.join(Request([1], SamplingParams(max_new_tokens=2)))
    batch.step()
    assert model.training
