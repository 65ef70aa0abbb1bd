"""`cyberslm generate`: each control is an option, and each option does something."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from calling import Cli

from cyberslm.decoding.sampling import SamplingParams

SLIDING = ("--context", "slide", "--max-new-tokens", 200, "--temperature", 0.05)
AGAIN = ("--temperature", 0, "--logit-bias", "FIRST=5")
"""One token again and again."""

EFFECTS: dict[str, tuple[object, ...]] = {
    "max_new_tokens": ("--max-new-tokens", 3),
    "min_new_tokens": ("--min-new-tokens", 9, "--stop-ids", "FIRST"),
    "temperature": ("--temperature", 5),
    "top_k": ("--top-k", 1),
    "top_p": ("--top-p", 0.01),
    "min_p": ("--min-p", 1),
    "typical_p": ("--typical-p", 0.01),
    "repetition_penalty": (*AGAIN, "--repetition-penalty", 100),
    "presence_penalty": (*AGAIN, "--presence-penalty", 9),
    "frequency_penalty": (*AGAIN, "--frequency-penalty", 9),
    "no_repeat_ngram": (*AGAIN, "--no-repeat-ngram", 1),
    "logit_bias": ("--logit-bias", "FIRST=-50"),
    "banned_ids": ("--banned-ids", "FIRST"),
    "forced_ids": ("--forced-ids", 70, "--forced-ids", 71),
    "stop": ("--stop", "LAST"),
    "stop_ids": ("--stop-ids", "FIRST"),
    "logprobs": ("--logprobs", 1),
    "n": ("-n", 2),
    "beams": ("--beams", 3),
    "length_penalty": ("--beams", 3, "--length-penalty", -9, "--stop-ids", 70),
    "context": ("--context", "slide", "--max-new-tokens", 50),
    "sinks": (*SLIDING, "--sinks", 20),
    "seed": ("--seed", 5),
}
WITHOUT: dict[str, tuple[object, ...]] = {
    "min_new_tokens": ("--stop-ids", "FIRST"),
    "length_penalty": ("--beams", 3, "--stop-ids", 70),
    "context": (),
    "sinks": SLIDING,
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram"), AGAIN),
}


def records(call: Cli, model: Path, *arguments: object) -> list[dict]:
    said = call("generate", model, "--prompt", "The", "--max-new-tokens", 12, "--seed", 3, "--json", *arguments)
    assert said.code == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def test_every_control_is_an_option_with_an_effect(call: Cli, trained: Path) -> None:
    """G55: an option that exists, is printed, and does nothing."""
    assert set(EFFECTS) == set(SamplingParams.__dataclass_fields__)
    (plain,) = records(call, trained / "run")
    first, last = str(plain["ids"][0]), plain["text"][-2:]

    def filled(arguments: tuple[object, ...]) -> list[str]:
        return [str(each).replace("FIRST", first).replace("LAST", last) for each in arguments]

    for name, arguments in EFFECTS.items():
        before = records(call, trained / "run", *filled(WITHOUT.get(name, ())))
        assert records(call, trained / "run", *filled(arguments)) != before, name


def test_json_says_everything(call: Cli, trained: Path) -> None:
    (made,) = records(call, trained / "run", "--logprobs", 2)
    assert set(made) == {"prompt", "text", "finish_reason", "ids", "sample", "truncated", "logprobs"}
    assert len(made["logprobs"]) >= len(made["ids"])
    assert all(set(seen) == {"logprob", "top", "entropy"} and len(seen["top"]) == 2 for seen in made["logprobs"])
    best = records(call, trained / "run", "--beams", 3, "-n", 2)
    assert [beam["sample"] for beam in best] == [0, 1]
    assert best[0]["score"] >= best[1]["score"]


@pytest.mark.parametrize("more", [("--stream",), ("--no-stream",), ("--prompt", "B")])
def test_bound_answer_is_printed_alone(call: Cli, trained: Path, more: tuple[str, ...]) -> None:
    """Prompt and answer were glued together, so that no other program could read the JSON."""
    schema = ("--regex", "[a-c]{3}", "--max-new-tokens", 8)
    said = call("generate", trained / "run", "--prompt", "Severity: ", *schema, *more)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert len(lines) == (2 if "B" in more else 1)
    assert all(re.fullmatch("[a-c]{3}", line) for line in lines)


def test_quantize_tells_sizes_and_how_to_go_on(call: Cli, trained: Path, tmp_path: Path) -> None:
    """It said nothing of what was won, or how to see what was lost."""
    target = tmp_path / "in 8 bits"
    said = call("quantize", trained / "run", target)
    assert said.code == 0
    before, after = ((folder / "model.safetensors").stat().st_size for folder in (trained / "run" / "final", target))
    first, second, last = said.err.splitlines()
    found = re.fullmatch(rf"{target}: int8, ([\d,]+) bytes of weights -> ([\d,]+)", first)
    assert found is not None
    assert [int(size.replace(",", "")) for size in found.groups()] == pytest.approx([before, after], rel=0.05)
    assert "cyberslm eval" in second
    assert last == f"next:  cyberslm generate '{target}' --prompt 'TEXT'"


def test_prompt_that_loses_its_beginning_is_told(call: Cli, trained: Path) -> None:
    arguments = ("generate", trained / "run", "--prompt", "word " * 60, "--context", "truncate-left")
    for more in (("--stream",), ("--no-stream",)):
        said = call(*arguments, "--max-new-tokens", 4, *more)
        assert said.code == 0
        assert "note: the prompt's first" in said.err
        assert said.out.startswith("word word")


def test_answer_without_a_token_left_is_told(call: Cli, trained: Path) -> None:
    ids = [part for token in range(400) for part in ("--banned-ids", token)]
    said = call("generate", trained / "run", "--prompt", "The", *ids)
    assert (said.code, said.out) == (0, "The\n")
    assert "the settings left no token that may follow" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stop", ""), "stop must be texts of 1 to 1,024 characters"),
        (("--logit-bias", "a=3"), "--logit-bias is 'a=3': write it as ID=BIAS"),
        (("--logit-bias", "3=1e9"), "logit_bias must be from -100 to 100, not 1000000000.0 (of id 3)"),
        (("--banned-ids", "-1"), "banned_ids must be ids"),
        (("--forced-ids", "1000000"), "forced_ids must be ids from 0 to 399"),
        (("-n", "3", "--temperature", "0"), "greedy answers are all the same"),
        (("-n", "3", "--stream"), "--stream shows one prompt's text"),
        (("--beams", "2", "--temperature", "1"), "temperature must be 0 with beams 2"),
        (("--repetition-penalty", "0"), "repetition_penalty must be a number from 0.01 to 100"),
        (("--min-p", "nan"), "min_p must be a number from 0 to 1"),
        (("--logprobs", "21", "--json"), "logprobs must be a whole number from 0 to 20"),
        (("--logprobs", "2"), "--logprobs are part of --json"),
        (("--max-new-tokens", "1000000000"), "do not fit the model's context of 32"),
        (("--context", "sideways"), "sideways"),
    ],
)
def test_control_out_of_range_is_refused_by_name(call: Cli, trained: Path, arguments: tuple, words: str) -> None:
    said = call("generate", trained / "run", "--prompt", "x", *arguments)
    assert (said.code, said.out) == (2, "")
    assert words in said.err
