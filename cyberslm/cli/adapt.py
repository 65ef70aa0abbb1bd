"""Verbs that make a model of another: ``finetune`` trains it on, ``merge`` puts an adapter into it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from cyberslm.cli.options import Config, Overrides, Quiet


def finetune(
    config: Config,
    overrides: Overrides = None,
    stop_at: Annotated[int | None, typer.Option(help="End this call after that step; run again to go on.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a model on: a base and text in, model folder out.

    The base is any model folder, its own weights or adapters beside them are trained, and OUT_DIR/final is a whole
    model. Goes on from the newest checkpoint if there is one.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it saves while there is a run, and must not end the process else
    from cyberslm.training.process import prepare_for_training

    prepare_for_training()
    from cyberslm.recipes.finetune import load_finetune
    from cyberslm.recipes.train import run_training

    outcome = run_training(load_finetune(config, overrides or ()), stop_at=stop_at, quiet=quiet)
    if outcome.signal_number is not None and outcome.final is None:
        raise typer.Exit(128 + outcome.signal_number)


def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model folder that the adapter was trained on.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An adapter folder, ours or PEFT's, or a run.")],
    target: Annotated[Path, typer.Argument(metavar="DEST", help="The model folder to write.")],
) -> None:
    """Put an adapter into its base: one plain model folder, as exact as the two."""
    from cyberslm.recipes.merge import merge_adapter

    typer.echo(f"model: {merge_adapter(base, adapter, target)}")
