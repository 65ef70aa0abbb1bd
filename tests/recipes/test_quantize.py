"""Model folders in fewer bits than fp32: opened for use, refused where bits would be missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cyberslm import files
from cyberslm.checkpoint.adapter import save_adapter
from cyberslm.checkpoint.folder import KIND, WEIGHTS, Extras, load_model, save_model
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.lora import LoraConfig, add_adapters
from cyberslm.model.quantised import precision_of, set_precision
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.use import load, quantize


@pytest.fixture(scope="module")
def int8(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(trained / "run", tmp_path_factory.mktemp("reduced") / "int8")


def altered(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    """A copy with a change, under a manifest that fits it."""

    def fill(staging: Path) -> dict[str, object]:
        for path in folder.iterdir():
            if path.name != files.MANIFEST:
                shutil.copy(path, staging)
        change(staging)
        return {"kind": KIND}

    files.publish(target, fill)
    return target


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_reduced_folder_is_the_model_reduced_when_opened(precision: str, trained: Path, tmp_path: Path) -> None:
    folder = quantize(trained / "run", tmp_path / "small", precision=precision)
    opened, reduced = load(folder, fast="off").model, load(trained / "run", precision=precision, fast="off").model
    assert precision_of(opened) == precision
    assert opened.state_dict().keys() == reduced.state_dict().keys()
    assert all(torch.equal(opened.state_dict()[name], tensor) for name, tensor in reduced.state_dict().items())
    whole = (trained / "run" / "final" / WEIGHTS).stat().st_size
    assert (folder / WEIGHTS).stat().st_size < whole * (0.6 if precision == "bf16" else 0.4)


def test_int4_needs_whole_groups(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not 48: use int8"):
        quantize(trained / "run", tmp_path / "small", precision="int4")
    assert not (tmp_path / "small").exists()


def test_it_generates_and_scores_like_the_original(int8: Path, trained: Path) -> None:
    assert load(int8, fast="off").generate("The", max_new_tokens=5)[0].text
    data = trained / "run" / "data"
    before, after = (evaluate(folder, data=data).score.bits_per_byte for folder in (trained / "run", int8))
    assert after == pytest.approx(before, rel=0.005)


def test_training_and_export_refuse_it_and_say_where_it_came_from(int8: Path, trained: Path) -> None:
    with pytest.raises(ConfigError, match=f"kept in int8, for use only.*{trained / 'run' / 'final'}"):
        load_model(int8)
    with pytest.raises(ConfigError, match="for use only"):
        quantize(int8, int8.parent / "again")
    config = json.loads((int8 / "config.json").read_text())
    assert config["model_type"] == "cyberslm"  # so that no other program takes it for a Llama


def test_another_precision_than_its_own_is_refused(int8: Path) -> None:
    assert precision_of(load(int8, precision="int8", fast="off").model) == "int8"
    with pytest.raises(ConfigError, match="kept in int8 and can't be turned to bf16"):
        load(int8, precision="bf16")


def test_sizes_are_checked_before_they_are_used(int8: Path, tmp_path: Path) -> None:
    def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            tensors = load_file(folder / WEIGHTS)
            change(tensors)
            save_file(tensors, folder / WEIGHTS)

        return write

    def with_precision(value: object) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            config = json.loads((folder / "config.json").read_text())
            config["cyberslm"]["precision"] = value
            (folder / "config.json").write_text(json.dumps(config))

        return write

    name = "model.layers.0.mlp.up_proj.scales"
    cases = {
        "missing": (with_tensors(lambda t: t.pop(name)), "scales is missing"),
        "short": (with_tensors(lambda t: t.update({name: t[name][:-1].clone()})), "has shape"),
        "wide": (with_tensors(lambda t: t.update({name: t[name].bfloat16()})), "type BF16, not F32"),
        "other": (with_precision("int4"), "multiple of 32|holds tensors|parameters"),
        "odd": (with_precision("int3"), "precision is one of fp32"),
        "listed": (with_precision(["int8"]), "precision is one of fp32"),
    }
    for case, (change, message) in cases.items():
        folder = altered(int8, tmp_path / case, change)
        with pytest.raises((IntegrityError, ConfigError), match=message):
            load_model(folder, reduced="take")


def test_reducing_keeps_what_is_not_a_matrix(trained: Path) -> None:
    model = load_model(trained / "run" / "final").model
    norms = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.ndim == 1}
    set_precision(model, "int8")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in norms.items())


def test_a_chat_model_in_fewer_bits_can_still_chat(trained: Path, tmp_path: Path) -> None:
    """Chat template and stop ids were left out: the small folder answered in another format and never ended a turn."""
    found, extras = load_model(trained / "run" / "final"), Extras("{{ messages }}", (7,))
    save_model(tmp_path / "chat", found.model, found.tokenizer, {}, extras=extras)
    small = quantize(tmp_path / "chat", tmp_path / "small")
    assert load_model(small, reduced="take").extras == extras


def test_a_folder_that_is_there_is_not_replaced(trained: Path, tmp_path: Path) -> None:
    """With the model itself as DEST its fp32 weights were gone for good."""
    shutil.copytree(trained / "run" / "final", tmp_path / "model")
    with pytest.raises(ConfigError, match="model exists: name another folder"):
        quantize(tmp_path / "model", tmp_path / "model")
    assert precision_of(load_model(tmp_path / "model").model) == "fp32"


def test_an_adapter_is_reduced_with_its_base(trained: Path, tmp_path: Path) -> None:
    """It is opened by `load` like any model, and was called a folder of the wrong kind here."""
    base, lora = trained / "run" / "final", LoraConfig(rank=2)
    found = load_model(base)
    add_adapters(found.model, lora)
    adapted = found._replace(manifest={"base_sha256": found.manifest["self"]})
    save_adapter(tmp_path / "adapter", adapted, lora, base=str(base))
    small = load_model(quantize(tmp_path / "adapter", tmp_path / "small"), reduced="take").model.state_dict()
    of_base = load(base, precision="int8", fast="off").model.state_dict()  # a new adapter changes nothing
    assert all(torch.equal(small[name], tensor) for name, tensor in of_base.items())
