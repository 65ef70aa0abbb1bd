"""Conversations as one text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyberslm.errors import DataError, InputError
from cyberslm.text.messages import ROLES, Conversation, Message, checked, last_answer, pack, unpack

contents = st.text() | st.text(alphabet="\ufdd0\ufdd1\ufdd2\ufdd3123+-user\n", max_size=20)
turns = st.lists(st.builds(Message, st.sampled_from(ROLES), contents), max_size=4).map(tuple)


@given(turns.filter(bool), turns, turns)
def test_every_conversation_comes_back(messages, chosen, rejected):
    conversation = Conversation(messages, chosen, rejected)
    assert unpack(pack(conversation)) == conversation


@pytest.mark.parametrize("text", ["", "plain text", "\ufdd1", "\ufdd1user", "\ufdd1boss\ufdd2x", "x\ufdd1user\ufdd2y"])
def test_any_other_text_is_refused(text):
    with pytest.raises(DataError, match="conversation"):
        unpack(text)


def test_the_rejected_answer_is_no_text_to_learn_a_vocabulary_from():
    pair = Conversation((Message("user", "q"),), (Message("assistant", "a"),), (Message("assistant", "b"),))
    assert list(pair.contents) == ["q", "a"]


def test_messages_are_pairs_or_mappings():
    wanted = (Message("user", "a"), Message("assistant", "b"))
    assert checked([("user", "a"), {"role": "assistant", "content": "b"}]) == wanted


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "at least one message"),
        (["hi"], "message 0"),
        ([("user", "a"), ("boss", "b")], "message 1 has the role 'boss'"),
        ([("user", 3)], "int"),
        ([{"role": "user"}], "NoneType"),
    ],
)
def test_a_bad_message_is_named(messages, named):
    with pytest.raises(InputError, match=named):
        checked(messages)


def test_the_last_answer_is_found():
    assert last_answer([Message("user", "a")]) == -1
    assert last_answer([Message("assistant", "a"), Message("assistant", "b"), Message("user", "c")]) == 1
