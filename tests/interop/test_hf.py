"""Hugging Face folders come in with their results, or are refused by what they hold that isn't known."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers
from foreign import FAMILIES, LENGTH, SPECIAL, TEMPLATE, change, family_model, save_family
from llama_cpp import LlamaCpp
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library

from cyberslm.checkpoint.folder import load_model
from cyberslm.errors import ConfigError, CyberSLMError, IntegrityError
from cyberslm.interop.exporting import export_gguf
from cyberslm.interop.hf import read_source
from cyberslm.interop.source import write_source
from cyberslm.interop.vocabulary_out import merge_scores
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.spm import SentencePieceTokenizer
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer


def import_folder(folder: Path, target: Path) -> None:
    write_source(read_source(folder), target)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_librarys(tmp_path: Path, library: Library, qwen_library: Library, name: str) -> None:
    theirs = save_family(name, tmp_path / "theirs", qwen_library if name.startswith("qwen2") else library)
    import_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = load_model(tmp_path / "ours").model
    ids = torch.randint(0, 480, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for part in (ids, ids[:, :9]):
            torch.testing.assert_close(ours(part), theirs(part).logits, atol=1e-4, rtol=0)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shards_and_halves_come_in_exactly(tmp_path: Path, library: Library, dtype: torch.dtype) -> None:
    theirs = family_model("llama").to(dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    save_family("llama", tmp_path / "beside", library)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "theirs" / name).write_bytes((tmp_path / "beside" / name).read_bytes())
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    import_folder(tmp_path / "theirs", tmp_path / "ours")
    found = load_file(tmp_path / "ours" / "model.safetensors")
    for name, weight in theirs.state_dict().items():
        assert torch.equal(found[name], weight.float()), name


def test_template_stops_licence_and_source_are_kept(tmp_path: Path, library: Library) -> None:
    folder = tmp_path / "theirs"
    save_family("llama", folder, library)
    change(folder / "generation_config.json", eos_token_id=[2, 0])
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Model\nlicense: none\n")
    import_folder(folder, tmp_path / "ours")
    found = load_model(tmp_path / "ours")
    assert found.extras.chat_template == TEMPLATE
    assert found.extras.stop_ids == (0,)
    assert found.model.config.eos_token_id == 2
    source = found.manifest["source"]
    assert source["says"] == {"license": "apache-2.0"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(source["files"])
    assert source["weights"] == "as in the files (F32)"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs.chat_template == TEMPLATE
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == [2, 0]


def test_ids_are_the_librarys(tmp_path: Path, library: Library) -> None:
    save_family("llama", tmp_path / "theirs", library)
    import_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = load_model(tmp_path / "ours").tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in ("", " CVE-2024-3094\n\n  x", "\u6f22\u5b57 \U0001f600", "a\tb  c 0123"):
        assert ours.encode(text) == theirs(text).input_ids
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, 2)
    assert {1, 2}.isdisjoint(ours.encode(f"a{SPECIAL[1]}b{SPECIAL[2]}"))


WRONG_SETTINGS: dict[str, tuple[dict, str]] = {
    "unknown": ({"residual_multiplier": 0.5}, "residual_multiplier"),
    "family": ({"model_type": "gemma3"}, "model_type 'gemma3'"),
    "class": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "own code": ({"auto_map": {"AutoModel": "modeling.py"}}, "auto_map"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "rope type": ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "rope setting": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "extra": 1}}, "rope_parameters.extra"),
    "rope partial": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
    "rope without": ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
    "rope shape": ({"rope_scaling": 3}, "rope_scaling"),
    "yarn truncate": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        "truncate",
    ),
    "no width": ({"hidden_size": ...}, "hidden_size is missing"),
    "vast": ({"num_hidden_layers": 10**15}, "num_layers"),
    "words": ({"hidden_size": "many"}, "hidden_size|hidden_dim|wrong type"),
    "stop": ({"eos_token_id": 9999}, "eos_token_id 9999"),
    "window": ({"sliding_window": 4}, "sliding_window"),
    "more layers": ({"num_hidden_layers": 4}, "layers.3"),
    "fewer layers": ({"num_hidden_layers": 2}, "layers.2"),
    "wider": ({"intermediate_size": 64}, "has shape"),
    "tied": ({"tie_word_embeddings": True}, "lm_head.weight differs"),
    "vocabulary": ({"vocab_size": 100}, "tokens and 100 rows"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_setting_that_cannot_be_honoured_is_named(tmp_path: Path, library: Library, name: str) -> None:
    changes, words = WRONG_SETTINGS[name]
    save_family("llama", tmp_path / "theirs", library)
    change(tmp_path / "theirs" / "config.json", **changes)
    with pytest.raises(CyberSLMError, match=words):
        import_folder(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_windows_of_qwen_that_are_too_many_take_no_memory(tmp_path: Path, library: Library) -> None:
    save_family("qwen3 windows", tmp_path / "theirs", library)
    change(tmp_path / "theirs" / "config.json", num_hidden_layers=10**15, layer_types=...)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        read_source(tmp_path / "theirs")


def test_unknown_missing_and_doubled_tensors_are_named(tmp_path: Path, library: Library) -> None:
    folder = tmp_path / "theirs"
    save_family("llama", folder, library)
    whole = load_file(folder / "model.safetensors")
    gate = "model.layers.1.mlp.gate_proj.weight"
    extra = {"model.layers.1.mlp.gate_proj.lora_A": torch.ones(2, 2)}
    for weights, words in (
        (whole | extra, "lora_A' is unknown"),
        ({k: v for k, v in whole.items() if k != gate}, "gate_proj.weight' is missing"),
        (whole | {gate: torch.zeros(48, 33)}, "gate_proj.weight has shape"),
        (whole | {gate: torch.zeros(48, 32, dtype=torch.int8)}, "of type I8"),
    ):
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=words):
            read_source(folder)
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(whole | derived, folder / "model.safetensors")
    read_source(folder)
    save_file(whole | {gate: torch.full((48, 32), torch.nan)}, folder / "model.safetensors")
    with pytest.raises(IntegrityError, match="gate_proj.weight is not finite"):
        import_folder(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_equal_head_of_a_tied_model_is_taken_as_tied(tmp_path: Path, library: Library) -> None:
    folder = tmp_path / "theirs"
    save_family("llama tied", folder, library)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert read_source(folder).parts.config.tie_weights


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_refused_unopened(tmp_path: Path, library: Library, name: str) -> None:
    """G48: a "safe" load fell back to a full pickle."""
    from cyberslm.recipes.trade import open_source

    folder = tmp_path / "theirs"
    save_family("llama", folder, library)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(f"cposix\nmkdir\n(V{tmp_path / 'ran'}\ntR.".encode())  # a pickle that makes a folder
    for source in (folder, folder / name):
        with pytest.raises(CyberSLMError, match="pickle|GGUF"):
            open_source(source)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", 7])
def test_index_names_stay_inside_the_folder(tmp_path: Path, library: Library, name: object) -> None:
    folder = tmp_path / "theirs"
    save_family("llama", folder, library)
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match=r"no plain \.safetensors name"):
        read_source(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"])
def test_link_out_of_the_folder_is_refused_but_not_into_the_cache(tmp_path: Path, library: Library, name: str) -> None:
    folder = tmp_path / "models--x" / "snapshots" / "abc"
    save_family("llama", folder, library)
    (tmp_path / "outside").write_bytes((folder / name).read_bytes())
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (folder / name).rename(blobs / "1")
    (folder / name).symlink_to("../../blobs/1")
    read_source(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="leaves the folder"):
        read_source(folder)


def test_damaged_files_are_named(tmp_path: Path, library: Library) -> None:
    folder = tmp_path / "theirs"
    save_family("llama", folder, library)
    for name, content in (
        ("config.json", b"{"),
        ("config.json", b"[1]"),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        ("tokenizer.json", b"{}"),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(CyberSLMError, match=name):
            read_source(folder)
        (folder / name).write_bytes(whole)


def own_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """A Llama whose folder holds a SentencePiece model and its twin."""
    theirs = family_model("llama tied")
    theirs.save_pretrained(folder)
    change(folder / "generation_config.json", eos_token_id=3)
    change(folder / "config.json", eos_token_id=3)
    tokenizer.save(folder)


def test_sentencepiece_model_is_taken_alone_or_beside_its_twin(tmp_path: Path, trained: Path) -> None:
    tokenizer = load_tokenizer(trained / "run" / "final")
    folder = tmp_path / "theirs"
    own_folder(folder, tokenizer)
    listed = folder / "tokenizer.json"
    text = "CVE-2024-3094 \u2581 \u6f22\n <eos>"
    for kind in (SentencePieceTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer):
        found = read_source(folder).parts.tokenizer
        assert type(found) is kind
        assert found.encode(text) == tokenizer.encode(text)
        assert (found.bos_id, found.eos_id, found.add_bos) == (2, 3, True)
        if not listed.exists():
            continue
        if kind is SentencePieceTokenizer:  # then a tokenizer.json that is no twin, then none
            listed.write_text(listed.read_text().replace("\n", " "))
        else:
            listed.unlink()
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json and no tokenizer\.model"):
        read_source(folder)


@pytest.mark.parametrize("form", ["model", "merges"])
def test_llama_2_tokenizer_comes_in_and_its_vocabulary_goes_out(tmp_path: Path, trained: Path, form: str) -> None:
    """A model that puts a space before each text, has no pad, and numbers unk, bos and eos from 0."""
    text = "\n".join(path.read_text() for path in sorted((trained / "text").glob("*.txt")))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*text.splitlines(), *["x" + " " * 20 + "y"] * 9]), model_writer=model, vocab_size=470,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, minloglevel=3,
    )  # fmt: skip
    folder = tmp_path / "theirs"
    family_model("llama").save_pretrained(folder)
    if form == "model":
        (folder / "tokenizer.model").write_bytes(model.getvalue())
    else:
        SentencePieceTokenizer.from_proto(model.getvalue()).save(folder)
        (folder / "tokenizer.model").unlink()
    import_folder(folder, tmp_path / "ours")
    found = load_model(tmp_path / "ours")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert found.tokenizer.encode("CVE-1 x\n y") == [1, *theirs.encode("CVE-1 x\n y")]
    export_gguf(found, tmp_path / "out", "f32")
    server = LlamaCpp(tmp_path / "out" / "model-f32.gguf")
    strings = [
        "",
        "CVE-1 x\n y",
        " two  spaces ",
        "\u6f22\U0001f600",
        text[:2000],
        *(" " * n + "z" for n in range(1, 40)),
    ]
    assert [server.encode(one) for one in strings] == [found.tokenizer.encode(one) for one in strings]


def test_scores_of_merges_keep_their_order_and_ties() -> None:
    merges = [("a", "b"), ("_", "_"), ("__", "__"), ("_", "___"), ("__", "_"), ("_", "__"), ("ab", "c"), ("a", "bc")]
    scores = merge_scores(merges)
    assert scores["ab"] > scores["__"] > scores["____"] > scores["___"] > scores["abc"]
    together = merge_scores([("_", "__"), ("__", "__"), ("__", "_"), ("a", "b")])
    assert together["___"] == together["____"] > together["ab"]


def test_folder_of_our_own_is_a_source_too(tmp_path: Path, trained: Path) -> None:
    import_folder(trained / "run" / "final", tmp_path / "ours")
    ours, found = load_model(trained / "run" / "final"), load_model(tmp_path / "ours")
    assert found.model.config == ours.model.config
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), found.model.parameters(), strict=True))
    assert found.tokenizer.sha256 == ours.tokenizer.sha256


def test_template_of_the_tokenizer_settings_is_kept_the_default_of_several(tmp_path: Path, library: Library) -> None:
    folder = tmp_path / "theirs"
    save_family("llama", folder, library)
    (folder / "chat_template.jinja").unlink()
    settings = folder / "tokenizer_config.json"
    for value, wanted in (
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "t"}], None),
        (..., None),
    ):
        change(settings, chat_template=value)
        assert read_source(folder).parts.extras.chat_template == wanted
