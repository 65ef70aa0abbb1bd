"""Models trained to answer: they stop, here and in transformers; masks, folders. bugs.md G23, G24, G33, G34, G57."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SMALL
from ranked_runs import run_in, same_run
from runs import fingerprint, of_type
from typer.testing import CliRunner

from cyberslm.checkpoint.folder import load_model
from cyberslm.cli.main import app
from cyberslm.errors import ConfigError
from cyberslm.generation.chat import Chat
from cyberslm.recipes.check import check
from cyberslm.recipes.config import load_run
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.finetune import load_any, load_finetune
from cyberslm.recipes.train import run_training
from cyberslm.recipes.use import load, open_chat
from cyberslm.text.chat import TEMPLATE_FILE
from cyberslm.text.messages import Message

WORDS = ["red", "blue", "gold", "grey"]
CHAT = {"format": "chat", "rows": "pack", "isolate_documents": True}

Write = Callable[..., Path]


def say(word: str) -> dict[str, str]:
    return {"prompt": f"say {word}", "completion": word}


def write_run(folder: Path, name: str, records: list[dict], *, data: dict, **sections: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    config = json.loads(json.dumps(SMALL)) | {"out_dir": name}
    config["data"] = {"sources": [f"{name}.jsonl"], "validation_fraction": 0.2} | data
    for key, value in sections.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path


@pytest.fixture(scope="session")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model learned to say a word and stop."""
    folder = tmp_path_factory.mktemp("answering")
    records = [say(word) | {"prompt": f"say {word}" + " please" * n} for word in WORDS for n in range(4)]
    path = write_run(
        folder, "sft", records, data=CHAT | {"validation_fraction": 0}, model={"max_seq_len": 192},
        tokenizer={"vocab_size": 300, "shrink": True}, optimizer={"lr": 1e-2},
        train={"max_steps": 60, "micro_batch_size": 4, "global_batch_size": 4}, scheduler={"warmup_steps": 5},
    )  # fmt: skip
    run_training(load_run(path), quiet=True)
    return folder


def test_a_model_trained_to_stop_stops_by_itself(answering):
    """G23: the end of a turn is a target, and generation waits for that id."""
    talk, doubt = open_chat(answering / "sft")
    assert doubt is None
    for word in WORDS:
        events = list(Chat(talk.engine, talk.renderer).reply(f"say {word}"))
        assert ("".join(event.text for event in events), events[-1].finish_reason) == (word, "stop")
        assert events[-1].token_id in talk.renderer.stop_ids


def test_the_folder_says_how_it_is_asked_and_what_ends_an_answer(answering):
    found = load_model(answering / "sft" / "final")
    end = next(index for index in found.tokenizer.control_ids if found.tokenizer.piece(index) == "<|end|>")
    assert found.extras.stop_ids == (end,)
    assert (answering / "sft" / "final" / TEMPLATE_FILE).read_text() == found.extras.chat_template
    settings = json.loads((answering / "sft" / "final" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [found.tokenizer.eos_id, end]


def test_it_stops_in_transformers_too_after_the_same_ids(answering):
    """G24 and G57: one template, one prompt, one end."""
    import transformers

    talk, _ = open_chat(answering / "sft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(answering / "sft" / "final")
    model = transformers.AutoModelForCausalLM.from_pretrained(answering / "sft" / "final")
    for word in WORDS:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"say {word}"}], add_generation_prompt=True, return_dict=False
        )
        assert asked == talk.renderer.prompt([Message("user", f"say {word}")])
        made = model.generate(torch.tensor([asked]), max_new_tokens=20, do_sample=False)[0, len(asked) :].tolist()
        ours = [e.token_id for e in Chat(talk.engine, talk.renderer).reply(f"say {word}")]
        assert made == ours
        assert tokenizer.decode(made, skip_special_tokens=True) == word


def test_chat_prints_the_answer(answering):
    shown = CliRunner().invoke(app, ["chat", str(answering / "sft"), "--message", "say gold", "--temperature", "0"])
    assert (shown.exit_code, shown.stdout) == (0, "gold\n"), shown.output


def test_only_answers_are_trained_tokens(answering):
    records = of_type(answering / "sft", "train")
    run = of_type(answering / "sft", "run")[0]
    assert 0 < records[0]["step_tokens"] < run["tokens_per_step"] / 2


def test_the_log_shows_the_first_rows_with_what_is_not_trained_in_brackets(answering):
    log = (answering / "sft" / "train.log").read_text()
    line = next(line for line in log.splitlines() if "<|assistant|>" in line)
    assert "chat: markers format, all answers trained" in log
    assert "[<|user|>]" in line
    assert "|<|end|>" in line


def test_check_shows_the_same(answering):
    assert "[<|user|>]" in "\n".join(check(load_run(answering / "sft.yaml"), lambda _: None))


def test_inspect_shows_what_is_trained(answering):
    shown = CliRunner().invoke(app, ["data", "inspect", str(answering / "sft.yaml")])
    assert shown.exit_code == 0, shown.output
    assert "[<|user|>]" in shown.output


def test_the_kept_configuration_says_what_was_left_open(answering):
    run = load_run(answering / "sft" / "config.yaml").value
    assert run.data.chat.max_tokens == 192
    assert run_training(load_run(answering / "sft.yaml"), quiet=True).state.step == 60


def test_bits_per_byte_count_answers_alone(tmp_path):
    """What was asked is no text that is scored: its length changes nothing that is divided by."""
    path = write_run(
        tmp_path, "eval", [say(word) | {"prompt": "x" * n} for word in WORDS for n in range(6)],
        data=CHAT, model={"max_seq_len": 64}, tokenizer={"vocab_size": 300, "shrink": True}, train={"max_steps": 5},
        scheduler={"warmup_steps": 1},
    )  # fmt: skip
    run_training(load_run(path), quiet=True)
    found = evaluate(tmp_path / "eval")
    held_out = sum(len(word) for word in WORDS) * 6
    assert 0 < found.score.num_bytes < held_out
    assert found.score.num_bytes < found.text_bytes
    assert all(0 <= yardstick.bits_per_byte < 1000 for yardstick in found.yardsticks)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 4), (4, 4)])
def test_micro_batches_of_unequal_answers_give_one_loss(tmp_path, sizes):
    """G33: the divisor is the number of trained tokens of the whole step."""
    micro, batch = sizes
    records = [{"prompt": f"q{n}", "completion": "a " * (1 + 7 * n % 11)} for n in range(24)]
    losses = []
    for name, rows in (("cut", micro), ("whole", batch)):
        path = write_run(
            tmp_path / f"{micro}", name, records, data=CHAT | {"validation_fraction": 0}, model={"max_seq_len": 48},
            tokenizer={"vocab_size": 300, "shrink": True}, train={"max_steps": 6, "micro_batch_size": rows},
            scheduler={"warmup_steps": 1},
        )  # fmt: skip
        run_training(load_run(path), quiet=True)
        losses.append([record["loss"] for record in of_type(tmp_path / f"{micro}" / name, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_preferences_without_a_base_are_refused(tmp_path):
    data = CHAT | {"format": "preference"}
    with pytest.raises(ConfigError, match="finetune, objective: dpo"):
        load_run(write_run(tmp_path, "x", [], data=data))


PAIRS = [
    {"prompt": f"say {word}" + " please" * n, "chosen": word.upper(), "rejected": word}
    for word in WORDS
    for n in range(4)
]


def dpo_run(answering: Path, folder: Path, name: str = "dpo", **sections) -> Path:
    sections = {"dpo": {"beta": 0.5}, "optimizer": {"lr": 2e-3}, **sections}
    return write_run(
        folder, name, PAIRS, data=CHAT | {"format": "preference"}, base=str(answering / "sft"), objective="dpo",
        model=None, tokenizer=None,
        train={"max_steps": 12, "micro_batch_size": 2, "global_batch_size": 4} | sections.pop("train", {}),
        scheduler={"warmup_steps": 2}, eval={"interval": 4}, checkpoint={"interval": 6}, **sections,
    )  # fmt: skip


@pytest.fixture(scope="module")
def preferring(answering, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferring")
    run_training(load_finetune(dpo_run(answering, folder)), quiet=True)
    return folder


def test_dpo_begins_at_log_2_and_learns_to_rank(preferring):
    """Before the first step the model is its own reference: margin 0, loss log 2."""
    records = of_type(preferring / "dpo", "train")
    assert records[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert records[0]["reward_margin"] == pytest.approx(0, abs=1e-3)
    assert records[-1]["loss"] < 0.5 < records[-1]["reward_margin"]
    assert records[-1]["accuracy"] == 1.0
    base, last = of_type(preferring / "dpo", "base")[0], of_type(preferring / "dpo", "validation")[-1]
    assert base["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert last["reward_margin"] > base["reward_margin"]
    log = (preferring / "dpo" / "train.log").read_text()
    assert "ranked right 100.0%" in log
    assert "pairs ranked right" in log


def test_a_models_template_and_stops_come_from_its_base(preferring, answering):
    mine, base = (load_model(folder / "final").extras for folder in (preferring / "dpo", answering / "sft"))
    assert mine == base


def test_log_probabilities_of_the_base_are_kept_and_used_again(answering, preferring, tmp_path, monkeypatch):
    """Another run on the same base and tokens makes none; another base, or a damaged file, makes them anew."""
    kept = preferring / "dpo" / "data-reference"
    assert (kept / "reference.safetensors").is_file()
    made: list[int] = []
    real = __import__("cyberslm.recipes.preferences", fromlist=["x"])._log_probs
    monkeypatch.setattr("cyberslm.recipes.preferences._log_probs", lambda *args: made.append(1) or real(*args))
    shared = {"prepared": str(preferring / "dpo" / "data")}
    for name, expected in (("again", 0), ("damaged", 2)):
        if name == "damaged":
            data = bytearray((kept / "reference.safetensors").read_bytes())
            data[-1] ^= 1
            (kept / "reference.safetensors").write_bytes(bytes(data))
        made.clear()
        path = dpo_run(answering, tmp_path, name)
        run_training(load_finetune(path, [f"data.prepared={shared['prepared']}", "train.max_steps=3"]), quiet=True)
        assert len(made) == expected


def test_a_stopped_dpo_run_goes_on_to_the_same_bits(answering, preferring, tmp_path):
    path = dpo_run(answering, tmp_path)
    run_training(load_finetune(path), stop_at=7, quiet=True)
    run_training(load_finetune(path), quiet=True)
    ours, straight = fingerprint(tmp_path / "dpo"), fingerprint(preferring / "dpo")
    assert {k: v for k, v in ours.items() if k != "log"} == {k: v for k, v in straight.items() if k != "log"}


def test_dpo_with_adapters_ranks_too(answering, tmp_path):
    path = dpo_run(answering, tmp_path, "lora", lora={"rank": 4}, optimizer={"lr": 2e-2})
    run_training(load_finetune(path), quiet=True)
    records = of_type(tmp_path / "lora", "train")
    assert records[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert records[-1]["accuracy"] == 1.0
    assert load_model(tmp_path / "lora" / "final").extras.chat_template is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": "next_token", "dpo": None}, "dpo learns from preference"),
        ({"train": {"z_loss": 0.1}}, "z_loss"),
        ({"replay": {"path": "dpo.jsonl"}}, "replay"),
        ({"distributed": {"strategy": "fsdp"}}, "fsdp"),
    ],
)
def test_what_does_not_go_with_dpo_is_refused_by_name(answering, tmp_path, changes, named):
    path = dpo_run(answering, tmp_path)
    config = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key)
        else:
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=named):
        load_finetune(path)


def test_an_sft_run_on_a_base_keeps_its_format(answering, tmp_path):
    """Its template lies beside the base's tokenizer and is found there."""
    records = [say(word) for word in WORDS * 6]
    path = write_run(
        tmp_path, "more", records, data=CHAT | {"validation_fraction": 0}, base=str(answering / "sft"), model=None,
        tokenizer=None, train={"max_steps": 3}, scheduler={"warmup_steps": 1},
    )  # fmt: skip
    loaded = load_any(path)
    assert loaded.value.data.chat.template == str(answering / "sft" / "final" / TEMPLATE_FILE)
    run_training(loaded, quiet=True)
    mine, base = (load_model(folder / "final").extras for folder in (tmp_path / "more", answering / "sft"))
    assert mine == base
    assert load(tmp_path / "more").generate(["x"], max_new_tokens=1)


def test_ranks_divide_answers_and_pairs_as_one_process_does(answering, preferring, tmp_path):
    """G33 across ranks: unequal answers weigh by their tokens, pairs by their number."""
    path = dpo_run(answering, tmp_path)
    assert run_in(2, path, "distributed.strategy=ddp") == [(12, None)] * 2
    same_run(tmp_path / "dpo", preferring / "dpo")
    records = [{"prompt": f"q{n}", "completion": "a " * (1 + 7 * n % 11)} for n in range(24)]
    for name in ("one", "two"):
        path = write_run(
            tmp_path, name, records, data=CHAT, model={"max_seq_len": 48}, train={"max_steps": 6},
            tokenizer={"vocab_size": 300, "shrink": True}, scheduler={"warmup_steps": 1},
        )  # fmt: skip
        if name == "two":
            run_in(2, path, "distributed.strategy=ddp")
        else:
            run_training(load_run(path), quiet=True)
    same_run(tmp_path / "two", tmp_path / "one")


def test_the_recipes_run_one_after_the_other(answering, tmp_path, monkeypatch):
    """configs/sft-security-qa.yaml and configs/dpo-demo.yaml, tiny, on pairs that the script makes."""
    from test_security_qa import SCRIPTS, write_corpus

    monkeypatch.syspath_prepend(str(SCRIPTS))
    import security_qa

    security_qa.make(write_corpus(tmp_path), tmp_path / "qa")
    configs, base = SCRIPTS.parent / "configs", str(answering / "sft")
    tiny = ["train.max_steps=2", "scheduler.warmup_steps=1", "eval.interval=1", "checkpoint.interval=1", "threads=1"]
    for name, learned in (("sft-security-qa", "train"), ("dpo-demo", "preferences")):
        held_out = "held-out" if learned == "train" else "preferences-held-out"
        settings = [
            f"out_dir={tmp_path / name}",
            f"base={base}",
            f"data.sources=[{tmp_path / 'qa' / learned}.jsonl]",
            f"data.validation=[{tmp_path / 'qa' / held_out}.jsonl]",
        ]
        outcome = run_training(load_finetune(configs / f"{name}.yaml", [*settings, *tiny]), quiet=True)
        assert outcome.final is not None
        base = str(outcome.final)
    assert "accuracy" in json.loads((tmp_path / "dpo-demo" / "final" / "manifest.json").read_text())["validation"]
