"""Score a model on held-out text and set the yardsticks beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cyberslm import files
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import Prepared
from cyberslm.errors import ConfigError
from cyberslm.evaluation.mcq import Result, ask, read_questions
from cyberslm.evaluation.yardsticks import Yardstick, yardsticks
from cyberslm.generation.engine import Engine
from cyberslm.recipes.data import bytes_per_id, open_verified
from cyberslm.recipes.finetune import kept_run
from cyberslm.recipes.replay import naming
from cyberslm.recipes.use import find_model
from cyberslm.recipes.use import load as load_engine
from cyberslm.training.loss import Score, measure

ROWS = 8


@dataclass(frozen=True)
class Evaluation:
    model: Path
    data: Path
    score: Score
    documents: int
    text_bytes: int
    yardsticks: list[Yardstick]


def evaluate(path: Path, *, data: Path | None = None, device: str = "auto") -> Evaluation:
    """Bits per byte of the model on the validation split of prepared data (default: those of its run), in fp32.

    Rows are cut as in its training, and there are all of them, whatever ``eval.max_rows`` the run had.
    """
    folder = find_model(path)
    engine: Engine = load_engine(folder, device=device)
    prepared = open_verified(data or _data_of(folder))
    theirs, ours = prepared.tokenizer, engine.tokenizer
    if (ours.sha256, ours.add_bos) != (theirs.sha256, theirs.add_bos):
        raise ConfigError(
            f"{prepared.folder} was made with another tokenizer than {folder}: prepare the text with the model's"
        )
    if prepared.manifest["settings"].get("format") == "preference":
        raise ConfigError(
            f"{prepared.folder} holds preferences, and eval measures one text: name other data with --data"
        )
    if prepared.validation is None:
        raise ConfigError(
            f"{prepared.folder} has no validation split: prepare data with data.validation_fraction above 0"
        )
    tokenizer = prepared.tokenizer
    manifest = files.read_manifest(folder)
    by_source = manifest.get("rows_by_source") is True
    loader = RowLoader(
        prepared.validation,
        seq_len=_row_length(manifest, engine.model.max_seq_len),
        batch_rows=ROWS,
        seed=0,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        layout="pack" if manifest.get("rows") == "pack" else "concat",
        isolate=manifest.get("isolate_documents") is True,
        by_source=by_source,
    )
    name = _naming(folder, prepared, by_source=by_source)
    score = measure(engine.model, loader.sequential(ROWS), bytes_per_id(tokenizer), name=name)
    return Evaluation(
        folder,
        prepared.folder,
        score,
        prepared.validation.num_documents,
        prepared.validation.text_bytes,
        yardsticks(prepared.train, loader, tokenizer),
    )


def ask_questions(path: Path, file: Path, *, device: str = "auto") -> Result:
    """The model's answers to the multiple-choice questions of a file, in fp32."""
    questions = read_questions(file)
    engine: Engine = load_engine(find_model(path), device=device)
    return ask(engine.model, engine.tokenizer, questions)


def _row_length(manifest: dict, context: int) -> int:
    """That of the rows it was trained on."""
    found = manifest.get("seq_len")
    return found if isinstance(found, int) and 1 <= found <= context else context


def _naming(model: Path, prepared: Prepared, *, by_source: bool) -> Callable[[int], str]:
    """What the sources of the data are called: as in the run that the model lies in, where the data are its own."""
    for folder in (model.parent, model.parent.parent):
        if by_source and (folder / "config.yaml").is_file():
            run = kept_run(folder / "config.yaml")
            if run.prepared.resolve() == prepared.folder.resolve():
                return naming(run, prepared)
    return prepared.validation_source


def _data_of(model: Path) -> Path:
    """The prepared data of the run that a model folder lies in."""
    for folder in (model.parent, model.parent.parent):
        if files.looks_published(folder / "data"):
            return folder / "data"
        if (folder / "config.yaml").is_file():
            return kept_run(folder / "config.yaml").prepared
    raise ConfigError(f"{model} does not lie in a run folder: name prepared data with --data")
