"""Arguments and options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace the file's.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or a run folder.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Literal["auto", "fp32", "bf16", "int8", "int4"]
Reduced = Literal["bf16", "int8", "int4"]
Fast = Literal["auto", "on", "off"]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text: one object a line.")]


def say(text: str) -> None:
    """A line for people on stderr, which leaves stdout to results."""
    typer.echo(text, err=True)
