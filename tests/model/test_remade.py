"""What products take in is made again going backward, to the same bits, and isn't kept meanwhile."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from keeping import bytes_kept

from cyberslm.data.loader import Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import LoraConfig, add_adapters
from cyberslm.model.model import CyberSLM
from cyberslm.model.remade import Recipe, Remade, not_kept
from cyberslm.training.loss import next_token_loss
from cyberslm.training.sharing import recompute_blocks

pytestmark = pytest.mark.usefixtures("native_cache")

SMALL = CyberSLMConfig(
    vocab_size=60, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_dim=64, max_seq_len=64
)
IDS = torch.randint(0, 60, (3, 41), generator=torch.Generator().manual_seed(0))
BATCH = Batch(IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous())


def network(*, lora: bool = False, **changes: object) -> CyberSLM:
    model = CyberSLM(replace(SMALL, **changes), seed=1)
    if lora:
        add_adapters(model, LoraConfig(rank=2), seed=3)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
    model.use_native()
    return model.train()


def gradients(model: CyberSLM, *, bf16: bool, passes: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = next_token_loss(model, BATCH).objective if passes == 1 else model(BATCH.input_ids).square().mean()
    for left in reversed(range(passes)):
        loss.backward(retain_graph=left > 0)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"activation": "geglu", "bias": True},
        {"activation": "gelu"},
        {"norm": "layer"},
        {"lora": True},
    ],
    ids=str,
)
def test_gradients_are_the_same_to_the_bit(changes: dict[str, object], bf16: bool) -> None:
    found = []
    for context in (nullcontext(), patch("cyberslm.model.block.not_kept", lambda *_: nullcontext())):
        ffn = patch("cyberslm.model.ffn.not_kept", lambda *_: nullcontext()) if found else nullcontext()
        with context, ffn:
            found.append(gradients(network(**changes), bf16=bf16))
    assert len(found[0]) == len(found[1]) > 3
    assert all(map(torch.equal, *found))


def test_a_second_pass_through_one_graph_makes_it_once_more() -> None:
    model = network()
    once = gradients(model, bf16=False)
    with patch("cyberslm.model.block.not_kept", lambda *_: nullcontext()):
        twice = gradients(model, bf16=False, passes=2)
    assert all(map(torch.equal, gradients(model, bf16=False, passes=2), twice))
    assert all(map(torch.equal, gradients(model, bf16=False), once))


def test_what_is_not_the_value_is_kept_as_it_is() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    value, other, made = torch.randn(3, 4), torch.randn(3, 4), []

    def recipe() -> torch.Tensor:
        made.append(1)
        return value.clone()

    with not_kept(value, Recipe(recipe, ())):
        result = (value @ weight).sum() + (value[1:] @ weight).sum() + (other @ weight).sum()
    assert not made
    result.backward()
    assert len(made) == 1
    right = value.sum(0) + value[1:].sum(0) + other.sum(0)
    torch.testing.assert_close(weight.grad, right.unsqueeze(1).expand(4, 4))


def test_the_value_is_let_go_when_all_that_asked_have_it() -> None:
    value = torch.ones(2)
    remade = Remade(value, Recipe(torch.clone, (value,)))
    first, second = remade.pack(value), remade.pack(value[1:])
    remade.unpack(first)
    assert remade._value is not None
    assert remade.unpack(second).tolist() == [1.0]
    assert remade._value is None


def test_without_gradients_and_without_a_recipe_nothing_is_hooked() -> None:
    value = torch.ones(2)
    with torch.no_grad():
        assert isinstance(not_kept(value, Recipe(torch.clone, (value,))), nullcontext)
    for each, recipe in ((value, None), (value[1:], Recipe(torch.clone, (value[1:],)))):
        assert isinstance(not_kept(each, recipe), nullcontext)


@pytest.mark.parametrize("lora", [False, True])
def test_less_is_kept(lora: bool) -> None:
    less = bytes_kept(network(lora=lora, num_layers=8), BATCH, bf16=True)
    with (
        patch("cyberslm.model.block.not_kept", lambda *_: nullcontext()),
        patch("cyberslm.model.ffn.not_kept", lambda *_: nullcontext()),
    ):
        assert less < 0.85 * bytes_kept(network(lora=lora, num_layers=8), BATCH, bf16=True)


def test_whole_blocks_that_are_made_again_keep_only_what_goes_in() -> None:
    """Hooks inside would have kept a block's weights and factors through its checkpoint."""
    model = network()
    right = gradients(model, bf16=False)
    recompute_blocks(model)
    with patch.object(Remade, "__init__", side_effect=AssertionError):
        again = gradients(model, bf16=False)
    assert all(map(torch.equal, again, right))


@pytest.mark.parametrize("name", ["down_proj.weight", "input_layernorm.weight", "q_proj.weight"])
def test_what_was_changed_in_place_is_an_error_as_without_hooks(name: str) -> None:
    """Gradients were wrong in silence."""
    model = network()
    loss = next_token_loss(model, BATCH).objective
    with torch.no_grad():
        next(p for each, p in model.named_parameters() if each.endswith(name)).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_a_graph_without_a_backward_pass_is_let_go(activation: str) -> None:
    """Results that their own operators keep held themselves for good."""
    model = network(activation=activation, num_layers=1)
    gone = []
    keep = Remade.pack

    def pack(self: Remade, tensor: torch.Tensor) -> object:
        packed = keep(self, tensor)
        gone.append(weakref.ref(self))
        return packed

    with patch.object(Remade, "pack", pack):
        loss = next_token_loss(model, BATCH).objective
    assert gone
    assert all(each() is not None for each in gone)
    del loss
    gc.collect()
    assert all(each() is None for each in gone)


def test_over_a_frozen_base_nothing_is_held_that_would_not_be() -> None:
    """In the first block the recipe kept what nothing else did."""
    model = CyberSLM(SMALL, seed=1)
    add_adapters(model, LoraConfig(rank=2, targets=("down_proj",)), seed=3)
    model.use_native()
    seen = []
    with patch("cyberslm.model.block.not_kept", lambda _value, recipe: seen.append(recipe) or nullcontext()):
        next_token_loss(model.train(), BATCH)
    assert seen[:2] == [None, None]
    assert seen[2] is not None
