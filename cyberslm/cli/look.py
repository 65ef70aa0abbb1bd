"""Verbs that look and change nothing: ``doctor`` at the machine, ``check`` at a run to come, ``plot`` at runs."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cyberslm.cli.options import AsJson, Config, Overrides, say
from cyberslm.errors import ConfigError


def doctor(as_json: AsJson = False) -> None:
    """Show what this machine has and reaches, and what to mend.

    Cores, memory, allocator, GPU, compiler, extras, and measured rates, as training would find them. Asks no network.
    """
    from cyberslm.training.process import prepare_for_training

    prepare_for_training(make=False)
    from cyberslm.recipes.doctor import doctor as examine
    from cyberslm.recipes.doctor import line, problems

    if as_json:
        found = list(examine())
        warnings = {finding.name: finding.fix for finding in problems(found)}
        typer.echo(json.dumps({finding.name: finding.value for finding in found} | {"warnings": warnings}))
        return
    found = []
    for finding in examine():
        found.append(finding)
        typer.echo(line(finding))
    number = len(problems(found))
    typer.echo("nothing to mend" if not number else f"{number} warning{'s' * (number > 1)}, each with what to do")


def check(config: Config, overrides: Overrides = None) -> None:
    """Show what a run would do, without training.

    Settings, sizes, steps and the first batch as text. Data are prepared if they aren't yet.
    """
    from cyberslm.training.process import prepare_for_training

    prepare_for_training()  # as train does, so that what is measured holds for it
    from cyberslm.recipes.check import check as lines
    from cyberslm.recipes.finetune import load_any

    for line in lines(load_any(config, overrides or ()), say):
        typer.echo(line)


class Axis(StrEnum):
    step = "step"
    tokens = "tokens"
    time = "time"


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or metrics.jsonl files.")],
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="The PNG to write.")],
    x: Annotated[Axis, typer.Option(help="What the curves are drawn over.")] = Axis.step,
    label: Annotated[
        list[str] | None, typer.Option(help="Name of a run in the legend, one for each; default: its folder.")
    ] = None,
    bits_per_byte: Annotated[
        bool, typer.Option("--bits-per-byte", help="Validation in bits per byte, which compares other tokenizers.")
    ] = False,
) -> None:
    """Draw the curves of one run or of several as a PNG.

    Loss in training and validation, learning rate and throughput (plots extra).
    """
    from cyberslm.files import write_bytes
    from cyberslm.recipes.plot import chart

    if label and len(label) != len(runs):
        raise ConfigError(f"--label is given {len(label)} times for {len(runs)} runs: give one for each, or none")
    write_bytes(out, chart(runs, labels=label, x=x.value, bits_per_byte=bits_per_byte))
    typer.echo(f"plot: {out}")
