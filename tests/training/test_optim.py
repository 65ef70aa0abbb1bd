from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.optim import (
    OptimizerConfig,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
)

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)


def step(model: CyberSLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(4, 40, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_decay_is_for_matrices_only() -> None:
    model = CyberSLM(CONFIG)
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in decay["params"])
    assert all(p.ndim == 1 for p in no_decay["params"])
    assert len(decay["params"]) + len(no_decay["params"]) == len(list(model.parameters()))


def test_restored_state_is_equal_and_gives_the_same_next_updates() -> None:
    """G39 (pytorch#43706): moments were cast while loading, which changed every later update."""
    models = [CyberSLM(CONFIG, seed=1) for _ in range(2)]
    first = build_optimizer(models[0], OptimizerConfig())
    for seed in range(3):
        step(models[0], first, seed)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(first, models[0]).items()}
    models[1].load_state_dict(models[0].state_dict())
    second = build_optimizer(models[1], OptimizerConfig())
    load_optimizer_tensors(second, models[1], saved)
    again = optimizer_tensors(second, models[1])
    assert set(again) == set(saved)
    assert all(again[name].dtype == saved[name].dtype and torch.equal(again[name], saved[name]) for name in saved)
    for seed in range(3, 8):
        for model, optimizer in zip(models, (first, second), strict=True):
            step(model, optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"exp_avg/layers.9.mlp.up_proj.weight": torch.zeros(7)}, "layers.9.* is unknown"),
        (lambda t: t | {"other/norm.weight": torch.zeros(32)}, "other/norm.weight is unknown"),
        (lambda t: {k: v for k, v in t.items() if k != "step/norm.weight"}, "step/norm.weight is missing"),
        (lambda t: t | {"exp_avg/norm.weight": torch.zeros(7)}, r"exp_avg/norm.weight is torch.float32 \(7,\)"),
        (
            lambda t: t | {"exp_avg_sq/norm.weight": torch.zeros(32).bfloat16()},
            "exp_avg_sq/norm.weight is torch.bfloat16",
        ),
    ],
)
def test_state_that_does_not_belong_is_refused_by_name(change: Callable, words: str) -> None:
    model = CyberSLM(CONFIG)
    optimizer = build_optimizer(model, OptimizerConfig())
    step(model, optimizer, 0)
    tensors = optimizer_tensors(optimizer, model)
    with pytest.raises(IntegrityError, match=words):
        load_optimizer_tensors(build_optimizer(model, OptimizerConfig()), model, change(tensors))


@pytest.mark.parametrize(
    ("field", "value"), [("lr", 0.0), ("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", 0.0), ("weight_decay", -0.1)]
)
def test_impossible_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        OptimizerConfig(**{field: value})
