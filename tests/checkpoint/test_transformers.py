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
from cyberslm.model.config import CyberSLMConfig
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


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_head_layout_gives_the_same_logits(
    trained: Path, tmp_path: Path, kv_heads: int, *, tie_weights: bool
) -> None:
    tokenizer = load_tokenizer(trained / "run" / "final")
    config = CyberSLMConfig(
        vocab_size=tokenizer.vocab_size + 3,
        hidden_dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=12,
        ffn_hidden_dim=80,
        max_seq_len=64,
        rope_base=5_000.0,
        norm_eps=1e-3,
        tie_weights=tie_weights,
    )
    model = CyberSLM(config, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    save_model(tmp_path / "m", model, tokenizer, {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = torch.randint(0, config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-4, rtol=0)
        padded = theirs(ids, attention_mask=mask).logits
        torch.testing.assert_close(padded[mask.bool()], model(ids, mask)[mask.bool()], atol=1e-4, rtol=0)


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
