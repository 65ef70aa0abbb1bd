from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cyberslm.data.loader import Batch
from cyberslm.errors import ConfigError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import TARGETS, AdaptedLinear, LoraConfig, adapters, add_adapters, keep_base_in, merge
from cyberslm.model.model import CyberSLM
from cyberslm.training.loss import next_token_loss

SIZES = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 48, "max_seq_len": 40}
IDS = torch.randint(4, 96, (2, 11), generator=torch.Generator().manual_seed(5))
BATCH = Batch(IDS[:, :-1], IDS[:, 1:])


def adapted(config: LoraConfig | None = None, **changes: object) -> CyberSLM:
    """A model whose adapters have learned something."""
    model = CyberSLM(CyberSLMConfig(vocab_size=96, **(SIZES | changes)), seed=4)
    add_adapters(model, LoraConfig(rank=4) if config is None else config, seed=1)
    generator = torch.Generator().manual_seed(7)
    for layer in adapters(model).values():
        layer.lora_B.data.normal_(0, 0.05, generator=generator)
    return model


def by_formula(layer: AdaptedLinear, x: Tensor) -> Tensor:
    out = x @ layer.weight.mT + layer.scale * (x @ layer.lora_A.mT) @ layer.lora_B.mT
    return out if layer.bias is None else out + layer.bias


@pytest.mark.parametrize("bias", [True, False])
def test_layer_and_its_gradients_are_those_of_the_formula(bias: bool) -> None:
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(12, 20, bias=bias, dtype=torch.float64), LoraConfig(rank=3, alpha=5))
    layer.lora_A.data, layer.lora_B.data = torch.randn(3, 12).double(), torch.randn(20, 3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 5, 20, dtype=torch.float64)
    learned = (x, layer.lora_A, layer.lora_B)
    mine = torch.autograd.grad(layer(x), learned, grad)
    wanted = torch.autograd.grad(by_formula(layer, x), learned, grad)
    torch.testing.assert_close(layer(x), by_formula(layer, x))
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(layer, (x,))


def test_dropout_is_on_the_adapters_input_alone_and_in_training_alone() -> None:
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(12, 20), LoraConfig(rank=3, dropout=0.5))
    layer.lora_A.data.normal_()
    layer.lora_B.data.normal_()
    x = torch.randn(4, 12, requires_grad=True)
    torch.manual_seed(3)
    got = layer(x)
    torch.manual_seed(3)
    inner = nn.functional.dropout(x, 0.5)
    wanted = nn.functional.linear(x, layer.weight, layer.bias) + layer.scale * (inner @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(got, wanted)
    learned, grad = (x, layer.lora_A, layer.lora_B), torch.randn(4, 20)
    for one, other in zip(
        torch.autograd.grad(got, learned, grad), torch.autograd.grad(wanted, learned, grad), strict=True
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(layer.eval()(x), by_formula(layer, x))


def test_new_adapters_change_nothing_and_are_a_function_of_the_seed() -> None:
    plain = CyberSLM(CyberSLMConfig(vocab_size=96, **SIZES), seed=4)
    first, again, other = (copy.deepcopy(plain) for _ in range(3))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        add_adapters(model, LoraConfig(rank=4), seed=seed)
    assert torch.equal(first(IDS), plain(IDS))
    same, differs = (
        [torch.equal(adapters(first)[name].lora_A, layer.lora_A) for name, layer in adapters(model).items()]
        for model in (again, other)
    )
    assert all(same)
    assert not any(differs)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_weights": False}, {"bias": True}, {"qk_norm": True, "head_dim": 12}, {"activation": "relu2"}],
)
def test_merged_model_has_the_logits_of_the_adapted_one(changes: dict) -> None:
    """G49, G50."""
    config = LoraConfig(rank=4, targets=tuple(t for t in TARGETS if t != "gate_proj" or "activation" not in changes))
    model = adapted(config, **changes).eval()
    wanted = model(IDS)
    plain = merge(model)
    assert not adapters(plain)
    torch.testing.assert_close(plain(IDS), wanted, atol=1e-5, rtol=0)
    assert {name for name, _ in plain.named_parameters()} == {
        name for name, _ in CyberSLM(plain.config, device="meta").named_parameters()
    }


def test_merge_rounds_once_and_leaves_base_and_adapter_as_they_were() -> None:
    """G50: repeated merging and unmerging drifted; here a merge makes new layers from what stays."""
    layer = next(iter(adapters(adapted()).values()))
    layer.weight.data = layer.weight.data.bfloat16()
    before = layer.weight.clone(), layer.lora_A.clone(), layer.lora_B.clone()
    exact = layer.weight.double() + layer.scale * layer.lora_B.double() @ layer.lora_A.double()
    found = [layer.merged().weight for _ in range(10)]
    assert all(torch.equal(one, found[0]) for one in found)
    assert all(torch.equal(a, b) for a, b in zip(before, (layer.weight, layer.lora_A, layer.lora_B), strict=True))
    error = (found[0].double() - exact).abs()
    assert (error <= exact.abs() * 2**-8).all()  # half a bf16 step


def test_only_adapters_get_gradients_and_the_base_stays() -> None:
    """G51."""
    model = adapted().train()
    before = {name: p.clone() for name, p in model.named_parameters() if "lora" not in name}
    next_token_loss(model, BATCH).objective.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if "lora" in name}
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.5).step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters() if name in before)


def test_frozen_head_gives_the_gradient_of_a_trained_one_to_features() -> None:
    frozen, trained = adapted().train(), adapted().train()
    trained.embed_tokens.weight.requires_grad_()
    for model in (frozen, trained):
        next_token_loss(model, BATCH).objective.backward()
    for name, layer in adapters(frozen).items():
        torch.testing.assert_close(layer.lora_A.grad, adapters(trained)[name].lora_A.grad)
    assert frozen.embed_tokens.weight.grad is None
    assert trained.embed_tokens.weight.grad is not None


def test_base_in_bf16_gives_what_autocast_gives_from_fp32() -> None:
    full, half = adapted().eval(), adapted().eval()
    full.embed_tokens.weight.data = full.embed_tokens.weight.data.bfloat16().float()  # the lookup isn't a product
    keep_base_in(half, torch.bfloat16)
    assert {p.dtype for name, p in half.named_parameters() if "norm" in name or "lora" in name} == {torch.float32}
    assert half.layers[0].self_attn.q_proj.weight.dtype == half.embed_tokens.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(half(IDS), full(IDS), atol=0, rtol=0)
    assert half(IDS).dtype == torch.float32  # and without autocast
    assert half.dtype == torch.float32


def test_cached_decoding_of_an_adapted_model_is_that_of_the_merged_one() -> None:
    model = adapted().eval()
    found = model.generate(IDS, 8)
    assert torch.equal(found, merge(copy.deepcopy(model)).generate(IDS, 8))


def test_targets_alone_are_adapted() -> None:
    model = adapted(LoraConfig(rank=2, targets=("v_proj", "down_proj")))
    assert set(adapters(model)) == {
        f"layers.{n}.{name}" for n in (0, 1) for name in ("self_attn.v_proj", "mlp.down_proj")
    }


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert LoraConfig(rank=16, alpha=8).scale == 0.5
    assert LoraConfig(rank=16, alpha=8, rslora=True).scale == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ("lm_head",)}, "targets has 'lm_head': embedding and head take no adapter"),
        ({"targets": ("embed_tokens",)}, "targets has 'embed_tokens': embedding and head take no adapter"),
        ({"targets": ("wq",)}, "targets has 'wq': known are q_proj"),
        ({"targets": ()}, "targets must name one layer or more"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
        ({"rank": 0}, "rank must be from 1 to 4,096, not 0"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_settings_that_cant_be_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)


def test_target_that_the_base_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora.targets has 'gate_proj', and the base has no such layer"):
        adapted(activation="gelu")


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_blocks_give_the_gradients_of_plain_ones(dropout: float) -> None:
    model = adapted(LoraConfig(rank=4, dropout=dropout)).train()
    found = []
    for on in (False, True):
        model.compile_blocks(on=on)
        torch.manual_seed(1)
        output = next_token_loss(model, BATCH)
        output.objective.backward()
        found.append([layer.lora_A.grad for layer in adapters(model).values()] + [output.loss_sum.detach()])
        model.zero_grad(set_to_none=True)
    if dropout:  # other draws
        assert all(torch.isfinite(one).all() for one in found[1])
        return
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
