"""What import and export say of folders that are ours already."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from cyberslm import files
from cyberslm.checkpoint.adapter import save_adapter
from cyberslm.checkpoint.folder import Extras, load_model
from cyberslm.errors import ConfigError
from cyberslm.interop import gguf, hf
from cyberslm.interop.source import Source, assembled
from cyberslm.model.lora import LoraConfig, adapters, add_adapters
from cyberslm.recipes.trade import Target, export_model, import_model
from cyberslm.recipes.use import load, load_merged

IDS = torch.tensor([[2, 9, 17, 33]])


@pytest.fixture
def adapter(trained: Path, tmp_path: Path) -> Path:
    base, config = trained / "run" / "final", LoraConfig(rank=2)
    found = load_model(base)
    add_adapters(found.model, config)
    for layer in adapters(found.model).values():
        layer.lora_B.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    fields, template = {"base_sha256": found.manifest["self"]}, "{{ messages[0]['content'] }}"
    adapted = found._replace(manifest=fields, extras=Extras(template, (5,)))
    save_adapter(tmp_path / "adapter", adapted, config, base=str(base))
    return tmp_path / "adapter"


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_adapter_is_exported_in_its_base(adapter: Path, tmp_path: Path, to: Target) -> None:
    """The error named kinds of folders that people don't know, and no way out."""
    said: list[str] = []
    export_model(adapter, tmp_path / "out", to=to, dtype="f32", force=False, say=said.append)
    assert said[0] == f"{adapter} is an adapter: what is exported is its base with it"
    file = tmp_path / "out" / "model-f32.gguf"
    again: Source = hf.read_source(tmp_path / "out") if to == "hf" else gguf.read_source(file)
    wanted = load_merged(adapter)
    assert again.parts.extras == wanted.extras == Extras("{{ messages[0]['content'] }}", (5,))
    torch.testing.assert_close(assembled(again.parts)(IDS), wanted.model(IDS), atol=1e-5, rtol=0)
    assert files.verify(tmp_path / "out")["of"]["manifest"] == files.read_manifest(adapter)["self"]


def test_adapter_of_peft_is_exported_under_the_hash_of_its_weights(adapter: Path, tmp_path: Path) -> None:
    (adapter / "manifest.json").unlink()
    export_model(adapter, tmp_path / "out", to="hf", dtype=None, force=False, say=silent)
    of = files.verify(tmp_path / "out")["of"]
    assert of["manifest"] == files.sha256_file(adapter / "adapter_model.safetensors")


def test_adapter_whose_base_is_gone_says_how_to_name_another(adapter: Path) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "manifest.json").unlink()
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "gone"}))
    with pytest.raises(ConfigError, match=r"its base: gone is not a folder.*; or  cyberslm merge BASE .*adapter DEST"):
        load(adapter)


def test_import_of_ones_own_folder_points_the_way(trained: Path, adapter: Path, tmp_path: Path) -> None:
    """A run and an export of GGUF were called no Hugging Face folders, and a model was copied without its history."""
    run, exported = trained / "run", tmp_path / "exported"
    export_model(run, exported, to="gguf", dtype="f32", force=False, say=silent)
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    ways = {
        run: f"is a run, whose model is taken as it is:  cyberslm generate {run} --prompt",
        tmp_path / "half": "is a run, whose model is taken as it is",
        run / "final": f"is a model folder already:  cyberslm generate {run / 'final'} --prompt",
        adapter: f"a model with it is made by  cyberslm merge BASE {adapter} DEST",
        exported: f"name the file:  cyberslm import {exported / 'model-f32.gguf'} DEST",
    }
    for source, words in ways.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            import_model(source, Path("DEST"), force=False, say=silent)
    assert not Path("DEST").exists()


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_export_is_no_model_folder_and_comes_back_by_import(trained: Path, tmp_path: Path, to: Target) -> None:
    """The error named kinds of folders that people don't know."""
    out = tmp_path / "out"
    export_model(trained / "run", out, to=to, dtype="f32", force=False, say=silent)
    source = out if to == "hf" else out / "model-f32.gguf"
    with pytest.raises(ConfigError, match=re.escape(f"bring it back with  cyberslm import {source} DEST")):
        load(out)
    import_model(source, tmp_path / "back", force=False, say=silent)
    wanted = load_model(trained / "run" / "final").model(IDS)
    torch.testing.assert_close(load_model(tmp_path / "back").model(IDS), wanted, atol=1e-5, rtol=0)


def test_model_folder_of_others_is_imported_though_it_holds_checkpoints(trained: Path, tmp_path: Path) -> None:
    export_model(trained / "run", tmp_path / "theirs", to="hf", dtype=None, force=False, say=silent)
    (tmp_path / "theirs" / "manifest.json").unlink()
    (tmp_path / "theirs" / "checkpoints").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours", force=False, say=silent)
    shutil.rmtree(tmp_path / "theirs")
    assert load(tmp_path / "ours").generate(["The "], max_new_tokens=2)
