from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import oracles
import pytest
import torch

from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.generation.engine import Engine
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

CONFIG = CyberSLMConfig(vocab_size=262, hidden_dim=32, num_layers=2, num_heads=4, ffn_hidden_dim=48, max_seq_len=64)
PROMPTS = ["a", "a b c d e f g", "The quick brown fox, CVE-2024-1234", "", "0000"]


class Bytes:
    """A tokenizer of single bytes: id = byte + 4."""

    vocab_size, pad_id, unk_id, bos_id, eos_id, add_bos = 260, 0, 1, 2, 3, True
    control_ids = frozenset({0, 1, 2, 3})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [2] * add_special_tokens + [byte + 4 for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - 4 for i in ids if i >= 4).decode("utf-8", "replace")

    def stream_decoder(self, *, after: Sequence[int] = ()) -> object:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        class Stream:
            def push(self, token: int) -> str:
                return decoder.decode(bytes([token - 4]) if token >= 4 else b"")

            def finish(self) -> str:
                return decoder.decode(b"", final=True)

        return Stream()


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = CyberSLM(CONFIG, seed=2).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)
    return Engine(model, Bytes())


class Scripted(CyberSLM):
    """A network whose logits spell a given list of ids."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(CONFIG)
        self.script = script
        self.at = -1

    def head(self, features: torch.Tensor) -> torch.Tensor:
        self.at += 1
        logits = torch.zeros(*features.shape[:-1], 262)
        logits[..., self.script[self.at]] = 9.0
        return logits


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_batch_of_ragged_prompts_equals_each_alone(engine: Engine, order: list[int]) -> None:
    """G04: identical ids per row, whatever the batch and its order."""
    prompts = [PROMPTS[i] for i in order]
    together = engine.generate(prompts, max_new_tokens=12)
    for prompt, made in zip(prompts, together, strict=True):
        alone = engine.generate(prompt, max_new_tokens=12)[0]
        assert (made.prompt, made.text, made.ids, made.finish_reason) == (
            prompt,
            alone.text,
            alone.ids,
            alone.finish_reason,
        )


def test_greedy_equals_the_uncached_loop(engine: Engine) -> None:
    for prompt in PROMPTS:
        wanted = oracles.greedy(_Allowed(engine), engine.tokenizer.encode(prompt), 10, stop=3)
        made = engine.generate(prompt, max_new_tokens=10)[0]
        assert list(made.ids) == [token for token in wanted if token != 3]


class _Allowed:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.engine.model(ids)
        logits[..., [0, 1, 2, 260, 261]] = -torch.inf
        return logits


def test_rows_beyond_the_vocabulary_and_control_ids_are_never_made(engine: Engine) -> None:
    made = engine.generate(["x"] * 8, [SamplingParams(max_new_tokens=40, temperature=50.0, seed=s) for s in range(8)])
    assert all(4 <= token < 260 for completion in made for token in completion.ids)


def test_same_seed_gives_the_same_text_wherever_it_stands(engine: Engine) -> None:
    """G15: requests shared one generator, so a neighbour changed the result."""
    params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=7)
    alone = engine.generate("CVE-", params)[0].ids
    other = SamplingParams(max_new_tokens=10, temperature=1.0, seed=8)
    before = torch.random.get_rng_state()
    for place in range(4):
        batch = ["CVE-" if i == place else f"neighbour {i}" for i in range(4)]
        settings = [params if i == place else other for i in range(4)]
        assert engine.generate(batch, settings)[place].ids == alone
    assert engine.generate("CVE-", params)[0].ids == alone
    assert torch.equal(torch.random.get_rng_state(), before)
    assert engine.generate("CVE-", other)[0].ids != alone
    torch.set_num_threads(2)
    try:
        assert engine.generate("CVE-", params)[0].ids == alone
    finally:
        torch.set_num_threads(1)


def test_joined_stream_equals_generate(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=25, temperature=2.0, seed=3)
    events = list(engine.stream(PROMPTS[:3], params))
    for row, made in enumerate(engine.generate(PROMPTS[:3], params)):
        assert "".join(event.text for event in events if event.row == row) == made.text
        assert made.text == engine.tokenizer.decode(made.ids)
        assert [event.finish_reason for event in events if event.row == row][-1] == made.finish_reason


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\U0001f468‍\U0001f469‍\U0001f467", "漢字", "é"], ids=["emoji", "zwj", "cjk", "latin"]
)
def test_stream_never_cuts_a_character(text: str) -> None:
    """G12 (llama.cpp#4036): a character of several tokens was streamed as replacement characters."""
    script = [byte + 4 for byte in text.encode()] + [3]
    events = list(Engine(Scripted(script), Bytes()).stream("x", max_new_tokens=len(script)))
    assert "".join(event.text for event in events) == text
    assert not any("�" in event.text for event in events)


def test_invalid_bytes_are_released_at_the_end() -> None:
    events = list(Engine(Scripted([0xF0 + 4, 0x9F + 4, 3]), Bytes()).stream("x", max_new_tokens=3))
    assert [event.text for event in events] == ["", "", "�"]


def test_end_of_document_stops_without_text() -> None:
    made = Engine(Scripted([69, 70, 3, 71]), Bytes()).generate("x", max_new_tokens=10)[0]
    assert (made.text, made.ids, made.finish_reason) == ("AB", (69, 70), "stop")
    made = Engine(Scripted([69, 70, 71]), Bytes()).generate("x", max_new_tokens=3)[0]
    assert (made.text, made.finish_reason) == ("ABC", "length")


def test_default_budget_ends_at_the_context(engine: Engine) -> None:
    made = engine.generate("y" * 50)[0]
    assert len(made.ids) <= 64 - 51


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.stream("x" * 100), "prompt's 101 tokens do not fit the model's context of 64"),
        (lambda e: e.stream("x", max_new_tokens=63), "2 tokens and max_new_tokens 63 do not fit .* at most 62 new"),
        (lambda e: e.stream("x", temprature=1.0), "unknown setting 'temprature'; known: .*temperature"),
        (lambda e: e.stream("x", temperature=-1), "temperature must be"),
        (lambda e: e.stream(["x", "y"], [SamplingParams()]), "2 prompts were given and 1 settings"),
        (lambda e: e.generate(None), "prompts must be a string or a list of strings, not None"),
        (lambda e: e.generate(3), "not 3"),
        (lambda e: e.generate(["a", b"b"]), "prompts must be"),
        (lambda e: e.generate("a", {"seed": 1}), "params must be SamplingParams"),
        (lambda e: e.generate("a", "x"), "params must be SamplingParams"),
        (lambda e: e.stream("x", max_new_tokens=10**9), "2 tokens and max_new_tokens 1000000000 do not fit .* of 64"),
        (lambda e: e.stream([[]]), "the prompt is empty"),
        (lambda e: e.stream([[5, 262]]), "the prompt must hold ids from 0 to 261 .*, not 262"),
        (lambda e: e.stream([[5, "a"]]), "a prompt must be a text or a list of ids"),
        (lambda e: e.stream([5, 6]), "prompts must be a string .*list of ids may stand for each"),
        (lambda e: e.stream("x", stop=""), "stop must be texts of 1 to"),
        (lambda e: e.stream("x", forced_ids=[2]), "forced_ids must be ids that can be made, not 2"),
        (lambda e: e.stream("x", banned_ids=[262]), "banned_ids must be ids from 0 to 261"),
    ],
)
def test_bad_request_is_refused_when_it_is_made(engine: Engine, call: object, words: str) -> None:
    with pytest.raises(GenerationError, match=words):
        call(engine)


def script(text: str, *, stop: int = 3) -> Engine:
    ids = [byte + 4 for byte in text.encode()]
    return Engine(Scripted([*ids, stop]), Bytes())


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["X", "DEFGHIJ"], "D"])
def test_stop_string_ends_the_answer_and_no_part_of_it_is_streamed(stop: object) -> None:
    """G13 (vllm#3574): its first part had already been sent."""
    events = list(script("ABCDEFGHIJK").stream("x", max_new_tokens=11, stop=stop))
    assert [event.text for event in events if event.text] == ["A", "B", "C"]
    assert events[-1].finish_reason == "stop"
    made = script("ABCDEFGHIJK").generate("x", max_new_tokens=11, stop=stop)[0]
    assert (made.text, made.finish_reason) == ("ABC", "stop")
    assert made.ids == tuple(byte + 4 for byte in b"ABCDEFGHIJ")[: len(events)]


def test_text_held_for_a_stop_string_comes_at_the_end() -> None:
    for budget, reason in ((3, "length"), (4, "stop")):
        made = script("ABC").generate("x", max_new_tokens=budget, stop="BCD")[0]
        assert (made.text, made.finish_reason) == ("ABC", reason)


def test_stop_string_before_the_minimum_is_text() -> None:
    made = script("ABABAB").generate("x", max_new_tokens=6, stop="A", min_new_tokens=2)[0]
    assert made.text == "AB"
    assert script("ABABAB").generate("x", max_new_tokens=6, stop="AB", min_new_tokens=2)[0].text == "AB"


def test_row_stopped_by_its_text_leaves_the_batch(engine: Engine) -> None:
    free = engine.generate("a", max_new_tokens=12)[0]
    settings = [SamplingParams(max_new_tokens=12, stop=free.text[3:5]), SamplingParams(max_new_tokens=12)]
    events = list(engine.stream(["a", "a b c"], settings))
    assert sum(event.row == 0 for event in events) < 12
    assert "".join(e.text for e in events if e.row == 0) == free.text[: free.text.index(free.text[3:5])]
    assert [e.token_id for e in events if e.row == 1] == [e.token_id for e in engine.stream("a b c", max_new_tokens=12)]


def test_own_stop_ids_end_without_text_and_may_be_control_ids() -> None:
    for stop in (70, 2):
        made = Engine(Scripted([69, stop, 71]), Bytes()).generate("x", max_new_tokens=3, stop_ids=[stop])[0]
        assert (made.text, made.ids, made.finish_reason) == ("A", (69,), "stop")
    events = Engine(Scripted([69, 2, 71]), Bytes()).stream("x", max_new_tokens=3)
    assert 2 not in [event.token_id for event in events]


def test_prompt_of_ids_is_taken_as_it_is(engine: Engine) -> None:
    ids = engine.tokenizer.encode("a b")
    (by_ids,), (by_text,) = engine.generate([ids], max_new_tokens=6), engine.generate("a b", max_new_tokens=6)
    assert (by_ids.ids, by_ids.prompt) == (by_text.ids, "a b")
    control = engine.generate([[2], [0, 1, 2, 3]], max_new_tokens=4)
    assert all(made.ids for made in control)


def test_samples_come_with_their_number_and_in_order(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.5, seed=4, n=3)
    made = engine.generate(["a", "b"], params)
    assert [(one.prompt, one.sample) for one in made] == [(p, s) for p in "ab" for s in range(3)]
    assert len({one.ids for one in made}) == 6
    assert made[0].ids == engine.generate("a", params, n=1)[0].ids
    for sample in range(3):
        text = "".join(e.text for e in engine.stream("a", params) if e.sample == sample)
        assert text == made[sample].text


def test_log_probabilities_are_the_models_own(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0.7, top_k=3, seed=1, logprobs=2)
    made = engine.generate("a b", params)[0]
    ids = [*engine.tokenizer.encode("a b"), *made.ids]
    log = engine.model(torch.tensor([ids])).detach()[0].double().log_softmax(-1)
    first = len(ids) - len(made.ids) - 1
    for place, seen in enumerate(made.logprobs):
        row = log[first + place]
        assert seen.logprob == pytest.approx(float(row[ids[first + place + 1]]), abs=1e-4)
        assert [token for token, _ in seen.top] == row.topk(2).indices.tolist()
        assert seen.entropy == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-3)
    assert engine.generate("a b", params, logprobs=None)[0].logprobs == ()
    events = list(engine.stream("a b", params, logprobs=0))
    assert [event.top_logprobs for event in events] == [()] * 6
    assert all(event.logprob is not None and event.entropy is not None for event in events)


def test_beams_give_the_best_answers_first(engine: Engine) -> None:
    made = engine.generate(
        ["a b", "x"], [SamplingParams(max_new_tokens=5, beams=4, n=2), SamplingParams(max_new_tokens=5)]
    )
    assert [(one.prompt, one.sample) for one in made] == [("a b", 0), ("a b", 1), ("x", 0)]
    assert made[0].score >= made[1].score
    assert made[0].text == engine.tokenizer.decode(made[0].ids)
    assert made[2].score is None
    assert made[2].ids == engine.generate("x", max_new_tokens=5)[0].ids
    assert all(token < 260 for one in made for token in one.ids)


def test_context_rules_and_what_they_report(engine: Engine) -> None:
    prompt = "y" * 100
    cut = engine.generate(prompt, context="truncate-left", max_new_tokens=10)[0]
    assert (cut.truncated, cut.prompt) == (47, prompt)
    assert cut.ids == engine.generate([engine.tokenizer.encode(prompt)[47:]], max_new_tokens=10)[0].ids
    slid = engine.generate("abc", context="slide", max_new_tokens=200, banned_ids=[3])[0]
    assert (len(slid.ids), slid.finish_reason, slid.truncated) == (200, "length", 0)
    assert engine.generate(prompt, context="slide", max_new_tokens=3)[0].truncated == 101 - 48
    assert engine.generate("abc", banned_ids=[3])[0].finish_reason == "context"


def test_requests_come_and_go_in_a_session(engine: Engine) -> None:
    session = engine.session()
    assert len(session) == 0
    session.join("a b c", SamplingParams(max_new_tokens=9))
    events = session.step()
    assert session.join("x", SamplingParams(max_new_tokens=4, beams=2)) == 1
    assert session.join("0000", SamplingParams(max_new_tokens=9, temperature=1.0, n=2, seed=1)) == 2
    events += session.step()
    (cancelled,) = session.cancel(2, 1)
    assert (cancelled.row, cancelled.sample, cancelled.token_id, cancelled.finish_reason) == (2, 1, None, "cancelled")
    assert session.cancel(2, 1) == []
    gone = session.join("y", SamplingParams(beams=2))
    assert [(event.row, event.finish_reason) for event in session.cancel(gone)] == [(gone, "cancelled")]
    while len(session):
        events += session.step()
    for row, prompt in ((0, "a b c"), (1, "x")):
        alone = engine.generate(prompt, max_new_tokens=9 if row == 0 else 4, beams=row + 1)[0]
        assert "".join(event.text for event in events if event.row == row) == alone.text
    assert {event.row for event in events} == {0, 1, 2}
    assert len(session) == 0


def test_guides_are_given_one_for_each_prompt(engine: Engine) -> None:
    class Letters:
        done = False

        def allowed(self) -> torch.Tensor:
            return torch.arange(262) == ord("q") + 4

        def accept(self, token: int) -> None: ...

        def fork(self) -> Letters:
            return self

    made = engine.generate(["a", "b"], max_new_tokens=4, guides=[Letters(), None])
    assert made[0].text == "qqqq"
    assert made[1].ids == engine.generate("b", max_new_tokens=4)[0].ids
    blocked = engine.generate("a", guides=[Letters()], banned_ids=[ord("q") + 4])[0]
    assert (blocked.text, blocked.ids, blocked.finish_reason) == ("", (), "blocked")
    with pytest.raises(GenerationError, match="2 prompts were given and 1 guides"):
        engine.generate(["a", "b"], guides=[None])


def test_no_prompts_give_no_completions(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_tokenizer_larger_than_the_model_is_refused() -> None:
    model = CyberSLM(CyberSLMConfig(vocab_size=100, hidden_dim=16, num_layers=1, num_heads=2))
    with pytest.raises(GenerationError, match="260 ids and the model 100 rows"):
        Engine(model, Bytes())
