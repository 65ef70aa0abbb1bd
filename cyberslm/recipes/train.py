"""The training recipe: configuration and text in, model folder out; from scratch or from a base (`origin`).

RUN/  config.yaml  base_config.yaml  env.json  metrics.jsonl  train.log  samples.jsonl  plots/loss.png
      data/  checkpoints/step-00001000/  final/

A run that stopped, for whatever reason, goes on from its newest whole checkpoint when it is started again; with a
configuration that would change the result it is refused. Everything that can be refused is refused before training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cyberslm import files
from cyberslm.checkpoint.folder import TrainingFiles, load_training
from cyberslm.checkpoint.steps import Step, newest, step_folder
from cyberslm.config import Loaded, dump
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import Prepared, open_prepared
from cyberslm.errors import ConfigError
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.conversations import preview
from cyberslm.recipes.data import Say, describe, ensure_prepared, fit_model
from cyberslm.recipes.estimate import Estimate, estimate, figures, lines, refuse_too_large, share_of_limit
from cyberslm.recipes.finish import finish, finished, said_of
from cyberslm.recipes.folder import refuse_other_run, require_space, write_run_files
from cyberslm.recipes.header import header, processes
from cyberslm.recipes.hooks import Process, RunHooks, check_samples
from cyberslm.recipes.interrupts import Interrupts
from cyberslm.recipes.machine import autocast, cpu_threads, loss_scale, on_this_machine, wants_compiling, with_native
from cyberslm.recipes.origin import Origin, origin_of
from cyberslm.recipes.preferences import ensure_reference, objective_of, trained_rows
from cyberslm.training.compiled import compile_and_try
from cyberslm.training.distributed import Dist, joined
from cyberslm.training.elsewhere import require_trackers
from cyberslm.training.loss import Loss
from cyberslm.training.optim import group_sizes
from cyberslm.training.sharing import recompute_blocks, share
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import Record, Screen
from cyberslm.training.trainer import Plan, train


@dataclass(frozen=True)
class Outcome:
    """How a call of `run_training` ended: ``signal_number`` is set when one stopped it, after saving."""

    state: TrainState
    final: Path | None
    signal_number: int | None


def run_training(loaded: Loaded[TrainRun], *, stop_at: int | None = None, quiet: bool = False) -> Outcome:
    """Do the whole job of ``cyberslm train`` or ``finetune``.

    ``stop_at`` ends this call after that step; start again to go on.
    """
    run = loaded.value
    if stop_at is not None and not 1 <= stop_at <= run.train.max_steps:
        raise ConfigError(f"--stop-at must be from 1 to train.max_steps {run.train.max_steps}, not {stop_at}")
    require_trackers(run.logging.trackers)
    run, device = on_this_machine(run)
    interrupts = Interrupts()
    with interrupts.saving(), joined(run.distributed, device) as dist, cpu_threads(run.threads):
        run = replace(run, precision=dist.told(run.precision))
        _require_agreement(run, dist)
        with _own_folder(run, dist, quiet=quiet) as screen:
            return _train(replace(loaded, value=run), Process(dist, screen, interrupts), stop_at)


def _require_agreement(run: TrainRun, dist: Dist) -> None:
    """Refuse processes of different configurations, and a step, or a stage of the ramp, with fewer rows than them."""
    first, *others = dist.gather(dump(run).splitlines())
    for rank, theirs in enumerate(others, 1):
        if odd := sorted(set(theirs) ^ set(first)):
            raise ConfigError(
                f"process {rank} has another configuration than process 0, by {odd[0].strip()!r}: start all with the"
                " same file and arguments"
            )
    stages = {f"train.batch_ramp: a stage of {rows} rows": rows for _, rows in run.train.batch_ramp}
    stages[f"train.global_batch_size {run.train.global_batch_size}"] = run.train.global_batch_size
    for name, rows in stages.items():
        if rows < dist.world:
            raise ConfigError(
                f"{name} must be at least the number of processes, {dist.world}, each of which trains on a row or more"
            )


@contextmanager
def _own_folder(run: TrainRun, dist: Dist, *, quiet: bool) -> Iterator[Screen]:
    """Hold the run's folder and open its log: the first rank does, for all."""
    with ExitStack() as held:

        def hold() -> str | None:
            files.make_folder(run.folder / "checkpoints")
            held.enter_context(files.lock(run.folder))
            files.sweep(run.folder)
            files.sweep(run.folder / "checkpoints")
            return refuse_other_run(run)

        other_length = dist.on_first(hold)
        screen = Screen(run.folder / "train.log" if dist.first else None, quiet=quiet or not dist.first)
        held.callback(screen.close)
        if other_length is not None:
            screen.line(other_length)
        yield screen


def _train(loaded: Loaded[TrainRun], process: Process, stop_at: int | None) -> Outcome:
    run, dist, screen = loaded.value, process.dist, process.screen
    step, done = _standing(run, dist, screen.line)
    if done is not None:
        screen.line(said_of(run))
        return Outcome(done, run.folder / "final", None)
    prepared = dist.on_first(lambda: ensure_prepared(run, screen.line)) or open_prepared(run.prepared)
    run = replace(run, model=fit_model(run.model, prepared.tokenizer, given=loaded.given))
    check_samples(run, prepared.tokenizer)
    _check_patience(run, prepared)
    dist.on_first(lambda: _claim(loaded, run))
    refuse_too_large(run, dist)
    run = with_native(run, dist, screen.line)
    origin = origin_of(run)
    found = estimate(run, origin, prepared, dist, probe=step is None)
    model, state, training = _start(run, origin, step, dist.device, screen.line)
    model.use_native(on=run.native is True)
    loss, count = objective_of(run)
    dist.on_first(lambda: ensure_reference(run, prepared, lambda: origin.fresh(dist.device), screen.line))
    if run.train.activation_checkpointing:
        recompute_blocks(model)
    compile_if_asked(run, model, loss, trained_rows(run, prepared), process)
    loss, holding = share(model, loss, dist, precision=run.precision)
    this = RunHooks(run, origin, model, prepared, state, process)
    if found.limit is not None:
        this.share_per_rate = share_of_limit(run, found.limit)
    if training is not None and step is not None:
        this.load_training(training.tensors)
        this.before = files.read_manifest(step.path).get("before")
    if state.step == 0:
        this.publish(_run_record(run, origin, this.loader, prepared, found))
    for line in (
        *describe(prepared),
        *header(run, origin, this.loader, dist.device),
        *processes(run, dist),
        *lines(run, found),
        *preview(run, prepared, this.loader),
    ):
        screen.line(line)
    plan = Plan(
        config=run.train,
        schedule=run.scheduler,
        seed=run.seed,
        until=run.train.max_steps if stop_at is None else stop_at,
        validate_every=run.eval.interval,
        save_every=run.checkpoint.interval,
        autocast=this.autocast,
        loss=loss,
        loss_scale=loss_scale(run),
        count=count,
        mean=this.mean,
        dist=dist,
        holding=holding,
    )
    if state.step == 0:
        this.measure_base()
    screen.start_bar(total=state.total_steps(run.train), done=state.step, unit="step")
    try:
        with process.interrupts.stopping():
            state = train(plan, model, this.optimizer, this.loader, state, this)
    finally:
        screen.stop_bar()
        this.close()
    number = int(max(dist.each(process.interrupts.number or 0)[0])) or None
    if not state.is_over(run.train):
        total = state.total_steps(run.train) or "?"
        screen.line(f"stopped at step {state.step} of {total}; the same command goes on from there")
        return Outcome(state, None, number)
    dist.on_first(lambda: finish(run, origin, state, prepared, screen))
    return Outcome(state, run.folder / "final", number)


def _standing(run: TrainRun, dist: Dist, say: Say) -> tuple[Step | None, TrainState | None]:
    """The checkpoint to go on from, as the first rank sees it, and the run's state if it is finished."""

    def look() -> tuple[int | None, dict | None]:
        step = newest(run.folder / "checkpoints", say)
        done = finished(run, step)
        return None if step is None else step.step, None if done is None else done.to_json()

    number, done = dist.told(dist.on_first(look))
    step = None if number is None else Step(number, step_folder(run.folder / "checkpoints", number), None)
    return step, None if done is None else TrainState.from_json(done)


def _claim(loaded: Loaded[TrainRun], run: TrainRun) -> None:
    require_space(run)
    write_run_files(loaded, run)


def _check_patience(run: TrainRun, prepared: Prepared) -> None:
    if run.train.patience and prepared.validation is None:
        raise ConfigError(
            f"train.patience is {run.train.patience} and there is no validation text: set data.validation_fraction or"
            " data.validation, or train.patience=0"
        )


def _start(
    run: TrainRun, origin: Origin, step: Step | None, device: torch.device, say: Say
) -> tuple[CyberSLM, TrainState, TrainingFiles | None]:
    if step is None:
        return origin.fresh(device), TrainState(), None
    model, training = origin.reopened(step.path, device), load_training(step.path)
    state = TrainState.from_json(dict(training.state))
    say(f"resuming from {step.path} (step {step.step} of {state.total_steps(run.train) or '?'})")
    return model, state, training


def compile_if_asked(run: TrainRun, model: CyberSLM, loss: Loss, loader: RowLoader, process: Process) -> None:
    """Compile where the setting or the length of the run asks for it; one warning where it can't be done.

    Before ranks share the model: each tries by itself, and all go without if one has to.
    """
    dist, say = process.dist, process.screen.line
    if not wants_compiling(run, dist):
        return
    started = time.perf_counter()
    rows = loader.batch(0, rank=dist.rank, world=dist.world).rows(0, run.train.micro_batch_size)
    failed = compile_and_try(model, loss, rows, autocast(run.precision, dist.device))
    everywhere = dist.gather([model.is_compiled, failed])
    failed = next((reason for _, reason in everywhere if reason is not None), None)
    if not all(compiled for compiled, _ in everywhere):
        model.compile_blocks(on=False)
        say(f"warning: not compiled, the run goes on without (compile: false leaves this out): {failed}")
        return
    if failed is not None:
        model.compile_blocks()  # on a rank where flex attention works too
    slower = "" if failed is None else f"; warning: documents by a slower mask, as flex attention failed: {failed}"
    say(f"compiled: {time.perf_counter() - started:.0f} s{slower}")


def _run_record(run: TrainRun, origin: Origin, loader: RowLoader, prepared: Prepared, found: Estimate) -> Record:
    """The header block for machines: the first line of ``metrics.jsonl``."""
    return {
        "type": "run",
        "step": 0,
        "parameters": run.model.num_parameters,
        "embedding_parameters": run.model.num_embedding_parameters,
        "groups": group_sizes(origin.outline(), run.optimizer),
        "max_steps": run.train.max_steps,
        "max_seconds": run.train.max_seconds,
        "tokens_per_step": run.train.global_batch_size * run.seq_len,
        "rows_per_epoch": loader.rows_per_epoch,
        "train_tokens": prepared.train.num_tokens,
        "data_sha256": prepared.data_sha256,
        "tokenizer_sha256": prepared.tokenizer.sha256,
        "device": run.device,
        "precision": run.precision,
        "seed": run.seed,
        **origin.fields,
        **figures(run, found),
    }
