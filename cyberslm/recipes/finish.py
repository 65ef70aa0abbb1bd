"""How a run ends: which checkpoint becomes ``final/``, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cyberslm import files
from cyberslm.checkpoint.adapter import KIND as ADAPTER
from cyberslm.checkpoint.adapter import copy_adapter, verify_adapter
from cyberslm.checkpoint.folder import load_state, save_model, verify_model
from cyberslm.checkpoint.steps import Step, list_steps, ranked, verify_step
from cyberslm.data.prepare import Prepared
from cyberslm.errors import IntegrityError
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import Say, row_loader
from cyberslm.recipes.origin import Origin
from cyberslm.recipes.replay import validated_apart
from cyberslm.recipes.told import next_command
from cyberslm.training.plots import can_plot
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import MetricsFile, Screen, short

ADAPTER_FOLDER = "final-adapter"


KEPT = (
    *("step", "data_sha256", "cyberslm", "rows", "isolate_documents", "seq_len", "ema_decay", "base_sha256"),
    *("before", "validation", "rows_by_source"),
)
"""What the manifest of ``final/`` takes over from its step's."""


def finish(run: TrainRun, origin: Origin, state: TrainState, prepared: Prepared, screen: Screen) -> None:
    """Publish ``final/``, and of adapters ``final-adapter/`` before it, and say so."""
    chosen, model = _choose(run, origin, screen.line)
    manifest = files.read_manifest(chosen.path)
    kept = {key: manifest[key] for key in KEPT if key in manifest}
    final = run.folder / "final"
    if manifest["kind"] == ADAPTER:
        copy_adapter(chosen.path, run.folder / ADAPTER_FOLDER)
    save_model(final, model, prepared.tokenizer, kept, extras=origin.extras(prepared.tokenizer))
    score = manifest.get("validation") or {}
    screen.line("")
    why = f", ended by train.{state.ended}" if state.ended else ""
    overflows = f"{state.overflows} skipped for fp16, " if run.precision == "fp16" else ""
    events = f"{state.bad_steps} skipped, {overflows}{state.spikes} loss spikes, {state.rollbacks} rollbacks"
    screen.line(f"done: {state.step} steps, {short(state.tokens)} tokens, {events}{why}")
    if score:
        label = "best validation" if run.checkpoint.final == "best" else "last validation"
        screen.line(
            f"{label}: step {chosen.step}, loss {score['loss']:.4f}, {score['bits_per_byte']:.4f} bits per byte"
        )
        if "accuracy" in score:
            screen.line(f"  pairs ranked right {score['accuracy']:.1%}, mean margin {score['reward_margin']:.4f}")
        for name, part in score.get("by_source", {}).items():
            screen.line(f"  {name}: loss {part['loss']:.4f}, {part['bits_per_byte']:.4f} bits per byte")
    if manifest.get("before") and prepared.validation is not None:
        _compare(run, state.step, manifest["before"], score, screen)
        rows = row_loader(run, prepared, prepared.validation)
        screen.line(_measured_on(run, [rows.num_rows(part) for part in validated_apart(run, prepared)]))
    mean = f", running mean of the weights, decay {run.train.ema_decay:g}" if run.train.ema_decay else ""
    screen.line(f"model: {final} (step {chosen.step}{mean})")
    if manifest["kind"] == ADAPTER:
        screen.line(f"adapter: {run.folder / ADAPTER_FOLDER} (for the base alone)")
    if run.logging.plots:
        missing = "" if can_plot() else " (not drawn: pip install 'cyberslm[plots]')"
        screen.line(f"curve: {run.folder / 'plots' / 'loss.png'}{missing}")
    text = run.data.format == "text"
    screen.line(next_command("generate", final, "--prompt 'TEXT'") if text else next_command("chat", final))


def _in_order(run: TrainRun) -> list[Step]:
    """The checkpoints in the order in which ``checkpoint.final`` wants them for ``final/``."""
    steps = list_steps(run.folder / "checkpoints")
    return ranked(steps) if run.checkpoint.final == "best" else steps[::-1]


def _choose(run: TrainRun, origin: Origin, say: Say) -> tuple[Step, CyberSLM]:
    """The checkpoint that becomes ``final/``: the first whole one in order."""
    for step in _in_order(run):
        try:
            verify_step(step.path)
            return step, origin.whole(step.path)
        except IntegrityError as error:
            say(f"warning: checkpoint {step.path.name} is damaged and is passed over: {error}")
    raise IntegrityError(f"no checkpoint in {run.folder / 'checkpoints'} is whole: delete them to start anew")


def _compare(run: TrainRun, step: int, before: Mapping, after: Mapping, screen: Screen) -> None:
    """What training did to the base, on the run's own text and on general text."""
    rows = [("validation", before, after)]
    parts = before.get("by_source") or {}
    if parts:
        rows = [(name, part, (after.get("by_source") or {}).get(name) or {}) for name, part in parts.items()]
    record: dict[str, object] = {"type": "comparison", "step": step}
    screen.line(f"{'bits per byte':24}{'base':>10}{'now':>10}")
    for name, old, new in rows:
        if "bits_per_byte" not in new:
            continue
        was, now = old["bits_per_byte"], new["bits_per_byte"]
        screen.line(f"{name:24}{was:10.4f}{now:10.4f}{(now / was - 1) * 100 if was else 0.0:+9.1f} %")
        record |= {f"before/{name}": was, f"after/{name}": now}
    metrics = MetricsFile(run.folder / "metrics.jsonl", step=step)
    metrics.write(record)
    metrics.close()


def _measured_on(run: TrainRun, held: list[int]) -> str:
    """How many of the rows that are ``held`` out the run's figures are of; ``cyberslm eval`` takes all, in fp32."""
    limit = run.eval.max_rows
    shown = " and ".join(f"{min(limit or rows, rows):,} of {rows:,}" for rows in held)
    spread = ", spread evenly (eval.max_rows)" if limit and limit < max(held) else ""
    return f"measured in {run.precision} on {shown} rows{spread}"


def finished(run: TrainRun, newest_step: Step | None) -> TrainState | None:
    """The state of a run that has nothing left to do: all steps are made, and ``final/`` is whole and the right one."""
    if newest_step is None:
        return None
    state = TrainState.from_json(load_state(newest_step.path))
    if not state.is_over(run.train):
        return None
    wanted = next((step for step in _in_order(run) if _is_whole(step.path, verify_step)), None)
    final = run.folder / "final"
    if wanted is None or not _is_whole(final, verify_model) or files.read_manifest(final).get("step") != wanted.step:
        return None
    adapted = files.read_manifest(wanted.path)["kind"] == ADAPTER
    if adapted and not _is_whole(run.folder / ADAPTER_FOLDER, verify_adapter):
        return None
    return state


def said_of(run: TrainRun) -> str:
    """A finished run in one line: where its model is, and how it scored."""
    final = run.folder / "final"
    manifest = files.read_manifest(final)
    figures = [f"step {manifest['step']}"]
    if score := manifest.get("validation"):
        was = manifest.get("before", {}).get("bits_per_byte")
        base = "" if was is None else f", the base's {was:.4f}"
        figures.append(f"validation loss {score['loss']:.4f}, {score['bits_per_byte']:.4f} bits per byte{base}")
    return f"this run is finished: {final} ({', '.join(figures)})"


def _is_whole(folder: Path, verify: Callable[[Path], dict]) -> bool:
    try:
        verify(folder)
    except IntegrityError:
        return False
    return True
