"""Conversations with a model: what it is asked, what is kept, when history is cut."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cyberslm.cli.main import app
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.errors import GenerationError
from cyberslm.generation.chat import Chat
from cyberslm.recipes.use import load, open_chat
from cyberslm.text.chat import renderer_for
from cyberslm.text.messages import Message

SHORT = SamplingParams(max_new_tokens=4)


@pytest.fixture
def talk(trained) -> Chat:
    return open_chat(trained / "run")[0]


def test_an_answer_continues_the_rendered_conversation_and_is_kept(talk):
    first = "".join(event.text for event in talk.reply("Hi", SHORT))
    alone = talk.engine.generate(
        [talk.renderer.prompt([Message("user", "Hi")])], SHORT, stop_ids=tuple(talk.renderer.stop_ids)
    )[0]
    assert first == alone.text
    second = "".join(event.text for event in talk.reply("So?", SHORT))
    assert talk.messages == [
        Message("user", "Hi"), Message("assistant", first), Message("user", "So?"), Message("assistant", second),
    ]  # fmt: skip


def test_a_system_message_comes_first(trained):
    talk, _ = open_chat(trained / "run", system="S")
    list(talk.reply("Hi", SHORT))
    assert talk.messages[0] == Message("system", "S")


def test_the_oldest_exchanges_are_left_out_when_the_context_is_full(talk):
    for number in range(6):
        list(talk.reply(f"q{number}", SHORT))
        assert talk.left_out % 2 == 0
    assert talk.left_out > 0
    assert len(talk.messages) == 12


def test_a_message_that_does_not_fit_is_refused_and_forgotten(talk):
    list(talk.reply("Hi", SHORT))
    before = list(talk.messages)
    with pytest.raises(GenerationError, match="shorten"):
        talk.reply("word " * 100, SHORT)
    with pytest.raises(GenerationError, match="no room for a message"):
        talk.reply("a", SamplingParams(max_new_tokens=32))
    assert talk.messages == before


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_an_answer_that_is_given_up_is_kept_as_far_as_it_came(talk, taken):
    """Dropped before its first token, or while someone still held it, it left no trace of the message either."""
    events = talk.reply("Hi", SHORT)
    said = "".join(next(events).text for _ in range(taken))
    expected = [Message("user", "Hi"), Message("assistant", said)]
    assert (talk.messages, talk.finish_reason) == (expected, "cancelled")
    events.close()
    assert (talk.messages, talk.finish_reason) == (expected, "cancelled")
    list(talk.reply("So?", SHORT))
    assert talk.messages[:3] == [*expected, Message("user", "So?")]
    assert talk.finish_reason == "length"


def test_a_reply_ends_the_answer_before_it(talk):
    """An answer that was held and dropped later put the messages back to what they were before the next one."""
    first = talk.reply("Hi", SHORT)
    next(first)
    list(talk.reply("So?", SHORT))
    after = list(talk.messages)
    assert list(first) == []
    del first
    assert talk.messages == after
    assert len(after) == 4


def test_a_stop_id_ends_the_answer_and_leaves_no_text(trained, monkeypatch):
    """Whatever the model makes first ends the answer, once it is one of the format's stop ids."""
    engine = load(trained / "run")
    renderer = renderer_for(engine.tokenizer)
    made = engine.generate([renderer.prompt([Message("user", "Hi")])], SHORT)[0].ids[0]
    monkeypatch.setattr(type(renderer), "stop_ids", frozenset({made}))
    events = list(Chat(engine, renderer).reply("Hi", SHORT))
    assert [(event.text, event.finish_reason) for event in events] == [("", "stop")]


def test_without_a_template_one_is_told_that_the_model_was_not_trained_to_answer(trained):
    _, doubt = open_chat(trained / "run")
    assert doubt is not None
    assert "no chat template" in doubt


def invoke(trained, *args: str, text: str | None = None):
    return CliRunner().invoke(
        app, ["chat", str(trained / "run"), "--temperature", "0", "--max-new-tokens", "4", *args], input=text
    )


def test_chat_answers_messages_and_says_when_history_is_cut(trained):
    shown = invoke(trained, *[arg for n in range(5) for arg in ("--message", f"q{n}")])
    assert shown.exit_code == 0, shown.output
    assert "warning:" in shown.stderr
    assert "the context is full: the 2 oldest messages are left out" in shown.stderr
    assert shown.stdout.count("\n") >= 5


def test_chat_reads_lines_from_a_pipe_and_begins_anew(trained):
    import json

    once = invoke(trained, "--json", text="Hi\n")
    twice = invoke(trained, "--json", text="Hi\n\n/new\nHi\n")
    records = [json.loads(line) for line in twice.stdout.splitlines()]
    assert records == [json.loads(once.stdout)] * 2
    assert records[0]["message"] == "Hi"


def test_chat_refuses_what_does_not_fit(trained):
    shown = invoke(trained, "--message", "word " * 100)
    assert isinstance(shown.exception, GenerationError)
