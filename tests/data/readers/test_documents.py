from __future__ import annotations

import stat
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from packed import tar_of, zip_of
from reading import documents_and_counts

from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import InputFile, find_inputs
from cyberslm.data.prepare import clean_corpus
from cyberslm.data.sources import read_documents
from cyberslm.errors import DataError


@pytest.mark.parametrize(
    "name", ["a.txt", "a.html", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.mbox", "a.eml", "a.zip", "a.tar"]
)
def test_an_empty_file_of_any_format_is_counted(read, name, compress):
    assert read(name, b"").counts.skipped == {"empty": 1}
    assert read(f"{name}.gz", compress[".gz"](b"")).counts.skipped == {"empty": 1}


def files_of(folder: Path) -> list[InputFile]:
    return find_inputs([str(folder)], key="data.sources").files


def test_files_read_in_worker_processes_give_what_one_process_reads(tmp_path, compress):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo \xff\n\nthree")
    (tmp_path / "b.jsonl.gz").write_bytes(compress[".gz"](b'{"text": "x\\ud800"}\n{}\n'))
    (tmp_path / "c.zip").write_bytes(zip_of({"in/a.txt": b"one", "d.png": b"picture", "x.zip": b"nested"}))
    (tmp_path / "d.html").write_bytes(b"<h1>Heading</h1><p>text")
    config = DataConfig(sources=(str(tmp_path),), txt_unit="paragraph", on_bad_input="skip")
    files = files_of(tmp_path)
    alone = [documents_and_counts(file, config) for file in files]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        shared = list(pool.map(documents_and_counts, files, [config] * len(files)))
    assert shared == alone
    together, merged = Counts(), Counts()
    for file in files:
        list(read_documents(file, config, together))
    for _, counts in shared:
        merged.merge(counts)
    assert merged == together
    assert merged.skipped.total() >= 4


def test_a_file_that_cannot_be_read_is_an_error_or_a_counted_skip(tmp_path, monkeypatch):
    from cyberslm.data import parts as module

    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    hash_file = module.hash_file

    def refuse(file: InputFile) -> str:
        if file.name == "b.txt":
            raise DataError("cannot read b.txt: Permission denied")
        return hash_file(file)

    monkeypatch.setattr(module, "hash_file", refuse)
    refused = clean_corpus(DataConfig(sources=(str(tmp_path),)), tmp_path)
    with pytest.raises(DataError, match="Permission denied"), refused:
        pass
    config = DataConfig(sources=(str(tmp_path),), on_bad_input="skip", validation_fraction=0.0)
    with clean_corpus(config, tmp_path) as corpus:
        counts = corpus.new_counts()
        assert [piece.text for piece in corpus.pieces(counts, "tokens")] == ["text of a.txt", "text of c.txt"]
    assert counts["data.sources[0]"].skipped == {"unreadable": 1}
    assert [facts["sha256"] is None for facts in corpus.file_facts] == [False, True, False]


def test_a_folder_of_every_format_is_read_in_path_order(tmp_path, compress):
    contents = {
        "a.txt": b"1",
        "b.md.gz": compress[".gz"](b"2"),
        "c.html": b"<p>3",
        "d.jsonl": b'{"text": "4"}',
        "e.json.zst": compress[".zst"](b'[{"text": "5"}]'),
        "f.csv": b"text\n6\n",
        "g.tsv": b"id\ttext\n1\t7\n",
        "h.mbox": b"From x\n\n8\n",
        "i.eml": b"\n9\n",
        "j.zip": zip_of({"k.txt": b"10"}),
        "l.tar.xz": compress[".xz"](tar_of({"m.txt": b"11"})),
        "n.log.1": b"12",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    config = DataConfig(sources=(str(tmp_path),))
    texts = [found.text.strip() for file in files_of(tmp_path) for found in read_documents(file, config, Counts())]
    assert texts == [str(number) for number in range(1, 13)]


@pytest.mark.parametrize(("name", "module", "data"), [("a.html", "resiliparse.extract.html2text", b"<p>x")])
def test_a_format_whose_library_is_absent_says_what_to_install(read, monkeypatch, name, module, data):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"pip install 'cyberslm\[data\]'"):
        read(name, data, on_bad_input="skip")


def test_names_of_files_are_printable(tmp_path):
    (tmp_path / "a\x1b[2J\n.txt").write_text("text")
    (file,) = files_of(tmp_path)
    assert file.name == "a\\x1b[2J\\n.txt"
    assert stat.S_ISREG(file.path.stat().st_mode)
