from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.optim import (
    OptimizerConfig,
    build_optimizer,
    group_sizes,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
    set_rates,
)

CONFIG = CyberSLMConfig(vocab_size=40, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=16)


def step(model: CyberSLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(4, 40, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


NAMES = ("adamw", "muon")


def groups(model: CyberSLM, **settings: object) -> dict[str, dict]:
    return {group["name"]: group for group in parameter_groups(model, OptimizerConfig(**settings))}


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_the_group_of_its_kind(tied: bool) -> None:
    config = replace(CONFIG, tie_weights=tied, qk_norm=True, bias=True)
    model = CyberSLM(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {group: {names[parameter] for parameter in content["params"]} for group, content in groups(model).items()}
    embeddings = {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert found["embeddings"] == embeddings
    assert found["hidden"] == {n for p, n in names.items() if p.ndim == 2} - embeddings
    assert found["gains"] == {n for p, n in names.items() if p.ndim == 1}
    assert any("q_norm" in name for name in found["gains"])
    assert any(name.endswith("bias") for name in found["gains"])


@pytest.mark.parametrize(("decay_embeddings", "expected"), [(True, 0.1), (False, 0.0)])
def test_gains_never_decay_and_embeddings_where_asked(decay_embeddings: bool, expected: float) -> None:
    found = groups(CyberSLM(CONFIG), decay_embeddings=decay_embeddings)
    decays = {name: group["weight_decay"] for name, group in found.items()}
    assert decays == {"hidden": 0.1, "embeddings": expected, "gains": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_decay_shrinks_matrices_without_a_gradient_and_nothing_else(name: str) -> None:
    model = CyberSLM(CONFIG, seed=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.5, decay_embeddings=False))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, parameter in model.named_parameters():
        factor = 1.0 if parameter.ndim == 1 or "embed" in key else 0.95
        torch.testing.assert_close(parameter, before[key] * factor)


def test_group_sizes_add_up_to_the_model() -> None:
    model = CyberSLM(CONFIG)
    sizes = group_sizes(model, OptimizerConfig(name="muon", lr=1e-3, muon_lr=2e-2))
    assert sum(group["parameters"] for group in sizes.values()) == CONFIG.num_parameters
    assert [(n, g["algorithm"], g["lr"]) for n, g in sizes.items()] == [
        ("hidden", "muon", 2e-2),
        ("embeddings", "adamw", 1e-3),
        ("gains", "adamw", 1e-3),
    ]


def test_frozen_parameters_are_in_no_group() -> None:
    model = CyberSLM(CONFIG)
    model.embed_tokens.weight.requires_grad_(False)
    assert set(groups(model)) == {"hidden", "gains"}


def test_one_share_scales_the_rate_of_every_group() -> None:
    model = CyberSLM(CONFIG)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=1e-3, muon_lr=2e-2))
    for share in (0.25, 1.0, 0.5):
        rates = set_rates(optimizer, share)
        assert rates == {"hidden": 2e-2 * share, "embeddings": 1e-3 * share, "gains": 1e-3 * share}
        assert [group["lr"] for group in optimizer.param_groups] == list(rates.values())


@pytest.mark.parametrize("name", NAMES)
def test_restored_state_is_equal_and_gives_the_same_next_updates(name: str) -> None:
    """G39 (pytorch#43706): moments were cast while loading, which changed every later update."""
    config = OptimizerConfig(name=name)
    models = [CyberSLM(CONFIG, seed=1) for _ in range(2)]
    first = build_optimizer(models[0], config)
    for seed in range(3):
        step(models[0], first, seed)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(first, models[0]).items()}
    models[1].load_state_dict(models[0].state_dict())
    second = build_optimizer(models[1], config)
    load_optimizer_tensors(second, models[1], saved)
    again = optimizer_tensors(second, models[1])
    assert set(again) == set(saved)
    assert all(again[name].dtype == saved[name].dtype and torch.equal(again[name], saved[name]) for name in saved)
    for seed in range(3, 8):
        for model, optimizer in zip(models, (first, second), strict=True):
            step(model, optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


def test_muon_keeps_a_momentum_for_its_matrices_and_two_moments_for_the_rest() -> None:
    model = CyberSLM(CONFIG, seed=1)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    step(model, optimizer, 0)
    tensors = optimizer_tensors(optimizer, model)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    kinds = {
        name: {key.split("/")[0] for key in tensors if key.endswith(f"/{name}")} for name, _ in model.named_parameters()
    }
    assert kinds["layers.0.mlp.up_proj.weight"] == {"momentum_buffer"}
    assert kinds["embed_tokens.weight"] == kinds["norm.weight"] == {"exp_avg", "exp_avg_sq", "step"}


def test_state_of_the_other_optimizer_is_refused_by_name() -> None:
    model = CyberSLM(CONFIG)
    muon, adamw = (build_optimizer(model, OptimizerConfig(name=name)) for name in ("muon", "adamw"))
    step(model, muon, 0)
    with pytest.raises(IntegrityError, match=r"exp_avg/layers.0\S+ is missing"):
        load_optimizer_tensors(adamw, model, optimizer_tensors(muon, model))


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


@pytest.mark.parametrize("field", ["muon_lr", "muon_momentum", "muon_adjust"])
def test_setting_of_muon_is_refused_without_it(field: str) -> None:
    value = {"muon_lr": 0.02, "muon_momentum": 0.9, "muon_adjust": "original"}[field]
    with pytest.raises(ConfigError, match=f"{field} is for name: muon"):
        OptimizerConfig(**{field: value})
    assert getattr(OptimizerConfig(name="muon", **{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("muon_lr", 0.0),
        ("muon_momentum", 1.0),
        ("lr", 0.0),
        ("lr", -1.0),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
    ],
)
def test_impossible_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        OptimizerConfig(**{field: value})
