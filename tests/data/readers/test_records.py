from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyberslm.errors import ConfigError, DataError

REPEATED = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"))
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1).filter(str.strip)

# Shapes

SHAPES = {
    "text": ({"text": "a", "prompt": "x", "completion": "y"}, "a"),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, "q\n\na"),
    "white space at the border": ({"prompt": "q:", "completion": " a"}, "q: a"),
    "instruction": ({"instruction": "do", "input": "with", "output": "done"}, "do\n\nwith\n\ndone"),
    "instruction without input": ({"instruction": "do", "input": "", "output": "done"}, "do\n\ndone"),
    "messages": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        "user: q\n\nassistant: a",
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "user: q\n\nassistant: a",
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        "user: a\nb",
    ),
    "preference": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "q\n\ngood"),
    "preference of messages": (
        {"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "rejected": []},
        "user: q\n\nassistant: a",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_becomes_one_readable_text(read, shape):
    record, text = SHAPES[shape]
    assert read("a.jsonl", json.dumps(record)).texts == [text]


def test_the_shape_is_told_for_each_record_and_can_be_fixed(read):
    records = [{"text": "t", "prompt": "p", "completion": "c"}, {"instruction": "i", "output": "o"}]
    content = "\n".join(map(json.dumps, records))
    assert read("a.jsonl", content).texts == ["t", "i\n\no"]
    found = read("a.jsonl", content, record_shape="prompt_completion", on_bad_input="skip")
    assert (found.texts, found.counts.skipped) == (["p\n\nc"], {"bad record": 1})


@pytest.mark.parametrize(("field", "text"), [("body.text", "deep"), ("body.list.1.t", "listed"), ("text", "top")])
def test_text_field_is_a_dotted_path(read, field, text):
    record = {"text": "top", "body": {"text": "deep", "list": [{}, {"t": "listed"}]}}
    assert read("a.jsonl", json.dumps(record), text_field=field).texts == [text]


@pytest.mark.parametrize("field", ["body.none", "body.list.7", "body.text.x", "list"])
def test_a_path_that_leads_nowhere_is_told_with_the_fields_there_are(read, field):
    with pytest.raises(DataError, match=rf"a\.jsonl:1: no field '{field}' \(data\.text_field\); the record has 'body'"):
        read("a.jsonl", '{"body": {"text": "s3cret", "list": []}}', text_field=field)


BAD = [
    {"messages": "x"},
    {"messages": ["x"]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"prompt": 1, "completion": "x"},
    {"instruction": "x", "output": None},
    {"chosen": {}},
    {"title": "s3cret"},
    {},
    [],
    "s3cret",
]


@pytest.mark.parametrize("record", BAD, ids=str)
def test_a_record_without_text_is_an_error_that_quotes_nothing_or_a_counted_skip(read, record):
    content = json.dumps(record)
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*on_bad_input: skip") as caught:
        read("a.jsonl", content)
    assert "s3cret" not in str(caught.value)
    assert read("a.jsonl", content, on_bad_input="skip").counts.skipped == {"bad record": 1}


def test_parts_of_messages_that_are_not_text_are_counted(read):
    messages = [
        {"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
    ]
    found = read("a.jsonl", json.dumps({"messages": messages}))
    assert found.texts == ["user: what?"]
    assert found.counts.skipped == {"part of a message that is not text": 2}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"text_field": "a..b"}, "text_field"),
        ({"text_field": "a", "record_shape": "messages"}, "record_shape"),
        ({"encodings": ("utf-16",)}, "encodings"),
        ({"encodings": ("no-such",)}, "encodings"),
        ({"mail_headers": ("a b",)}, "mail_headers"),
        ({"max_document_bytes": 10}, "max_document_bytes"),
        ({"max_expansion": 0}, "max_expansion"),
    ],
)
def test_settings_that_cannot_be_honoured_name_their_key(read, options, key):
    with pytest.raises(ConfigError, match=key):
        read("a.txt", "x", **options)


# JSON


@given(records=st.lists(TEXTS, max_size=6), indent=st.sampled_from([None, 1]), comma=st.sampled_from([",", " ,\r\n "]))
@REPEATED
def test_arrays_and_records_in_a_row_give_the_same_texts(read, records, indent, comma):
    made = [json.dumps({"text": text}, indent=indent) for text in records]
    assert read("a.json", "[" + comma.join(made) + "]").texts == records
    assert read("a.json", "\n".join(made)).texts == records


def test_records_of_an_array_tell_their_line(read):
    found = read("a.json", '[\n {"text":\n "a"},\n\n {"text": "b"}]\n{"text": "c"}')
    assert list(zip(found.texts, found.lines, strict=True)) == [("a", 2), ("b", 5), ("c", 6)]


def test_records_over_read_borders_are_whole(read):
    texts = [f"{number} " + "x" * (number * 37 % 5000) for number in range(600)] + ["y" * 900_000, "end"]
    assert read("a.json", json.dumps([{"text": text} for text in texts])).texts == texts


BROKEN = {
    "cut in a string": ('[{"text": "a"},\n{"text": "s3cr', 2),
    "cut after a comma": ('[{"text": "a"},\n', 2),
    "cut in the array": ('[{"text": "a"}\n', 2),
    "a comma too many": ('[{"text": "a"},\n]', 2),
    "no comma": ('[{"text": "a"}\n{"text": "s3cr"}]', 2),
    "junk behind": ('[{"text": "a"}]\ns3cr', 2),
    "deep": ('{"text": "a"}\n' + "[" * 3 + '{"a":' * 100_000, 2),
    "a huge number": ('{"text": "a"}\n{"n": ' + "9" * 10_000 + "}", 2),
    "bad bytes": (b'{"text": "a"}\n{"text": "\xff"}', 2),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_json_that_breaks_off_is_told_with_its_line_and_what_came_before_is_kept(read, kind):
    content, line = BROKEN[kind]
    with pytest.raises(DataError, match=rf"a\.json:{line}: ") as caught:
        read("a.json", content)
    assert "s3cr" not in str(caught.value)
    found = read("a.json", content, on_bad_input="skip")
    assert found.texts == ["a"]
    assert sum(found.counts.skipped.values()) == 1


@pytest.mark.parametrize(("name", "content"), [("a.json", '[{"text": "%s"}]'), ("a.jsonl", '{"text": "%s"}\n')])
def test_a_record_beyond_the_limit_is_bad_input(read, name, content):
    with pytest.raises(DataError, match=r"of more than 1,024 bytes, data\.max_document_bytes"):
        read(name, content % ("x" * 600_000), max_document_bytes=1024)


def test_a_json_line_beyond_the_limit_costs_itself_alone(read):
    content = '{"text": "a"}\n{"text": "%s"}\n{"text": "b"}\n' % ("x" * 600_000)  # noqa: UP031
    found = read("a.jsonl", content, max_document_bytes=1024, on_bad_input="skip")
    assert (found.texts, found.lines, found.counts.skipped) == (["a", "b"], [1, 3], {"bad record": 1})


# Tables


@given(rows=st.lists(st.tuples(CELLS.filter(str.strip), CELLS), max_size=6))
@REPEATED
def test_any_cells_survive_csv_and_tsv(read, rows):
    for name, delimiter in (("a.csv", ","), ("a.csv", ";"), ("a.csv", "|"), ("a.tsv", "\t")):
        made = io.StringIO()
        csv.writer(made, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("text", "n"), *rows])
        assert read(name, made.getvalue().encode()).texts == [text for text, _ in rows]


def test_rows_tell_the_line_where_they_begin(read):
    found = read("a.csv", 'id,text\r\n1,"a\r\nb"\r\n\r\n2,c\r\n')
    assert list(zip(found.texts, found.lines, strict=True)) == [("a\nb", 2), ("c", 5)]
    assert found.counts.skipped == {"blank line": 1}


@pytest.mark.parametrize("row", [b"1", b"1,2,3", b'1,"x"y', b"1,caf\xe9", b"1,n\0l"])
def test_a_bad_row_costs_itself_alone(read, row):
    content = b"id,text\n" + b"".join(b"%d,filler\n" % number for number in range(1200)) + row + b"\n3,after\n"
    with pytest.raises(DataError, match=r"a\.csv:1202: "):
        read("a.csv", content)
    found = read("a.csv", content, on_bad_input="skip")
    assert (len(found.texts), found.texts[-1], found.counts.skipped) == (1201, "after", {"bad record": 1})


def test_a_quote_that_is_never_closed_ends_the_reading_at_the_limit(read):
    content = 'n,text\n1,a\n2,"' + "b,c\n" * 1000
    found = read("a.csv", content, max_document_bytes=1024, on_bad_input="skip")
    assert (found.texts, found.counts.skipped) == (["a"], {"longer than data.max_document_bytes": 1})


@pytest.mark.parametrize("header", ["text,text", ",", '"'])
def test_a_table_without_a_usable_header_is_told(read, header):
    with pytest.raises(DataError, match=r"a\.csv:1: the first line is no header"):
        read("a.csv", header + "\na,b\n")


def test_long_cells_are_read_and_the_limit_of_the_module_stays_as_it_was(read):
    before = csv.field_size_limit()
    assert read("a.csv", f'text,n\n"{"x" * 300_000}",1\n').texts == ["x" * 300_000]
    assert csv.field_size_limit() == before


def parquet_bytes(columns: dict[str, list[object]], **options: object) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    made = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), made, **options)
    return made.getvalue()


@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
@REPEATED
def test_any_text_survives_parquet_alone_or_packed(read, compress, texts):
    data = parquet_bytes({"id": list(range(len(texts))), "text": texts}, row_group_size=3)
    for name, packed in (("a.parquet", data), ("lying.txt", data), ("a.parquet.zst", compress[".zst"](data))):
        found = read(name, packed)
        assert (found.texts, found.lines) == (texts, list(range(1, len(texts) + 1)))


def test_parquet_rows_have_shapes_and_null_is_empty(read):
    messages = [[{"role": "user", "content": "q"}], None]
    found = read("a.parquet", parquet_bytes({"conversations": messages}), on_bad_input="skip")
    assert found.texts == ["user: q"]
    found = read("a.parquet", parquet_bytes({"text": ["a", None, "c"]}))
    assert (found.texts, found.lines, found.counts.skipped) == (["a", "c"], [1, 3], {"empty": 1})


def test_parquet_that_is_cut_damaged_or_without_text_is_told(read):
    data = parquet_bytes({"text": [str(number**9) for number in range(99)]}, compression="zstd", use_dictionary=False)
    broken = bytearray(data)
    broken[5:60] = bytes(55)
    for content in (data[:-9], bytes(broken)):
        with pytest.raises(DataError, match=r"a\.parquet:1: damaged Parquet"):
            read("a.parquet", content)
    with pytest.raises(DataError, match=r"no column that holds text; it has 'title'; name one in data\.text_field"):
        read("a.parquet", parquet_bytes({"title": ["a"]}))
    assert read("a.parquet", parquet_bytes({"title": ["a"]}), text_field="title").texts == ["a"]


def test_a_packed_parquet_file_beyond_the_limit_is_bad_input(read, compress):
    data = parquet_bytes({"text": [str(number) * 9 for number in range(999)]})
    with pytest.raises(DataError, match="a Parquet file in another file of more than 1,024 bytes"):
        read("a.parquet.gz", compress[".gz"](data), max_document_bytes=1024)
