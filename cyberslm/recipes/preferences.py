"""What a run minimises, and for preferences what its base thinks of each answer.

The base's log-probabilities never change, so they are worked out once, before the first step, and kept beside the
shards in a folder that is bound to base, tokens and precision by their hashes:

    PREPARED-reference/  reference.safetensors  manifest.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from cyberslm import files
from cyberslm.data.loader import Batch, RowLoader
from cyberslm.data.prepare import Prepared
from cyberslm.data.store import TokenStore
from cyberslm.errors import IntegrityError
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import Say, row_loader
from cyberslm.recipes.finetune import FinetuneRun
from cyberslm.recipes.machine import autocast
from cyberslm.training.loss import Loss, count_targets, next_token_loss
from cyberslm.training.preference import answer_log_probs, count_pairs, preference_loss

FILE = "reference.safetensors"
FORMAT = "cyberslm-reference/1"
ROWS = 4


class Objective(NamedTuple):
    """A loss, and what its sum is divided by."""

    loss: Loss
    count: Callable[[Batch], int]


def objective_of(run: TrainRun) -> Objective:
    """What the run minimises, and what validation measures."""
    if isinstance(run, FinetuneRun) and run.objective == "dpo":
        return Objective(partial(preference_loss, config=run.dpo), count_pairs)
    return Objective(partial(next_token_loss, z_loss=run.train.z_loss), count_targets)


def ensure_reference(run: TrainRun, prepared: Prepared, base: Callable[[], CyberSLM], say: Say) -> None:
    """Work out what the ``base`` gives each answer, unless it is kept already; nothing for other runs."""
    if not isinstance(run, FinetuneRun) or run.objective != "dpo" or _kept(run, prepared) is not None:
        return
    folder = reference_folder(run)
    say(f"dpo: the base's log-probabilities of {_documents(prepared):,} answers, kept in {folder}")
    model = base().eval()
    arrays = {"train": _log_probs(run, prepared, prepared.train, model)}
    if prepared.validation is not None:
        arrays["validation"] = _log_probs(run, prepared, prepared.validation, model)

    def fill(staging: Path) -> dict[str, object]:
        save_file(arrays, staging / FILE)
        return _bound_to(run, prepared)

    files.publish(folder, fill, replace=True)


def trained_rows(run: TrainRun, prepared: Prepared) -> RowLoader:
    """The rows that the run trains on, with what its base thinks of them where it learns preferences."""
    return row_loader(run, prepared, prepared.train, reference=reference_for(run, prepared, prepared.train))


def reference_for(run: TrainRun, prepared: Prepared, store: TokenStore) -> npt.NDArray[np.float64] | None:
    """What `ensure_reference` kept for a split, a number for each document."""
    if not isinstance(run, FinetuneRun) or run.objective != "dpo":
        return None
    kept = _kept(run, prepared)
    if kept is None:
        return None
    split = "train" if store is prepared.train else "validation"
    try:
        found = load_file(kept / FILE)[split]
    except (OSError, SafetensorError, KeyError) as error:
        raise IntegrityError(f"{kept / FILE} can't be read: {error}; delete the folder {kept}") from error
    if found.shape != (store.num_documents,) or found.dtype != np.float64:
        raise IntegrityError(f"{kept / FILE} is not of these {store.num_documents} answers; delete the folder {kept}")
    return found


def reference_folder(run: TrainRun) -> Path:
    return run.prepared.with_name(f"{run.prepared.name}-reference")


def _kept(run: FinetuneRun, prepared: Prepared) -> Path | None:
    """The folder of kept log-probabilities, if they are of this base and these tokens, and whole."""
    folder = reference_folder(run)
    if not files.looks_published(folder):
        return None
    try:
        manifest: dict[str, Any] = files.verify(folder)
    except IntegrityError:
        return None
    wanted = _bound_to(run, prepared)
    return folder if all(manifest.get(key) == value for key, value in wanted.items()) else None


def _bound_to(run: FinetuneRun, prepared: Prepared) -> dict[str, object]:
    return {
        "format": FORMAT,
        "base_sha256": run.base_sha256,
        "data_sha256": prepared.data_sha256,
        "precision": run.precision,
    }


@torch.no_grad()
def _log_probs(run: TrainRun, prepared: Prepared, store: TokenStore, model: CyberSLM) -> npt.NDArray[np.float64]:
    """Rows are made as in training; the documents' own numbers tell which answer is which."""
    found = np.full(store.num_documents, np.nan)
    numbers = np.arange(store.num_documents, dtype=np.float64)
    loader = row_loader(run, prepared, store, reference=numbers)
    for batch in (each.to(model.device) for each in loader.sequential(ROWS)):
        if batch.reference is None or batch.docs is None:
            continue
        with autocast(run.precision, model.device)():
            answers = answer_log_probs(model, batch, documents=batch.reference.shape[1])
        there = answers.tokens_BD > 0
        found[batch.reference[there].long().cpu().numpy()] = answers.log_probs_BD[there].double().cpu().numpy()
    if np.isnan(found).any():
        raise IntegrityError("the base gives an answer no log-probability: its weights are damaged or not finite")
    return found


def _documents(prepared: Prepared) -> int:
    return prepared.train.num_documents + (0 if prepared.validation is None else prepared.validation.num_documents)
