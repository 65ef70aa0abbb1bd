"""Verbs that use a finished model, ``generate``, or make it smaller for that, ``quantize``."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cyberslm.cli import constraints
from cyberslm.cli.options import AsJson, Device, Fast, Model, Precision, Reduced, say
from cyberslm.cli.quick import quick_imports
from cyberslm.errors import GenerationError

if TYPE_CHECKING:
    from cyberslm.generation.engine import Completion

TEMPERATURE = 0.8


class Context(StrEnum):
    error = "error"
    truncate_left = "truncate-left"
    slide = "slide"


def generate(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; repeat for several; - reads stdin.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file whose whole text is the prompt.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most new tokens; default 256 or what fits.")] = None,
    min_new_tokens: Annotated[int, typer.Option(help="Tokens before which nothing stops an answer.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(
            help=f"0 is greedy; higher is more varied; default {TEMPERATURE}, with --beams 0.", show_default=False
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that reach this probability.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Draw from tokens at least this share as likely as the first.")] = 0.0,
    typical_p: Annotated[
        float, typer.Option(help="Draw from the tokens of most typical surprise that reach this probability.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: make tokens of prompt and answer less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logit of each token that the answer holds.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time that the answer holds it.")] = 0.0,
    no_repeat_ngram: Annotated[
        int, typer.Option(help="No sequence of so many tokens twice in prompt and answer; 0 = any.")
    ] = 0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; repeat for several.")
    ] = None,
    banned_ids: Annotated[list[int] | None, typer.Option(metavar="ID", help="A token never made; repeatable.")] = None,
    forced_ids: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="A token that the answer begins with; repeatable, in order.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends an answer, left out of it; repeatable.")
    ] = None,
    stop_ids: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="A token that ends an answer; repeatable.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, with so many alternatives, and entropy.")
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers to each prompt.")] = 1,
    beams: Annotated[int, typer.Option(help="Width of a search for the most likely answers; 1 = none.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="With --beams: higher prefers longer answers.")] = 1.0,
    context: Annotated[
        Context,
        typer.Option(
            help="Where prompt and answer exceed the context: error, drop the prompt's beginning, or slide along it."
        ),
    ] = Context.error,
    sinks: Annotated[int, typer.Option(help="With --context slide: first tokens that stay.")] = 4,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Show text as it is made; default on a terminal.")
    ] = None,
    json_schema: constraints.JsonSchema = None,
    regex: constraints.Regex = None,
    choice: constraints.Choice = None,
    grammar: constraints.Grammar = None,
    preset: constraints.PresetName = None,
    preset_ids: constraints.PresetIds = None,
    preset_optional: constraints.PresetOptional = False,
    ground: constraints.Ground = False,
    ground_kinds: constraints.GroundKinds = None,
    allow: constraints.Allow = None,
    as_json: AsJson = False,
    device: Device = "auto",
    precision: Annotated[Precision, typer.Option(help="Bits of the weights; auto = as they are kept.")] = "auto",
    fast: Annotated[Fast, typer.Option(help="The compiled step: auto, on (wait for it) or off.")] = "auto",
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Same text in fewer passes where it repeats its prompt or itself.")
    ] = False,
    draft: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="A smaller model that drafts: same text in fewer passes.")
    ] = None,
) -> None:
    """Continue a prompt.

    Prompt and continuation are printed as one text. An answer whose form is bound (--json-schema, --regex, --choice,
    --grammar, --preset) is printed alone; --json gives one object per answer.
    """
    given = dict(locals())
    prompts = _prompts(prompt, prompt_file)
    several = len(prompts) > 1 or n > 1
    if stream and (as_json or several):
        raise GenerationError(
            "--stream shows one prompt's text as it is made: leave it out with --json, several prompts or --n"
        )
    if logprobs is not None and not as_json:
        raise GenerationError("--logprobs are part of --json: give both, or neither")
    with quick_imports():
        from cyberslm.decoding.sampling import SamplingParams
        from cyberslm.recipes.use import load

    given["temperature"] = temperature if temperature is not None else TEMPERATURE if beams == 1 else 0.0
    given["context"], given["logit_bias"] = context.value, dict(map(_bias, logit_bias or ()))
    for name in ("stop", "stop_ids", "banned_ids", "forced_ids"):
        given[name] = given[name] or ()
    params = SamplingParams(**{name: given[name] for name in SamplingParams.__dataclass_fields__})
    form = constraints.FormOptions(**{name: given[name] for name in constraints.FormOptions._fields})
    demands = form.demands(prompts)
    engine = load(model, device=device, precision=precision, fast=fast, lookup=lookup, draft=draft)
    if (sys.stdout.isatty() if stream is None else stream) and not several and not as_json:
        events = engine.stream(prompts, params, demand=demands)
        _write("" if demands[0].constraint is not None else prompts[0])
        for event in events:
            _write(event.text)
            if event.finish_reason is not None:
                _notes(event.truncated, event.finish_reason)
        _write("\n")
        return
    bound = demands[0].constraint is not None
    for made in engine.generate(prompts, params, demand=demands):
        text = made.text if bound else made.prompt + made.text
        _write((json.dumps(_record(made), ensure_ascii=False) if as_json else text) + "\n")
        _notes(made.truncated, made.finish_reason)
        if made.valid is False:
            say(f"note: the answer is not whole: it ended ({made.finish_reason}) before it met what was asked of it")


def quantize(
    model: Model,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The new model folder.")],
    precision: Annotated[Reduced, typer.Option(help="bf16, int8 or int4.")] = "int8",
) -> None:
    """Write a model folder in fewer bits: smaller and faster to use, no longer to be trained or exported."""
    from cyberslm.recipes.told import next_command
    from cyberslm.recipes.use import quantize as write

    write(model, dest, precision=precision, say=say)
    say(next_command("generate", dest, "--prompt 'TEXT'"))


def _record(made: Completion) -> dict[str, object]:
    record: dict[str, object] = {
        "prompt": made.prompt,
        "text": made.text,
        "finish_reason": made.finish_reason,
        "ids": made.ids,
        "sample": made.sample,
        "truncated": made.truncated,
    }
    if made.valid is not None:
        record["valid"] = made.valid
    if made.score is not None:
        record["score"] = made.score
    if made.logprobs:
        record["logprobs"] = [seen._asdict() for seen in made.logprobs]
    return record


def _notes(truncated: int, finish_reason: str) -> None:
    if truncated:
        say(f"note: the prompt's first {truncated:,} tokens did not fit the context and were left out")
    if finish_reason == "blocked":
        say("note: the answer ended as the settings left no token that may follow")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise GenerationError(f"--logit-bias is {text!r}: write it as ID=BIAS, such as 12=-5") from None


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    if given and file is not None:
        raise GenerationError("give either --prompt or --prompt-file, not both")
    if not given and file is None:
        raise GenerationError("give a prompt: --prompt TEXT (repeatable), --prompt - for stdin, or --prompt-file FILE")
    if "-" in (given or ()) and sys.stdin is None:
        raise GenerationError("--prompt - reads stdin, which is closed")
    try:
        if file is not None:
            return [file.read_text(encoding="utf-8")]
        return [sys.stdin.buffer.read().decode("utf-8") if text == "-" else text for text in given or ()]
    except OSError as error:
        raise GenerationError(f"--prompt-file {file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GenerationError(f"the prompt is not UTF-8 text: {error}") from error


def _write(text: str) -> None:
    """Text as UTF-8 whatever the locale."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
