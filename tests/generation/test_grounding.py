from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import GenerationError
from cyberslm.generation.constrain import Constraint
from cyberslm.generation.demand import Demand
from cyberslm.generation.engine import Engine
from cyberslm.generation.grounding import Grounding, Identifier
from cyberslm.generation.guides import Guides
from cyberslm.generation.identifiers import KINDS
from cyberslm.generation.presets import preset
from cyberslm.generation.walk import FORBIDDEN, Forbidden, Vocabulary, Walk
from cyberslm.text.tokenizer import Tokenizer

PROMPT = (
    "Host 10.0.0.12 asked evil.com (2001:db8::1) for https://evil.com/a/b.php?x=1 after CVE-2024-3400; file"
    " d41d8cd98f00b204e9800998ecf8427e, mail bob@corp.example, 10.0.0.1.\nSummary: "
)
# An independent look: patterns as people write them, with borders of their own.
NAIVE = [
    r"CVE-\d{4}-\d{4,}",
    r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)",
    r"\b(?:[0-9a-f]{64}|[0-9a-f]{40}|[0-9a-f]{32})\b",
    r"[\w.+-]+@[\w-]+\.[a-z]{2,}",
    r"https?://[^\s\"'<>]+",
    r"\b(?:[a-z0-9-]+\.)+[a-z]{2,}\b",
    r"(?<![\w:])(?:[0-9a-f]{1,4}:){2,7}:?[0-9a-f]{1,4}(?![\w:])|(?<![\w:])(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
]
TIMES = re.compile(r"(?:[0-9a-f]{1,4}:){2,5}[0-9a-f]{1,4}")


def naive(text: str) -> set[str]:
    found = {m[0].lower().rstrip(".,;:!?)]") for p in NAIVE for m in re.finditer(p, text, re.IGNORECASE | re.ASCII)}
    return {value for value in found if not TIMES.fullmatch(value)}


def spell(
    guides: Guides, tokenizer: Tokenizer, text: str, ground: Grounding, *, prompt: str = PROMPT, budget: int = 99
) -> bool:
    """Whether a text can be made to its end, a byte at a time and as the tokenizer cuts it; both must agree."""
    singles = {
        tokenizer.token_bytes(t): t
        for t in range(tokenizer.vocab_size - 1, -1, -1)
        if len(tokenizer.token_bytes(t)) == 1
    }
    outcomes = set()
    for ids in ([singles[bytes([byte])] for byte in text.encode()], tokenizer.encode(text, add_special_tokens=False)):
        prompt_ids = tokenizer.encode(prompt)
        guide = guides.guide(Demand(ground=ground), prompt_ids=prompt_ids, budget=budget, stop_ids=[tokenizer.eos_id])
        assert guide is not None
        made = True
        for token in ids:
            allowed = guide.allowed()
            assert allowed is not None
            made = made and bool(allowed[token])
            if made:
                guide.accept(token)
        outcomes.add(made and bool(guide.allowed()[tokenizer.eos_id]))
    assert len(outcomes) == 1
    return outcomes.pop()


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer)


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.12 and 10.0.0.1, version 1.2.3, 10.0.0",
        "EVIL.com, evil[.]com and evil(dot)com.",
        "https://evil.com/a/b.php?x=1. hxxps://evil[.]com/a/b.php?x=1",
        "cve-2024-3400-based, CVE- and CVE",
        "D41D8CD98F00B204E9800998ECF8427E",
        "bob@corp.example or bob[@]corp.example",
        "2001:db8::1/64 at 12:30:45",
        "e.g. 3.5 U.S.",
        "allowed.example",
    ],
)
def test_what_the_prompt_or_the_list_holds_can_be_copied(guides: Guides, tokenizer: Tokenizer, text: str) -> None:
    assert spell(guides, tokenizer, text, Grounding(allow=("allowed.example",)))


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.2",
        "10.0.0.123",
        "evil.co",
        "evil.com.net",
        "my-evil.com",
        "evil[.]org",
        "https://evil.com/a/b.php",
        "https://evil.com/a/b.php?x=12",
        "http://evil.com/a/b.php?x=1",
        "CVE-2024-3401",
        "CVE-2024-34001",
        "CVE-2024-",
        "d41d8cd98f00b204e9800998ecf8427f",
        "d41d8cd98f00b204e9800998ecf8427e0",
        "rob@corp.example",
        "bob@corp",
        "2001:db8::12",
        "a::b",
        "report.pdf",
    ],
)
def test_what_nobody_named_cannot_be_made(guides: Guides, tokenizer: Tokenizer, text: str) -> None:
    assert not spell(guides, tokenizer, text, Grounding())


def test_kinds_that_are_not_asked_for_are_free(guides: Guides, tokenizer: Tokenizer) -> None:
    assert spell(guides, tokenizer, "CVE-2099-1 at 8.8.8.8", Grounding(kinds=("url", "hash")))
    assert not spell(guides, tokenizer, "8.8.8.8", Grounding(kinds=("ipv4",)))


def test_an_answer_that_continues_an_identifier_of_the_prompt(guides: Guides, tokenizer: Tokenizer) -> None:
    prompt = "10.0.0.12 is seen. Also 10.0.0.1"
    assert spell(guides, tokenizer, "2 again", Grounding(), prompt=prompt)
    assert spell(guides, tokenizer, " again", Grounding(), prompt=prompt)
    assert not spell(guides, tokenizer, "3 again", Grounding(), prompt=prompt)


def test_control_ids_separate_the_prompt_from_the_answer(guides: Guides, tokenizer: Tokenizer) -> None:
    """ "foo-" of the prompt and "bar.com" of the answer are not "foo-bar.com" where a control id is between them."""
    control = next(t for t in sorted(tokenizer.control_ids) if t not in (tokenizer.eos_id, tokenizer.bos_id))
    ids = [*tokenizer.encode("foo-bar.com foo-"), control]
    ground = Grounding()
    guide = guides.guide(Demand(ground=ground), prompt_ids=ids, budget=50, stop_ids=[tokenizer.eos_id])
    assert guide is not None
    allowed = True
    for token in tokenizer.encode("bar.com", add_special_tokens=False):
        allowed = allowed and bool(guide.allowed()[token])
        guide.accept(token)
    assert not allowed
    assert guides.is_met(Demand(ground=ground), prompt_ids=ids[:-1], ids=[], text="bar.com")
    assert not guides.is_met(Demand(ground=ground), prompt_ids=ids, ids=[], text="bar.com")


def test_an_identifier_that_the_budget_cannot_finish_is_not_begun(guides: Guides, tokenizer: Tokenizer) -> None:
    singles = {
        tokenizer.token_bytes(t): t
        for t in range(tokenizer.vocab_size - 1, -1, -1)
        if len(tokenizer.token_bytes(t)) == 1
    }
    for budget, fits in ((9, True), (8, False)):
        guide = guides.guide(
            Demand(ground=Grounding()),
            prompt_ids=tokenizer.encode("10.0.0.12 "),
            budget=budget,
            stop_ids=[tokenizer.eos_id],
        )
        assert guide is not None
        for byte in b"10.0.0.":
            guide.accept(singles[bytes([byte])])
        assert guide.allowed()[singles[b"1"]] == fits


def test_an_untrained_model_invents_nothing(untrained: Engine) -> None:
    """Half of the answers are made of just the bytes that identifiers are made of."""
    check_inventions(untrained, 5)


@pytest.mark.slow
def test_two_hundred_answers_at_temperature_one_and_a_half_invent_nothing(untrained: Engine) -> None:
    check_inventions(untrained, 100)


def check_inventions(engine: Engine, count: int) -> None:
    known = naive(PROMPT)
    crowd = Constraint.regex(r"[CVEcve0-9a-f.:@/ht ps\[\]()x-]{40,400}")
    for demand in (Demand(ground=Grounding()), Demand(crowd, Grounding())):
        for made in engine.generate(PROMPT, demand=demand, temperature=1.5, n=count, seed=3, max_new_tokens=200):
            assert naive(PROMPT + made.text) <= known
            assert made.valid is (made.finish_reason != "blocked" or demand.constraint is None)
    assert naive("10.0.0.77 x.org") == {"10.0.0.77", "x.org"}


def test_without_grounding_the_same_model_does_invent(untrained: Engine) -> None:
    """Else the tests above could not fail."""
    crowd = Constraint.regex(r"[CVEcve0-9a-f.:@/ht ps\[\]()x-]{40,400}")
    answers = untrained.generate(PROMPT, demand=Demand(crowd), temperature=1.5, n=6, seed=3, max_new_tokens=200)
    assert any(naive(PROMPT + made.text) - naive(PROMPT) for made in answers)


def test_an_answer_of_nothing_but_identifiers_copies_them(untrained: Engine) -> None:
    demand = Demand(Constraint.regex(r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}"), Grounding())
    for made in untrained.generate(PROMPT, demand=demand, temperature=1.0, n=6, seed=1):
        assert made.finish_reason == "blocked" or made.text in ("10.0.0.12", "10.0.0.1")


def test_a_grounded_schema_allows_no_escapes_that_hide_an_identifier(guides: Guides, tokenizer: Tokenizer) -> None:
    for ground, allowed in ((None, True), (Grounding(), False)):
        demand = Demand(Constraint.json_schema({"type": "string"}), ground)
        guide = guides.guide(demand, prompt_ids=tokenizer.encode("a"), budget=90, stop_ids=[tokenizer.eos_id])
        assert guide is not None
        singles = {tokenizer.token_bytes(t): t for t in range(tokenizer.vocab_size - 1, -1, -1)}
        for byte in b'"\\':
            guide.accept(singles[bytes([byte])])
        assert guide.allowed()[singles[b"n"]] == allowed
        assert guide.allowed()[singles[b"\\"]]


def test_a_verdict_is_grounded_and_valid(untrained: Engine) -> None:
    demand = Demand(preset("verdict"), Grounding())
    for made in untrained.generate(PROMPT, demand=demand, temperature=1.0, n=4, seed=1, max_new_tokens=200):
        assert made.valid
        assert naive(PROMPT + " " + made.text) <= naive(PROMPT)


def test_where_constraint_and_grounding_leave_nothing_the_answer_is_blocked(untrained: Engine) -> None:
    demand = Demand(Constraint.choice(["8.8.8.8"]), Grounding())
    made = untrained.generate("a", demand=demand)[0]
    assert (made.finish_reason, made.valid) == ("blocked", False)
    assert not naive(made.text)


def test_invented_identifiers_are_named() -> None:
    found = Grounding(allow=("9.9.9.9",)).invented("see 10.0.0.1", "2 and evil.com, 9.9.9.9")
    assert found == [Identifier("domain", "evil.com"), Identifier("ipv4", "10.0.0.12")]
    assert Grounding().invented("see 10.0.0.1", "2", tail="") == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grounding(kinds=("ip",)), "no kind 'ip'; kinds: cve, ipv4"),
        (lambda: Grounding(kinds=()), "at least one kind"),
        (lambda: Grounding(allow=("evil",)), "'evil' holds no identifier"),
        (lambda: Grounding(allow=("a.bc",) * 100_001), "100001 entries; at most 100000"),
    ],
)
def test_what_cannot_be_grounded_is_refused(make: object, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        make()  # type: ignore[operator]


WORDS = [b"", b"a", b"ab", b"aba", b"b", b"ba", b"bb", b"abab"]


@given(st.text("ab", max_size=6), st.sampled_from(["ab", "ba", "abb"]))
@settings(max_examples=60, deadline=None)
def test_a_walk_equals_each_token_alone(text: str, sequence: str) -> None:
    vocabulary = Vocabulary(WORDS.__getitem__, len(WORDS))
    walk = Walk(Forbidden(sequence.encode()), vocabulary)
    state = walk.read(walk.start, text.encode())
    if state == FORBIDDEN:
        return
    expected = [bool(word) and walk.read(state, word) != FORBIDDEN for word in WORDS]
    assert np.array_equal(walk.reach(state).fine, expected)
    assert all(walk.reach(state).ends[t] == walk.read(state, word) for t, word in enumerate(WORDS) if word)
    slow = [bool(word) and sequence.encode() not in text.encode() + word for word in WORDS]
    assert expected == slow or "a" in sequence[1:]


def test_every_kind_is_grounded_by_default() -> None:
    assert Grounding().kinds == tuple(KINDS)
