from __future__ import annotations

import pytest

from cyberslm.generation.closing import Words
from cyberslm.generation.constrain import Constraint
from cyberslm.generation.demand import Demand
from cyberslm.generation.engine import Engine
from cyberslm.generation.grounding import Grounding
from cyberslm.generation.guides import Guides
from cyberslm.text.tokenizer import Tokenizer

FREE = Constraint.json_schema({"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]})
DEEP = Constraint.grammar('start: item\nitem: "(" item* ")"\n')


@pytest.mark.parametrize("constraint", [FREE, DEEP], ids=["free text", "nesting"])
@pytest.mark.parametrize("budget", [16, 45, 130])
def test_answers_that_would_go_on_for_ever_end_in_time(untrained: Engine, constraint: Constraint, budget: int) -> None:
    """An untrained model nearly never closes a string or more brackets than it opens."""
    for made in untrained.generate("a", demand=Demand(constraint), temperature=1.0, n=4, seed=1, max_new_tokens=budget):
        assert made.valid
        assert len(made.ids) <= budget


def test_a_large_budget_narrows_nothing_at_first(tokenizer: Tokenizer) -> None:
    wide, narrow = (
        Guides(tokenizer).guide(Demand(FREE), prompt_ids=[9], budget=budget, stop_ids=[tokenizer.eos_id])
        for budget in (500, 14)
    )
    assert wide is not None
    assert narrow is not None
    for token in tokenizer.encode('{"note":"', add_special_tokens=False):
        wide.accept(token)
        narrow.accept(token)
    assert wide.allowed().sum() > narrow.allowed().sum() > 0
    quote = tokenizer.encode('"', add_special_tokens=False)[-1]
    assert narrow.allowed()[quote]


def test_an_ending_does_not_break_grounding(untrained: Engine) -> None:
    demand = Demand(FREE, Grounding())
    for made in untrained.generate("10.0.0.1", demand=demand, temperature=1.0, n=4, seed=2, max_new_tokens=40):
        assert made.valid


def test_where_no_ending_is_found_the_answer_says_that_it_is_not_whole(untrained: Engine) -> None:
    """Greedy search and a search of 48 steps both miss an ending behind a long count of one letter in free text."""
    constraint = Constraint.regex(r"([^\n]*k){70}!")
    made = untrained.generate("a", demand=Demand(constraint), temperature=1.0, seed=1, max_new_tokens=60)[0]
    assert (made.finish_reason, made.valid) == ("length", False)


def test_bytes_are_spelled_by_the_longest_tokens() -> None:
    words = Words([b"", b"a", b"ab", b"b", b"ab"], eos_id=0)
    assert words.spell(b"abba") == [2, 3, 1]
    assert words.spell(b"abc") is None
    assert words.spell_singly(b"ab") == [1, 3]
