from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import all_of, in_ranks

from cyberslm.data.loader import IGNORE, Batch
from cyberslm.errors import ConfigError, TrainingError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.config import TrainConfig
from cyberslm.training.distributed import Dist, DistributedConfig, first_to_tell, joined
from cyberslm.training.ema import WeightMean
from cyberslm.training.loss import Loss, LossOutput, Score, join, next_token_loss
from cyberslm.training.loss_scale import LossScale
from cyberslm.training.optim import (
    ADAMW_STATE,
    OptimizerConfig,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
)
from cyberslm.training.schedule import SchedulerConfig
from cyberslm.training.shards import cut_like, own_part, whole
from cyberslm.training.sharing import fill, recompute_blocks, share, whole_model
from cyberslm.training.state import TrainState
from cyberslm.training.trainer import Plan, train

CPU = torch.device("cpu")
SIZES = {"vocab_size": 41, "hidden_dim": 32, "num_layers": 2, "num_heads": 2, "ffn_hidden_dim": 48, "max_seq_len": 16}
"""The vocabulary is odd, so that the embedding can't be cut into equal parts."""


class Rows:
    """Random rows as a function of the step, cut into runs for the ranks; ``trained`` targets of each row count."""

    def __init__(self, trained: Sequence[int]) -> None:
        self.trained = trained

    def first_row(self, step: int) -> int:
        return step * len(self.trained)

    def batch(self, step: int, *, rank: int = 0, world: int = 1, passed: int = 0) -> Batch:
        rows = len(self.trained)
        step += passed // rows
        ids = torch.randint(4, 41, (rows, 17), generator=torch.Generator().manual_seed(step))
        targets = ids[:, 1:].clone()
        for row, count in enumerate(self.trained):
            targets[row, count:] = IGNORE
        return Batch(ids[:, :-1].contiguous(), targets).rows(rows * rank // world, rows * (rank + 1) // world)


class Hooks:
    def __init__(self) -> None:
        self.records: list[dict] = []

    def record(self, record: dict) -> None:
        self.records.append(record)

    def validate(self, state: TrainState) -> Score | None:
        return None

    def save(self, state: TrainState, score: Score | None) -> None: ...

    def should_save(self) -> bool:
        return False

    def should_stop(self) -> bool:
        return False

    def go_back(self, step: int) -> TrainState:
        raise NotImplementedError(step)


class Seen(torch.optim.SGD):
    """Keeps the whole gradients of its last step, by name."""

    def __init__(self, model: CyberSLM) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.named = dict(model.named_parameters())
        self.gradients: dict[str, np.ndarray] = {}

    def step(self, *args: object) -> None:
        self.gradients = {name: whole(p.grad).numpy().copy() for name, p in self.named.items()}
        super().step()


SHOWN = ("step", "loss", "grad_norm", "step_tokens", "tokens", "skipped")
SCALED = ("loss_scale", "overflows")
Case = dict[str, Any]
Result = tuple[list[dict[str, np.ndarray]], list[dict]]


def go(case: Case, dist: Dist) -> Result:
    """Gradients and records of two steps, as every rank sees them."""
    model = CyberSLM(CyberSLMConfig(**SIZES | case.get("model", {})), seed=1)
    if case.get("recompute"):
        recompute_blocks(model)
    loss: Loss = next_token_loss
    if poison := case.get("poisoned"):
        loss = poisoned_for(dist.rank, poison)
    shared = share(model, loss, dist, precision=case.get("precision", "fp32"))
    optimizer, hooks = Seen(model), Hooks()
    config = TrainConfig(
        max_steps=2,
        micro_batch_size=case["micro"],
        global_batch_size=len(case["rows"]),
        grad_clip=case.get("clip", 0.0),
    )
    plan = Plan(
        config=config,
        seed=1,
        schedule=SchedulerConfig(name="constant", warmup_steps=0),
        until=1 if case.get("one") else 2,
        validate_every=9,
        save_every=9,
        loss=shared.loss,
        holding=shared.holding,
        dist=dist,
        loss_scale=case.get("loss_scale"),
    )
    train(plan, model, optimizer, Rows(case["rows"]), TrainState(), hooks)
    left = {name: p.detach().numpy() for name, p in whole_model(model).named_parameters()}
    shown = [{key: record[key] for key in (*SHOWN, *SCALED) if key in record} for record in hooks.records]
    return [optimizer.gradients, left], shown


def poisoned_for(rank: int, poison: Sequence[str]) -> Callable[[CyberSLM, Batch], LossOutput]:
    """Those parts of the last rank's loss are infinite."""

    def loss(model: CyberSLM, batch: Batch) -> LossOutput:
        output = next_token_loss(model, batch)
        infinite = {name: getattr(output, name) * math.inf for name in poison}
        return output._replace(**infinite) if rank == 1 else output

    return loss


CASES: dict[str, Case] = {
    "equal rows": {"rows": (16, 16, 16, 16), "micro": 2},
    "accumulation of three, uneven rows": {"rows": (1, 2, 10, 16, 7), "micro": 1},
    "a rank without a trained token": {"rows": (0, 0, 16, 3), "micro": 1},
    "clipped": {"rows": (5, 9, 16), "micro": 2, "clip": 0.05},
    "untied": {"rows": (5, 9, 16), "micro": 2, "model": {"tie_weights": False}},
    "activations computed again": {"rows": (5, 9, 16), "micro": 1, "recompute": True},
    "scaled and clipped": {"rows": (5, 9, 16), "micro": 2, "clip": 0.05, "loss_scale": LossScale()},
}


def all_cases(strategy: str) -> list[Result]:
    with joined(DistributedConfig(strategy=strategy), CPU) as dist:
        assert (dist.strategy, dist.backend, dist.world) == (strategy, "gloo", 2)
        return [go(case, dist) for case in CASES.values()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_have_the_gradients_of_one_process(strategy: str) -> None:
    """G33 across ranks: sums are divided once by the trained tokens of all, also where a rank has fewer or none."""
    found = all_of(in_ranks(all_cases, strategy))
    for name, first, second in zip(CASES, *found, strict=True):
        alone = go({**CASES[name], "micro": 16, "recompute": False}, Dist())
        for rank in (first, second):
            for part, wanted in zip(rank[0], alone[0], strict=True):
                assert part.keys() == wanted.keys()
                for key, value in part.items():
                    np.testing.assert_allclose(value, wanted[key], rtol=1e-5, atol=1e-6, err_msg=f"{name}: {key}")
            for record, wanted_record in zip(rank[1], alone[1], strict=True):
                assert record == pytest.approx(wanted_record, rel=1e-5, abs=1e-6), name
        assert first[1] == second[1], f"{name}: ranks saw other numbers"


def bf16_blocks(model: CyberSLM, batch: Batch) -> LossOutput:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return next_token_loss(model, batch)


def test_fsdp_in_bf16_keeps_fp32_gradients_and_weights_that_are_near_those_of_fp32() -> None:
    fp32, bf16 = all_of(in_ranks(mixed_precision))[0]
    for name, gradient in bf16.items():
        assert gradient.dtype == np.float32
        norm = np.linalg.norm(fp32[name])
        assert 0 < np.linalg.norm(gradient - fp32[name]) < 0.03 * norm, name


def mixed_precision() -> list[dict[str, np.ndarray]]:
    found = []
    with joined(DistributedConfig(strategy="fsdp"), CPU) as dist:
        for precision, loss in (("fp32", next_token_loss), ("bf16", bf16_blocks)):
            model = CyberSLM(CyberSLMConfig(**SIZES), seed=1)
            shared = share(model, loss, dist, precision=precision)
            batch = Rows((16, 9, 7, 16)).batch(0, rank=dist.rank, world=2)
            with shared.holding():
                shared.loss(model, batch.rows(0, 1)).objective.backward()
            shared.loss(model, batch.rows(1, 2)).objective.backward()
            found.append({name: whole(p.grad).numpy().copy() for name, p in model.named_parameters()})
    return found


def skipping(strategy: str) -> list[dict]:
    with joined(DistributedConfig(strategy=strategy), CPU) as dist:
        found = []
        for poison, scale in ((("objective", "loss_sum"), None), (("objective",), LossScale(start=2.0))):
            case = {"rows": (4, 5, 6), "micro": 1, "poisoned": poison, "loss_scale": scale}
            (_, left), records = go(case, dist)
            assert all(np.isfinite(value).all() for value in left.values())
            found += records
        return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_step_that_is_not_finite_on_one_rank_is_skipped_by_all(strategy: str) -> None:
    """With a loss scale a gradient alone that isn't is an overflow on all, until the scale is 1."""
    for records in all_of(in_ranks(skipping, strategy)):
        assert [record["skipped"] for record in records] == [1, 2, 0, 1]
        assert [record[name] for name in SCALED for record in records[2:]] == [2.0, 1.0, 1, 1]


def together() -> list[Any]:
    with joined(DistributedConfig(), CPU) as dist:
        mine = {"rank": dist.rank, "odd": math.inf, "text": "x" * (1 + 40 * dist.rank)}
        return [
            dist.each(dist.rank, math.nan, 2.0**53),
            dist.any(dist.rank == 1),
            dist.any(False),
            dist.gather(mine),
            dist.told(dist.rank + 7),
            dist.on_first(lambda: dist.rank + 1),
            dist.total(0.1),
        ]


def test_ranks_see_the_same_values_in_the_same_order() -> None:
    first, second, third = all_of(in_ranks(together, world=3))
    assert first[5:6] + second[5:6] + third[5:6] == [1, None, None]
    assert (
        str(first[0])
        == str(second[0])
        == "[[0.0, 1.0, 2.0], [nan, nan, nan], [9007199254740992.0" + ", 9007199254740992.0" * 2 + "]]"
    )
    assert first[1:5] == second[1:5] == third[1:5]
    assert first[1:3] == [True, False]
    assert [(part["rank"], part["odd"], len(part["text"])) for part in first[3]] == [
        (r, math.inf, 1 + 40 * r) for r in range(3)
    ]
    assert first[4] == 7
    assert first[6] == pytest.approx(0.3)


def test_alone_is_a_world_of_one_without_a_network() -> None:
    with joined(DistributedConfig(), CPU) as dist:
        assert dist == Dist()
        assert dist.each(1, 2) == [[1.0], [2.0]]
        assert (dist.gather([1]), dist.told("x"), dist.on_first(lambda: 3), dist.any(True)) == ([[1]], "x", 3, True)
    assert not torch.distributed.is_initialized()


def test_fsdp_on_one_process_is_honoured() -> None:
    case = {"rows": (5, 9, 16), "micro": 2}
    with joined(DistributedConfig(strategy="fsdp"), CPU) as dist:
        assert (dist.world, dist.backend) == (1, "gloo")
        sharded = go(case, dist)
    alone = go(case, Dist())
    for key, value in sharded[0][1].items():
        np.testing.assert_allclose(value, alone[0][1][key], atol=1e-6)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number from 1 on, not 'two'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE must be a whole number from 1 on, not '0'"),
        ({"RANK": "-1"}, "RANK must be a whole number from 0 on, not '-1'"),
        ({"LOCAL_RANK": "\u00b2"}, "LOCAL_RANK must be a whole number from 0 on"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set: start the processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
    ],
)
def test_environment_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], message: str
) -> None:
    for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=message), joined(DistributedConfig(), CPU):
        pass


@pytest.mark.parametrize(("field", "value"), [("timeout", 0.5), ("wait", 1e8), ("timeout", math.nan)])
def test_impossible_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        DistributedConfig(**{field: value})


def test_only_what_the_network_says_is_called_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cyberslm.training.distributed.PAUSE_SECONDS", 0)
    alone = DistributedConfig(strategy="fsdp")
    with pytest.raises(RuntimeError, match="shapes") as found, joined(alone, CPU):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(found.value, TrainingError)
    with pytest.raises(TrainingError, match=r"rank 0 lost another rank.*Connection closed by peer"), joined(alone, CPU):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9\nmore")


def fall_silent(number: int) -> float:
    with joined(DistributedConfig(timeout=1.5), CPU) as dist:
        dist.total(1.0)
        if dist.rank == 1:
            os.kill(os.getpid(), number)
        return dist.total(1.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_rank_that_is_killed_or_silent_ends_the_others_with_a_message(number: int) -> None:
    first, second = in_ranks(fall_silent, number, within=6.0)
    assert first.error is not None
    assert first.error.startswith("TrainingError: rank 0 lost another rank, which ended or was silent")
    assert second.code == -signal.SIGKILL


def killed_while_waiting() -> None:
    with joined(DistributedConfig(), CPU) as dist:
        dist.on_first(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_first_rank_killed_at_its_work_ends_those_that_wait() -> None:
    _, second = in_ranks(killed_while_waiting, within=15.0)
    assert second.error is not None
    assert second.error.startswith("TrainingError: rank 1 lost another rank")


def interrupted_while_waiting(marker: Path) -> str:
    def interrupt(*_: object) -> None:
        marker.touch()
        raise SystemExit(5)

    signal.signal(signal.SIGALRM, interrupt)
    with joined(DistributedConfig(), CPU) as dist:
        if dist.rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        dist.on_first(lambda: signal.sigtimedwait([signal.SIGUSR2], 1))
    return "done"


def test_waiting_rank_hears_signals(tmp_path: Path) -> None:
    """A wait inside the network library would hear none for as long as data are prepared."""
    in_ranks(interrupted_while_waiting, tmp_path / "heard", within=15.0)
    assert (tmp_path / "heard").exists()


def test_process_without_a_launcher_always_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert first_to_tell()


def test_first_process_that_tells_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert [first_to_tell(), first_to_tell()] == [True, False]
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 60)
    assert [first_to_tell(), first_to_tell()] == [True, False], "what an earlier start told doesn't count"


def test_joined_scores_are_the_score_of_all() -> None:
    part = Score(2.5, 5, 9)
    scores = [Score(3.0, 2, 7, {"a": part}), Score(0.0, 0, 0), Score(1.0, 1, 1, {"b": part, "a": part})]
    joint = join([Score.from_json(score.to_json()) for score in scores])
    assert joint == Score(4.0, 3, 8, {"a": Score(5.0, 10, 18), "b": part})


def cut_up_and_whole(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights, their mean and moments after three updates with the same gradients, of a cut model and of a plain one.

    After the second the weights and their mean are put back as a checkpoint has them.
    """
    found = []
    with joined(DistributedConfig(strategy="fsdp"), CPU) as dist:
        for sharing in (True, False):
            model = CyberSLM(CyberSLMConfig(**SIZES), seed=1)
            if sharing:
                share(model, next_token_loss, dist, precision="fp32")
            optimizer, mean = build_optimizer(model, OptimizerConfig(name=name)), WeightMean(model, 0.9)
            for step in range(1, 4):
                drawn = torch.Generator().manual_seed(step)
                for parameter in model.parameters():
                    parameter.grad = cut_like(torch.randn(parameter.shape, generator=drawn), parameter)
                optimizer.step()
                mean.update(step)
                if step == 2:
                    with mean.applied() as trained:
                        kept = {key: whole(tensor).clone() for key, tensor in trained.items()}
                        published = {key: whole(p.detach()).clone() for key, p in model.named_parameters()}
                    fill(model, published)
                    mean.load(kept)
            with mean.applied() as trained:
                held = {f"mean/{key}": whole(p) for key, p in model.named_parameters()} | dict(trained)
                held |= optimizer_tensors(optimizer, model)
                found.append({key: whole(tensor.detach()).numpy().copy() for key, tensor in held.items()})
    return found[0], found[1]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_matrices_that_are_cut_up_take_the_step_of_whole_ones(name: str) -> None:
    """Muon needs all of a matrix; the mean of the weights moves part by part."""
    for sharded, plain in all_of(in_ranks(cut_up_and_whole, name, world=3)):
        assert sharded.keys() == plain.keys()
        for key, value in sharded.items():
            np.testing.assert_allclose(value, plain[key], rtol=1e-6, atol=1e-7, err_msg=key)


def restored_sizes() -> list[tuple[int, int]]:
    """Bytes of each moment that a rank of two got back, and of the memory that it keeps for it."""
    with joined(DistributedConfig(strategy="fsdp"), CPU) as dist:
        model = CyberSLM(CyberSLMConfig(**SIZES), seed=1)
        share(model, next_token_loss, dist, precision="fp32")
        optimizer = build_optimizer(model, OptimizerConfig())
        full = {
            f"{kind}/{name}": torch.zeros(() if kind == "step" else p.shape)
            for name, p in model.named_parameters()
            for kind in ADAMW_STATE
        }
        load_optimizer_tensors(optimizer, model, full)
        parts = {key: own_part(tensor) for key, tensor in optimizer_tensors(optimizer, model).items()}
        assert all(
            2 * part.numel() < full[key].numel() + 2 * full[key].shape[-1] for key, part in parts.items() if part.ndim
        )
        return [(part.nbytes, part.untyped_storage().nbytes()) for part in parts.values()]


def test_restored_moments_keep_the_memory_of_their_part_alone() -> None:
    """A part that is a view of the whole tensor would keep all of it; torch copies it."""
    for sizes in all_of(in_ranks(restored_sizes)):
        assert all(kept == size for size, kept in sizes)


def kept_bytes(model: CyberSLM, batch: Batch) -> int:
    """Bytes of different storages kept for the backward pass, weights left out."""
    weights = {p.data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), pack(t))[1], lambda t: t):
        next_token_loss(model, batch)
    return sum(found.values())


def test_activation_checkpointing_keeps_less_and_gives_the_same_bits_with_dropout() -> None:
    config = CyberSLMConfig(**SIZES | {"num_layers": 6, "dropout": 0.1, "attn_dropout": 0.1})
    batch = Rows((16,) * 8).batch(0)
    gradients, kept = [], []
    for recompute in (False, True):
        model = CyberSLM(config, seed=1).train()
        if recompute:
            recompute_blocks(model)
        kept.append(kept_bytes(model, batch))
        torch.manual_seed(5)
        next_token_loss(model, batch).objective.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert kept[1] < kept[0] / 3
