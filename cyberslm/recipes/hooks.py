"""The hooks of one training run: where its numbers, validations, samples and checkpoints go, and what stops it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cyberslm import files
from cyberslm.checkpoint.folder import TrainingFiles, load_training
from cyberslm.checkpoint.steps import remove_after, rotate, step_folder
from cyberslm.data.prepare import Prepared
from cyberslm.decoding.request import budget_for
from cyberslm.decoding.sampling import SamplingParams
from cyberslm.generation.engine import Engine
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import bytes_per_id, row_loader
from cyberslm.recipes.finetune import replayed
from cyberslm.recipes.interrupts import Interrupts
from cyberslm.recipes.machine import autocast, package_version, products
from cyberslm.recipes.origin import Origin
from cyberslm.recipes.preferences import objective_of, reference_for, trained_rows
from cyberslm.recipes.replay import deciding, naming, validated_apart
from cyberslm.text.tokenizer import Tokenizer
from cyberslm.training.distributed import Dist
from cyberslm.training.elsewhere import open_trackers
from cyberslm.training.ema import TRAINED, WeightMean
from cyberslm.training.loss import Score, join, measure
from cyberslm.training.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from cyberslm.training.plots import can_plot, curves
from cyberslm.training.sharing import fill, whole_model, whole_tensors
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import (
    Meter,
    MetricsFile,
    Record,
    Screen,
    event_line,
    peak_memory,
    read_metrics,
    validation_line,
)


def sampling(run: TrainRun) -> SamplingParams:
    """Settings of the samples that a run shows of itself."""
    return SamplingParams(max_new_tokens=run.eval.sample_tokens, temperature=0.8, top_p=0.95, seed=0)


def check_samples(run: TrainRun, tokenizer: Tokenizer) -> None:
    """Refuse a sample prompt that the model could not continue: `GenerationError`."""
    for prompt in run.eval.sample_prompts:
        budget_for(len(tokenizer.encode(prompt)), sampling(run), run.model.max_seq_len)


@dataclass(frozen=True)
class Process:
    """This process's part in a run: its place among the ranks, what it shows and which signals it got."""

    dist: Dist
    screen: Screen
    interrupts: Interrupts


class RunHooks:
    """One run in its folder: the hooks of the training loop and what they need; the first rank alone writes."""

    def __init__(  # noqa: PLR0913 (what a run is made of)
        self,
        run: TrainRun,
        origin: Origin,
        model: CyberSLM,
        prepared: Prepared,
        state: TrainState,
        process: Process,
    ) -> None:
        self.run, self.origin, self.model, self.prepared = run, origin, model, prepared
        self.dist, self.screen, self.interrupts = process.dist, process.screen, process.interrupts
        self.optimizer = build_optimizer(model, run.optimizer, products=products(run))
        self.mean = WeightMean(model, run.train.ema_decay) if run.train.ema_decay else None
        first = self.dist.first
        self.metrics = MetricsFile(run.folder / "metrics.jsonl" if first else None, step=state.step)
        self.samples = MetricsFile(run.folder / "samples.jsonl" if first else None, step=state.step)
        self.trackers = open_trackers(run.logging.trackers, run.folder, step=state.step) if first else []
        self.share_per_rate: float | None = None
        """What a token a second is of the machine's measured limit, where it is to be shown."""
        self.meter = Meter(total_steps=state.total_steps(run.train), interval=run.logging.interval)
        self.bytes_per_id = bytes_per_id(prepared.tokenizer)
        self.autocast = autocast(run.precision, model.device)
        self.loader = trained_rows(run, prepared)
        self.before: dict[str, object] | None = None
        """How the base scored on the run's validation text, before the first step; None from scratch."""

    def record(self, record: Record) -> None:
        if record["type"] == "train":
            record = {**record, **self._seen(float(str(record["tokens_per_second"])))}
        self.publish(record)
        if record["type"] == "train":
            self.screen.advance(int(str(record["step"])))
            line = self.meter.add(record)
        elif record["type"] in ("validation", "base"):
            line = validation_line(record, total_steps=self.meter.total_steps)
        else:
            line = event_line(record)
        if record["type"] == "plan":
            self.meter.total_steps = int(str(record["total"]))
        if line is not None:
            self.screen.line(line)

    def publish(self, record: Record) -> None:
        """A record for metrics.jsonl and the trackers."""
        self.metrics.write(record)
        for tracker in self.trackers:
            tracker.write(record)

    def _seen(self, rate: float) -> dict[str, float]:
        """What a train record says besides of the machine: peak memory of this process, share of the limit used."""
        seen: dict[str, float] = {"peak_memory": peak_memory()}
        if self.model.device.type == "cuda":
            seen["peak_gpu_memory"] = torch.cuda.max_memory_allocated(self.model.device)
        if self.share_per_rate is not None:
            seen["share_of_limit"] = rate * self.share_per_rate
        return seen

    def validate(self, state: TrainState) -> Score | None:
        with self._published():
            model = whole_model(self.model)
            self.dist.on_first(lambda: self._sample(model, state.step))
            return self._score(model)

    def measure_base(self) -> None:
        """Score a base before the first step, so that what training did to it can be told."""
        if not self.origin.fields or (score := self._score(whole_model(self.model))) is None:
            return
        self.before = _figures(score)
        judged = score.ranking or {"perplexity": score.perplexity}
        figures = {"loss": score.loss, **judged, "bits_per_byte": score.bits_per_byte}
        parts = {f"bits_per_byte/{name}": part.bits_per_byte for name, part in score.by_source.items()}
        self.record({"type": "base", "step": 0, "best": False, **figures, **parts})

    def _score(self, model: CyberSLM) -> Score | None:
        if self.prepared.validation is None:
            return None
        store = self.prepared.validation
        loader = row_loader(self.run, self.prepared, store, reference=reference_for(self.run, self.prepared, store))
        rows, limit = self.run.train.micro_batch_size, self.run.eval.max_rows
        loss, name, found = objective_of(self.run).loss, naming(self.run, self.prepared), []
        for part in validated_apart(self.run, self.prepared):
            batches = loader.sequential(rows, limit=limit, rank=self.dist.rank, world=self.dist.world, sources=part)
            with self.autocast():
                found.append(measure(model, batches, self.bytes_per_id, loss, name=name))
        mine = join(found)
        return deciding(join(Score.from_json(part) for part in self.dist.gather(mine.to_json())))

    @contextmanager
    def _published(self) -> Iterator[Mapping[str, Tensor]]:
        """The model holds the weights to judge and to publish; what is yielded must be saved besides to go on."""
        if self.mean is None:
            yield {}
            return
        with self.mean.applied() as trained:
            yield trained

    def _sample(self, model: CyberSLM, step: int) -> None:
        prompts = self.run.eval.sample_prompts
        if not prompts:
            return
        engine = Engine(model, self.prepared.tokenizer)
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
        if replayed(self.run) is not None:
            fields["rows_by_source"] = True
        if score is not None and math.isfinite(score.loss):
            fields["validation"] = _figures(score)
        if self.before is not None:
            fields["before"] = self.before
        if self.run.train.seq_len is not None:
            fields["seq_len"] = self.run.seq_len
        if self.mean is not None:
            fields["ema_decay"] = self.run.train.ema_decay
        self.interrupts.wants_save = False
        with self._published() as trained:
            tensors = whole_tensors({**optimizer_tensors(self.optimizer, self.model), **trained}, self.dist)
            model, training = whole_model(self.model), TrainingFiles(tensors, state.to_json())
            self.dist.on_first(lambda: self._write(model, fields, training, state.step))

    def _write(self, model: CyberSLM, fields: dict[str, object], training: TrainingFiles, step: int) -> None:
        for place in (self.metrics, self.samples, *self.trackers):
            place.sync()
        target = step_folder(self.checkpoints, step)
        self.origin.save(target, model, self.prepared.tokenizer, fields, training)
        returns = self.run.train.on_spike == "rollback"
        scheduled = step // self.run.checkpoint.interval * self.run.checkpoint.interval
        rotate(self.checkpoints, self.run.checkpoint.keep_last, current=step, keep=(scheduled,) if returns else ())
        self.screen.line(f"step {step}/{self.meter.total_steps or '?'} | saved {target}")
        self._plot()

    def load_training(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's training tensors back, the model holding the weights that it published."""
        trained = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{TRAINED}/")}
        if self.mean is not None:
            self.mean.load(trained)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in trained}
        load_optimizer_tensors(self.optimizer, self.model, tensors)

    def go_back(self, step: int) -> TrainState:
        if step == 0:
            fill(self.model, self.origin.fresh(self.model.device).state_dict())
            self.optimizer.state.clear()
            if self.mean is not None:
                self.mean.reset()
            state = TrainState()
        else:
            folder = step_folder(self.checkpoints, step)
            found, training = self.origin.reopened(folder, self.model.device), load_training(folder)
            fill(self.model, found.state_dict())
            self.load_training(training.tensors)
            state = TrainState.from_json(dict(training.state))
        self.dist.on_first(lambda: self._forget_after(step))
        return state

    def _forget_after(self, step: int) -> None:
        self.metrics.go_back(step)
        self.samples.go_back(step)
        for tracker in self.trackers:
            tracker.close()
        self.trackers = open_trackers(self.run.logging.trackers, self.run.folder, step=step)
        remove_after(self.checkpoints, step)

    def _plot(self) -> None:
        if self.run.logging.plots and can_plot():
            folder = files.make_folder(self.run.folder / "plots")
            png = curves({self.run.folder.name: read_metrics(self.run.folder / "metrics.jsonl")})
            files.write_bytes(folder / "loss.png", png)

    def should_save(self) -> bool:
        return self.interrupts.wants_save

    def should_stop(self) -> bool:
        return self.interrupts.number is not None

    @property
    def checkpoints(self) -> Path:
        return self.run.folder / "checkpoints"

    def close(self) -> None:
        for place in (self.metrics, self.samples, *self.trackers):
            place.close()


def _figures(score: Score) -> dict[str, object]:
    """What a manifest keeps of a score and its parts."""
    by_source = {name: part.figures() for name, part in score.by_source.items()}
    return score.figures() | ({"by_source": by_source} if by_source else {})
