"""Packed, isolated and mixed rows through a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MakeRun

from cyberslm import files
from cyberslm.data.loader import RowLoader
from cyberslm.data.shards import ShardWriter
from cyberslm.data.store import TokenStore
from cyberslm.errors import ConfigError, DataError
from cyberslm.recipes.check import check
from cyberslm.recipes.config import load_run
from cyberslm.recipes.data import ensure_prepared, row_loader
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.shown import shown_row
from cyberslm.recipes.train import run_training
from cyberslm.training.trackers import read_metrics

MODES = {"data.rows": "pack", "data.isolate_documents": True, "data.mixture": {0: 1, 1: 2}}


@pytest.fixture
def two_sources(make_run: MakeRun) -> MakeRun:
    """A run on two sources: the text files, and the JSON lines beside them."""

    def make(changes: dict[str, object] | None = None, *, folder: Path | None = None) -> Path:
        sources = {"data.sources": ["text/*.txt", "text/more.jsonl"], "data.txt_unit": "paragraph"}
        changes = sources | (changes or {})
        return make_run(changes) if folder is None else make_run(changes, folder=folder)

    return make


def test_packed_mixed_run_that_was_interrupted_gives_the_same_bits(two_sources: MakeRun, tmp_path: Path) -> None:
    straight = two_sources(MODES)
    broken = two_sources(MODES, folder=tmp_path / "broken")
    run_training(load_run(straight), quiet=True)
    run_training(load_run(broken), stop_at=7, quiet=True)
    run_training(load_run(broken), quiet=True)
    finals = [files.sha256_file(path.parent / "run" / "final" / "model.safetensors") for path in (straight, broken)]
    assert finals[0] == finals[1]
    with pytest.raises(ConfigError, match=r"data\.rows: 'pack' there, 'concat' now"):
        run_training(load_run(broken, ["data.rows=concat"]), quiet=True)


def test_scores_are_told_by_source_everywhere_and_their_bits_add_up(
    two_sources: MakeRun, capsys: pytest.CaptureFixture
) -> None:
    path = two_sources({"eval.max_rows": 0} | MODES)
    run_training(load_run(path))
    run = path.parent / "run"
    names = ["data.sources[0]", "data.sources[1]"]
    last = [record for record in read_metrics(run / "metrics.jsonl") if record["type"] == "validation"][-1]
    screen = capsys.readouterr().err
    for name in names:
        low, high = sorted(last[f"bits_per_byte/{each}"] for each in names)
        assert low < last["bits_per_byte"] < high
        assert f"{name} {last[f'bits_per_byte/{name}']:.4f}" in screen
    manifest = files.read_manifest(run / "final")
    assert (manifest["rows"], manifest["isolate_documents"]) == ("pack", True)
    for name in names:
        figures = manifest["validation"]["by_source"][name]
        assert f"  {name}: loss {figures['loss']:.4f}, {figures['bits_per_byte']:.4f} bits per byte" in screen
    found = evaluate(run)
    assert sum(part.num_bytes for part in found.score.by_source.values()) == found.score.num_bytes == found.text_bytes
    assert found.score.loss == pytest.approx(manifest["validation"]["loss"], rel=1e-5)


def test_evaluation_makes_rows_as_in_training(two_sources: MakeRun, tmp_path: Path) -> None:
    """A model that never saw across a border was scored with other documents in sight."""
    path = two_sources({"data.isolate_documents": True, "train.max_steps": 5, "eval.max_rows": 0})
    run_training(load_run(path), quiet=True)
    run = path.parent / "run"
    apart = evaluate(run).score
    assert apart.loss == pytest.approx(files.read_manifest(run / "final")["validation"]["loss"], rel=1e-5)


def test_check_marks_documents_and_describes_rows(two_sources: MakeRun) -> None:
    run = load_run(two_sources(MODES | {"data.mixture": {0: 2, 1: 1}, "data.txt_unit": "line"}))
    lines = list(check(run, lambda line: None))
    prepared = ensure_prepared(run.value, lambda line: None)
    loader = row_loader(run.value, prepared, prepared.train)
    rows = [line for line in lines if line.startswith("row ")]
    batch = loader.batch(0)
    assert len(rows) == 2
    for row, line in enumerate(rows):
        assert line.count("||") <= int(batch.docs[row].max())
        assert line.count("||[<bos>]") + line.count(": [<bos>]") == line.count("<bos>")
    text = "\n".join(lines)
    assert f"rows: {loader.usage.rows:,} packed, {loader.usage.padding:.2%} padding; " in text
    assert "documents don't see each other" in text
    assert "mixture: data.sources[0]: " in text
    assert "66.67% of all" in text


class Numbers:
    """Spells each id as its number."""

    control_ids = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return str(token).encode()


@pytest.mark.parametrize(
    ("layout", "isolate", "shown"),
    [
        ("concat", False, "[10]|11|12||13|14||15|16"),
        ("concat", True, "[10]|11|12||[13]|14||[15]|16"),
        ("pack", True, "[10]|11|12||[13]|14||[15]|16"),
        ("pack", False, "[10]|11|12||[13]|14||[15]|16"),
    ],
)
def test_check_shows_each_token_once_and_which_are_not_trained(
    tmp_path: Path, layout: str, isolate: bool, shown: str
) -> None:
    """The last token of an isolated document is a target and no input; it is shown behind its last input."""
    with ShardWriter(tmp_path, "train", vocab_size=40, tokenizer_sha256="00" * 32) as writer:
        for ids in ([10, 11, 12], [13, 14], [15, 16]):
            writer.add(np.array(ids), text_bytes=1)
    store = TokenStore.open(tmp_path, "train", tokenizer_sha256="00" * 32, vocab_size=40)
    loader = RowLoader(store, seq_len=8, batch_rows=1, seed=0, pad_id=0, layout=layout, isolate=isolate)
    assert shown_row(loader, loader.bordered(0), 0, Numbers()) == shown


def test_mixture_is_refused_where_it_does_not_fit(two_sources: MakeRun) -> None:
    for mixture, problem in (
        ({2: 1}, r"data\.mixture.*names source 2; data\.sources has 0 to 1|mixture names source 2"),
        ({"text": 1}, "mixture has the key 'text'"),
        ({0: -1}, "mixture gives source 0 -1"),
        ({0: 0, 1: 0}, "mixture is 0 for every source"),
        ({"01": 1}, "mixture has the key '01'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_run(two_sources({"data.mixture": mixture}))
    run = load_run(two_sources({"data.mixture": {0: 1}}))
    with pytest.raises(DataError, match="nothing of source 1"):
        list(check(run, lambda line: None))


def test_mixture_does_not_touch_shards_or_validation(two_sources: MakeRun) -> None:
    plain, mixed = load_run(two_sources()).value, load_run(two_sources({"data.mixture": {0: 0, 1: 1}})).value
    prepared = [ensure_prepared(run, lambda line: None) for run in (plain, mixed)]
    assert prepared[0].data_sha256 == prepared[1].data_sha256
    rows = [
        torch.cat([batch.targets for batch in row_loader(run, data, data.validation).sequential(4)])
        for run, data in zip((plain, mixed), prepared, strict=True)
    ]
    assert torch.equal(*rows)


def test_eval_prints_each_source(two_sources: MakeRun, capsys: pytest.CaptureFixture) -> None:
    from typer.testing import CliRunner

    from cyberslm.cli.main import app

    path = two_sources({"train.max_steps": 5})
    run_training(load_run(path), quiet=True)
    run = str(path.parent / "run")
    found = json.loads(CliRunner().invoke(app, ["eval", run, "--json"]).stdout)
    assert set(found["by_source"]) == {"data.sources[0]", "data.sources[1]"}
    lines = CliRunner().invoke(app, ["eval", run]).stdout.splitlines()
    for name, figures in found["by_source"].items():
        assert f"{'  of ' + name:24}{figures['bits_per_byte']:13.4f}" in lines
