"""Verbs that work through a file of records with a model: ``score``, ``classify``, ``extract``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from cyberslm.cli.options import AsJson, Device, Model, Quiet
from cyberslm.cli.quick import quick_imports
from cyberslm.errors import ConfigError

if TYPE_CHECKING:
    from cyberslm.data.records import Form, RecordFile
    from cyberslm.recipes.work import Task


class Format(StrEnum):
    text = "text"
    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"


class OnBad(StrEnum):
    error = "error"
    skip = "skip"


class By(StrEnum):
    bits_per_byte = "bits_per_byte"
    bits_per_token = "bits_per_token"
    bits = "bits"
    max_bits = "max_bits"


Input = Annotated[Path, typer.Argument(metavar="INPUT", help="Lines of text, CSV, TSV or JSON lines; - reads stdin.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="The .csv or .jsonl to write.")]
Field = Annotated[str | None, typer.Option("--field", "--text-field", help="Column or key of the text.")]
FormOf = Annotated[Format | None, typer.Option("--format", help="What INPUT is; default: by its name.")]
OnBadInput = Annotated[OnBad, typer.Option(help="A record that can't be read: stop, or skip and count it.")]
Encoding = Annotated[list[str] | None, typer.Option(help="Encoding to try for what is not UTF-8; repeatable.")]
Prefix = Annotated[str, typer.Option(help="Put before the names of the new fields.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing FILE.")]


def score(
    model: Model,
    source: Input,
    out: Out,
    field: Field = None,
    by: Annotated[By, typer.Option(help="The figure that ranks and is compared.")] = By.bits_per_byte,
    top: Annotated[int | None, typer.Option(help="Write only this many, the most unusual first.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Write only records whose figure is above this.")] = None,
    sort: Annotated[bool, typer.Option("--sort", help="Write all, the most unusual first.")] = False,
    baseline: Annotated[Path | None, typer.Option(metavar="FILE", help="Normal records to compare with.")] = None,
    fpr: Annotated[
        float | None, typer.Option(help="Write only what is above all but this share of the baseline's records.")
    ] = None,
    end: Annotated[
        bool, typer.Option("--end/--no-end", help="Count the end of each text as a token, as in training.")
    ] = True,
    surprises: Annotated[int, typer.Option(help="Most surprising tokens to show for each record.")] = 3,
    batch_tokens: Annotated[int, typer.Option(help="Positions of one forward pass.")] = 4096,
    form: FormOf = None,
    on_bad_input: OnBadInput = OnBad.error,
    encoding: Encoding = None,
    prefix: Prefix = "",
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Score the records of a file: how unusual each is for the model.

    Bits per byte and token, the most surprising tokens, and a percentile among normal records. Stopped at any point,
    the same command goes on where it was.
    """
    with quick_imports():
        from cyberslm.recipes.score import ScoreSettings
        from cyberslm.recipes.score import score as work
        from cyberslm.training.trackers import Screen

    settings = ScoreSettings(
        by=by.value,
        top=top,
        threshold=threshold,
        sort=sort,
        baseline=baseline,
        fpr=fpr,
        with_end=end,
        surprises=surprises,
        batch_tokens=batch_tokens,
    )
    task = _task(_source(source, field, form, on_bad_input, encoding), out, prefix, force=force)
    found = work(model, task, settings, screen=Screen(quiet=quiet), device=device)
    _show(found, out, None, as_json=as_json, quiet=quiet)


class Compared(StrEnum):
    prior = "prior"
    sum = "sum"
    mean = "mean"


def classify(
    model: Model,
    labels: Annotated[Path, typer.Option(metavar="FILE", help="Labels and their words: .yaml or .csv.")],
    source: Annotated[
        Path | None, typer.Argument(metavar="INPUT", help="Records to label; - reads stdin, none only calibrates.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The .csv or .jsonl to write.")] = None,
    field: Field = None,
    template: Annotated[str | None, typer.Option(help="Replaces that of --labels; has {text} and {label}.")] = None,
    method: Annotated[Compared, typer.Option(help="What of a label's likelihood is compared.")] = Compared.prior,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Labelled records to fit probabilities on.")
    ] = None,
    label_field: Annotated[str, typer.Option(help="Column or key of the label in --calibrate.")] = "label",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON to write with --calibrate, else to use.")
    ] = None,
    abstain_below: Annotated[float, typer.Option(help="Write abstain for labels of a lower probability.")] = 0.0,
    batch_tokens: Annotated[int, typer.Option(help="Positions of one forward pass.")] = 4096,
    form: FormOf = None,
    on_bad_input: OnBadInput = OnBad.error,
    encoding: Encoding = None,
    prefix: Prefix = "",
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Label the records of a file by likelihood.

    With calibrated probabilities once a small labelled file was given. Stopped at any point, the same command goes on
    where it was.
    """
    if (source is None) != (out is None):
        raise ConfigError("give INPUT and --out together; without both, --calibrate only calibrates")
    if source is None and calibrate is None:
        raise ConfigError("give records to label, INPUT and --out, or labelled ones with --calibrate")
    if calibrate is not None and calibration is not None and calibration.exists() and not force:
        raise ConfigError(f"{calibration} exists: name another --calibration, or replace it with --force")
    with quick_imports():
        from cyberslm.recipes.classify import Classifier, ClassifySettings
        from cyberslm.recipes.classify import classify as work
        from cyberslm.recipes.labels import read_labels
        from cyberslm.training.trackers import Screen

    settings = ClassifySettings(
        labels=read_labels(labels, template=template),
        method=method.value,
        abstain_below=abstain_below,
        batch_tokens=batch_tokens,
    )
    screen = Screen(quiet=quiet)
    task = None
    if source is not None and out is not None:
        task = _task(_source(source, field, form, on_bad_input, encoding), out, prefix, force=force)
    labelled = None if calibrate is None else _source(calibrate, field, None, on_bad_input, encoding)
    classifier = Classifier(model, settings, device=device)
    report = None
    if labelled is not None:
        report = classifier.calibrate(labelled, label_field, screen)
        if calibration is not None:
            report.save(calibration)
    elif calibration is not None:
        classifier.take(calibration)
    found = None if task is None else work(classifier, task, screen=screen)
    _show(found, out, report, as_json=as_json, quiet=quiet)


def extract(
    model: Model,
    source: Input,
    schema: Annotated[Path, typer.Option(metavar="FILE", help="JSON schema of an object; its properties are filled.")],
    out: Out,
    field: Field = None,
    template: Annotated[str | None, typer.Option(help="The prompt; has {text}.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    ground: Annotated[
        bool, typer.Option("--ground/--no-ground", help="Let identifiers only be copied from the record.")
    ] = True,
    allow: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Identifiers that may be written, by line.")
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Records that are answered together.")] = 16,
    form: FormOf = None,
    on_bad_input: OnBadInput = OnBad.error,
    encoding: Encoding = None,
    prefix: Prefix = "",
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Fill the fields of a JSON schema from each record of a file (constrain extra).

    Always valid; identifiers are copied, never made up. Stopped at any point, the same command goes on where it was.
    """
    with quick_imports():
        from cyberslm.recipes.extract import BLOCK_RECORDS, DEFAULT_TEMPLATE, ExtractSettings, read_allowed, read_schema
        from cyberslm.recipes.extract import extract as work
        from cyberslm.training.trackers import Screen

    settings = ExtractSettings(
        schema=read_schema(schema),
        template=DEFAULT_TEMPLATE if template is None else template,
        max_new_tokens=max_new_tokens,
        ground=ground,
        allow=() if allow is None else read_allowed(allow),
        batch_rows=batch_rows,
    )
    task = _task(_source(source, field, form, on_bad_input, encoding), out, prefix, force=force)
    task = replace(task, block_records=BLOCK_RECORDS)
    found = work(model, task, settings, screen=Screen(quiet=quiet), device=device)
    _show(found, out, None, as_json=as_json, quiet=quiet)


class _Found(Protocol):
    def figures(self) -> dict[str, Any]: ...
    def lines(self, out: Path) -> Iterator[str]: ...


class _Report(Protocol):
    def to_json(self) -> dict[str, Any]: ...
    def lines(self) -> Iterator[str]: ...


def _source(
    path: Path, field: str | None, form: Format | None, on_bad_input: OnBad, encoding: list[str] | None
) -> RecordFile:
    from cyberslm.data.records import RecordFile

    named: Form | None = None if form is None else form.value
    return RecordFile(
        path=None if str(path) == "-" else path,
        form=named,
        field=field,
        on_bad_input=on_bad_input.value,
        encodings=tuple(encoding or ()),
        option="--field",
    )


def _task(source: RecordFile, out: Path, prefix: str, *, force: bool) -> Task:
    from cyberslm.recipes.work import Task

    if source.path is not None and out.exists() and out.samefile(source.path):
        raise ConfigError(f"--out {out} is the input: name another file")
    return Task(source=source, out=out, prefix=prefix, replace=force)


def _show(found: _Found | None, out: Path | None, about: _Report | None, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        figures = {} if found is None else found.figures() | {"out": str(out)}
        typer.echo(json.dumps(figures if about is None else figures | {"calibration": about.to_json()}))
    elif not quiet:
        for line in () if about is None else about.lines():
            typer.echo(line)
        for line in () if found is None or out is None else found.lines(out):
            typer.echo(line)
