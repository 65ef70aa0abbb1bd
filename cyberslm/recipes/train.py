"""The training recipe: configuration and text in, model folder out.

RUN/  config.yaml  base_config.yaml  env.json  metrics.jsonl  train.log  samples.jsonl  plots/loss.png
      data/  checkpoints/step-00001000/  final/

A run that stopped, for whatever reason, goes on from its newest whole checkpoint when it is started again; with a
configuration that would change the result it is refused. Everything that can be refused is refused before training.
"""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

import torch

from cyberslm import files
from cyberslm.checkpoint.folder import TrainingFiles, load_model, load_training, save_model, verify_model
from cyberslm.checkpoint.steps import Step, best, list_steps, newest, rotate, step_folder
from cyberslm.config import Loaded, differences, dump, load
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import Prepared
from cyberslm.errors import ConfigError, IntegrityError, StorageError
from cyberslm.generation.engine import Engine
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import NOT_THE_RESULT, NOT_THE_RESULT_SECTIONS, TrainRun
from cyberslm.recipes.data import Say, describe, ensure_prepared, fit_model
from cyberslm.recipes.use import pick_device
from cyberslm.training.loss import Score, measure
from cyberslm.training.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from cyberslm.training.plots import can_plot, loss_curve
from cyberslm.training.schedule import learning_rate
from cyberslm.training.trackers import Meter, MetricsFile, Record, Screen, read_metrics, short, validation_line
from cyberslm.training.trainer import Plan, TrainState, train

PACKAGES = ("cyberslm", "torch", "sentencepiece", "safetensors", "numpy")


@dataclass(frozen=True)
class Outcome:
    """How a call of `run_training` ended: ``signal_number`` is set when one stopped it, after saving."""

    state: TrainState
    final: Path | None
    signal_number: int | None


class Interrupts:
    """Ctrl-C and SIGTERM ask the loop to save and stop; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        try:
            before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread of the program: signals are its business
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise SystemExit(128 + number)
        self.number = number


class _Run:
    """One run in its folder: the hooks of the training loop and what they need."""

    def __init__(self, run: TrainRun, model: CyberSLM, prepared: Prepared, state: TrainState, screen: Screen) -> None:
        self.run, self.model, self.prepared, self.screen = run, model, prepared, screen
        self.optimizer = build_optimizer(model, run.optimizer)
        self.interrupts = Interrupts()
        self.metrics = MetricsFile(run.folder / "metrics.jsonl", step=state.step)
        self.samples = MetricsFile(run.folder / "samples.jsonl", step=state.step)
        self.meter = Meter(total_steps=run.train.max_steps, interval=run.logging.interval)
        tokenizer = prepared.tokenizer
        self.bytes_per_id = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
        self.autocast = autocast(run.precision, model.device)

    def loader(self, *, validation: bool = False) -> RowLoader | None:
        store = self.prepared.validation if validation else self.prepared.train
        if store is None:
            return None
        tokenizer = self.prepared.tokenizer
        return RowLoader(
            store,
            seq_len=self.run.model.max_seq_len,
            batch_rows=self.run.train.global_batch_size,
            seed=self.run.seed,
            pad_id=tokenizer.pad_id,
            bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        )

    def record(self, record: Record) -> None:
        self.metrics.write(record)
        if record["type"] == "validation":
            self.screen.line(validation_line(record, total_steps=self.run.train.max_steps))
        elif (line := self.meter.add(record)) is not None:
            self.screen.line(line)
        if record["type"] == "train":
            self.screen.advance(int(str(record["step"])))

    def validate(self, state: TrainState) -> Score | None:
        loader = self.loader(validation=True)
        if loader is None:
            return None
        batches = loader.sequential(self.run.train.micro_batch_size)
        limit, total = self.run.eval.max_batches, -(-loader.rows_per_epoch // self.run.train.micro_batch_size)
        if 0 < limit < total:
            wanted = {index * total // limit for index in range(limit)}
            batches = (batch for index, batch in enumerate(batches) if index in wanted)
        with self.autocast():
            score = measure(self.model, batches, self.bytes_per_id)
        self._sample(state.step)
        return score

    def _sample(self, step: int) -> None:
        prompts = self.run.eval.sample_prompts
        if not prompts:
            return
        engine = Engine(self.model, self.prepared.tokenizer)
        made = engine.generate(prompts, max_new_tokens=self.run.eval.sample_tokens, temperature=0.8, top_p=0.95, seed=0)
        for completion in made:
            self.samples.write({"type": "sample", "step": step, "prompt": completion.prompt, "text": completion.text})
            self.screen.line(f"step {step} | sample | {(completion.prompt + completion.text)!r}")

    def save(self, state: TrainState, score: Score | None) -> None:
        fields: dict[str, object] = {
            "step": state.step,
            "data_sha256": self.prepared.data_sha256,
            "cyberslm": _version("cyberslm"),
        }
        if score is not None:
            fields["validation"] = {"loss": score.loss, "bits_per_byte": score.bits_per_byte}
        training = TrainingFiles(optimizer_tensors(self.optimizer, self.model), state.to_json())
        checkpoints = self.run.folder / "checkpoints"
        target = step_folder(checkpoints, state.step)
        save_model(target, self.model, self.prepared.tokenizer, fields, training)
        rotate(checkpoints, self.run.checkpoint.keep_last)
        self.screen.line(f"step {state.step}/{self.run.train.max_steps} | saved {target}")
        self._plot()

    def _plot(self) -> None:
        if self.run.logging.plots and can_plot():
            folder = self.run.folder / "plots"
            folder.mkdir(exist_ok=True)
            png = loss_curve(read_metrics(self.run.folder / "metrics.jsonl"), title=self.run.folder.name)
            files.write_bytes(folder / "loss.png", png)

    def should_stop(self) -> bool:
        return self.interrupts.number is not None

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()


def run_training(loaded: Loaded[TrainRun], *, stop_at: int | None = None, quiet: bool = False) -> Outcome:
    """Do the whole job of ``cyberslm train``. ``stop_at`` ends this call after that step; start again to go on."""
    run = loaded.value
    if stop_at is not None and not 1 <= stop_at <= run.train.max_steps:
        raise ConfigError(f"--stop-at must be from 1 to train.max_steps {run.train.max_steps}, not {stop_at}")
    device = pick_device(run.device)
    if run.threads:
        torch.set_num_threads(run.threads)
    _make_folder(run.folder)
    with files.lock(run.folder):
        files.sweep(run.folder)
        files.sweep(run.folder / "checkpoints")
        _refuse_other_run(run)
        screen = Screen(run.folder / "train.log", quiet=quiet)
        try:
            return _train(loaded, device, screen, stop_at)
        finally:
            screen.close()


def _train(loaded: Loaded[TrainRun], device: torch.device, screen: Screen, stop_at: int | None) -> Outcome:
    run = loaded.value
    step = newest(run.folder / "checkpoints", screen.line)
    began_with = None if step is None else str(files.read_manifest(step.path).get("data_sha256"))
    prepared = ensure_prepared(run, screen.line, trained_on=began_with)
    run = replace(run, model=fit_model(run.model, prepared.tokenizer, vocab_given="model.vocab_size" in loaded.given))
    done = _finished(run, step)
    if done is not None:
        screen.line(f"this run is finished: {run.folder / 'final'} (step {done.step})")
        return Outcome(done, run.folder / "final", None)
    _require_space(run)
    _write_run_files(loaded, run)
    model, state, training = _start(run, step, device, screen.line)
    this = _Run(run, model, prepared, state, screen)
    if training is not None:
        load_optimizer_tensors(this.optimizer, model, training.tensors)
    loader = this.loader()
    if loader is None:
        raise ConfigError("data.sources: there is nothing to train on")
    for line in (*describe(prepared), *header(run, loader, device)):
        screen.line(line)
    plan = Plan(
        config=run.train,
        seed=run.seed,
        rate=partial(learning_rate, peak=run.optimizer.lr, total=run.train.max_steps, config=run.scheduler),
        until=run.train.max_steps if stop_at is None else stop_at,
        validate_every=run.eval.interval,
        save_every=run.checkpoint.interval,
        autocast=this.autocast,
    )
    screen.start_bar(total=run.train.max_steps, done=state.step, unit="step")
    try:
        with this.interrupts.caught():
            train(plan, model, this.optimizer, loader, state, this)
    finally:
        screen.stop_bar()
        this.close()
    return _finish(run, state, this.interrupts.number, prepared, screen)


def _start(
    run: TrainRun, step: Step | None, device: torch.device, say: Say
) -> tuple[CyberSLM, TrainState, TrainingFiles | None]:
    if step is None:
        return CyberSLM(run.model, seed=run.seed, device=device), TrainState(), None
    found = load_model(step.path, device=device)
    if found.model.config != run.model:
        raise ConfigError(f"{step.path} holds a model of another shape than the configuration: choose another out_dir")
    training = load_training(step.path)
    say(f"resuming from {step.path} (step {step.step} of {run.train.max_steps})")
    return found.model, TrainState.from_json(dict(training.state)), training


def _finish(run: TrainRun, state: TrainState, number: int | None, prepared: Prepared, screen: Screen) -> Outcome:
    if state.step < run.train.max_steps:
        screen.line(f"stopped at step {state.step} of {run.train.max_steps}; the same command goes on from there")
        return Outcome(state, None, number)
    steps = list_steps(run.folder / "checkpoints")
    chosen = (best(steps) if run.checkpoint.final == "best" else None) or steps[-1]
    found = load_model(chosen.path)
    kept = {
        key: found.manifest[key] for key in ("step", "data_sha256", "cyberslm", "validation") if key in found.manifest
    }
    final = run.folder / "final"
    save_model(final, found.model, prepared.tokenizer, kept)
    score = found.manifest.get("validation") or {}
    screen.line("")
    screen.line(f"done: {state.step} steps, {short(state.tokens)} tokens, {state.bad_steps} skipped")
    if score:
        screen.line(
            f"best validation: step {chosen.step}, loss {score['loss']:.4f}, {score['bits_per_byte']:.4f} bits per byte"
        )
    screen.line(f"model: {final} (step {chosen.step})")
    if run.logging.plots:
        missing = "" if can_plot() else " (not drawn: pip install 'cyberslm[plots]')"
        screen.line(f"curve: {run.folder / 'plots' / 'loss.png'}{missing}")
    screen.line(f"next:  cyberslm generate {final} --prompt 'TEXT'")
    return Outcome(state, final, number)


def header(run: TrainRun, loader: RowLoader, device: torch.device) -> list[str]:
    """The block that opens a run: what is about to be trained, on how much, where."""
    config, batch = run.model, run.train.global_batch_size
    step_tokens = batch * config.max_seq_len
    steps_per_epoch = loader.rows_per_epoch / batch
    total = config.num_parameters
    return [
        f"model: {total:,} parameters ({total - config.num_embedding_parameters:,} without embeddings),"
        f" {config.num_layers} layers, width {config.hidden_dim}, context {config.max_seq_len},"
        f" vocabulary {config.vocab_size:,}",
        f"steps: {run.train.max_steps:,} of {step_tokens:,} tokens ({batch} rows,"
        f" {min(batch, run.train.micro_batch_size)} at a time), {steps_per_epoch:,.1f} steps per epoch,"
        f" {run.train.max_steps / steps_per_epoch:,.2f} epochs,"
        f" {run.train.max_steps * step_tokens / total:,.1f} tokens per parameter",
        f"device: {device}, {precision_name(run.precision, device)}, {torch.get_num_threads()} threads,"
        f" seed {run.seed}",
        f"folder: {run.folder}",
    ]


def precision_name(precision: str, device: torch.device) -> str:
    """What ``precision`` means on this machine."""
    if precision == "auto":
        if device.type == "cuda":
            return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
        return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    return precision


def autocast(precision: str, device: torch.device) -> Callable:
    """A context for the forward pass: bf16 matrix products on fp32 weights, or nothing."""
    if precision_name(precision, device) == "fp32":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def _finished(run: TrainRun, step: Step | None) -> TrainState | None:
    """The state of a run that has nothing left to do."""
    if step is None or step.step < run.train.max_steps:
        return None
    try:
        verify_model(run.folder / "final")
    except IntegrityError:
        return None
    return TrainState.from_json(dict(load_training(step.path).state))


def _refuse_other_run(run: TrainRun) -> None:
    """Stop when the folder holds checkpoints of a configuration with another result."""
    kept = run.folder / "config.yaml"
    if not kept.exists() or not list_steps(run.folder / "checkpoints"):
        return
    before = load(kept, TrainRun).value
    changed = {
        key: values
        for key, values in differences(before, run).items()
        if key not in NOT_THE_RESULT
        and not key.startswith(NOT_THE_RESULT_SECTIONS)
        and not key.startswith("model.vocab")
    }
    if changed:
        lines = "".join(f"\n  {key}: {old!r} there, {new!r} now" for key, (old, new) in sorted(changed.items()))
        raise ConfigError(
            f"out_dir: {run.folder} holds a run with another configuration:{lines}\n"
            "choose another out_dir, or give the same settings to go on with it"
        )


def _require_space(run: TrainRun) -> None:
    """The kept checkpoints (weights and two moments, fp32), the one being written, and final/."""
    missing = max(1, run.checkpoint.keep_last + 2 - len(list_steps(run.folder / "checkpoints")))
    needed = run.model.num_parameters * 4 * (3 * missing + 1)
    files.require_space(run.folder, needed, what="checkpoints and final/")


def _make_folder(folder: Path) -> None:
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"out_dir: {folder} can't be made: {error.strerror}") from error


def _write_run_files(loaded: Loaded[TrainRun], run: TrainRun) -> None:
    files.write_text(run.folder / "base_config.yaml", loaded.text)
    files.write_text(run.folder / "config.yaml", dump(run))
    environment = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: _version(name) for name in PACKAGES},
        "command": sys.argv,
    }
    files.write_text(run.folder / "env.json", json.dumps(environment, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
