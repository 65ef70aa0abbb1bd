"""Compiled blocks give what plain ones give, and a machine that can't compile trains without."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from cyberslm.data.loader import Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.compiled import compile_and_try, is_worth_compiling
from cyberslm.training.config import NO_LIMIT, TrainConfig
from cyberslm.training.loss import next_token_loss

CONFIG = CyberSLMConfig(
    vocab_size=50, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_dim=48, max_seq_len=96
)
bf16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def rows(*, documents: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (3, 97), generator=generator)
    docs = (torch.rand(3, 96, generator=generator) < 0.05).long().cumsum(1) if documents else None
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), docs)


def gradients(model: CyberSLM, batch: Batch, autocast: object) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with autocast():  # type: ignore[operator]
        objective = next_token_loss(model, batch).objective
    objective.backward()
    return [objective.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's graphs, run by torch's plain operators: no C++ compiler, no minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def agree(documents: bool, autocast: object, tolerance: float) -> None:
    model, batch = CyberSLM(CONFIG, seed=1).train(), rows(documents=documents)
    plain = gradients(model, batch, autocast)
    assert compile_and_try(model, next_token_loss, batch, autocast) is None  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())
    for one, other in zip(gradients(model, batch, autocast), plain, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("autocast", "tolerance"), [(nullcontext, 1e-5), (bf16, 2e-2)])
def test_graphs_give_the_gradients_of_plain_blocks(
    without_code: None, documents: bool, autocast: object, tolerance: float
) -> None:
    agree(documents, autocast, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("autocast", "tolerance"), [(nullcontext, 1e-5), (bf16, 2e-2)])
def test_compiled_code_gives_the_gradients_of_plain_blocks(documents: bool, autocast: object, tolerance: float) -> None:
    agree(documents, autocast, tolerance)


def test_rows_cut_otherwise_need_no_other_graph(without_code: None) -> None:
    model = CyberSLM(CONFIG, seed=1).train()
    assert compile_and_try(model, next_token_loss, rows(documents=True), nullcontext) is None
    other = rows()._replace(docs=torch.div(torch.arange(96), 30, rounding_mode="floor").expand(3, -1).contiguous())
    with torch.compiler.set_stance("fail_on_recompile"):
        next_token_loss(model, other).objective.backward()


def test_only_training_runs_the_graph(without_code: None) -> None:
    """Validation and generation have other shapes: each would compile anew."""
    model = CyberSLM(CONFIG, seed=1).train()
    assert compile_and_try(model, next_token_loss, rows(), nullcontext) is None
    with torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        model(rows().input_ids[:1, :5])
    model.eval()
    with torch.compiler.set_stance("fail_on_recompile"):
        model.generate(rows().input_ids[:1, :5], 3)


def test_random_state_is_left_alone(without_code: None) -> None:
    model = CyberSLM(CyberSLMConfig(**{**vars(CONFIG), "dropout": 0.5}), seed=1)
    before = torch.get_rng_state()
    compile_and_try(model, next_token_loss, rows(), nullcontext)
    assert torch.equal(before, torch.get_rng_state())


def test_machine_that_can_t_compile_says_why_and_trains_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_options: object) -> object:
        def run(*_inputs: object) -> object:
            raise RuntimeError("no compiler\nlong story")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    model = CyberSLM(CONFIG, seed=1)
    assert compile_and_try(model, next_token_loss, rows(), nullcontext) == "no compiler"
    next_token_loss(model, rows()).objective.backward()


def test_length_of_the_run_decides() -> None:
    assert not is_worth_compiling(CONFIG, TrainConfig())
    assert not is_worth_compiling(CyberSLMConfig(), TrainConfig(max_steps=1000), native=True)
    for left in ({"norm": "layer"}, {"activation": "gelu"}, {"dropout": 0.1}, {"attn_dropout": 0.1}):
        assert is_worth_compiling(CyberSLMConfig(**left), TrainConfig(max_steps=1000), native=True)
    assert is_worth_compiling(CyberSLMConfig(), TrainConfig(max_steps=1000))
    assert not is_worth_compiling(CyberSLMConfig(), TrainConfig(max_steps=NO_LIMIT, max_time="9m"))
    assert is_worth_compiling(CyberSLMConfig(), TrainConfig(max_steps=NO_LIMIT, max_time="10m"))
