"""What a step's rows are doesn't depend on when they were read, and a device is never waited for inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cyberslm.data.loader import Batch
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM
from cyberslm.model.plan import over_documents
from cyberslm.training.config import TrainConfig
from cyberslm.training.distributed import Dist
from cyberslm.training.feed import Feed
from cyberslm.training.loss import next_token_loss
from cyberslm.training.schedule import SchedulerConfig
from cyberslm.training.trainer import Plan, _accumulate, _micro_batches

META = torch.device("meta")
CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_dim=48)


class Rows:
    """Two rows a step, which hold its number; ``read`` lists what was asked for."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def batch(self, step: int, *, rank: int, world: int, passed: int) -> Batch:
        assert (rank, world) == (0, 1)
        self.read.append((step, passed))
        return Batch(torch.full((2, 4), step + passed), torch.full((2, 4), -100).index_fill(1, torch.tensor([0]), 5))


def test_next_steps_rows_are_read_once_and_early_where_a_device_works_meanwhile() -> None:
    rows = Rows()
    feed = Feed(rows, META, Dist())  # type: ignore[arg-type]
    assert feed.rows(1, passed=0)[1:] == (2, 2, 2)
    feed.read_ahead(2, passed=0)
    assert rows.read == [(0, 0), (1, 0)]
    assert feed.rows(2, passed=0).batch.input_ids.device == META
    assert rows.read == [(0, 0), (1, 0)]
    feed.read_ahead(3, passed=0)
    feed.rows(1, passed=8)  # after a rollback
    assert rows.read[-1] == (0, 8)


def test_processor_reads_when_it_trains() -> None:
    rows = Rows()
    feed = Feed(rows, torch.device("cpu"), Dist())  # type: ignore[arg-type]
    feed.read_ahead(1, passed=0)
    assert rows.read == []
    assert feed.rows(3, passed=4).batch.input_ids.unique().tolist() == [6]


class Copies(TorchDispatchMode):
    """Lists copies between host and device for which the host waits."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        result = func(*args, **given)
        places = {t.device.type for t in (*args, result) if isinstance(t, torch.Tensor)}
        waits = not (given.get("non_blocking") or any(a is True for a in args[2:3]))
        if name in ("_to_copy", "copy_") and len(places) > 1 and waits:
            self.found.append(name)
        return result


class Literals(TorchFunctionMode):
    """Lists tensors made on a device from Python's numbers, which are a copy too."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type != "cpu":
            self.found.append(func.__name__)
        return result


@contextmanager
def waits() -> Iterator[list[str]]:
    """Besides values that are read, which raises on the meta device: what makes a host wait for its device."""
    found: list[str] = []
    with Literals(found), Copies(found):
        yield found


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (lambda x: x.new_ones(3) + x.sum() + torch.full((1,), 3, device=META), []),
        (lambda x: torch.tensor([3], device=META), ["tensor"]),
        (lambda x: x.copy_(torch.zeros(3)), ["copy_"]),
        (lambda x: x.copy_(torch.zeros(3), non_blocking=True), []),
        (lambda x: torch.zeros(3).to(META), ["_to_copy"]),
        (lambda x: torch.zeros(3).to(META, non_blocking=True), []),
    ],
)
def test_a_copy_that_waits_is_seen(work: Callable[[torch.Tensor], object], wanted: list[str]) -> None:
    with waits() as found:
        work(torch.zeros(3, device=META))
    assert found == wanted


@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, torch.Tensor.nonzero, torch.Tensor.tolist])
def test_a_value_that_is_read_raises(ask: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        ask(torch.zeros(1, device=META))


def rows(device: torch.device | str, *, documents: bool) -> Batch:
    ids = torch.zeros(4, 16, dtype=torch.int64, device=device)
    return Batch(ids, ids, ids if documents else None)


VARIANTS: list[dict] = [
    {},
    {"sliding_window": 4},
    {"qk_norm": True, "logit_softcap": 5.0, "dropout": 0.1},
    {"bias": True, "norm": "layer", "activation": "gelu"},
    {"rope_scaling": RopeScaling(type="dynamic", factor=2.0, original_max_seq_len=8)},
]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_backward_of_all_micro_batches_read_no_value(
    variant: dict, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the meta device have none: whatever asks for one raises.

    A length given as ``torch.tensor([n], device=...)`` made each micro-batch wait for the one before.
    """
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device: False)  # which knows no meta device
    model = CyberSLM(CyberSLMConfig(**{**vars(CONFIG), "max_seq_len": 16, **variant}), device="meta").train()
    plan = Plan(
        config=TrainConfig(micro_batch_size=2, global_batch_size=4),
        schedule=SchedulerConfig(),
        seed=0,
        until=1,
        validate_every=1,
        save_every=1,
        autocast=nullcontext,
        loss=partial(next_token_loss, z_loss=0.1),
    )
    with waits() as found:
        total = _accumulate(plan, model, _micro_batches(plan, rows("meta", documents=documents), 3), 64.0)
    assert total.is_meta
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
    assert found == []


@pytest.mark.parametrize("window", [None, 4])
def test_block_masks_are_made_without_a_wait(window: int | None) -> None:
    model = CyberSLM(CONFIG, device="meta")
    with waits() as found:
        plan = over_documents(rows("meta", documents=True).input_ids, rope=model.rope, windows=[window])
    assert plan.sights[window].blocks is not None
    assert found == []


def test_rows_go_to_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **options: calls.append((args, options)) or self)
    batch, gpu = rows("cpu", documents=True), torch.device("cuda")
    batch.to(gpu)
    assert calls.count("pinned") == calls.count(((gpu,), {"non_blocking": True})) == 3


def test_rows_are_not_pinned_for_the_processor() -> None:
    batch = rows("cpu", documents=True)
    assert all(a is b for a, b in zip(batch.to(torch.device("cpu")), batch, strict=True))
