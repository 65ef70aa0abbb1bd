"""What llama.cpp itself makes of the GGUF files written here: the same ids, logits, text and stop."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from foreign import FAMILIES, byte_level, save_family
from llama_cpp import LlamaCpp
from strings import varied
from tokenizers import Tokenizer as Library

import cyberslm
from cyberslm.checkpoint.folder import Extras, ModelFolder, ModelParts, load_model, save_model
from cyberslm.errors import ConfigError
from cyberslm.interop.exporting import export_gguf
from cyberslm.interop.gguf import read_source as read_gguf_source
from cyberslm.interop.gguf_out import write_gguf
from cyberslm.interop.hf import read_source
from cyberslm.interop.source import write_source
from cyberslm.interop.vocabulary import PRE_TOKENIZERS
from cyberslm.interop.vocabulary_out import Vocabulary, vocabulary_of
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer

VOCABULARY = 480
REFUSED = {
    "llama dynamic": "dynamic",
    "mistral": "sliding_window",
    "qwen2 windows": "sliding_window",
    "qwen3 windows": "sliding_window",
    "qwen3 biases": "biases beside qk_norm",
}


def prompt(vocab_size: int, seed: int = 3) -> list[int]:
    return torch.randint(3, vocab_size - 10, (40,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: CyberSLM, ids: list[int], count: int, *, ends: frozenset[int] = frozenset()) -> list[int]:
    made: list[int] = []
    with torch.no_grad():
        while len(made) < count and not (made and made[-1] in ends):
            made.append(int(model(torch.tensor([ids + made]))[0, -1].argmax()))
    return made


def rounded(scaling: RopeScaling | None) -> list[object]:
    """Settings to six digits, as fp32 carries them."""
    values = [] if scaling is None else asdict(scaling).values()
    return [f"{value:.6g}" if isinstance(value, float) else value for value in values]


def assert_same_logits(model: CyberSLM, server: LlamaCpp) -> None:
    """Log-probabilities of the whole vocabulary, after prompts whose next token is one that llama.cpp shows at once."""
    compared = 0
    for seed in range(30):
        ids = prompt(model.config.vocab_size, seed)
        answer = server.complete(ids, 1, alternatives=model.config.vocab_size)
        if "completion_probabilities" not in answer:  # half a character, or the end
            continue
        with torch.no_grad():
            wanted = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        found = {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}
        assert len(found) == model.config.vocab_size
        assert max(abs(wanted[index].item() - value) for index, value in found.items()) < 1e-4
        compared += 1
        if compared == 3:
            return
    raise AssertionError("no prompt was compared")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_llama_cpp_or_the_family_is_refused(
    tmp_path: Path, library: Library, qwen_library: Library, name: str
) -> None:
    save_family(name, tmp_path / "theirs", qwen_library if name.startswith("qwen2") else library)
    write_source(read_source(tmp_path / "theirs"), tmp_path / "ours")
    found = load_model(tmp_path / "ours")
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            export_gguf(found, tmp_path / "out", "f32")
        assert not (tmp_path / "out").exists()
        return
    export_gguf(found, tmp_path / "out", "f32")
    assert_same_logits(found.model, LlamaCpp(tmp_path / "out" / "model-f32.gguf"))
    again = read_gguf_source(tmp_path / "out" / "model-f32.gguf").parts
    assert replace(again.config, rope_scaling=None) == replace(found.model.config, rope_scaling=None)
    assert rounded(again.config.rope_scaling) == rounded(found.model.config.rope_scaling)
    assert all(torch.equal(again.tensor(key), weight) for key, weight in found.model.named_parameters())


VARIANTS: dict[str, dict] = {
    "interleaved": {"rope_layout": "interleaved"},
    "interleaved qk_norm": {"rope_layout": "interleaved", "qk_norm": True},
    "interleaved biases": {"rope_layout": "interleaved", "bias_q": True},
    "output bias alone": {"bias_out": True},
    "yarn of qwen3": {"qk_norm": True, "rope_scaling": RopeScaling(type="yarn", factor=4.0, original_max_seq_len=16)},
    "untied": {"tie_weights": False},
    "more rows than tokens": {"vocab_size": 407},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_own_variants_are_those_of_llama_cpp(trained: Path, tmp_path: Path, name: str) -> None:
    found = own_model(trained, tmp_path / "ours", **VARIANTS[name])
    export_gguf(found, tmp_path / "out", "f32")
    assert_same_logits(found.model, LlamaCpp(tmp_path / "out" / "model-f32.gguf"))


def own_model(trained: Path, target: Path, extras: Extras = Extras(), **changes: object) -> ModelFolder:  # noqa: B008
    tokenizer = load_tokenizer(trained / "run" / "final")
    sizes = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_dim": 64}
    fields = {"vocab_size": tokenizer.vocab_size, "max_seq_len": 64, **sizes, **changes}
    model = CyberSLM(CyberSLMConfig(**fields), seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    save_model(target, model, tokenizer, {}, extras=extras)
    return load_model(target)


RULES = ("gpt-2", "smollm", "llama-bpe", "qwen2")
ODD = (
    *("", " ", "'\u017fs it'S I'LL", "\u00a0x\u2003 y\u3000", "\u00bd\u2167\u0663 12345", "\r\n\r\n  \t x"),
    "a\u0301\u0308 \u1e9b\u0323",
)


@pytest.fixture(scope="module", params=[*RULES, "sentencepiece"])
def words(request: pytest.FixtureRequest, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A tokenizer here and in llama.cpp."""
    folder = tmp_path_factory.mktemp("words")
    if request.param == "sentencepiece":
        found = own_model(trained, folder / "ours")
    else:
        library = byte_level(list(topics.values())[:40], request.param)
        save_family("llama", folder / "theirs", library)
        write_source(read_source(folder / "theirs"), folder / "ours")
        found = load_model(folder / "ours")
    export_gguf(found, folder / "out", "f16")
    return found.tokenizer, LlamaCpp(folder / "out" / "model-f16.gguf"), request.param


def test_ids_are_those_of_llama_cpp(words: tuple[Tokenizer, LlamaCpp, str]) -> None:
    tokenizer, server, rule = words
    strings = [*ODD, *varied(list(topics.values()), 300)]
    rng = random.Random(1)
    ranges = (
        (32, 127),
        (160, 0x2FF),
        (0x370, 0x52F),
        (0x900, 0x97F),
        (0x2000, 0x2580),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1FAFF),
    )
    strings += ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(20)) for _ in range(100)]
    if rule == "sentencepiece":
        strings = [text for text in strings if not {"\u2581", "\ufdd0"} & set(text)]
    assert len(strings) > 350
    different = [text for text in strings if server.encode(text) != tokenizer.encode(text)]
    assert different == []


@pytest.mark.parametrize("alias", ["llama3", "llama-v3", "falcon3", "deepseek-r1-qwen", "refact"])
def test_other_names_of_a_rule_and_its_habit_of_bos_are_those_of_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    """Files whose settings leave out the rule for <bos>."""
    rule = next(name for name in RULES if PRE_TOKENIZERS[name] == PRE_TOKENIZERS[alias])
    save_family("llama", tmp_path / "theirs", byte_level(list(topics.values())[:20], rule))
    write_source(read_source(tmp_path / "theirs"), tmp_path / "ours")
    found = load_model(tmp_path / "ours")

    def renamed(tokenizer: Tokenizer, rows: int) -> Vocabulary:
        values = {**vocabulary_of(tokenizer, rows).values, "tokenizer.ggml.pre": alias}
        del values["tokenizer.ggml.add_bos_token"]
        return Vocabulary(values, ())

    monkeypatch.setattr("cyberslm.interop.gguf_out.vocabulary_of", renamed)
    parts = ModelParts(found.model.config, found.model.get_parameter, found.tokenizer)
    write_gguf(tmp_path / "m.gguf", parts, "f16", {})
    again, server = read_gguf_source(tmp_path / "m.gguf").parts.tokenizer, LlamaCpp(tmp_path / "m.gguf")
    assert again.add_bos == (rule == "llama-bpe")
    strings = [*ODD, *varied(list(topics.values()), 40)]
    assert [again.encode(text) for text in strings] == [server.encode(text) for text in strings]


def test_text_that_spells_a_control_piece_is_text_unless_llama_cpp_is_asked_to_see_it(
    words: tuple[Tokenizer, LlamaCpp, str],
) -> None:
    """G19: here it is text always; llama.cpp's completion and chat routes parse special tokens in a prompt."""
    tokenizer, server, _ = words
    end = tokenizer.piece(tokenizer.eos_id)
    assert server.encode(f"a{end}b") == tokenizer.encode(f"a{end}b")
    assert tokenizer.eos_id not in tokenizer.encode(f"a{end}b")
    assert tokenizer.eos_id in server.encode(f"a{end}b", special=True)


def test_mark_of_a_space_is_the_one_difference_of_a_lossless_tokenizer(words: tuple[Tokenizer, LlamaCpp, str]) -> None:
    tokenizer, server, rule = words
    text = "a\u2581b"
    assert (server.encode(text) == tokenizer.encode(text)) == (rule != "sentencepiece")
    if rule == "sentencepiece":
        assert server.encode(text) == tokenizer.encode("a b")


@pytest.fixture(scope="module")
def stopper(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that answers "say x:" with three tokens and the end, which another id than <eos> marks for "y"."""
    folder = tmp_path_factory.mktemp("stopper") / "ours"
    tokenizer = load_tokenizer(trained / "run" / "final")
    end = min(tokenizer.control_ids - {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id})
    rows = [
        [*tokenizer.encode("say x:"), *tokenizer.encode("abc", add_special_tokens=False)[:3], tokenizer.eos_id],
        [*tokenizer.encode("say y:"), *tokenizer.encode("cba", add_special_tokens=False)[:3], end],
    ]
    config = CyberSLMConfig(
        vocab_size=tokenizer.vocab_size, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=64, max_seq_len=64
    )
    model = CyberSLM(config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.stack(
            [
                torch.nn.functional.cross_entropy(model(torch.tensor([row[:-1]]))[0], torch.tensor(row[1:]))
                for row in rows
            ]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(folder, model, tokenizer, {}, extras=Extras("{{ messages[0]['content'] }}", (end,)))
    return folder


def test_trained_stop_stops_there_too_with_the_same_ids(stopper: Path, tmp_path: Path) -> None:
    """G57 (llama.cpp#2711): ends and BOS rule were lost, and generation never stopped."""
    found = load_model(stopper)
    export_gguf(found, tmp_path / "out", "f32")
    server = LlamaCpp(tmp_path / "out" / "model-f32.gguf")
    ends = frozenset({found.tokenizer.eos_id, *found.extras.stop_ids})
    for text in ("say x:", "say y:"):
        ids = found.tokenizer.encode(text)
        assert server.encode(text) == ids
        made = greedy(found.model, ids, 20, ends=ends)
        answer = server.complete(ids, 20)
        assert made[-1] in ends
        assert len(made) == 4
        assert answer["stop_type"] == "eos"
        assert [i for i in answer["tokens"] if i not in ends] == made[:-1]
    engine = cyberslm.load(stopper)
    for text in ("say x:", "say y:"):
        completion = engine.generate(text, max_new_tokens=20)[0]
        assert completion.finish_reason == "stop"
        assert len(completion.ids) == 3
        assert completion.text == server.complete(found.tokenizer.encode(text), 20)["content"]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0", "q4_0"])
def test_rounded_files_run_there_with_the_text_that_they_have_here(stopper: Path, tmp_path: Path, dtype: str) -> None:
    found = load_model(stopper)
    export_gguf(found, tmp_path / "out", dtype)
    write_source(read_gguf_source(tmp_path / "out" / f"model-{dtype}.gguf"), tmp_path / "back")
    again = load_model(tmp_path / "back")
    server = LlamaCpp(tmp_path / "out" / f"model-{dtype}.gguf")
    ids = found.tokenizer.encode("say x:")
    made = greedy(again.model, ids, 20, ends=frozenset({found.tokenizer.eos_id, *found.extras.stop_ids}))
    assert [i for i in server.complete(ids, 20)["tokens"] if i != found.tokenizer.eos_id] == made[:-1]
    assert again.extras == found.extras
    assert again.manifest["source"]["weights"].startswith("roundings to")
