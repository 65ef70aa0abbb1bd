from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cyberslm import files
from cyberslm.checkpoint.folder import Extras, TrainingFiles, load_model, load_training, save_model
from cyberslm.checkpoint.hf import hf_config
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import SentencePieceTokenizer, load_tokenizer

SIZES = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 48, "max_seq_len": 40}


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> SentencePieceTokenizer:
    return load_tokenizer(trained / "run" / "final")


def model_for(tokenizer: SentencePieceTokenizer, **changes: object) -> CyberSLM:
    return CyberSLM(CyberSLMConfig(vocab_size=tokenizer.vocab_size, **(SIZES | changes)), seed=4)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: SentencePieceTokenizer) -> Path:
    training = TrainingFiles({"exp_avg/norm.weight": torch.arange(32.0)}, {"step": 7})
    save_model(tmp_path / "m", model_for(tokenizer), tokenizer, {"step": 7}, training)
    return tmp_path / "m"


@pytest.mark.parametrize("tie_weights", [True, False])
def test_loaded_model_is_bit_identical(tmp_path: Path, tokenizer: SentencePieceTokenizer, *, tie_weights: bool) -> None:
    """G46 (safetensors#98): a tied head was refused, dropped or left random. One copy lies on disk."""
    model = model_for(tokenizer, tie_weights=tie_weights)
    save_model(tmp_path / "m", model, tokenizer, {})
    found = load_model(tmp_path / "m")
    assert found.model.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.model.parameters(), strict=True))
    ids = torch.tensor([[2, 9, 17, 33]])
    assert torch.equal(model.eval()(ids), found.model(ids))
    names = set(load_file(tmp_path / "m" / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tie_weights
    assert found.tokenizer.sha256 == tokenizer.sha256 == found.manifest["tokenizer_sha256"]


def test_names_on_disk_are_those_of_llama(folder: Path) -> None:
    """G47 (nanoGPT#325): wrapper prefixes got into the names."""
    names = set(load_file(folder / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert all(name.startswith("model.") for name in names)


def test_training_files_come_back_exactly(folder: Path) -> None:
    training = load_training(folder)
    assert training.state == {"step": 7}
    assert torch.equal(training.tensors["exp_avg/norm.weight"], torch.arange(32.0))


def test_template_and_ends_come_back_and_wrong_ends_are_named(
    tmp_path: Path, tokenizer: SentencePieceTokenizer
) -> None:
    extras = Extras("{{ messages }}\r\n\u6f22", (5, 4))
    save_model(tmp_path / "m", model_for(tokenizer), tokenizer, {}, extras=extras)
    assert load_model(tmp_path / "m").extras == extras
    save_model(tmp_path / "m", model_for(tokenizer), tokenizer, {})
    assert load_model(tmp_path / "m").extras == Extras()
    for value in (None, "3", [3, -1], [3, tokenizer.vocab_size], [True], {}):
        path = tmp_path / "m" / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": value}))
        reseal(tmp_path / "m")
        with pytest.raises(IntegrityError, match=r"generation_config\.json: eos_token_id must be ids below"):
            load_model(tmp_path / "sealed")
        shutil.rmtree(tmp_path / "sealed")
        shutil.move(tmp_path / "old.json", tmp_path / "m" / "manifest.json")


def each_file(folder: Path) -> Iterable[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_flipped_bit_in_any_file_is_found_and_named(folder: Path) -> None:
    """G44: safetensors loaded 300 of 300 flipped payloads without complaint."""
    for name in each_file(folder):
        path = folder / name
        whole = path.read_bytes()
        for at in (0, len(whole) // 3, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(IntegrityError, match=path.name):
                load_model(folder)
        path.write_bytes(whole)
    load_model(folder)


def test_missing_or_torn_file_is_named(folder: Path) -> None:
    for name in each_file(folder):
        path = folder / name
        whole = path.read_bytes()
        for cut in (b"", whole[:1], whole[:-1], whole + b"\0"):
            path.write_bytes(cut)
            with pytest.raises(IntegrityError, match=path.name):
                load_model(folder)
        path.unlink()
        with pytest.raises(IntegrityError, match=path.name):
            load_model(folder)
        path.write_bytes(whole)


def reseal(folder: Path) -> None:
    """Give a tampered folder a manifest that fits, as an attacker would."""
    manifest = {
        k: v for k, v in json.loads((folder / "manifest.json").read_text()).items() if k not in ("files", "self")
    }
    shutil.move(folder / "manifest.json", folder.parent / "old.json")

    def fill(staging: Path) -> dict:
        shutil.copytree(folder, staging, dirs_exist_ok=True)
        return manifest

    files.publish(folder.parent / "sealed", fill)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_dim": 64}, "parameters, config.json asks for"),
        ({"num_layers": 3}, "parameters, config.json asks for"),
        ({"num_layers": 1}, "parameters, config.json asks for"),
        ({"num_layers": 5000}, "parameters, config.json asks for"),
        ({"num_layers": 1 << 24}, "num_layers must be at most 10,000"),
        ({"max_seq_len": 1 << 20, "head_dim": 1 << 10}, "the rotary table may have"),
        ({"max_seq_len": 1 << 24}, "max_seq_len must be at most"),
        ({"vocab_size": 1 << 50}, "vocab_size must be a whole number from 1"),
        ({"num_heads": "4"}, "num_heads"),
        ({"surprise": 1}, "surprise"),
        ({"format": 2}, "not written by CyberSLM"),
    ],
)
def test_config_that_does_not_fit_is_refused_before_memory_is_taken(folder: Path, change: dict, words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["cyberslm"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    reseal(folder)
    with pytest.raises((IntegrityError, ConfigError), match=words):
        load_model(folder.parent / "sealed")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_weights_of_another_type_are_refused(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    reseal(folder)
    with pytest.raises(IntegrityError, match="holds tensors of type .*, not F32"):
        load_model(folder.parent / "sealed")


def test_pickle_under_a_name_that_is_read_is_refused_and_not_run(folder: Path) -> None:
    """G48 (CVE-2026-1839): a safe load fell back to pickle. Nothing here can unpickle."""
    marker = folder.parent / "marker"
    evil = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for name in ("model.safetensors", "config.json", "tokenizer.model", "training/state.json"):
        copy = folder.parent / f"copy-{name.replace('/', '-')}"
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(evil)
        (copy / "pytorch_model.bin").write_bytes(evil)
        with pytest.raises(IntegrityError):
            load_model(copy)
    assert not marker.exists()


def test_non_finite_weights_are_never_published(tmp_path: Path, tokenizer: SentencePieceTokenizer) -> None:
    """G40: ruined weights were saved, and rotation deleted the last healthy ones."""
    model = model_for(tokenizer)
    save_model(tmp_path / "m", model, tokenizer, {"step": 1})
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(IntegrityError, match="model.layers.0.mlp.up_proj.weight is not finite"):
        save_model(tmp_path / "m", model, tokenizer, {"step": 2})
    assert load_model(tmp_path / "m").manifest["step"] == 1


def test_files_have_the_mode_of_the_umask(folder: Path) -> None:
    """G45 (safetensors#793): the library's writer made files that only their owner could read."""
    plain = folder.parent / "plain"
    plain.write_text("x")
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {
        plain.stat().st_mode & 0o777
    }


def test_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"no manifest.json in .*: not a finished CyberSLM folder"):
        load_model(tmp_path)
    files.publish(tmp_path / "d", lambda staging: {"kind": "data"})
    with pytest.raises(IntegrityError, match="of kind 'data'"):
        load_model(tmp_path / "d")


def test_safetensors_written_by_others_with_the_same_names_still_need_the_manifest(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"model.safetensors"):
        load_model(folder)


def test_config_json_speaks_of_exactly_this_network() -> None:
    config = CyberSLMConfig(num_kv_heads=2, rope_base=5e5, tie_weights=False, attn_dropout=0.1)
    written = hf_config(config)
    assert written["num_key_value_heads"] == 2
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert written["tie_word_embeddings"] is False
    assert written["attention_dropout"] == 0.1
