"""The ``cyberslm`` command: verbs, and what people see of errors.

Each verb imports what it runs when it runs, so that help needs no torch. Expected failures are one ``error: ...`` line
with the fix on stderr; ``--debug`` shows the traceback. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration,
130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cyberslm.cli import adapt, look, talk, trade, use, work
from cyberslm.cli.options import AsJson, Config, Device, Model, Overrides, Quiet, say
from cyberslm.errors import ConfigError, CyberSLMError

app = typer.Typer(
    help="Build a small language model from your own text: offline, exact, traceable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Work on training data.", no_args_is_help=True, rich_markup_mode=None)
tokenizer_app = typer.Typer(help="Work on tokenizers.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"cyberslm {version('cyberslm')}")
        raise typer.Exit


OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|_ALLOC_FAILED", re.IGNORECASE)


@app.callback()
def options(
    debug: Annotated[  # noqa: ARG001 (run looks for it)
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001 (its callback does it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every verb."""


@app.command(no_args_is_help=True)
def init(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A folder or file of your own text.")],
    out: Annotated[Path, typer.Option(help="The YAML file to write.")] = Path("cyberslm.yaml"),
    scale: Annotated[
        str | None, typer.Option(help="Size of the run: parameters, such as 33M, or a time, such as 2h.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented YAML for your own text.

    Its sizes suit how much text there is, or are those of --scale.
    """
    from cyberslm.files import write_text
    from cyberslm.recipes.starter import starter
    from cyberslm.recipes.told import next_command

    if out.exists() and not force:
        raise ConfigError(f"{out} exists: name another file with --out, or replace it with --force")
    write_text(out, starter(text, out=out, scale=scale))
    typer.echo(f"wrote {out}\n{next_command('check', out)}")


app.command()(look.doctor)
app.command(no_args_is_help=True)(look.check)
app.command(no_args_is_help=True)(look.plot)
app.command("import", no_args_is_help=True)(trade.import_model)
app.command("export", no_args_is_help=True)(trade.export_model)
app.command(no_args_is_help=True)(work.score)
app.command(no_args_is_help=True)(work.classify)
app.command(no_args_is_help=True)(work.extract)
app.command(no_args_is_help=True)(adapt.finetune)
app.command(no_args_is_help=True)(adapt.merge)


@app.command(no_args_is_help=True)
def train(
    config: Config,
    overrides: Overrides = None,
    stop_at: Annotated[int | None, typer.Option(help="End this call after that step; run again to go on.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a model: text in, model folder out.

    Prepares the data if needed, goes on from the newest checkpoint if there is one, and writes OUT_DIR/final.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it saves while there is a run, and must not end the process else
    from cyberslm.training.process import prepare_for_training

    prepare_for_training()
    from cyberslm.recipes.config import load_run
    from cyberslm.recipes.train import run_training

    outcome = run_training(load_run(config, overrides or ()), stop_at=stop_at, quiet=quiet)
    if outcome.signal_number is not None and outcome.final is None:
        raise typer.Exit(128 + outcome.signal_number)


app.command(no_args_is_help=True)(use.generate)
app.command(no_args_is_help=True)(use.quantize)


@app.command("eval", no_args_is_help=True)
def evaluate(
    model: Model,
    data: Annotated[Path | None, typer.Option(help="Prepared data to score on; default: the run's own.")] = None,
    mcq: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Multiple-choice questions to answer instead.")
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:
    """Score a model on held-out text, in fp32.

    Bits per byte, beside those of a unigram model and of compressors on the same bytes; or multiple choice.
    """
    if mcq is not None:
        talk.answer_questions(model, mcq, data=data, as_json=as_json, device=device)
        return
    from cyberslm.recipes.evaluate import evaluate as score

    found = score(model, data=data, device=device)
    rows = [(yardstick.name, yardstick.bits_per_byte) for yardstick in found.yardsticks]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "model": str(found.model),
                    "data": str(found.data),
                    "documents": found.documents,
                    "bytes": found.text_bytes,
                    "loss": found.score.loss,
                    "perplexity": found.score.perplexity,
                    "bits_per_byte": found.score.bits_per_byte,
                    "by_source": {name: part.figures() for name, part in found.score.by_source.items()},
                    "yardsticks": dict(rows),
                }
            )
        )
        return
    typer.echo(f"held-out text: {found.documents:,} documents, {found.text_bytes:,} bytes")
    typer.echo(f"{'':24}bits per byte")
    for name, bits in (*sorted(rows, key=lambda row: -row[1]), ("this model", found.score.bits_per_byte)):
        typer.echo(f"{name:24}{bits:13.4f}")
    for name, part in found.score.by_source.items():
        typer.echo(f"{'  of ' + name:24}{part.bits_per_byte:13.4f}")
    typer.echo(f"loss {found.score.loss:.4f} nats per token, perplexity {found.score.perplexity:,.2f}")


app.command(no_args_is_help=True)(talk.chat)


@data_app.command("prepare", no_args_is_help=True)
def data_prepare(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be kept, dropped, redacted.")
    ] = False,
    part: Annotated[str, typer.Option("--slice", metavar="I/N", help="Read and redact slice I of N alone.")] = "",
    merge: Annotated[bool, typer.Option("--merge", help="Make shards of the slices instead of the sources.")] = False,
) -> None:
    """Read, redact, clean, split and tokenize the sources.

    Nothing is done when the token shards are up to date.
    """
    from cyberslm.errors import ConfigError
    from cyberslm.recipes import data
    from cyberslm.recipes.finetune import load_any

    if sum((dry_run, merge, bool(part))) > 1:
        raise ConfigError("give one of --dry-run, --slice and --merge")
    run = load_any(config, overrides or ()).value
    if dry_run:
        for line in data.dry_run(run, say):
            typer.echo(line)
        return
    if part:
        number, _, count = part.partition("/")
        if not (number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
            raise ConfigError(f"--slice is {part!r}: write it as I/N, such as 1/4")
        typer.echo(f"slice: {data.write_slice(run, int(number), int(count), say)}")
        return
    prepared = data.merge_slices(run, say) if merge else data.ensure_prepared(run, say)
    for line in data.describe(prepared):
        typer.echo(line)
    typer.echo(f"prepared: {prepared.folder}")


@data_app.command("inspect", no_args_is_help=True)
def data_inspect(
    subject: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_FOLDER", help="A configuration, run or prepared folder.")
    ],
    samples: Annotated[int, typer.Option(min=0, max=1000, help="Random rows to show, for a configuration.")] = 3,
    seed: Annotated[int, typer.Option(help="Which rows these are.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a histogram of document lengths.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what prepared data hold and what was left out.

    Counts by source with reasons, lengths, the longest and shortest documents, and random rows with token borders.
    """
    from cyberslm.files import write_bytes
    from cyberslm.recipes import inspect

    opened = inspect.open_subject(subject)
    if plot is not None:
        write_bytes(plot, inspect.chart(opened))
    if as_json:
        typer.echo(json.dumps(inspect.summary(opened)))
        return
    for line in inspect.lines(opened, samples=samples, seed=seed, colour=sys.stdout.isatty()):
        typer.echo(line)
    if plot is not None:
        typer.echo(f"plot: {plot}")


@tokenizer_app.command("train", no_args_is_help=True)
def tokenizer_train(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default OUT_DIR/tokenizer.")] = None,
) -> None:
    """Train a tokenizer alone.

    It learns from the training split and is written to a folder that tokenizer.path can name.
    """
    from cyberslm.recipes.config import load_run
    from cyberslm.recipes.data import write_tokenizer

    folder = write_tokenizer(load_run(config, overrides or ()).value, out, say)
    typer.echo(f"tokenizer: {folder}\nuse it with:  tokenizer.path={folder}")


@tokenizer_app.command("report", no_args_is_help=True)
def tokenizer_report(
    subject: Annotated[
        Path,
        typer.Argument(metavar="CONFIG_OR_MODEL", help="A configuration, a model or run folder, or a tokenizer."),
    ],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Files, folders or globs; default: the run's sources.")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another tokenizer or model to compare with; repeat for several.")
    ] = None,
    sample_bytes: Annotated[int, typer.Option(help="Most bytes of each TEXT to measure on.")] = 4_000_000,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the comparison (plots extra).")] = None,
) -> None:
    """Show what a tokenizer costs.

    Bytes per token and tokens per word of each TEXT, tokens per indicator, texts that don't come back, idle pieces.
    """
    from cyberslm.recipes.tokenizer_report import report, table

    reports = report(subject, texts or (), against=against or (), sample_bytes=sample_bytes, say=say)
    if plot is not None:
        from cyberslm.files import write_bytes
        from cyberslm.text.plots import report_chart

        write_bytes(plot, report_chart(reports))
        say(f"chart: {plot}")
    for line in [json.dumps(each.to_json()) for each in reports] if as_json else table(reports):
        typer.echo(line)


def run() -> None:
    """Run the command line and leave with its exit code."""
    if sys.stdout is None:  # closed by the caller: what would be printed goes nowhere
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for the life of the process)
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has Ctrl-C ignored
        signal.signal(signal.SIGINT, _stop)
    try:
        app()
    except _Stopped as stopped:
        typer.echo(f"stopped by {signal.Signals(stopped.number).name}", err=True)
        sys.exit(128 + stopped.number)
    except CyberSLMError as error:
        if "--debug" in sys.argv:
            raise
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # Nobody reads any more: stop quietly, and keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        _fail("out of memory: lower train.micro_batch_size, train.global_batch_size or model.max_seq_len", 1)


def _fail(message: str, code: int) -> NoReturn:
    """One line with the error, from one of the processes that torchrun started, and this process's end."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone:
        from cyberslm.training.distributed import first_to_tell

        alone = first_to_tell()
    if alone:
        typer.echo(f"error: {message}", err=True)
    sys.exit(code)


class _Stopped(SystemExit):
    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _stop(number: int, _frame: object) -> None:
    """End as an exception does, so that nothing half-written is left."""
    raise _Stopped(number)
