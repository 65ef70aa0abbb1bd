from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cyberslm
from cyberslm import files
from cyberslm.data import prepare as module
from cyberslm.data import tokenizing
from cyberslm.data.config import DataConfig
from cyberslm.data.prepare import Prepared, clean_corpus, open_prepared, prepare, stale
from cyberslm.data.store import TokenStore
from cyberslm.errors import DataError, IntegrityError, StorageError
from cyberslm.text.tokenizer import SentencePieceTokenizer

SETTINGS = {"vocab_size": 260, "add_bos": True}


def prepare_bytes(target: Path, tokenizer, *sources: str | Path, **options) -> Prepared:
    config = DataConfig(sources=tuple(map(str, sources)), **({"validation_fraction": 0.0} | options))
    return prepare(config, lambda texts: tokenizer, target, tokenizer_settings=SETTINGS)


def texts_of(store: TokenStore | None, tokenizer) -> list[str]:
    if store is None:
        return []
    bounds = [store.document_bounds(index) for index in range(store.num_documents)]
    return [tokenizer.decode(store.slice(*bound).tolist()) for bound in bounds]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def hundred(tmp_path) -> Path:
    return write_jsonl(tmp_path / "hundred.jsonl", [f"document {index}" for index in range(100)])


# What is written


def test_every_document_is_on_one_side_with_bos_and_eos(tmp_path, hundred, byte_tokenizer):
    prepared = prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, validation_fraction=0.1)
    train, validation = (texts_of(store, byte_tokenizer) for store in (prepared.train, prepared.validation))
    assert sorted(train + validation) == sorted(f"document {index}" for index in range(100))
    assert 3 <= len(validation) <= 20
    first = prepared.train.slice(*prepared.train.document_bounds(0)).tolist()
    assert first == [2, *(byte + 4 for byte in train[0].encode()), 3]
    assert prepared.train.text_bytes == len("".join(train))
    assert files.verify(tmp_path / "out") == prepared.manifest


def test_nothing_is_held_out_with_fraction_0(tmp_path, hundred, byte_tokenizer):
    prepared = prepare_bytes(tmp_path / "out", byte_tokenizer, hundred)
    assert prepared.validation is None
    assert prepared.train.num_documents == 100


def test_batches_do_not_change_what_is_written(tmp_path, hundred, byte_tokenizer, monkeypatch):
    whole = prepare_bytes(tmp_path / "whole", byte_tokenizer, hundred, shard_tokens=100)
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 30)
    small = prepare_bytes(tmp_path / "small", byte_tokenizer, hundred, shard_tokens=100)
    monkeypatch.setattr(tokenizing, "BATCH_DOCUMENTS", 1)
    single = prepare_bytes(tmp_path / "single", byte_tokenizer, hundred, shard_tokens=100)
    assert whole.data_sha256 == small.data_sha256 == single.data_sha256
    assert len(whole.train.paths) > 5


def test_the_data_hash_depends_on_text_alone_not_on_folder_time_or_order_on_disk(tmp_path, byte_tokenizer):
    names = ["b.txt", "d\u00e9j\u00e0.txt", "a/c.md"]
    hashes = set()
    for folder, order in (("one", names), ("elsewhere/two", names[::-1])):
        for name in order:
            path = tmp_path / folder / "text" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}")
            os.utime(path, ns=(1, len(hashes) + 5))
        hashes.add(prepare_bytes(tmp_path / folder / "out", byte_tokenizer, tmp_path / folder / "text").data_sha256)
    assert len(hashes) == 1
    (tmp_path / "one/text/b.txt").write_text("other text")
    assert prepare_bytes(tmp_path / "one/out", byte_tokenizer, tmp_path / "one/text").data_sha256 not in hashes


def test_windows_copies_give_the_same_shards(tmp_path, byte_tokenizer, write):
    """Files opened with the platform's line ends gave other tokens for CRLF input."""
    text = "first\nsecond\n\nthird \u00e9\n"
    write("unix/a.txt", text)
    write("dos/a.txt", "\ufeff" + text.replace("\n", "\r\n"))
    hashes = [
        prepare_bytes(tmp_path / f"{kind}-out", byte_tokenizer, tmp_path / kind).data_sha256 for kind in ("unix", "dos")
    ]
    assert hashes[0] == hashes[1]


LOCALE_SCRIPT = """
import sys
from pathlib import Path
from conftest import ByteTokenizer
from cyberslm.data import prepare as module
from cyberslm.data.config import DataConfig
module.load_tokenizer = ByteTokenizer.load
config = DataConfig(sources=(bytes.fromhex(sys.argv[1]).decode(),), validation_fraction=0.3)
prepared = module.prepare(config, lambda texts: ByteTokenizer(), Path(sys.argv[2]), tokenizer_settings={})
names = [line for line in Path(sys.argv[2], "inputs.jsonl").read_text(encoding="utf-8").splitlines()]
print(sys.getfilesystemencoding(), prepared.data_sha256, ascii([line.split(", ")[1] for line in names]))
"""


def test_no_locale_changes_the_shards(tmp_path, write):
    for index, name in enumerate(["\u00e9.txt", "z.txt", "\u96ea/a.jsonl"]):
        text = f"\u00e9\u96ea\U0001f600 {index}"
        write(f"t\u00e9xt/{name}", json.dumps({"text": text}, ensure_ascii=False) if "jsonl" in name else text)
    source = str(tmp_path / "t\u00e9xt").encode().hex()
    path = os.pathsep.join([str(Path(cyberslm.__file__).parents[1]), str(Path(__file__).parent)])
    results = []
    for index, settings in enumerate(
        [
            {"PYTHONUTF8": "1"},
            {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            {"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "77"},
        ]
    ):
        command = [sys.executable, "-c", LOCALE_SCRIPT, source, str(tmp_path / f"out-{index}")]
        env = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": path, **settings}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        results.append(done.stdout.split(maxsplit=1))
    assert results[1][0] in ("ascii", "ansi_x3.4-1968")
    assert len({shards for _, shards in results}) == 1


def test_threads_reach_the_tokenizer(tmp_path, hundred, byte_tokenizer, monkeypatch):
    asked = []
    encode = byte_tokenizer.encode_documents
    monkeypatch.setattr(
        byte_tokenizer,
        "encode_documents",
        lambda texts, *, num_threads: asked.append(num_threads) or encode(texts),
    )
    prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, threads=3)
    prepare_bytes(tmp_path / "out", byte_tokenizer, hundred)
    assert asked == [3, len(os.sched_getaffinity(0))]


def test_the_manifest_counts_each_source_and_lists_each_file(tmp_path, byte_tokenizer, write):
    one = write("one/a.txt", "alpha")
    write("one/b.png", "picture")
    write("one/empty.txt", " ")
    two = write_jsonl(tmp_path / "two.jsonl", ["beta \u00e9", "b\ud800"])
    prepared = prepare_bytes(tmp_path / "out", byte_tokenizer, tmp_path / "one", two)
    sources = prepared.manifest["sources"]
    assert sources["data.sources[0]"] == {
        "documents": 1,
        "validation_documents": 0,
        "bytes": 5,
        "tokens": 7,
        "mended_surrogates": 0,
        "cuts": 0,
        "skipped": {"empty": 1, "extension .png": 1},
        "first_skipped": {"empty": str(tmp_path / "one/empty.txt:1")},
    }
    assert sources["data.sources[1]"]["mended_surrogates"] == 1
    assert sum(source["tokens"] for source in sources.values()) == prepared.train.num_tokens
    assert sum(source["bytes"] for source in sources.values()) == prepared.train.text_bytes
    listed = [json.loads(line) for line in (tmp_path / "out/inputs.jsonl").read_text().splitlines()]
    assert [(entry["source"], entry["path"]) for entry in listed] == [
        ("data.sources[0]", "a.txt"),
        ("data.sources[0]", "empty.txt"),
        ("data.sources[1]", "two.jsonl"),
    ]
    assert listed[0]["sha256"] == files.sha256_file(Path(one))


# Split


def test_copies_never_fall_on_both_sides(tmp_path, byte_tokenizer):
    """Duplicates that ended up in train and validation made validation look far too good."""
    originals = [f"document {index}\nbody" for index in range(70)]
    copies = originals[:28] + [originals[28] + " ", originals[29].replace("\n", "\r\n")]
    source = write_jsonl(tmp_path / "in.jsonl", copies + originals)
    prepared = prepare_bytes(tmp_path / "out", byte_tokenizer, source, validation_fraction=0.1)
    train, validation = (texts_of(store, byte_tokenizer) for store in (prepared.train, prepared.validation))
    assert len(train) + len(validation) == 100
    assert {text.strip() for text in train} & {text.strip() for text in validation} == set()


def test_the_split_does_not_depend_on_order_or_file_names(tmp_path, byte_tokenizer):
    texts = [f"document {index}" for index in range(100)]
    one = write_jsonl(tmp_path / "one.jsonl", texts)
    two = write_jsonl(tmp_path / "other/two.jsonl", texts[::-1])
    sides = [
        texts_of(
            prepare_bytes(tmp_path / "out", byte_tokenizer, source, validation_fraction=0.2).validation, byte_tokenizer
        )
        for source in (one, two)
    ]
    assert sides[0] == sides[1][::-1]


def test_training_copies_of_validation_documents_are_left_out_and_counted(tmp_path, byte_tokenizer):
    sources = write_jsonl(tmp_path / "in.jsonl", ["a", "b ", "c", "b"])
    validation = write_jsonl(tmp_path / "val.jsonl", ["b", "z"])
    prepared = prepare_bytes(
        tmp_path / "out", byte_tokenizer, sources, validation=(str(validation),), validation_fraction=0.5
    )
    assert texts_of(prepared.train, byte_tokenizer) == ["a", "c"]
    assert texts_of(prepared.validation, byte_tokenizer) == ["b", "z"]
    assert prepared.manifest["sources"]["data.sources[0]"]["skipped"] == {"copy in data.validation": 2}


def test_the_tokenizer_is_made_from_training_documents_only_and_may_read_them_twice(tmp_path, hundred, byte_tokenizer):
    passes: list[list[str]] = []

    def tokenizer_for(texts):
        passes.extend([list(texts()), list(texts())])
        return byte_tokenizer

    config = DataConfig(sources=(str(hundred),), validation_fraction=0.2)
    prepared = prepare(config, tokenizer_for, tmp_path / "out", tokenizer_settings={})
    assert passes[0] == passes[1] == texts_of(prepared.train, byte_tokenizer)
    assert len(passes[0]) < 100


def test_training_texts_alone_are_those_that_preparing_trains_on(tmp_path, hundred, byte_tokenizer):
    config = DataConfig(sources=(str(hundred),), validation_fraction=0.2)
    prepared = prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings={})
    with clean_corpus(config, tmp_path) as corpus:
        assert list(corpus.training_texts()) == texts_of(prepared.train, byte_tokenizer)
    assert not list(tmp_path.glob(".*"))


# What is refused


def test_no_sources_is_an_error(tmp_path, byte_tokenizer):
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        prepare_bytes(tmp_path / "out", byte_tokenizer)


def test_a_corpus_without_text_is_its_own_error_with_what_was_skipped(tmp_path, byte_tokenizer, write):
    write("in/a.txt", " \n")
    write("in/b.pdf", "x")
    with pytest.raises(DataError, match=r"hold no text: 1 files read, skipped: 1 empty, 1 extension \.pdf"):
        prepare_bytes(tmp_path / "out", byte_tokenizer, tmp_path / "in")


def test_an_empty_validation_split_is_refused_by_name_before_the_tokenizer_trains(tmp_path, byte_tokenizer, write):
    trained = []

    def tokenizer_for(texts):
        list(texts())
        trained.append(True)
        return byte_tokenizer

    write("a.txt", "one document"), write("b.txt", "and another")
    config = DataConfig(sources=(str(tmp_path),), validation_fraction=0.01)
    with pytest.raises(
        DataError, match=r"validation_fraction 0\.01 holds out none of the 2 documents; .*paragraph.*: 0"
    ):
        prepare(config, tokenizer_for, tmp_path / "out", tokenizer_settings={})
    assert trained == []


def test_a_corpus_of_one_document_is_told_what_to_do(tmp_path, byte_tokenizer, write):
    config = DataConfig(sources=(write("a.txt", "one document"),), validation_fraction=0.05)
    with pytest.raises(DataError, match=r"hold one document .*txt_unit: paragraph, or set data.validation_fraction: 0"):
        prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings={})


def test_runs_and_prepared_data_inside_a_source_are_not_read(tmp_path, byte_tokenizer, write):
    """A run in a folder of the text read its own log and file list as text."""
    for name in ("a.txt", "b.txt", "c.txt"):
        write(name, f"document {name} with some words")
    config = DataConfig(sources=(str(tmp_path),), validation_fraction=0.5)
    first = prepare(config, lambda texts: byte_tokenizer, tmp_path / "runs" / "x" / "data", tokenizer_settings={})
    run = tmp_path / "runs" / "x"
    (run / "checkpoints").mkdir()
    (run / ".lock").write_text("")
    (run / "train.log").write_text("step 1")
    assert stale(first.folder, config, {}) is None
    again = prepare(config, lambda texts: byte_tokenizer, tmp_path / "other", tokenizer_settings={})
    assert again.data_sha256 == first.data_sha256
    assert again.manifest["sources"]["data.sources[0]"]["skipped"] == {"folder that CyberSLM wrote": 1}


def test_a_link_that_loops_is_counted_not_followed(tmp_path, byte_tokenizer, write):
    """A link to itself ended in a traceback."""
    write("a.txt", "one"), write("b.txt", "two")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    config = DataConfig(sources=(str(tmp_path),), validation_fraction=0.0)
    found = prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings={})
    assert sum(found.manifest["sources"]["data.sources[0]"]["skipped"].values()) == 1


def test_empty_validation_sources_are_refused(tmp_path, hundred, byte_tokenizer, write):
    with pytest.raises(DataError, match=r"data\.validation holds no text"):
        prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, validation=(write("v.txt", ""),))


def test_an_empty_training_split_is_refused(tmp_path, hundred, byte_tokenizer):
    with pytest.raises(DataError, match="all 100 documents are held out and none is left"):
        prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, validation=(str(hundred),))


def test_a_split_of_one_token_is_refused_with_the_smallest_size(tmp_path, byte_tokenizer, write, monkeypatch):
    encode = byte_tokenizer.encode_documents
    monkeypatch.setattr(byte_tokenizer, "encode_documents", lambda texts, **_: [ids[:1] for ids in encode(texts)])
    with pytest.raises(DataError, match="train split has 1 tokens; the smallest usable is 2"):
        prepare_bytes(tmp_path / "out", byte_tokenizer, write("a.txt", "x"))


def test_a_failure_leaves_earlier_data_whole_and_no_litter(tmp_path, hundred, byte_tokenizer, write):
    before = prepare_bytes(tmp_path / "run/out", byte_tokenizer, hundred)
    bad = write("bad.jsonl", '{"text": "a"}\n{"text"')
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        prepare_bytes(tmp_path / "run/out", byte_tokenizer, bad)
    assert files.verify(tmp_path / "run/out") == before.manifest
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["out"]


def test_a_full_disk_is_a_storage_error_that_leaves_earlier_data_whole(tmp_path, hundred, byte_tokenizer, monkeypatch):
    before = prepare_bytes(tmp_path / "run/out", byte_tokenizer, hundred)

    class FullDisk(tokenizing.ShardWriter):
        def add(self, ids, **facts):
            if self.num_documents == 50:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().add(ids, **facts)

    monkeypatch.setattr(tokenizing, "ShardWriter", FullDisk)
    with pytest.raises(StorageError, match="No space left on device"):
        prepare_bytes(tmp_path / "run/out", byte_tokenizer, hundred)
    assert files.verify(tmp_path / "run/out") == before.manifest
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] == ["out"]


def test_earlier_data_are_replaced_whole(tmp_path, hundred, byte_tokenizer, write):
    prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, shard_tokens=20)
    prepared = prepare_bytes(tmp_path / "out", byte_tokenizer, write("a.txt", "text"))
    assert [path.name for path in prepared.train.paths] == ["train-00000.tokens"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "inputs.jsonl",
        "manifest.json",
        "tokenizer",
        "train-00000.tokens",
    ]


def test_a_folder_that_holds_other_files_is_never_replaced(tmp_path, byte_tokenizer, write):
    thesis = Path(write("mine/thesis.txt", "years of work"))
    with pytest.raises(StorageError, match=r"data\.prepared: .*mine holds 'thesis\.txt'"):
        prepare_bytes(tmp_path / "mine", byte_tokenizer, thesis)
    assert thesis.read_text() == "years of work"


# Opening


def test_opening_gives_what_preparing_gave(tmp_path, hundred, byte_tokenizer):
    made = prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, validation_fraction=0.1)
    opened = open_prepared(tmp_path / "out")
    assert opened.manifest == made.manifest
    assert opened.train.slice(0, 50).tolist() == made.train.slice(0, 50).tolist()
    assert opened.tokenizer.add_bos is True


@pytest.mark.parametrize(
    "name", ["train-00001.tokens", "train-00003.tokens", "tokenizer/tokenizer.model", "inputs.jsonl"]
)
def test_a_missing_or_cut_part_is_named(tmp_path, hundred, byte_tokenizer, name):
    prepare_bytes(tmp_path / "out", byte_tokenizer, hundred, shard_tokens=400)
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=name):
        open_prepared(tmp_path / "out")
    path.unlink()
    with pytest.raises(IntegrityError, match=f"{name} is missing"):
        open_prepared(tmp_path / "out")


def test_shards_of_another_tokenizer_are_refused(tmp_path, hundred, byte_tokenizer, monkeypatch):
    prepare_bytes(tmp_path / "out", byte_tokenizer, hundred)
    monkeypatch.setattr(byte_tokenizer.__class__, "load", lambda folder: None)

    def other(folder):
        tokenizer = byte_tokenizer.__class__()
        tokenizer.sha256 = "cd" * 32
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", other)
    with pytest.raises(IntegrityError, match="is not the tokenizer of these shards"):
        open_prepared(tmp_path / "out")


@pytest.mark.parametrize("fields", [{}, {"format": "cyberslm-checkpoint/1"}, {"format": module.FORMAT}])
def test_a_published_folder_of_another_kind_is_refused(tmp_path, fields):
    files.publish(tmp_path / "out", lambda staging: (staging / "a").write_text("x") and fields)
    with pytest.raises(IntegrityError, match=r"holds|lacks"):
        open_prepared(tmp_path / "out")


# Reuse


@pytest.fixture
def corpus(tmp_path, byte_tokenizer, write) -> Iterator[tuple[Path, DataConfig]]:
    write("in/a.txt", "alpha")
    write("in/b.txt", "beta")
    config = DataConfig(sources=(str(tmp_path / "in"),), validation_fraction=0.0)
    prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings=SETTINGS)
    return tmp_path / "out", config


def test_unchanged_data_are_reused_without_hashing(corpus, monkeypatch):
    monkeypatch.setattr(module, "hash_file", None)
    assert stale(*corpus, SETTINGS) is None


def test_paths_and_threads_do_not_make_data_stale(tmp_path, corpus):
    shutil.copytree(tmp_path / "in", tmp_path / "moved")
    moved = DataConfig(sources=(str(tmp_path / "moved"),), validation_fraction=0.0, threads=1, prepared="x")
    assert stale(corpus[0], moved, SETTINGS) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"validation_fraction": 0.5}, r"data\.validation_fraction was 0\.0 and is now 0\.5"),
        ({"txt_unit": "line"}, r"data\.txt_unit was 'file' and is now 'line'"),
        ({"text_field": "body"}, r"data\.text_field"),
        ({"on_bad_input": "skip"}, r"data\.on_bad_input"),
        ({"shard_tokens": 5}, r"data\.shard_tokens"),
    ],
)
def test_a_setting_that_shapes_the_tokens_makes_data_stale_by_name(corpus, options, reason):
    folder, config = corpus
    changed = DataConfig(**({"sources": config.sources, "validation_fraction": 0.0} | options))
    assert module.re.search(reason, stale(folder, changed, SETTINGS) or "")


@pytest.mark.parametrize("settings", [{"vocab_size": 300, "add_bos": True}, {"vocab_size": 260}, {}])
def test_other_tokenizer_settings_make_data_stale_by_name(corpus, settings):
    assert "tokenizer." in (stale(*corpus, settings) or "")


def test_a_source_that_changed_came_or_went_makes_data_stale_by_name(tmp_path, corpus):
    a, c = tmp_path / "in/a.txt", tmp_path / "in/c.txt"
    a.touch()
    assert stale(*corpus, SETTINGS) is None
    a.write_text("ALPHA")
    os.utime(a, ns=(1, 1))
    assert "a.txt has changed" in (stale(*corpus, SETTINGS) or "")
    a.write_text("alpha and more")
    assert "a.txt has changed" in (stale(*corpus, SETTINGS) or "")
    a.write_text("alpha")
    c.write_text("new")
    assert "c.txt is new" in (stale(*corpus, SETTINGS) or "")
    c.unlink()
    a.unlink()
    assert "a.txt of data.sources[0] is gone" in (stale(*corpus, SETTINGS) or "")
    shutil.rmtree(tmp_path / "in")
    assert "there is no file or folder" in (stale(*corpus, SETTINGS) or "")


def test_new_validation_sources_make_data_stale(tmp_path, corpus, write):
    folder, config = corpus
    added = DataConfig(sources=config.sources, validation=(write("v.txt", "v"),), validation_fraction=0.0)
    assert stale(folder, added, SETTINGS) is not None


def test_prepared_data_without_sources_are_taken_as_they_are(tmp_path, corpus):
    shutil.rmtree(tmp_path / "in")
    assert stale(corpus[0], DataConfig(), {}) is None


def test_absent_damaged_or_foreign_data_are_stale(tmp_path, corpus):
    folder, config = corpus
    assert "not there" in (stale(tmp_path / "none", config, SETTINGS) or "")
    assert "manifest.json" in (stale(tmp_path / "in", config, SETTINGS) or "")
    inputs = folder / "inputs.jsonl"
    inputs.write_bytes(b"x" * inputs.stat().st_size)
    assert "inputs.jsonl is damaged" in (stale(folder, config, SETTINGS) or "")
    (folder / "train-00000.tokens").unlink()
    assert "train-00000.tokens is missing" in (stale(folder, config, SETTINGS) or "")


# Progress and the real tokenizer


def test_progress_rises_to_the_whole_in_each_stage(tmp_path, byte_tokenizer, write):
    told: list[tuple[str, int, int]] = []
    write("in/a.txt", ("line of text " * 100 + "\n") * 3000)
    write("in/b.txt", "b")

    def tokenizer_for(texts):
        list(texts())
        return byte_tokenizer

    config = DataConfig(sources=(str(tmp_path / "in"),), txt_unit="line", validation_fraction=0.0)
    prepare(config, tokenizer_for, tmp_path / "out", tokenizer_settings={}, progress=lambda *now: told.append(now))
    total = 1301 * 3000 + 1
    for stage in ("read", "tokenizer", "tokens"):
        done = [now[1] for now in told if now[0] == stage]
        assert done == sorted(done)
        totals = {now[2] for now in told if now[0] == stage}
        assert totals == ({total} if stage == "read" else totals)
        assert (done[0], {done[-1]}) == (0, totals)
        assert stage == "read" or len(done) > 3


def test_a_trained_tokenizer_round_trips_the_corpus_through_shards(tmp_path):
    from cyberslm.text.tokenizer import load_tokenizer
    from cyberslm.text.train import TokenizerConfig, train_tokenizer

    sources = Path(os.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(sources.glob("a*.py"))]
    texts += ["\u2581 <eos> \ufdd0", "caf\u00e9 \U0001f600\n\n\n    x"]
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    settings = TokenizerConfig(vocab_size=600)
    config = DataConfig(sources=(str(source),), validation_fraction=0.2, shard_tokens=5000)
    prepared = prepare(
        config, lambda texts: train_tokenizer(texts(), settings).tokenizer, tmp_path / "out", tokenizer_settings={}
    )
    assert isinstance(prepared.tokenizer, SentencePieceTokenizer)
    assert load_tokenizer(tmp_path / "out/tokenizer").sha256 == prepared.tokenizer.sha256
    found = texts_of(prepared.train, prepared.tokenizer) + texts_of(prepared.validation, prepared.tokenizer)
    assert sorted(found) == sorted(texts)
    assert len(prepared.train.paths) > 1


def test_absent_sources_of_data_that_are_there_name_the_way_to_use_them(tmp_path, hundred, byte_tokenizer):
    """Data that were merged elsewhere could be trained on only by who knew that sources may be empty."""
    prepare_bytes(tmp_path / "out", byte_tokenizer, hundred)
    with pytest.raises(DataError, match=r"no file or folder .*absent; or give data\.sources=\[\] to use the data in"):
        prepare_bytes(tmp_path / "out", byte_tokenizer, tmp_path / "absent")
    with pytest.raises(DataError, match=r"absent$"):
        prepare_bytes(tmp_path / "other", byte_tokenizer, tmp_path / "absent")
    with pytest.raises(DataError, match=r"data\.sources=\[\] is right only where data\.prepared names"):
        prepare_bytes(tmp_path / "other", byte_tokenizer)
