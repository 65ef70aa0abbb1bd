"""What `data inspect` shows is what the shards hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeRun

from cyberslm import cli
from cyberslm.data.lengths import Lengths, bins
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import load_run
from cyberslm.recipes.data import ensure_prepared
from cyberslm.recipes.inspect import chart, lines, open_subject, sizes_by_source, summary


@pytest.fixture
def prepared_run(make_run: MakeRun) -> Path:
    path = make_run({"data.steps": [{"length": {"min_characters": 300}}], "data.redact": {}})
    ensure_prepared(load_run(path).value, lambda line: None)
    return path


def test_counts_are_those_of_the_documents(prepared_run: Path) -> None:
    subject = open_subject(prepared_run)
    told = summary(subject)
    store = subject.prepared.train
    sizes = [stop - start for start, stop in map(store.document_bounds, range(store.num_documents))]
    found = told["lengths"]["train"]["data.sources[0]"]
    assert (found["documents"], found["tokens"]) == (len(sizes), sum(sizes)) == (store.num_documents, store.num_tokens)
    assert (found["shortest"], found["longest"]) == (min(sizes), max(sizes))
    assert json.loads(json.dumps(told)) == told
    assert told["report"]["steps"][0]["step"] == "length"
    assert sum(size.size for size in sizes_by_source(store).values()) == len(sizes)


def test_lines_name_the_longest_and_shortest_with_their_places(prepared_run: Path) -> None:
    subject = open_subject(prepared_run)
    shown = list(lines(subject, samples=2, seed=1, colour=False))
    store = subject.prepared.train
    sizes = [stop - start for start, stop in map(store.document_bounds, range(store.num_documents))]
    for wanted in (max(sizes), min(sizes)):
        place = store.origin(store.document_bounds(sizes.index(wanted))[0])
        assert any(f"{wanted:,} tokens" in line and f"{place.file}:{place.line}" in line for line in shown)
    assert sum(line.startswith("row ") for line in shown) == 2
    assert any("% used (concat)" in line for line in shown)
    assert any("first skipped in data.sources[0]" in line and "length" in line for line in shown)
    coloured = list(lines(subject, samples=1, seed=1, colour=True))[-1]
    assert "\x1b[32m" in coloured
    assert "\x1b" not in "".join(shown)


def test_a_run_folder_shows_data_without_rows(prepared_run: Path) -> None:
    folder = load_run(prepared_run).value.folder
    for path in (folder, folder / "data"):
        assert not any(
            line.startswith(("row ", "rows")) for line in lines(open_subject(path), samples=3, seed=0, colour=False)
        )


def test_data_that_are_not_prepared_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    for path in (make_run(), tmp_path):
        with pytest.raises(ConfigError, match="has no prepared data: make them with"):
            open_subject(path)


def test_data_that_no_longer_fit_are_shown_with_a_warning(prepared_run: Path, tmp_path: Path) -> None:
    shown = list(lines(open_subject(prepared_run), samples=0, seed=0, colour=False))
    assert not any(line.startswith("warning") for line in shown)
    (tmp_path / "text" / "new.txt").write_text("more")
    shown = list(lines(open_subject(prepared_run), samples=0, seed=0, colour=False))
    assert shown[0].startswith("warning: these data no longer fit the configuration: ")
    assert "new.txt is new" in shown[0]


def test_a_model_folder_holds_no_prepared_data(trained: Path) -> None:
    with pytest.raises(ConfigError, match="has no prepared data: make them with"):
        open_subject(trained / "run" / "final")


def test_command_prints_json_and_draws(prepared_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["cyberslm", "data", "inspect", str(prepared_run), "--json", "--plot", f"{tmp_path}/x.png"]
    )
    with pytest.raises(SystemExit) as left:
        cli.run()
    assert not left.value.code
    assert json.loads(capsys.readouterr().out)["data_sha256"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert chart(open_subject(prepared_run)).startswith(b"\x89PNG")


def test_lengths_and_bins_of_a_known_list() -> None:
    sizes = np.array([1, 2, 3, 4, 100])
    assert Lengths.of(sizes) == (5, 110, 1, 3, 22.0, 100, 100)
    assert bins(sizes) == [(1, 2, 1), (2, 4, 2), (4, 8, 1), (8, 16, 0), (16, 32, 0), (32, 64, 0), (64, 128, 1)]
