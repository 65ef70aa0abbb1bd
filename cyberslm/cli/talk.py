"""``chat``: talk with a model, on a terminal, by ``--message``, or line by line from stdin; ``eval --mcq``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from cyberslm.cli.options import AsJson, Device, Model, say
from cyberslm.cli.quick import quick_imports
from cyberslm.errors import ConfigError, GenerationError

if TYPE_CHECKING:
    from cyberslm.decoding.sampling import SamplingParams
    from cyberslm.generation.chat import Chat

NEW = "/new"


def chat(
    model: Model,
    message: Annotated[
        list[str] | None, typer.Option(help="What to say; repeat for several turns. Default: asks on a terminal.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message that comes first.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; default 256, or a quarter of a short context.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; higher is more varied.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that reach this probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:
    """Talk with a model that was trained to answer.

    Answers stream, and end where the model ends its turn. On a terminal /new begins anew and Ctrl-D ends.
    """
    with quick_imports():
        from cyberslm.decoding.sampling import SamplingParams
        from cyberslm.recipes.use import open_chat

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    talk, doubt = open_chat(Path(model), device=device, system=system)
    if doubt is not None:
        say(f"warning: {doubt}")
    first = list(talk.messages)
    for text in message or _asked():
        if text.strip() == NEW and not message:
            talk.messages = list(first)
        elif text.strip():
            _answer(talk, text, params, as_json=as_json, forgiving=not message and sys.stdin.isatty())


def _answer(talk: Chat, text: str, params: SamplingParams, *, as_json: bool, forgiving: bool) -> None:
    """One exchange; on a terminal a message that can't be answered doesn't end the chat."""
    try:
        events = talk.reply(text, params)
    except GenerationError as error:
        if not forgiving:
            raise
        say(f"error: {error}")
        return
    if talk.left_out:
        say(f"note: the context is full: the {talk.left_out} oldest messages are left out")
    finish = None
    for event in events:
        finish = event.finish_reason
        if not as_json:
            _write(event.text)
    if as_json:
        answer = talk.messages[-1].content
        _write(json.dumps({"message": text, "answer": answer, "finish_reason": finish}, ensure_ascii=False) + "\n")
        return
    _write("\n")
    if finish == "length":
        say("note: the answer was cut at its budget (--max-new-tokens)")


def answer_questions(model: Path, file: Path, *, data: Path | None, as_json: bool, device: str) -> None:
    """``eval --mcq``: the share of questions answered right, with its interval and what guessing gives."""
    from cyberslm.recipes.evaluate import ask_questions

    if data is not None:
        raise ConfigError("--mcq asks the questions of a file: leave out --data")
    found = ask_questions(model, file, device=device)
    record = found.to_json()
    if as_json:
        typer.echo(json.dumps({"model": str(model), **record}))
        return
    typer.echo(f"{found.asked:,} questions, chance {found.chance:.1%}")
    for name, key in (("accuracy", "accuracy"), ("accuracy per byte", "accuracy_per_byte")):
        low, high = cast("tuple[float, float]", record[f"{key}_interval"])
        typer.echo(f"{name:24}{record[key]:8.1%}   95 % interval {low:.1%} to {high:.1%}")
    if found.too_long:
        first = found.too_long[0]
        say(f"note: {len(found.too_long)} questions don't fit the context and were not asked, such as {first}")


def _asked() -> Iterator[str]:
    """Lines from a terminal, with a mark that asks for them, or from a pipe."""
    if sys.stdin is None:
        raise GenerationError("give --message TEXT: stdin is closed")
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        yield line.decode("utf-8", "replace").rstrip("\r\n")


def _write(text: str) -> None:
    """Text as UTF-8 whatever the locale."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
