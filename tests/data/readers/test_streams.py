from __future__ import annotations

import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed import tar_of, zip_of

from cyberslm.data.readers import streams
from cyberslm.data.readers.formats import content_format, named_format, why_not_read
from cyberslm.errors import DataError

KINDS = [".gz", ".bz2", ".xz", ".zst"]
REPEATED = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text_files(text: str) -> dict[str, bytes]:
    """One text in each text format, under a name that says which."""
    record = {"text": text}
    rows = io.StringIO()
    rows.write('n,text\r\n1,"' + text.replace('"', '""') + '"\r\n')
    return {
        "a.txt": text.encode(),
        "b.txt": b"\xff\xfe" + text.encode("utf-16-le"),
        "a.jsonl": json.dumps(record).encode(),
        "a.json": json.dumps([record], indent=1, ensure_ascii=False).encode(),
        "a.csv": rows.getvalue().encode(),
        "a.eml": b"Content-Type: text/plain; charset=utf-8\n\n" + text.encode(),
    }


# No line ends, which mail loses at a text's ends, nor what would make the text empty.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0\ufeff\n"), min_size=1).filter(str.strip)


@given(text=TEXTS, more=TEXTS, kind=st.sampled_from(["", *KINDS]))
@REPEATED
def test_any_text_reads_back_equal_from_each_format_in_each_compression(read, compress, text, more, kind):
    text = f"{text}\n\n{more}"
    for name, data in text_files(text).items():
        packed = compress[kind](data) if kind else data
        found = read(name + kind, packed)
        assert (found.texts, found.counts.skipped) == ([text], {}), name


@given(text=TEXTS, kind=st.sampled_from(["", *KINDS]))
@REPEATED
def test_any_text_reads_back_equal_from_members_of_archives(read, compress, text, kind):
    files = text_files(text)
    tar = tar_of({f"in/{name}": data for name, data in files.items()})
    packed = compress[kind](tar) if kind else tar
    zipped = zip_of({f"in/{name}{kind}": compress[kind](data) if kind else data for name, data in files.items()})
    from_tar, from_zip = read(f"a.tar{kind}", packed), read("a.zip", zipped)
    assert from_tar.texts == from_zip.texts == [text] * len(files)
    assert from_tar.names == [f"a.tar{kind}!in/{name}" for name in files]
    assert from_zip.names == [f"a.zip!in/{name}{kind}" for name in files]


@pytest.mark.parametrize("kind", KINDS)
def test_several_streams_in_a_row_are_one_text(read, compress, kind):
    pack = compress[kind]
    assert read(f"a.txt{kind}", pack(b"one\n") + pack(b"two\n")).texts == ["one\ntwo\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_cut_anywhere_is_an_error_or_a_counted_skip(read, compress, kind):
    data = compress[kind](b"".join(b"line %d of text\n" % (number * 7919) for number in range(400)))
    for size in {11, 13, 20, len(data) // 2, len(data) - 5, len(data) - 1}:
        with pytest.raises(DataError, match=rf"a\.txt{kind}.*(end in the middle|damaged).*on_bad_input: skip"):
            read(f"a.txt{kind}", data[:size])
        found = read(f"a.txt{kind}", data[:size], on_bad_input="skip")
        assert found.texts == []
        assert found.counts.skipped == {"damaged or cut short": 1}


def test_what_was_whole_before_a_cut_is_kept_and_the_place_of_the_cut_told(read, compress):
    data = compress[".gz"](b"".join(b"%d: %d\n" % (number, number * 7919 % 10007) for number in range(60_000)))
    found = read("a.log.gz", data[:-20], txt_unit="line", on_bad_input="skip")
    assert 20_000 < len(found.texts) < 60_000
    assert found.texts[-1].startswith(f"{len(found.texts) - 1}: ")
    assert found.counts.first["damaged or cut short"].endswith(f"a.log.gz:{len(found.texts) + 1}")


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_never_pass_as_text(read, compress, kind):
    text = b"".join(b"line %d\n" % (number * 7919) for number in range(300))
    data = compress[kind](text)
    for at in range(12, len(data) - 12, max(1, len(data) // 40)):
        broken = bytearray(data)
        broken[at] ^= 0x10
        found = read(f"a.txt{kind}", bytes(broken), on_bad_input="skip")
        assert found.texts in ([], [text.decode()])
        assert found.texts or found.counts.skipped.total() == 1


def test_damage_is_told_without_quoting_the_bytes(read, compress):
    with pytest.raises(DataError) as caught:
        read("a.txt.gz", compress[".gz"](b"x") + b"hunter2")
    assert "hu" not in str(caught.value).replace("a.txt.gz", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_stopped_at_the_limit(read, compress, kind, monkeypatch):
    monkeypatch.setattr(streams, "ALWAYS_ALLOWED", 1 << 20)
    data = compress[kind](b"a b\n" * (1 << 20))
    with pytest.raises(DataError, match=r"expands to more than [\d,]+ bytes; .*raise data\.max_expansion"):
        read(f"a.txt{kind}", data, max_expansion=2)
    assert read(f"a.txt{kind}", data, max_expansion=2, on_bad_input="skip").counts.skipped == {"expands too much": 1}
    assert len(read(f"a.txt{kind}", data, max_expansion=1_000_000).texts[0]) == 1 << 22


def test_layers_and_members_share_one_limit(read, compress, monkeypatch):
    monkeypatch.setattr(streams, "ALWAYS_ALLOWED", 1 << 20)
    zipped = zip_of({f"{number}.txt": b"a b\n" * (300_000 // 4) for number in range(5)})
    found = read("a.zip", zipped, max_expansion=1, on_bad_input="skip")
    assert len(found.texts) == 3
    assert found.counts.skipped == {"expands too much": 2}


def test_two_layers_of_compression_are_read_and_three_are_not(read, compress):
    once = compress[".gz"](b"text")
    assert read("a.txt.gz", compress[".xz"](once)).texts == ["text"]
    with pytest.raises(DataError, match="compressed more than 2 times"):
        read("a.txt.gz", compress[".bz2"](compress[".xz"](once)))


@pytest.mark.parametrize("kind", KINDS)
def test_content_corrects_a_lying_extension(read, compress, kind):
    assert read("a.txt", compress[kind](b"packed")).texts == ["packed"]
    assert read(f"a.txt{kind}", b"plain").texts == ["plain"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.TXT", "text"),
        ("a.jsonl.GZ", "jsonl"),
        ("auth.log.12.gz", "text"),
        ("auth.log.1", "text"),
        ("a.tar.zst", "tar"),
        ("a.tgz", "tar"),
        ("a.gz", None),
        (".gz", None),
        ("a", None),
        ("a.12", None),
        ("a.png.gz", None),
    ],
)
def test_the_format_that_a_name_says(name, expected):
    assert named_format(name) == expected


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a.md", None),
        (".a.md", "hidden"),
        ("a.PNG", "extension .png"),
        ("a.png.gz", "extension .png.gz"),
        ("a.gz", "extension .gz"),
        ("Makefile", "no extension"),
    ],
)
def test_why_a_name_is_passed_over(name, why):
    assert why_not_read(name) == why


def test_text_that_begins_like_a_parquet_file_or_an_archive_is_text(read):
    for text in ("PAR1 is a mark", "BZh9 is one too", "PK is a prefix", "ustar"):
        assert content_format(text.encode()) is None
        assert read("a.txt", text).texts == [text]


def test_reading_zst_without_its_library_says_what_to_install(read, compress, monkeypatch):
    data = compress[".zst"](b"text")
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DataError, match=r"needs zstandard: pip install 'cyberslm\[data\]'"):
        read("a.txt.zst", data)
