"""Conversations in prepared data: records, rendering, masks, cutting, counting, resuming, packing of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cyberslm import files
from cyberslm.data import tokenizing
from cyberslm.data.chat import CUT, LONG, ChatConfig
from cyberslm.data.config import DataConfig
from cyberslm.data.loader import IGNORE, RowLoader
from cyberslm.data.prepare import Prepared, prepare, stale
from cyberslm.errors import ConfigError, DataError
from cyberslm.text.chat import renderer_for
from cyberslm.text.messages import Message
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer

LAYOUT = {"rows": "pack", "isolate_documents": True, "validation_fraction": 0.0}
ASKED = [Message("user", "Say a"), Message("assistant", "a")]


@pytest.fixture(scope="session")
def small_tokenizer() -> SentencePieceTokenizer:
    return train_tokenizer(["some text to say"] * 5, TokenizerConfig(vocab_size=300, shrink=True)).tokenizer


def write_records(folder: Path, *records: object, name: str = "a.jsonl") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def prepared(folder: Path, tokenizer, source: str, form: str = "chat", chat: dict | None = None, **options) -> Prepared:
    config = DataConfig(sources=(source,), format=form, chat=ChatConfig(**chat or {}), **LAYOUT | options)
    return prepare(config, lambda _: tokenizer, folder, tokenizer_settings={})


def ids_and_mask(found: Prepared, document: int) -> tuple[list[int], list[bool]]:
    bounds = found.train.document_bounds(document)
    return found.train.slice(*bounds).tolist(), found.train.trained(*bounds).tolist()


def spoken(found: Prepared, document: int) -> str:
    ids, trained = ids_and_mask(found, document)
    return found.tokenizer.decode([token for token, on in zip(ids, trained, strict=True) if on])


SHAPES = {
    "messages": {"messages": [{"role": "user", "content": "Say a"}, {"role": "assistant", "content": "a"}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say a"}]}, ASKED[1]._asdict()]},
    "conversations": {"conversations": [{"from": "human", "value": "Say a"}, {"from": "gpt", "value": "a"}]},
    "instruction": {"instruction": "Say a", "input": "", "output": "a"},
    "completion": {"prompt": "Say a", "completion": "a"},
    "prompt of messages": {"prompt": [ASKED[0]._asdict()], "completion": [ASKED[1]._asdict()]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_becomes_the_ids_and_mask_of_the_renderer(tmp_path, small_tokenizer, shape):
    found = prepared(tmp_path / "out", small_tokenizer, write_records(tmp_path / "in", SHAPES[shape]))
    rendered = renderer_for(small_tokenizer).render(ASKED)
    assert ids_and_mask(found, 0) == (rendered.ids, rendered.trained)
    assert found.train.masked
    assert found.train.text_bytes == len("Say a") + len("a")


def test_an_input_is_asked_below_its_instruction(tmp_path, small_tokenizer):
    record = {"instruction": "Sum up", "input": "the text", "output": "done"}
    found = prepared(tmp_path / "out", small_tokenizer, write_records(tmp_path / "in", record))
    assert (
        ids_and_mask(found, 0)[0]
        == renderer_for(small_tokenizer)
        .render([Message("user", "Sum up\n\nthe text"), Message("assistant", "done")])
        .ids
    )


BAD = {
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "nothing to learn"),
    "empty answer": ({"prompt": "a", "completion": " "}, "nothing to learn"),
    "other fields": ({"text": "s3cret"}, "not the fields of a conversation"),
    "unknown role": ({"messages": [{"role": "boss", "content": "a"}]}, "known role"),
    "tool calls": ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls"),
    "no list": ({"messages": "a"}, "not a list of messages"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_teaches_nothing_is_refused_by_place_or_counted(tmp_path, small_tokenizer, case):
    record, reason = BAD[case]
    source = write_records(tmp_path / "in", SHAPES["completion"], record)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{reason}") as caught:
        prepared(tmp_path / "out", small_tokenizer, source)
    assert "s3cret" not in str(caught.value)
    found = prepared(tmp_path / "out", small_tokenizer, source, on_bad_input="skip")
    assert found.train.num_documents == 1
    assert found.manifest["sources"]["data.sources[0]"]["skipped"] == {"bad record": 1}


def test_plain_text_is_no_conversation(tmp_path, small_tokenizer):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello there")
    with pytest.raises(DataError, match="a text file, and data.format: chat reads records"):
        prepared(tmp_path / "out", small_tokenizer, str(tmp_path / "in"))


def long_talk(turns: int) -> dict:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": f"word{n}"} for n in range(turns)]}


def test_a_long_conversation_is_cut_after_the_last_answer_that_fits(tmp_path, small_tokenizer):
    source = write_records(tmp_path / "in", long_talk(9), SHAPES["completion"])
    whole = [Message(**each) for each in long_talk(9)["messages"]]
    size = len(renderer_for(small_tokenizer).render(whole[:6]).ids)
    for room, kept in ((size, 6), (size + 1, 6), (size - 1, 4), (1000, 9)):
        found = prepared(tmp_path / f"out{room}", small_tokenizer, source, chat={"max_tokens": room})
        assert ids_and_mask(found, 0)[0] == renderer_for(small_tokenizer).render(whole[:kept]).ids
        skipped = found.manifest["sources"]["data.sources[0]"]["skipped"]
        assert skipped == ({CUT: 1} if kept < 9 else {})


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_what_can_not_be_cut_is_left_out_and_counted_with_its_place(tmp_path, small_tokenizer, too_long):
    source = write_records(tmp_path / "in", {"prompt": "x" * 200, "completion": "a"}, SHAPES["completion"])
    found = prepared(tmp_path / "out", small_tokenizer, source, chat={"max_tokens": 60, "too_long": too_long})
    counts = found.manifest["sources"]["data.sources[0]"]
    assert (counts["skipped"], counts["documents"], counts["bytes"] > 0) == ({LONG: 1}, 1, True)
    assert counts["first_skipped"][LONG] == "a.jsonl:1"
    assert found.train.num_documents == 1


def test_a_long_conversation_is_an_error_where_that_is_asked_for(tmp_path, small_tokenizer):
    source = write_records(tmp_path / "in", SHAPES["completion"], long_talk(30))
    with pytest.raises(DataError, match=r"a\.jsonl:2: a conversation of \d+ tokens.*max_tokens is 50"):
        prepared(tmp_path / "out", small_tokenizer, source, chat={"max_tokens": 50, "too_long": "error"})


def test_only_the_last_answer_is_trained_where_that_is_asked_for(tmp_path, small_tokenizer):
    source = write_records(tmp_path / "in", long_talk(6))
    assert spoken(prepared(tmp_path / "all", small_tokenizer, source), 0) == "word1word3word5"
    assert spoken(prepared(tmp_path / "last", small_tokenizer, source, chat={"learn": "last"}), 0) == "word5"
    cut = {
        "learn": "last",
        "max_tokens": len(
            renderer_for(small_tokenizer).render([Message(**each) for each in long_talk(4)["messages"]]).ids
        ),
    }
    assert spoken(prepared(tmp_path / "cut", small_tokenizer, source, chat=cut), 0) == "word3"


def test_style_and_template_decide_the_ids(tmp_path, small_tokenizer):
    source = write_records(tmp_path / "in", SHAPES["completion"])
    plain = prepared(tmp_path / "plain", small_tokenizer, source, chat={"style": "plain"})
    assert small_tokenizer.decode(ids_and_mask(plain, 0)[0]) == "### User:\nSay a\n\n### Assistant:\na\n\n"
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = prepared(tmp_path / "own", small_tokenizer, source, chat={"template": str(tmp_path / "t.jinja")})
    assert small_tokenizer.decode(ids_and_mask(found, 0)[0]) == "user: Say aassistant: a"
    assert spoken(found, 0) == "a"


def test_a_changed_template_or_setting_makes_data_stale(tmp_path, small_tokenizer):
    source = write_records(tmp_path / "in", SHAPES["completion"])
    template = tmp_path / "t.jinja"
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    template.write_text(text + "{% if add_generation_prompt %}assistant: {% endif %}")
    config = DataConfig(sources=(source,), format="chat", chat=ChatConfig(template=str(template)), **LAYOUT)
    prepare(config, lambda _: small_tokenizer, tmp_path / "out", tokenizer_settings={})
    assert stale(tmp_path / "out", config, {}) is None
    template.write_text(text + "{% if add_generation_prompt %}assistant: {% endif %} ")
    assert "data.chat.template" in (stale(tmp_path / "out", config, {}) or "")
    other = DataConfig(sources=(source,), format="chat", chat=ChatConfig(learn="last"), **LAYOUT)
    assert "data.chat" in (stale(tmp_path / "out", other, {}) or "")


PAIRS = [
    {"prompt": f"Is {n} good?", "chosen": f"yes, {n} is", "rejected": "no" * (1 + n % 3)} for n in range(7)
]  # fmt: skip


def test_a_preference_is_two_documents_with_only_the_answers_trained(tmp_path, small_tokenizer):
    found = prepared(tmp_path / "out", small_tokenizer, write_records(tmp_path / "in", *PAIRS), "preference")
    assert found.train.num_documents == 14
    for number, pair in enumerate(PAIRS):
        assert spoken(found, 2 * number) == pair["chosen"]
        assert spoken(found, 2 * number + 1) == pair["rejected"]
        asked = renderer_for(small_tokenizer).prompt([Message("user", pair["prompt"])])
        for document in (2 * number, 2 * number + 1):
            assert ids_and_mask(found, document)[0][: len(asked)] == asked


def test_the_prompt_of_a_preference_may_be_what_both_sides_share(tmp_path, small_tokenizer):
    shared = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "r"}]
    sides = {name: [*shared, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    found = prepared(tmp_path / "out", small_tokenizer, write_records(tmp_path / "in", sides), "preference")
    assert (spoken(found, 0), spoken(found, 1)) == ("chosen", "rejected")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected without an answer"),
        (
            {"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]},
            "prompt",
        ),
        ({"prompt": "a", "completion": "b"}, "chosen and rejected"),
    ],
)
def test_a_preference_without_a_choice_is_refused(tmp_path, small_tokenizer, record, reason):
    with pytest.raises(DataError, match=reason):
        prepared(tmp_path / "out", small_tokenizer, write_records(tmp_path / "in", record), "preference")


def test_pairs_lie_in_one_row_whole_and_carry_their_numbers(tmp_path, small_tokenizer):
    found = prepared(tmp_path / "out", small_tokenizer, write_records(tmp_path / "in", *PAIRS), "preference")
    store = found.train
    longest = max(
        store.document_bounds(n + 1)[1] - store.document_bounds(n)[0] - 2 for n in range(0, store.num_documents, 2)
    )
    loader = RowLoader(
        store, seq_len=2 * longest + 3, batch_rows=1, seed=0, pad_id=0, layout="pack", isolate=True, pairs=True,
        reference=np.arange(store.num_documents, dtype=np.float64),
    )  # fmt: skip
    seen = []
    for batch in loader.sequential(3):
        assert batch.docs is not None
        assert batch.reference is not None
        for row in range(batch.input_ids.shape[0]):
            count = int(batch.docs[row].max()) + 1
            numbers = batch.reference[row, :count].int().tolist()
            assert numbers[::2] == [number - 1 for number in numbers[1::2]]
            for place, number in enumerate(numbers):
                ids, trained = ids_and_mask(found, number)
                here = batch.docs[row] == place
                assert batch.input_ids[row][here].tolist() == ids[:-1]
                wanted = [token if on else IGNORE for token, on in zip(ids[1:], trained[1:], strict=True)]
                assert batch.targets[row][here].tolist() == wanted
            seen += numbers
    assert sorted(seen) == list(range(14))
    with pytest.raises(DataError, match=f"a row of {longest - 1} tokens"):
        _ = RowLoader(
            store, seq_len=longest - 1, batch_rows=1, seed=0, pad_id=0, layout="pack", isolate=True, pairs=True
        ).usage


def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path, small_tokenizer, monkeypatch):
    """Documents are not pieces here: some have none, and pairs have two."""
    monkeypatch.setattr(tokenizing, "BATCH_DOCUMENTS", 2)
    records = [pair if n % 3 else {**pair, "prompt": "x" * 300} for n, pair in enumerate(PAIRS * 3)]
    records = [{**pair, "prompt": f"{n} {pair['prompt']}"} for n, pair in enumerate(records)]
    source = write_records(tmp_path / "in", *records)
    options = {"chat": {"max_tokens": 100}, "shard_tokens": 60, "validation_fraction": 0.3}
    straight = prepared(tmp_path / "straight", small_tokenizer, source, "preference", **options)
    real = tokenizing.ShardWriter.add
    left = [9]

    def add(self, *args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real(self, *args, **kwargs)

    monkeypatch.setattr(tokenizing.ShardWriter, "add", add)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "killed", small_tokenizer, source, "preference", **options)
    monkeypatch.setattr(tokenizing.ShardWriter, "add", real)
    resumed = prepared(tmp_path / "killed", small_tokenizer, source, "preference", **options)
    assert resumed.data_sha256 == straight.data_sha256
    assert resumed.manifest["sources"] == straight.manifest["sources"]
    assert files.verify(resumed.folder)


def test_redaction_works_on_conversations_and_leaves_their_turns(tmp_path, small_tokenizer):
    from cyberslm.data.redact.config import RedactConfig

    record = {"prompt": "mail bob.smith@corp.acme.com now", "completion": "wrote to bob.smith@corp.acme.com"}
    source = write_records(tmp_path / "in", record)
    found = prepared(tmp_path / "out", small_tokenizer, source, redact=RedactConfig())
    assert "bob.smith" not in small_tokenizer.decode(ids_and_mask(found, 0)[0])
    assert spoken(found, 0).startswith("wrote to ")


def test_copies_of_a_conversation_are_dropped(tmp_path, small_tokenizer):
    from cyberslm.data.clean.config import ExactDuplicatesConfig, StepConfig

    source = write_records(tmp_path / "in", *[SHAPES["completion"]] * 3, SHAPES["instruction"], long_talk(2))
    steps = (StepConfig(exact_duplicates=ExactDuplicatesConfig()),)
    assert prepared(tmp_path / "out", small_tokenizer, source, steps=steps).train.num_documents == 2


def test_a_conversation_that_an_evaluation_file_holds_is_left_out(tmp_path, small_tokenizer):
    """The file need not hold conversations."""
    from cyberslm.data.clean.config import ContaminationConfig, StepConfig

    asked = "which of these many words are the words that a test will ask about some day"
    known = write_records(tmp_path / "eval", {"text": asked})
    source = write_records(tmp_path / "in", {"prompt": asked, "completion": "all"}, SHAPES["completion"])
    steps = (StepConfig(contamination=ContaminationConfig(against=(known,))),)
    found = prepared(tmp_path / "out", small_tokenizer, source, steps=steps)
    assert (found.train.num_documents, spoken(found, 0)) == (1, "a")


def test_a_vocabulary_is_learned_from_what_is_said(tmp_path, small_tokenizer):
    seen: list[str] = []

    def tokenizer_for(texts):
        seen.extend(texts())
        return small_tokenizer

    config = DataConfig(sources=(write_records(tmp_path / "in", SHAPES["messages"]),), format="chat", **LAYOUT)
    prepare(config, tokenizer_for, tmp_path / "out", tokenizer_settings={})
    assert seen == ["Say a", "a"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": "concat"}, "rows: pack"),
        ({"isolate_documents": False}, "isolate_documents: true"),
        ({"text_field": "x"}, "text_field"),
        ({"record_shape": "preference"}, "record_shape"),
        ({"format": "preference", "record_shape": "messages"}, "record_shape"),
        ({"format": "text", "chat": ChatConfig(learn="last")}, "chat has settings"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        DataConfig(**{"format": "chat", **LAYOUT, **options})


def test_a_step_that_changes_texts_is_refused_by_name():
    from cyberslm.data.clean.config import BoilerplateConfig, StepConfig

    with pytest.raises(ConfigError, match="boilerplate changes texts"):
        DataConfig(format="chat", steps=(StepConfig(boilerplate=BoilerplateConfig()),), **LAYOUT)


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"template": "x", "style": "plain"}])
def test_chat_settings_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ChatConfig(**options)
