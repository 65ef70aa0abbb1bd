"""Exports: what other libraries make of them, what is refused, and that nothing unproven gets its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from foreign import FAMILIES, save_family
from tokenizers import Tokenizer as Library

from cyberslm import files
from cyberslm.checkpoint.folder import Extras, ModelFolder, load_model, save_model
from cyberslm.errors import ConfigError, IntegrityError, StorageError
from cyberslm.interop import exporting
from cyberslm.interop.exporting import TOLERANCES, export_gguf, export_hf
from cyberslm.interop.hf import read_source
from cyberslm.interop.source import write_source
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer

SIZES = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 48, "max_seq_len": 64}
EXTRAS = Extras("{{ messages[0].content }}", (4, 5))


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> Tokenizer:
    return load_tokenizer(trained / "run" / "final")


def folder_of(target: Path, tokenizer: Tokenizer, extras: Extras = EXTRAS, **changes: object) -> ModelFolder:
    model = CyberSLM(CyberSLMConfig(**{"vocab_size": tokenizer.vocab_size, **SIZES, **changes}), seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    save_model(target, model, tokenizer, {}, extras=extras)
    return load_model(target)


VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", {}),
    "interleaved": ("LlamaForCausalLM", {"rope_layout": "interleaved", "rope_base": 500.0}),
    "interleaved with biases": ("LlamaForCausalLM", {"rope_layout": "interleaved", "bias": True}),
    "interleaved qk_norm": ("Qwen3ForCausalLM", {"rope_layout": "interleaved", "qk_norm": True}),
    "bias of keys and values": ("LlamaForCausalLM", {"bias_kv": True}),
    "bias of queries": ("Qwen3ForCausalLM", {"bias_q": True, "qk_norm": True}),
    "Qwen2's biases, another tokenizer": ("LlamaForCausalLM", {"bias_q": True, "bias_kv": True}),
    "output bias": ("LlamaForCausalLM", {"bias_out": True}),
    "window": ("MistralForCausalLM", {"sliding_window": 8}),
    "heads of their own width": ("MistralForCausalLM", {"num_heads": 3, "num_kv_heads": 3, "head_dim": 12}),
    "windows by layer": ("Qwen3ForCausalLM", {"sliding_window": (8, 0), "qk_norm": True}),
    "llama3": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(type="llama3", factor=4.0, original_max_seq_len=16)}),
    "dynamic": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(type="dynamic", factor=4.0, original_max_seq_len=16)}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_gives_the_same_logits_ids_and_stops(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    architecture, changes = VARIANTS[name]
    found = folder_of(tmp_path / "ours", tokenizer, **changes)
    export_hf(found, tmp_path / "out", "f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == architecture
    ids = torch.randint(0, tokenizer.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, found.model(ids), atol=1e-4, rtol=0)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "CVE-2024-3094 <eos> \u6f22\n"
    assert words(text).input_ids == tokenizer.encode(text)
    assert words.chat_template == EXTRAS.chat_template
    assert words.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert theirs.generation_config.eos_token_id == [3, 4, 5]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_comes_back_as_it_came(tmp_path: Path, library: Library, qwen_library: Library, name: str) -> None:
    theirs = save_family(name, tmp_path / "theirs", qwen_library if name.startswith("qwen2") else library)
    write_source(read_source(tmp_path / "theirs"), tmp_path / "ours")
    export_hf(load_model(tmp_path / "ours"), tmp_path / "out", "f32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, 480, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_halves_are_the_weights_rounded_once(tmp_path: Path, tokenizer: Tokenizer, dtype: str) -> None:
    found = folder_of(tmp_path / "ours", tokenizer)
    export_hf(found, tmp_path / "out", dtype)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == kind
    for name, weight in theirs.named_parameters():
        assert torch.equal(weight, found.model.get_parameter(name.removeprefix("model.")).to(kind))
    assert not (tmp_path / "out" / "model.safetensors").stat().st_size > 2.2 * found.model.config.num_parameters


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "geglu"}, "activation is 'geglu'"),
        ({"norm": "layer"}, "norm is 'layer'"),
        ({"key_dim": 6}, "key_dim is 6"),
        ({"logit_softcap": 15.0}, "logit_softcap is 15.0"),
        ({"qk_norm": True, "bias": True}, "bias is true beside qk_norm"),
        ({"qk_norm": True, "sliding_window": (8, 4)}, "several sizes"),
        ({"sliding_window": (8, 0)}, "not the same in all layers"),
        ({"sliding_window": 8, "bias_out": True}, "sliding_window beside biases"),
        ({"bias_q": True, "num_heads": 3, "num_kv_heads": 3, "head_dim": 12}, "no multiple of num_heads"),
    ],
)
def test_setting_that_nobody_else_has_is_named(tmp_path: Path, tokenizer: Tokenizer, changes: dict, words: str) -> None:
    found = folder_of(tmp_path / "ours", tokenizer, **changes)
    for export in (export_hf, export_gguf):
        with pytest.raises(ConfigError, match=words):
            export(found, tmp_path / "out", "f32")
    assert not (tmp_path / "out").exists()


def test_tokenizer_without_equal_merges_is_refused_by_gguf(tmp_path: Path, trained: Path) -> None:
    texts = [path.read_text() for path in sorted((trained / "text").glob("*.txt"))]
    unigram = train_tokenizer(texts, TokenizerConfig(vocab_size=400, model_type="unigram")).tokenizer
    found = folder_of(tmp_path / "ours", unigram)
    with pytest.raises(ConfigError, match="model_type unigram"):
        export_gguf(found, tmp_path / "out", "f16")
    export_hf(found, tmp_path / "out", "f32")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("CVE-1").input_ids == unigram.encode("CVE-1")


def test_unknown_type_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = folder_of(tmp_path / "ours", tokenizer)
    with pytest.raises(ConfigError, match="'q8_0' is not known for --to hf: f32, bf16, f16 are"):
        export_hf(found, tmp_path / "out", "q8_0")
    with pytest.raises(ConfigError, match="'q4_k' is not known for --to gguf"):
        export_gguf(found, tmp_path / "out", "q4_k")


def test_more_stops_than_names_and_values_beyond_f16_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = folder_of(tmp_path / "ours", tokenizer, Extras(None, (4, 5, 6)))
    with pytest.raises(ConfigError, match="3 ids end an answer besides"):
        export_gguf(found, tmp_path / "out", "f16")
    found = folder_of(tmp_path / "ours", tokenizer)
    with torch.no_grad():
        found.model.get_parameter("layers.0.mlp.up_proj.weight")[0, 0] = 1e6
    with pytest.raises(ConfigError, match="more than f16 holds"):
        export_gguf(found, tmp_path / "out", "f16")
    with pytest.raises(IntegrityError, match="not the model's in f16"):
        export_hf(found, tmp_path / "out", "f16")
    assert list(tmp_path.iterdir()) == [tmp_path / "ours"]


def test_what_is_not_the_model_is_not_published(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = folder_of(tmp_path / "ours", tokenizer)
    export_gguf(found, tmp_path / "out", "f32")
    before = (tmp_path / "out" / "manifest.json").read_bytes()

    def unturned(rows: torch.Tensor, heads: int) -> torch.Tensor:
        return rows

    monkeypatch.setattr("cyberslm.interop.gguf_out.interleave", unturned)
    with pytest.raises(IntegrityError, match=r"q_proj\.weight of the export is not the model's"):
        export_gguf(found, tmp_path / "out", "q4_0", replace=True)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "generation_config", lambda *_: {"eos_token_id": 3})
    with pytest.raises(IntegrityError, match="other stop ids"):
        export_hf(found, tmp_path / "other", "f32")
    monkeypatch.undo()
    monkeypatch.setitem(TOLERANCES, "bf16", 1e-9)
    with pytest.raises(IntegrityError, match="logits differ by"):
        export_hf(found, tmp_path / "other", "bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]


def test_export_says_what_it_was_made_of_and_verifies(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from cyberslm.interop.container import read_gguf

    found = folder_of(tmp_path / "ours", tokenizer)
    made = export_gguf(found, tmp_path / "out", "q8_0", name="mine")
    manifest = files.verify(tmp_path / "out")
    assert set(manifest["files"]) == {"model-q8_0.gguf", "Modelfile"}
    assert manifest["of"] == {"manifest": found.manifest["self"], "tokenizer_sha256": tokenizer.sha256}
    assert manifest["distance"] == made.distance
    assert any("U+2581" in note for note in manifest["notes"])
    values = read_gguf(tmp_path / "out" / "model-q8_0.gguf").values
    assert values["general.name"] == "mine"
    assert values["cyberslm.tokenizer_sha256"] == tokenizer.sha256
    assert values["llama.context_length"] == 64
    assert values["tokenizer.ggml.add_bos_token"] is tokenizer.add_bos
    assert values["tokenizer.ggml.add_space_prefix"] is False
    assert [values[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot", "eom")] == [3, 4, 5]


def test_modelfile_names_file_context_stops_and_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chatml = "{{'<|im_start|>' + messages[0].role + '<|im_end|>'}}"
    for template, words in ((None, 'TEMPLATE "{{ .Prompt }}"'), (chatml, "<|im_start|>{{ .Role }}"), ("x", None)):
        found = folder_of(tmp_path / "ours", tokenizer, Extras(template, (4,)))
        export_gguf(found, tmp_path / "out", "q8_0", replace=True)
        text = (tmp_path / "out" / "Modelfile").read_text()
        assert text.startswith("FROM ./model-q8_0.gguf\nPARAMETER num_ctx 64\n")
        assert f'PARAMETER stop "{tokenizer.piece(3)}"\nPARAMETER stop "{tokenizer.piece(4)}"\n' in text
        assert (words or "TEMPLATE") in text if words else "TEMPLATE" not in text


def test_foreign_folder_in_the_way_stays(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = folder_of(tmp_path / "ours", tokenizer)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(StorageError, match="not a CyberSLM folder"):
        export_hf(found, tmp_path / "out", "f32")
    assert (tmp_path / "out" / "precious").read_text() == "x"
    export_hf(found, tmp_path / "once", "f32")
    with pytest.raises(StorageError, match="exists already"):
        export_hf(found, tmp_path / "once", "bf16")
    assert export_hf(found, tmp_path / "once", "bf16", replace=True).distance > 0


def test_config_of_an_export_holds_no_settings_of_our_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export_hf(folder_of(tmp_path / "ours", tokenizer), tmp_path / "out", "bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "cyberslm" not in config
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
