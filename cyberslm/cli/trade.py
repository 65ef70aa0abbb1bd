"""Verbs that bring models in from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cyberslm.cli.options import say


def import_model(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder or a GGUF file.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The model folder to write.")],
) -> None:
    """Turn another tool's model into a model folder.

    Llama, Mistral, Qwen2, Qwen3, SmolLM2. Nothing in the source is run; what isn't known is refused by name.
    """
    from cyberslm.recipes.trade import import_model as run

    run(source, dest, say)
