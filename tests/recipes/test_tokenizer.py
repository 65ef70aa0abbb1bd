"""The tokenizer section of a run from end to end: trained, given in either format, reported on."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from conftest import MakeRun, write_corpus

import cyberslm
from cyberslm.errors import ConfigError, TokenizerError
from cyberslm.recipes.config import load_run
from cyberslm.recipes.data import ensure_prepared
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.tokenizer import make_tokenizer, tokenizer_settings
from cyberslm.recipes.tokenizer_report import find_tokenizer, report, table
from cyberslm.recipes.train import run_training
from cyberslm.text.config import TokenizerConfig
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.train import train_tokenizer


def silent(_text: str) -> None:
    return None


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json as other projects publish it."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("foreign")
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(topics.values(), vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def test_imported_tokenizer_trains_generates_and_evaluates(make_run: MakeRun, byte_level: Path) -> None:
    path = make_run({"tokenizer": {"path": str(byte_level / "tokenizer.json")}, "train.max_steps": 5})
    run_training(load_run(path), quiet=True)
    engine = cyberslm.load(path.parent / "run")
    assert isinstance(engine.tokenizer, HuggingFaceTokenizer)
    assert engine.model.config.eos_token_id == engine.tokenizer.eos_id == 0
    made = engine.generate(["The class"], max_new_tokens=8)[0]
    assert made.text == engine.tokenizer.decode(made.ids)
    found = evaluate(path.parent / "run", data=None, device="cpu")
    assert all(0 < yardstick.bits_per_byte < 20 for yardstick in found.yardsticks)


def test_prepared_data_are_stale_when_the_names_of_special_tokens_change(
    make_run: MakeRun, byte_level: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for file in byte_level.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    run = load_run(make_run({"tokenizer": {"path": str(folder)}})).value
    said: list[str] = []
    ensure_prepared(run, said.append)
    ensure_prepared(run, said.append)
    assert sum("up to date" in line for line in said) == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "bos_token": None}))
    said.clear()
    ensure_prepared(run, said.append)
    assert not any("up to date" in line for line in said)


def test_lossy_tokenizer_is_taken_only_when_asked_and_with_a_warning(byte_level: Path, tmp_path: Path) -> None:
    data = json.loads((byte_level / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | {"normalizer": {"type": "NFC"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    with pytest.raises(TokenizerError, match="normalised"):
        make_tokenizer(TokenizerConfig(path=str(tmp_path)), lambda: iter(()), silent)
    said: list[str] = []
    make_tokenizer(TokenizerConfig(path=str(tmp_path), lossless=False), lambda: iter(()), said.append)
    assert len(said) == 1
    assert said[0].startswith("warning: tokenizer.path")
    assert "normalised (NFC)" in said[0]


def test_settings_that_a_given_tokenizer_ignores_are_named(byte_level: Path) -> None:
    said: list[str] = []
    config = TokenizerConfig(path=str(byte_level), digits="triple", protected=("CVE-",))
    make_tokenizer(config, lambda: iter(()), said.append)
    assert said == ["warning: tokenizer.path is given, so nothing is trained and digits, protected have no effect"]


def test_absent_tokenizer_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.path: .*absent"):
        tokenizer_settings(TokenizerConfig(path=str(tmp_path / "absent")))


def test_settings_of_training_are_json_and_tell_every_change() -> None:
    base = TokenizerConfig()
    changes = [{"model_type": "unigram"}, {"protected": ("CVE-",)}, {"digits": "free"}, {"control_pieces": ()}]
    known = [json.dumps(tokenizer_settings(TokenizerConfig(**change))) for change in ({}, *changes)]
    assert len(set(known)) == len(known)
    assert json.loads(known[0]) == tokenizer_settings(base) == tokenizer_settings(TokenizerConfig(add_bos=True))


def test_report_finds_the_tokenizer_of_configuration_run_model_file_and_folder(trained: Path) -> None:
    final = trained / "run" / "final"
    known = {find_tokenizer(path).sha256 for path in (trained / "run.yaml", trained / "run", final)}
    known |= {find_tokenizer(final / "tokenizer.model").sha256, find_tokenizer(trained / "run/data/tokenizer").sha256}
    assert len(known) == 1


def test_configuration_without_a_tokenizer_says_how_to_make_one(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="cyberslm tokenizer train"):
        find_tokenizer(make_run())


def test_report_measures_the_runs_sources_or_the_given_texts(trained: Path, byte_level: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "other", documents=4)
    first, second = report(trained / "run.yaml", (), against=[byte_level], sample_bytes=10**6, say=silent)
    assert list(first.sources) == list(second.sources) == [str(trained / "text")]
    assert first.sources[str(trained / "text")].bytes == second.sources[str(trained / "text")].bytes
    given = [str(tmp_path / "other"), str(tmp_path / "other" / "*.jsonl")]
    (only,) = report(trained / "run", given, against=[], sample_bytes=10**6, say=silent)
    assert list(only.sources) == given
    assert only.sources[given[0]].bytes > only.sources[given[1]].bytes


def test_report_samples_within_the_limit_and_says_so(trained: Path) -> None:
    said: list[str] = []
    (found,) = report(trained / "run.yaml", (), against=[], sample_bytes=9_000, say=said.append)
    assert 5_000 < found.sources[str(trained / "text")].bytes <= 9_000
    assert any("evenly spread" in line for line in said)


def test_table_has_a_column_for_each_tokenizer(trained: Path, byte_level: Path) -> None:
    reports = report(trained / "run.yaml", (), against=[byte_level], sample_bytes=10**5, say=silent)
    lines = list(table(reports))
    row = next(line for line in lines if line.startswith("  SHA-256"))
    assert row.split()[1:] == [f"{each.indicators['SHA-256'].tokens:.1f}" for each in reports]
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("texts", [("absent",), ()])
def test_text_that_is_not_there_is_an_error(trained: Path, tmp_path: Path, texts: tuple) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises((ConfigError, ValueError), match=r"absent|no text"):
        report(trained / "run", texts or (str(tmp_path / "empty.txt"),), against=[], sample_bytes=10, say=silent)


def test_unigram_runs_train_too(make_run: MakeRun) -> None:
    path = make_run({"tokenizer": {"model_type": "unigram", "vocab_size": 500}, "train.max_steps": 5})
    run_training(load_run(path), quiet=True)
    kept = cyberslm.load(path.parent / "run").tokenizer
    texts = [(path.parent / "text" / name).read_text() for name in ("assert.txt",)]
    assert kept.decode(kept.encode(texts[0])) == texts[0]
    assert (
        train_tokenizer(texts, TokenizerConfig(model_type="unigram", vocab_size=500, shrink=True)).report.documents == 1
    )
