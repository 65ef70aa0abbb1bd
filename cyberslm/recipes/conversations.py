"""Conversations in a run: what the model's folder says of its format, and a first look at what is trained.

The format that a model was trained in goes into its folder as ``chat_template.jinja``, with the ids that end an answer,
so that ``chat``, a server, transformers and llama.cpp ask it as it was taught.
"""

from __future__ import annotations

from collections.abc import Iterator

from cyberslm.checkpoint.folder import Extras
from cyberslm.data.chat import renderer_of
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import Prepared
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.shown import LEGEND, shown_row
from cyberslm.text.tokenizer import Tokenizer

PREVIEWED = 2
PREVIEW_TOKENS = 120


def extras_of(run: TrainRun, tokenizer: Tokenizer, before: Extras) -> Extras:
    """What the run's model folders say of chats: as it is trained, else as it was ``before``."""
    if run.data.format == "text":
        return before
    renderer = renderer_of(run.data.chat, tokenizer)
    return Extras(renderer.template, tuple(sorted(renderer.stop_ids - {tokenizer.eos_id})))


def preview(run: TrainRun, prepared: Prepared, loader: RowLoader) -> Iterator[str]:
    """The beginning of the first rows, what is not trained in brackets."""
    if run.data.format == "text":
        return
    renderer = renderer_of(run.data.chat, prepared.tokenizer)
    yield f"chat: {renderer.name} format, {run.data.chat.learn} answers trained; first rows ({LEGEND}):"
    batch = loader.bordered(0)
    for row in range(min(PREVIEWED, batch.input_ids.shape[0])):
        yield f"  {shown_row(loader, batch, row, prepared.tokenizer, limit=PREVIEW_TOKENS)}"
