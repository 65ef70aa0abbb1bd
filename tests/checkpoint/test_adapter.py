from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cyberslm.checkpoint.adapter import (
    apply_adapter,
    copy_adapter,
    kept_extras,
    kept_tokenizer,
    load_adapter,
    save_adapter,
)
from cyberslm.checkpoint.folder import Extras, ModelFolder, TrainingFiles, save_model
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import LoraConfig, adapters, add_adapters
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer

SIZES = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 48, "max_seq_len": 40}
IDS = torch.randint(4, 96, (2, 11), generator=torch.Generator().manual_seed(5))


def base(**changes: object) -> CyberSLM:
    return CyberSLM(CyberSLMConfig(vocab_size=400, **(SIZES | changes)), seed=4).eval()


def learned(model: CyberSLM) -> None:
    generator = torch.Generator().manual_seed(7)
    for layer in adapters(model).values():
        layer.lora_B.data.normal_(0, 0.05, generator=generator)


def words(trained: Path) -> Tokenizer:
    return load_tokenizer(trained / "run" / "final")


@pytest.fixture
def folder(tmp_path: Path, trained: Path) -> Path:
    model, config = base(), LoraConfig(rank=4, alpha=6, targets=("q_proj", "down_proj"), rslora=True)
    add_adapters(model, config)
    learned(model)
    training = TrainingFiles({"exp_avg/x": torch.arange(3.0)}, {"step": 7})
    adapted = ModelFolder(model, words(trained), {"step": 7, "base_sha256": "ab"}, Extras("hi", (5,)))
    save_adapter(tmp_path / "a", adapted, config, base="somewhere", training=training)
    return tmp_path / "a"


def test_saved_adapter_comes_back_bit_for_bit(folder: Path) -> None:
    found = load_adapter(folder)
    assert (found.config.rank, found.config.alpha, found.config.rslora) == (4, 6.0, True)
    assert (found.base, found.base_sha256) == ("somewhere", "ab")
    wanted, model = base(), base()
    add_adapters(wanted, LoraConfig(rank=4, alpha=6, targets=("q_proj", "down_proj"), rslora=True))
    learned(wanted)
    apply_adapter(model, found)
    assert set(adapters(model)) == set(adapters(wanted))
    assert torch.equal(model(IDS), wanted(IDS))


def test_copy_holds_all_but_the_training_state(folder: Path, tmp_path: Path) -> None:
    copy_adapter(folder, tmp_path / "copy")
    here, copied = ({path.name for path in each.iterdir()} for each in (folder, tmp_path / "copy"))
    assert copied == here - {"training"}
    assert {"adapter_config.json", "chat_template.jinja", "generation_config.json", "tokenizer.json"} < copied
    assert load_adapter(tmp_path / "copy").base_sha256 == "ab"


def test_adapter_keeps_how_its_model_is_asked(folder: Path, trained: Path) -> None:
    """Chat template and stop ids of an adapter were those of its base, whatever it was trained with."""
    config, of_base = base().config, Extras("base's", (7,))
    assert kept_extras(folder, config, of_base) == Extras("hi", (5,))
    kept = kept_tokenizer(folder)
    assert kept is not None
    assert kept.sha256 == words(trained).sha256


def test_adapter_of_peft_has_the_template_beside_it_and_else_what_its_base_has(folder: Path) -> None:
    config, of_base = base().config, Extras("base's", (7,))
    as_of_peft(folder)
    (folder / "generation_config.json").unlink()
    assert kept_extras(folder, config, of_base) == Extras("hi", (7,))
    assert kept_tokenizer(folder) is None
    (folder / "chat_template.jinja").unlink()
    assert kept_extras(folder, config, of_base) == of_base


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
def test_peft_opens_our_adapter_on_the_transformers_model(
    tmp_path: Path, trained: Path, *, tie_weights: bool, rslora: bool
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model, config = base(tie_weights=tie_weights), LoraConfig(rank=4, alpha=6, rslora=rslora)
    save_model(tmp_path / "base", model, words(trained), {})
    add_adapters(model, config)
    learned(model)
    for parameter in model.norm.parameters():
        parameter.requires_grad_()
        parameter.data += 0.3
    save_adapter(tmp_path / "a", ModelFolder(model, words(trained), {}), config, base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "a").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, model(IDS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_our_model_opens_an_adapter_of_peft(tmp_path: Path, trained: Path, *, tie_weights: bool) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = base(tie_weights=tie_weights)
    save_model(tmp_path / "base", model, words(trained), {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["k_proj", "up_proj"], layers_to_transform=[1], task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(theirs, settings).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    theirs.save_pretrained(tmp_path / "a")
    apply_adapter(model, load_adapter(tmp_path / "a"))
    assert set(adapters(model)) == {"layers.1.self_attn.k_proj", "layers.1.mlp.up_proj"}
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(IDS), theirs(IDS).logits, atol=1e-5, rtol=0)


def as_of_peft(folder: Path, **changes: object) -> Path:
    (folder / "manifest.json").unlink()
    settings = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is {'q_proj': 3}"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"a_new_thing": 4}, "a_new_thing is 4, which is not supported"),
        ({"r": 5}, r"r is 5 and .*lora_A has shape \[4, "),
        ({"r": "4"}, "r, lora_alpha and lora_dropout must be numbers"),
        ({"r": 1 << 40}, "rank must be from 1"),
    ],
)
def test_settings_of_peft_that_would_change_the_result_are_refused(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_adapter(as_of_peft(folder, **changes))


def test_adapter_on_the_head_is_refused_by_name(folder: Path) -> None:
    """G49: merged into a tied head it changed the embedding too."""
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors |= {f"base_model.model.lm_head.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    save_file(tensors, as_of_peft(folder) / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="adapts 'lm_head'; adapters go on q_proj"):
        load_adapter(folder)


def test_pickled_adapter_is_not_opened(folder: Path) -> None:
    as_of_peft(folder)
    shutil.move(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin is a pickle, which could run code"):
        load_adapter(folder)


def test_damaged_adapter_is_named(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=r"adapter_model.safetensors.*has another SHA-256"):
        load_adapter(folder)
    with pytest.raises(ConfigError, match="is no adapter folder"):
        load_adapter(folder / "training")


def test_adapter_of_a_base_of_another_shape_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter tensor .*lora_. has shape \[.*\], its base wants"):
        apply_adapter(base(hidden_dim=48), load_adapter(folder))
    with pytest.raises(ConfigError, match=r"an adapter is for 'layers.1.*', which is no linear layer"):
        apply_adapter(base(num_layers=1), load_adapter(folder))
