"""The hooks of one training run: where its numbers, validations, samples and checkpoints go, and what stops it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch

from cyberslm import files
from cyberslm.checkpoint.folder import TrainingFiles, save_model
from cyberslm.checkpoint.steps import rotate, step_folder
from cyberslm.data.prepare import Prepared
from cyberslm.decoding.loop import budget_for
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.generation.engine import Engine
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import bytes_per_id, row_loader
from cyberslm.recipes.estimate import share_of_limit
from cyberslm.recipes.machine import autocast, package_version
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.training.elsewhere import open_trackers
from cyberslm.training.loss import Score, measure
from cyberslm.training.optim import build_optimizer, optimizer_tensors
from cyberslm.training.plots import can_plot, curves
from cyberslm.training.trackers import Meter, MetricsFile, Record, Screen, peak_memory, read_metrics, validation_line
from cyberslm.training.trainer import TrainState


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
        again = self.number is not None
        said = (
            b"quit without saving" if again else b"saving after this step, then stopping (again: quit without saving)"
        )
        with suppress(OSError):
            os.write(2, b"\n" + said + b"\n")
        if again:
            raise SystemExit(128 + number)
        self.number = number


def sampling(run: TrainRun) -> SamplingParams:
    """Settings of the samples that a run shows of itself."""
    return SamplingParams(max_new_tokens=run.eval.sample_tokens, temperature=0.8, top_p=0.95, seed=0)


def check_samples(run: TrainRun, tokenizer: Tokenizer) -> None:
    """Refuse a sample prompt that the model could not continue: `GenerationError`."""
    for prompt in run.eval.sample_prompts:
        budget_for(len(tokenizer.encode(prompt)), sampling(run), run.model.max_seq_len)


class RunHooks:
    """One run in its folder: the hooks of the training loop and what they need."""

    def __init__(
        self,
        run: TrainRun,
        model: CyberSLM,
        prepared: Prepared,
        state: TrainState,
        screen: Screen,
        *,
        limit: float | None = None,
    ) -> None:
        """``limit``: operations per second of matrix products here, where throughput is to be compared with it."""
        self.run, self.model, self.prepared, self.screen = run, model, prepared, screen
        self.optimizer = build_optimizer(model, run.optimizer)
        self.interrupts = Interrupts()
        self.metrics = MetricsFile(run.folder / "metrics.jsonl", step=state.step)
        self.samples = MetricsFile(run.folder / "samples.jsonl", step=state.step)
        self.trackers = open_trackers(run.logging.trackers, run.folder, step=state.step)
        self.share_per_rate = None if limit is None else share_of_limit(run, limit)
        self.meter = Meter(total_steps=run.train.max_steps, interval=run.logging.interval)
        self.bytes_per_id = bytes_per_id(prepared.tokenizer)
        self.autocast = autocast(run.precision, model.device)
        self.loader = row_loader(run, prepared, prepared.train)

    def record(self, record: Record) -> None:
        if record["type"] == "train":
            record = {**record, **self._seen(float(str(record["tokens_per_second"])))}
        self.publish(record)
        if record["type"] == "validation":
            self.screen.line(validation_line(record, total_steps=self.run.train.max_steps))
        elif (line := self.meter.add(record)) is not None:
            self.screen.line(line)
        if record["type"] == "train":
            self.screen.advance(int(str(record["step"])))

    def publish(self, record: Record) -> None:
        """A record for metrics.jsonl and the trackers."""
        self.metrics.write(record)
        for tracker in self.trackers:
            tracker.write(record)

    def _seen(self, rate: float) -> dict[str, float]:
        """What a train record says besides of the machine: peak memory so far, and the share of its limit used."""
        seen: dict[str, float] = {"peak_memory": peak_memory()}
        if self.model.device.type == "cuda":
            seen["peak_gpu_memory"] = torch.cuda.max_memory_allocated(self.model.device)
        if self.share_per_rate is not None:
            seen["share_of_limit"] = rate * self.share_per_rate
        return seen

    def validate(self, state: TrainState) -> Score | None:
        self._sample(state.step)
        if self.prepared.validation is None:
            return None
        loader = row_loader(self.run, self.prepared, self.prepared.validation)
        batches = loader.sequential(self.run.train.micro_batch_size, limit=self.run.eval.max_rows)
        with self.autocast():
            return measure(self.model, batches, self.bytes_per_id, name=self.prepared.validation_source)

    def _sample(self, step: int) -> None:
        prompts = self.run.eval.sample_prompts
        if not prompts:
            return
        engine = Engine(self.model, self.prepared.tokenizer)
        for completion in engine.generate(prompts, sampling(self.run)):
            sample = {"type": "sample", "step": step, "prompt": completion.prompt, "text": completion.text}
            for place in (self.samples, *self.trackers):
                place.write(sample)
            self.screen.line(f"step {step} | sample | {(completion.prompt + completion.text)!r}")

    def save(self, state: TrainState, score: Score | None) -> None:
        fields: dict[str, object] = {
            "step": state.step,
            "data_sha256": self.prepared.data_sha256,
            "cyberslm": package_version("cyberslm"),
            "rows": self.run.data.rows,
            "isolate_documents": self.run.data.isolate_documents,
        }
        if score is not None and math.isfinite(score.loss):
            by_source = {name: part.figures() for name, part in score.by_source.items()}
            fields["validation"] = score.figures() | ({"by_source": by_source} if by_source else {})
        training = TrainingFiles(optimizer_tensors(self.optimizer, self.model), state.to_json())
        for place in (self.metrics, self.samples, *self.trackers):
            place.sync()
        checkpoints = self.run.folder / "checkpoints"
        target = step_folder(checkpoints, state.step)
        save_model(target, self.model, self.prepared.tokenizer, fields, training)
        rotate(checkpoints, self.run.checkpoint.keep_last, current=state.step)
        self.screen.line(f"step {state.step}/{self.run.train.max_steps} | saved {target}")
        self._plot()

    def _plot(self) -> None:
        if self.run.logging.plots and can_plot():
            folder = files.make_folder(self.run.folder / "plots")
            png = curves({self.run.folder.name: read_metrics(self.run.folder / "metrics.jsonl")})
            files.write_bytes(folder / "loss.png", png)

    def should_stop(self) -> bool:
        return self.interrupts.number is not None

    def close(self) -> None:
        for place in (self.metrics, self.samples, *self.trackers):
            place.close()
