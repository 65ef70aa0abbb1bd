from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence

import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cyberslm.errors import ConfigError, GenerationError
from cyberslm.generation.constrain import MAX_REGEX_CHARS, Constraint
from cyberslm.generation.demand import Demand
from cyberslm.generation.engine import Completion, Engine
from cyberslm.generation.guides import Guides
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import Tokenizer

EVENT = {
    "type": "object",
    "properties": {
        "severity": {"enum": ["low", "high"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
        "notes": {"type": "string", "minLength": 3},
        "hosts": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "minItems": 1},
        "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["severity", "score", "notes", "hosts"],
    "additionalProperties": False,
}
NESTED = 'start: item\nitem: "(" item* ")" | /[a-z]{1,4}/\n'


def is_event(text: str) -> bool:
    def check(event: object) -> bool:
        return (
            isinstance(event, dict)
            and event["severity"] in ("low", "high")
            and type(event["score"]) is int
            and 0 <= event["score"] <= 100
            and len(event["notes"]) >= 3
            and len(event["hosts"]) >= 1
            and all(re.fullmatch("[a-z]{2,8}", host) for host in event["hosts"])
            and set(event) <= set(EVENT["properties"])
            and (event.get("parent") is None or check(event["parent"]))
        )

    return check(json.loads(text))


def is_nested(text: str) -> bool:
    shorter = re.sub(r"\((?:w|_)*\)|[a-z]{1,4}", "_", text)
    return text == "_" if shorter == text else is_nested(shorter)


CASES = {
    "json": (Constraint.json_schema(EVENT), is_event, 60),
    "regex": (Constraint.regex(r"[A-Z]{2,5}-[0-9]{1,9}( and [^\n]*end)?"), None, 40),
    "choice": (Constraint.choice(["yes", "no", "it \u00e9 depends\n", 'say "\\"']), None, 20),
    "grammar": (Constraint.grammar(NESTED), is_nested, 40),
}


def made_by(engine: Engine, kind: str, seeds: Sequence[int]) -> list[Completion]:
    constraint, _, budget = CASES[kind]
    answers = []
    for seed in seeds:
        answers += engine.generate(
            ["Report:", ""], demand=Demand(constraint), temperature=1.0, seed=seed, max_new_tokens=budget
        )
    return answers


def check(kind: str, answers: list[Completion]) -> None:
    constraint, judge, budget = CASES[kind]
    for made in answers:
        assert made.valid, (made.finish_reason, made.text)
        assert len(made.ids) <= budget
        if kind == "regex":
            assert re.fullmatch(constraint.source, made.text)
        elif kind == "choice":
            assert made.text in json.loads(constraint.source)
        else:
            assert judge is not None
            assert judge(made.text)


@pytest.mark.parametrize("kind", list(CASES))
def test_every_answer_of_an_untrained_model_is_valid(untrained: Engine, kind: str) -> None:
    check(kind, made_by(untrained, kind, range(5)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CASES))
def test_a_thousand_answers_of_an_untrained_model_are_valid(untrained: Engine, kind: str) -> None:
    check(kind, made_by(untrained, kind, range(125)))


def test_all_choices_and_lengths_come_up(untrained: Engine) -> None:
    """A constraint that always took the same way would be valid, too."""
    texts = {made.text for made in made_by(untrained, "choice", range(30))}
    assert texts == set(json.loads(CASES["choice"][0].source))
    assert len({made.text for made in made_by(untrained, "regex", range(10))}) >= 8


@given(st.lists(st.text(min_size=1, max_size=12).filter(lambda text: not {"\u2581", "\ufdd0"} & set(text)), min_size=1))
@settings(max_examples=40, deadline=None)
@example(["aer"])
@example(["error"])
def test_any_text_can_be_a_choice(guides: Guides, tokenizer: Tokenizer, choices: list[str]) -> None:
    """With the tokens that the tokenizer cuts it into: forced text used to come as the longest ids that spell it."""
    choices = [choice.encode("utf-8", "replace").decode() for choice in choices]
    demand = Demand(Constraint.choice(choices))
    for choice in choices:
        ids = tokenizer.encode(choice, add_special_tokens=False)
        guide = guides.guide(demand, prompt_ids=[9], budget=200, stop_ids=[tokenizer.eos_id])
        assert guide is not None
        for token in ids:
            assert guide.allowed()[token]
            guide.accept(token)
        assert guide.done or guide.allowed()[tokenizer.eos_id]
        assert guides.is_met(demand, prompt_ids=[9], ids=ids, text=choice)
        assert (
            not guides.is_met(demand, prompt_ids=[9], ids=ids[:-1], text=tokenizer.decode(ids[:-1])) or len(choices) > 1
        )


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer)


def test_control_ids_and_escapes_are_never_allowed(guides: Guides, tokenizer: Tokenizer) -> None:
    """U+FDD0 and U+2581 would be read otherwise than they were judged."""
    guide = guides.guide(Demand(Constraint.regex(r"(.|\n)*")), prompt_ids=[9], budget=300, stop_ids=[tokenizer.eos_id])
    assert guide is not None
    allowed = set(guide.allowed().nonzero().flatten().tolist())
    assert allowed & tokenizer.control_ids == {tokenizer.eos_id}
    for byte in "\ufdd0".encode()[:2]:
        token = next(t for t in range(tokenizer.vocab_size) if tokenizer.piece(t) == f"<0x{byte:02X}>")
        assert guide.allowed()[token]
        guide.accept(token)
    last = next(t for t in range(tokenizer.vocab_size) if tokenizer.piece(t) == "<0x90>")
    assert not guide.allowed()[last]


@pytest.mark.parametrize("mark", ["\u2581", "a\ufdd0"])
def test_choices_that_cannot_be_spelled_are_refused(untrained: Engine, mark: str) -> None:
    with pytest.raises(GenerationError, match=r"U\+2581"):
        untrained.generate("a", demand=Demand(Constraint.choice([mark, "b"])))


def test_a_fork_goes_its_own_way(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = guides.guide(Demand(Constraint.regex("ab|ac")), prompt_ids=[9], budget=9, stop_ids=[tokenizer.eos_id])
    assert guide is not None
    twin = guide.fork()
    for token in tokenizer.encode("ab", add_special_tokens=False):
        guide.accept(token)
    assert guide.done
    assert not twin.done
    for token in tokenizer.encode("ac", add_special_tokens=False):
        assert twin.allowed()[token]
        twin.accept(token)
    assert twin.done


def test_samples_beams_and_stop_ids_keep_to_the_constraint(untrained: Engine) -> None:
    demand = Demand(CASES["json"][0])
    several = untrained.generate("a", demand=demand, n=3, temperature=1.0, seed=1, max_new_tokens=60)
    beams = untrained.generate("a", demand=Demand(Constraint.regex("[ab]{3,9}")), beams=2, max_new_tokens=12)
    assert all(made.valid for made in [*several, *beams])
    assert len({made.text for made in several}) > 1
    stop = untrained.tokenizer.encode("a", add_special_tokens=False)[-1]
    ended = untrained.generate("a", demand=Demand(Constraint.choice(["bcd"])), stop_ids=(stop,))[0]
    assert ended.text == "bcd"


def test_an_answer_cut_by_a_stop_string_is_not_valid(untrained: Engine) -> None:
    made = untrained.generate("a", demand=Demand(Constraint.choice(["low risk"])), stop=("ris",))[0]
    assert (made.text, made.valid) == ("low ", False)


def test_nothing_asked_is_nothing_judged(untrained: Engine) -> None:
    assert untrained.generate("a", max_new_tokens=2)[0].valid is None


def test_the_prefix_of_a_text_is_no_part_of_the_answer() -> None:
    """A tokenizer that puts a space before each text takes one off again: what is left must match."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["risk low", "risk high 12"] * 20),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=3,
    )
    tokenizer = SentencePieceTokenizer.from_proto(model.getvalue(), lossless=False)
    assert tokenizer.spelling.prefix == b" "
    config = CyberSLMConfig(
        vocab_size=tokenizer.vocab_size, hidden_dim=32, num_layers=1, num_heads=2, ffn_hidden_dim=48
    )
    engine = Engine(CyberSLM(config, seed=5).eval(), tokenizer)
    for prompt in ([tokenizer.bos_id], "risk"):
        for seed in range(5):
            made = engine.generate(
                [prompt], demand=Demand(Constraint.regex("risk (low|high)")), temperature=1.0, seed=seed
            )[0]
            assert made.valid
            assert made.text in ("risk low", "risk high")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.regex(""), "must be text that isn't empty"),
        (lambda: Constraint.regex("a" * (MAX_REGEX_CHARS + 1)), f"at most {MAX_REGEX_CHARS}"),
        (lambda: Constraint.regex("\ud800"), "not valid Unicode"),
        (lambda: Constraint.choice([]), "between 1 and"),
        (lambda: Constraint.choice(["a", ""]), "isn't empty"),
        (lambda: Constraint.choice(map(str, range(30_000))), "30000"),
        (lambda: Constraint.grammar("start: " + '"a" ' * 100_000), "at most"),
    ],
)
def test_what_cannot_be_a_constraint_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.regex("(?=a)b"), "look-around"),
        (Constraint.regex("["), "unclosed character class"),
        (Constraint.regex(r"[^\s\S]"), "the regular expression can't be met"),
        (Constraint.grammar("start: missing"), "the grammar can't be used.*missing"),
        (Constraint.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types"),
        (Constraint.json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
        (Constraint.json_schema({"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
        (Constraint.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "unsatisfiable"),
        (Constraint.json_schema({"$ref": "http://elsewhere/x"}), "http://elsewhere/x"),
        (
            Constraint.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
            "can't be met: no answer that ends",
        ),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_what_cannot_be_met_is_refused_before_the_first_step(
    untrained: Engine, monkeypatch: pytest.MonkeyPatch, constraint: Constraint, message: str
) -> None:
    monkeypatch.setattr(untrained.model, "features", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(GenerationError, match=message):
        untrained.generate("a", demand=Demand(constraint), max_new_tokens=40)


def test_a_budget_that_is_too_small_is_refused_with_both_numbers(untrained: Engine) -> None:
    with pytest.raises(GenerationError, match=r"max_new_tokens 3 .*the shortest answer found has \d+ tokens"):
        untrained.generate("a", demand=Demand(CASES["json"][0]), max_new_tokens=3)


def test_demands_and_prompts_must_be_as_many(untrained: Engine) -> None:
    demands = [Demand(CASES["regex"][0])]
    with pytest.raises(GenerationError, match="2 prompts were given and 1 demands"):
        untrained.generate(["a", "b"], demand=demands)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a{1,1000}){1,1000}", "(.*a){20}.*b{300}", "(x|xx|xxx)*y{200}"])
def test_regular_expressions_that_blow_up_elsewhere_end_in_bounded_work(untrained: Engine, pattern: str) -> None:
    """Either an answer, or an honest refusal or end: what must not happen is work without bound."""
    try:
        made = untrained.generate(
            "a", demand=Demand(Constraint.regex(pattern)), temperature=1.0, seed=1, max_new_tokens=30
        )
    except GenerationError:
        return
    assert made[0].valid is (re.fullmatch(pattern, made[0].text) is not None) or made[0].finish_reason == "blocked"


def test_the_library_is_named_where_it_is_missing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'cyberslm\[constrain\]'"):
        Guides(tokenizer).guide(Demand(Constraint.regex("a")), prompt_ids=[9], budget=3, stop_ids=[tokenizer.eos_id])


def test_masks_are_boolean_and_as_long_as_the_vocabulary(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = guides.guide(Demand(Constraint.regex("a+")), prompt_ids=[9], budget=3, stop_ids=[tokenizer.eos_id])
    assert guide is not None
    mask = guide.allowed()
    assert mask is not None
    assert mask.dtype is torch.bool
    assert mask.shape == (tokenizer.vocab_size,)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex(r"CVE-\d{4}-[\d]{4}"),
        Constraint.json_schema({"properties": {"id": {"type": "string", "pattern": r"^CVE-\d{4}$"}}}),
    ],
)
def test_digits_of_expressions_are_ascii(constraint: Constraint) -> None:
    """A grounded `CVE-\\d{4}` used to make an id with a full-width digit, which no scan takes for an invention."""
    assert r"\d" not in constraint.source
    assert "0-9" in constraint.source


def test_a_backslash_before_d_stays() -> None:
    assert Constraint.regex(r"C:\\data").source == r"C:\\data"
