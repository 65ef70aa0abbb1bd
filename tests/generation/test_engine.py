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
    ],
)
def test_bad_request_is_refused_when_it_is_made(engine: Engine, call: object, words: str) -> None:
    with pytest.raises(GenerationError, match=words):
        call(engine)


def test_no_prompts_give_no_completions(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_tokenizer_larger_than_the_model_is_refused() -> None:
    model = CyberSLM(CyberSLMConfig(vocab_size=100, hidden_dim=16, num_layers=1, num_heads=2))
    with pytest.raises(GenerationError, match="260 ids and the model 100 rows"):
        Engine(model, Bytes())
