"""The folders open in Hugging Face transformers, unchanged, with the same logits and ids."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import transformers

import cyberslm
from cyberslm.checkpoint.folder import load_model, save_model
from cyberslm.model.config import CyberSLMConfig, RopeScaling
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import load_tokenizer

PIECES = (
    "def f(x):\n    return x ** 2  # comment\n",
    "4d5a90000300000004000000ffff0000",
    "https://example.org/a/b?c=%20d&e=f#g",
    "\U0001f468‍\U0001f469‍\U0001f467 \U0001f600\U0001f1e9\U0001f1ea",
    "漢字かな交じり文 한국어 Ελληνικά русский",
    "   leading and trailing   ",
    "\n\n\ttabs\tand\r\nnewlines\n",
    "<eos> <bos> <pad> <unk> </s> <s> <|system|>",
    "CVE-2024-3094 T1059.001 10.0.0.1 [.]com hxxp://",
    "▁▁ ▁x \ufdd0 \ufeff ‮ ​",
)


def varied(count: int) -> list[str]:
    rng = random.Random(7)
    text = "\n".join(topics.values())
    out = list(PIECES)
    while len(out) < count:
        start = rng.randrange(len(text) - 200)
        parts = [rng.choice(PIECES), text[start : start + rng.randrange(1, 120)], rng.choice(PIECES)]
        parts.append("".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(160, 0x2FFF)))) for _ in range(8)))
        rng.shuffle(parts)
        out.append("".join(parts[: rng.randrange(1, 5)]))
    return out


def test_final_and_step_folders_give_the_same_logits(trained: Path) -> None:
    steps = sorted((trained / "run" / "checkpoints").iterdir())
    for folder in (trained / "run" / "final", *steps):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        ours = load_model(folder).model
        ids = torch.randint(4, ours.config.vocab_size, (3, 32), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=1e-4, rtol=0)
        assert (theirs.config.eos_token_id, theirs.generation_config.eos_token_id) == (3, 3)


LENGTH = 64
BIASES = {"bias_q": True, "bias_kv": True, "bias_out": True}
SCALED = {"factor": 4.0, "original_max_seq_len": LENGTH // 4}
VARIANTS: dict[str, tuple[str, dict]] = {
    **{
        f"llama {kind} {'tied' if tied else 'untied'}": ("LlamaForCausalLM", {"num_kv_heads": n, "tie_weights": tied})
        for kind, n in (("mha", 4), ("gqa", 2), ("mqa", 1))
        for tied in (True, False)
    },
    "llama attention biases": ("LlamaForCausalLM", BIASES),
    "llama all biases": ("LlamaForCausalLM", {"bias": True}),
    "llama linear": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(type="linear", factor=4.0)}),
    "llama dynamic": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(type="dynamic", **SCALED)}),
    "llama yarn": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(type="yarn", **SCALED)}),
    "llama llama3": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(type="llama3", **SCALED)}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
    "qwen3 biases": ("Qwen3ForCausalLM", {"qk_norm": True, **BIASES, "tie_weights": False}),
    "qwen3 windows": ("Qwen3ForCausalLM", {"qk_norm": True, "sliding_window": (8, 0)}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "mistral mqa untied": ("MistralForCausalLM", {"sliding_window": 20, "num_kv_heads": 1, "tie_weights": False}),
}


def variant(changes: dict, vocab_size: int) -> CyberSLM:
    """A network whose every parameter is random and large enough to matter."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_dim": 64,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "ffn_hidden_dim": 80,
        "max_seq_len": LENGTH,
        "rope_base": 5_000.0,
        "norm_eps": 1e-3,
    }
    model = CyberSLM(CyberSLMConfig(**{**sizes, **changes}), seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return model


def differences(theirs: torch.nn.Module, ours: CyberSLM) -> dict[str, float]:
    """Largest difference of the logits by how they came about."""
    ids = torch.randint(0, ours.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    short = ids[:, : LENGTH // 4]
    found = {
        "prefill": (theirs(ids).logits - ours(ids)).abs().max(),
        "short": (theirs(short).logits - ours(short)).abs().max(),
    }
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = theirs(ids, attention_mask=mask, position_ids=positions).logits
    found["left-padded"] = (padded - ours(ids, mask))[mask.bool()].abs().max()
    cache, past, steps = ours.new_cache(2, LENGTH), None, []
    for part in ids[:, :30].split([10, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], dim=1):
        result = theirs(part, past_key_values=past, use_cache=True)
        past = result.past_key_values
        steps.append((result.logits - ours(part, cache=cache)).abs().max())
    found["cached decode"] = torch.stack(steps).max()
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_they_know_gives_the_same_logits(trained: Path, tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(trained / "run" / "final")
    architecture, changes = VARIANTS[name]
    ours = variant(changes, tokenizer.vocab_size + 3)
    save_model(tmp_path / "m", ours, tokenizer, {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert type(theirs).__name__ == architecture
    with torch.no_grad():
        found = differences(theirs, load_model(tmp_path / "m").model)
    if name == "llama dynamic":
        # theirs is no function of the row: it takes the batch's longest row and, in chunks, the longest it has seen
        found = {"prefill": found["prefill"]}
    assert max(found.values()) < 1e-4
    text = "CVE-2024-3094 <eos> \u6f22\n"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m")(text).input_ids == tokenizer.encode(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "geglu"},
        {"norm": "layer"},
        {"rope_layout": "interleaved"},
        {"key_dim": 8},
        {"logit_softcap": 15.0},
        {"bias_kv": True},
        {"bias_q": True, "bias_kv": True},  # Qwen2's, but under that name text would be cut in Qwen2's way
        {"sliding_window": (8, 0)},
        {"qk_norm": True, "bias": True},
        {"qk_norm": True, "sliding_window": (8, 4)},
    ],
)
def test_variant_that_they_do_not_know_is_refused_by_them_and_opens_here(
    trained: Path, tmp_path: Path, changes: dict
) -> None:
    tokenizer = load_tokenizer(trained / "run" / "final")
    ours = variant(changes, tokenizer.vocab_size)
    save_model(tmp_path / "m", ours, tokenizer, {})
    with pytest.raises(ValueError, match="cyberslm"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    again = load_model(tmp_path / "m").model
    assert again.config == ours.config
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(again(ids), ours(ids))


def test_same_ids_and_text_on_a_thousand_strings(trained: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(trained / "run" / "final")
    ours = cyberslm.load(trained / "run" / "final").tokenizer
    for text in varied(1000):
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids, repr(text)
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text, add_special_tokens=False)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == text
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (0, 2, 3, 1)


def test_transformers_generates_the_same_greedy_text(trained: Path) -> None:
    folder = trained / "run" / "final"
    engine = cyberslm.load(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in ("The ", "class", "\n"):
        encoded = tokenizer(prompt, return_tensors="pt")
        made = theirs.generate(**encoded, max_new_tokens=12, do_sample=False, suppress_tokens=[0, 1, 2])
        wanted = made[0, encoded.input_ids.shape[1] :].tolist()
        assert list(engine.generate(prompt, max_new_tokens=12)[0].ids) == [i for i in wanted if i != 3]
