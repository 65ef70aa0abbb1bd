from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import write_corpus
from runs import TIMED, of_type, spikes_at
from safetensors.torch import load_file

from cyberslm import files
from cyberslm.checkpoint.adapter import load_adapter
from cyberslm.checkpoint.folder import load_model, save_model
from cyberslm.checkpoint.steps import list_steps, step_folder
from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import open_prepared
from cyberslm.errors import ConfigError
from cyberslm.files.manifest import seal as sealed
from cyberslm.generation.engine import Engine
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.check import check
from cyberslm.recipes.config import load_run
from cyberslm.recipes.estimate import needed_memory
from cyberslm.recipes.evaluate import evaluate
from cyberslm.recipes.finetune import FinetuneRun, kept_run, load_any, load_finetune
from cyberslm.recipes.merge import merge_adapter
from cyberslm.recipes.origin import moving, origin_of
from cyberslm.recipes.train import run_training
from cyberslm.recipes.use import load, load_merged, open_chat
from cyberslm.training.distributed import Dist
from cyberslm.training.memory import Needed
from cyberslm.training.trackers import read_metrics

FINALS = ("final-adapter", "final")
LORA = {"rank": 4, "alpha": 8, "dropout": 0.1}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, trained: Path) -> Make:
    """Write a fine-tuning run's YAML with changes by dotted key."""

    def made(changes: dict[str, object] | None = None, *, name: str = "tuned") -> Path:
        write_corpus(tmp_path / "text", documents=20)
        (tmp_path / "general").mkdir(exist_ok=True)
        for number in range(12):
            (tmp_path / "general" / f"{number}.txt").write_text(f"The cat number {number} sat on mats. " * 20)
        config: dict = {
            "out_dir": name,
            "base": str(trained / "run"),
            "precision": "fp32",
            "data": {"sources": ["text"], "validation_fraction": 0.2},
            "train": {"max_steps": 12, "micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {"lr": 3e-3},
            "scheduler": {"warmup_steps": 3},
            "eval": {"interval": 6, "max_rows": 8},
            "checkpoint": {"interval": 6},
            "logging": {"interval": 6, "plots": False, "probe": False},
        }
        for key, value in (changes or {}).items():
            section, _, last = key.rpartition(".")
            (config.setdefault(section, {}) if section else config)[last] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    return made


def tune(path: Path, *overrides: str, stop_at: int | None = None) -> Path:
    loaded = load_finetune(path, overrides)
    run_training(loaded, stop_at=stop_at, quiet=True)
    return loaded.value.folder


def prints(run: Path) -> dict[str, str]:
    """What must not depend on interruptions."""
    last = list_steps(run / "checkpoints")[-1].path
    hashes = {str(path.relative_to(last)): files.sha256_file(path) for path in last.rglob("*.safetensors")}
    log = [{k: v for k, v in record.items() if k not in TIMED} for record in read_metrics(run / "metrics.jsonl")]
    return hashes | {"log": json.dumps(log), "final": files.sha256_file(run / "final" / "model.safetensors")}


@pytest.mark.parametrize(
    "changes", [{}, {"lora": LORA}, {"trainable": ["layers.1.*"]}, {"train.ema_decay": 0.9, "lora": LORA}]
)
def test_run_that_was_stopped_gives_the_bits_of_a_straight_one(make: Make, changes: dict) -> None:
    """G51: on resume the adapter was made anew, or the base was forgotten to be frozen."""
    straight = tune(make(changes))
    path = make(changes, name="stopped")
    for stop in (1, 4, 9):
        tune(path, stop_at=stop)
    stopped = tune(path)
    assert prints(stopped) == prints(straight)


def test_run_that_was_killed_gives_the_bits_of_a_straight_one(make: Make) -> None:
    wanted = prints(tune(make({"lora": LORA})))
    path = make({"lora": LORA}, name="killed")
    code = (
        "import sys, time\nfrom cyberslm.recipes import hooks\nfrom cyberslm.recipes.finetune import load_finetune\n"
        "from cyberslm.recipes.train import run_training\nreal = hooks.RunHooks.record\n"
        "def slowly(self, record):\n    real(self, record)\n"
        "    if record['step'] == 8: print('there', flush=True); time.sleep(60)\n"
        f"hooks.RunHooks.record = slowly\nrun_training(load_finetune({str(path)!r}), quiet=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert prints(tune(path)) == wanted


def test_adapters_alone_are_trained_and_kept(make: Make, trained: Path) -> None:
    """G51: 27 times more weights were trained after a resume; the base's bytes and hash stay."""
    before = files.sha256_file(trained / "run" / "final" / "model.safetensors")
    path = make({"lora": LORA})
    sizes = [moving(load_finetune(path).value).trained]
    run = tune(path, stop_at=6)
    sizes.append(
        sum(
            t.numel()
            for t in load_file(list_steps(run / "checkpoints")[-1].path / "adapter_model.safetensors").values()
        )
    )
    run = tune(path)
    step = list_steps(run / "checkpoints")[-1].path
    sizes.append(sum(tensor.numel() for tensor in load_adapter(step).tensors.values()))
    assert sizes == [4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))] * 3
    moments = load_file(step / "training" / "optimizer.safetensors")
    assert {name.rpartition(".")[2] for name in moments} == {"lora_A", "lora_B"}
    assert not (step / "model.safetensors").exists()
    assert files.sha256_file(trained / "run" / "final" / "model.safetensors") == before
    assert files.verify(run / "final-adapter")["base_sha256"] == files.read_manifest(trained / "run" / "final")["self"]


def test_final_is_a_whole_model_and_is_what_merge_makes(make: Make, trained: Path, tmp_path: Path) -> None:
    run = tune(make({"lora": LORA}))
    target = merge_adapter(trained / "run", run, tmp_path / "merged")
    ids = torch.tensor([[2, 9, 17, 33]])
    final, merged = load_model(run / "final").model, load_model(target).model
    assert torch.equal(final(ids), merged(ids))
    base = load_model(trained / "run" / "final").model
    assert not torch.allclose(final(ids), base(ids), atol=1e-3)
    assert load(run / "final-adapter").generate(["The "], max_new_tokens=4, temperature=0.0)  # with its base
    with pytest.raises(ConfigError, match=r"merged exists: name another folder"):
        merge_adapter(trained / "run", run, target)


def contents(folder: Path) -> dict[str, str]:
    """The hashes of a model folder's files."""
    return {name: entry["sha256"] for name, entry in files.verify(folder)["files"].items()}


@pytest.mark.parametrize("train", [True, False])
def test_adapter_with_new_tokens_over_its_base_is_final(
    make: Make, trained: Path, tmp_path: Path, *, train: bool
) -> None:
    """It fitted no base, whose vocabulary is smaller."""
    changes = {"lora": LORA, "extend_vocab": {"tokens": ["CVE-", "statement"], "train": train}}
    run = tune(make(changes | {"train.max_steps": 6, "eval.interval": 3}))
    target = merge_adapter(trained / "run", run, tmp_path / "merged")
    assert contents(target) == contents(run / "final")
    assert evaluate(run / "final-adapter").score == evaluate(run / "final").score
    text = "A statement on CVE-1"
    adapted, final = (load(run / name).generate([text], max_new_tokens=6, temperature=0.0) for name in FINALS)
    assert adapted[0].ids == final[0].ids


def test_adapter_of_new_tokens_is_refused_for_a_base_of_another_tokenizer(make: Make, trained: Path) -> None:
    run = tune(make({"lora": LORA, "extend_vocab": {"tokens": ["CVE-"]}, "train.max_steps": 6}))
    other = tune(make({"extend_vocab": {"tokens": ["statement"]}, "train.max_steps": 4}, name="other"))
    adapter = run / "final-adapter"
    manifest = files.read_manifest(adapter) | {"base_sha256": files.read_manifest(other / "final")["self"]}
    shutil.copytree(adapter, run / "moved")
    (run / "moved" / "manifest.json").write_bytes(seal(manifest))
    with pytest.raises(ConfigError, match="its tokenizer isn't the base's, nor that with more tokens"):
        load_merged(run / "moved", base=other / "final")


def seal(manifest: dict) -> bytes:
    fields = {key: value for key, value in manifest.items() if key not in ("files", "self")}
    return sealed(fields, manifest["files"])[1]


def test_peft_opens_an_adapter_with_new_tokens_on_a_base_with_as_many_rows(make: Make, trained: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run = tune(make({"lora": LORA, "extend_vocab": {"tokens": ["CVE-", "statement"]}, "train.max_steps": 6}))
    adapter, final = run / "final-adapter", load_model(run / "final")
    words = transformers.AutoTokenizer.from_pretrained(adapter)
    ids = words.encode("A statement on CVE-1")
    assert ids == final.tokenizer.encode("A statement on CVE-1")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "run" / "final")
    theirs.resize_token_embeddings(len(words))
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    with torch.no_grad():
        wanted = final.model(torch.tensor([ids]))
        torch.testing.assert_close(theirs(torch.tensor([ids])).logits, wanted, atol=1e-5, rtol=0)


def test_adapter_that_learned_to_chat_is_asked_so_wherever_it_is_opened(
    make: Make, trained: Path, tmp_path: Path
) -> None:
    """Opened, merged and exported it had the chat template and stop ids of its base, which here has neither."""
    (tmp_path / "qa.jsonl").write_text('{"prompt": "say red", "completion": "red"}\n' * 24)
    data = {
        "sources": ["qa.jsonl"],
        "format": "chat",
        "rows": "pack",
        "isolate_documents": True,
        "validation_fraction": 0,
    }
    run = tune(make({"lora": LORA, "data": data, "train.max_steps": 4}))
    final = load_model(run / "final").extras
    assert final.chat_template is not None
    assert final.stop_ids
    assert load_model(trained / "run" / "final").extras.chat_template is None
    target = merge_adapter(trained / "run", run, tmp_path / "merged")
    assert contents(target) == contents(run / "final")
    opened, doubt = open_chat(run / "final-adapter")
    assert doubt is None
    assert opened.renderer.template == final.chat_template
    assert set(final.stop_ids) <= set(load(run / "final-adapter").stop_ids)


@pytest.mark.parametrize("lora", [None, LORA])
def test_finished_run_says_so_in_one_line(make: Make, lora: dict | None) -> None:
    """A run of adapters wrote final/ again and printed its whole end at each start."""
    path = make({"lora": lora} if lora else {})
    run = tune(path)
    written, log = (run / "final" / "manifest.json").stat().st_mtime_ns, (run / "train.log").read_text()
    tune(path)
    assert (run / "final" / "manifest.json").stat().st_mtime_ns == written
    said = (run / "train.log").read_text().removeprefix(log)
    score = files.read_manifest(run / "final")["validation"]["bits_per_byte"]
    base = files.read_manifest(run / "final")["before"]["bits_per_byte"]
    assert said.count("\n") == 1
    assert f"this run is finished: {run / 'final'} (step 12, validation loss " in said
    assert f"{score:.4f} bits per byte, the base's {base:.4f})" in said


def test_adapter_that_is_gone_is_written_again(make: Make) -> None:
    path = make({"lora": LORA})
    run = tune(path)
    shutil.rmtree(run / "final-adapter")
    tune(path)
    assert files.verify(run / "final-adapter")


def test_text_made_while_training_is_that_of_the_merged_model(make: Make) -> None:
    run = tune(make({"lora": LORA, "eval.sample_prompts": ["The "], "eval.sample_tokens": 8}))
    assert any(json.loads(line)["step"] == 12 for line in (run / "samples.jsonl").read_text().splitlines())
    loaded = load_finetune(make({"lora": LORA}))
    step = files.read_manifest(run / "final")["step"]
    adapted = origin_of(loaded.value).reopened(step_folder(run / "checkpoints", step), torch.device("cpu")).eval()
    final = load_model(run / "final")
    made = [
        Engine(model, final.tokenizer).generate(["The ", "An if"], max_new_tokens=12, temperature=0.0)
        for model in (adapted, final.model)
    ]
    assert [one.ids for one in made[0]] == [one.ids for one in made[1]]


def test_another_base_is_refused(make: Make, trained: Path, tmp_path: Path) -> None:
    """G51."""
    path = make({"lora": LORA})
    run = tune(path, stop_at=6)
    other = tune(make(name="other"))
    with pytest.raises(ConfigError, match=r"base: .*other.* is another model than the run in"):
        tune(path, f"base={other}")
    shutil.copytree(trained / "run" / "final", tmp_path / "moved")
    tune(path, f"base={tmp_path / 'moved'}")
    with pytest.raises(ConfigError, match="the adapter was trained on another base than"):
        merge_adapter(other, run, tmp_path / "merged")


def test_replay_gives_its_share_and_is_validated_beside_the_runs_own_text(make: Make) -> None:
    path = make({"replay": {"path": "general", "weight": 0.25}, "eval.max_rows": 2})
    run = tune(path)
    log = (run / "train.log").read_text()
    shares = [float(line.rpartition(", ")[2].split("%")[0]) for line in log.splitlines() if line.startswith("mixture")]
    assert len(shares) == 2
    assert shares[1] == pytest.approx(25, abs=1)
    comparison = next(r for r in read_metrics(run / "metrics.jsonl") if r["type"] == "comparison")
    assert {"before/domain", "after/domain", "before/general", "after/general"} <= set(comparison)
    assert comparison["after/domain"] < comparison["before/domain"]
    manifest = files.verify(run / "final")
    assert manifest["before"]["by_source"]["general"]["bits_per_byte"] == comparison["before/general"]
    assert manifest["validation"]["bits_per_byte"] == comparison["after/domain"]
    assert "\nbits per byte                 base       now\ndomain " in log
    assert re.search(r"\nmeasured in fp32 on 2 of \d+ and 2 of \d+ rows, spread evenly \(eval.max_rows\)\n", log)


def test_base_is_scored_as_eval_scores_it(make: Make, trained: Path) -> None:
    run = tune(make({"eval.max_rows": 0}), stop_at=1)
    before = next(r for r in read_metrics(run / "metrics.jsonl") if r["type"] == "base")
    assert before["bits_per_byte"] == pytest.approx(
        evaluate(trained / "run", data=run / "data").score.bits_per_byte, rel=1e-6
    )


@pytest.mark.parametrize("rows", ["concat", "pack"])
def test_eval_gives_the_figures_of_the_runs_table(make: Make, tmp_path: Path, rows: str) -> None:
    """Its rows went from the run's own text into the general text, which the run's rows don't, and none had a name."""
    changes = {"replay": {"path": "general", "weight": 0.25}, "eval.max_rows": 0, "data.rows": rows}
    run = tune(make(changes))
    comparison = next(r for r in read_metrics(run / "metrics.jsonl") if r["type"] == "comparison")
    found = evaluate(run).score.by_source
    for name in ("domain", "general"):
        assert found[name].bits_per_byte == pytest.approx(comparison[f"after/{name}"], rel=1e-6)
    held = RowLoader(open_prepared(run / "data").validation, seq_len=32, batch_rows=1, seed=0, pad_id=0, by_source=True)
    if rows == "concat":
        log = (run / "train.log").read_text()
        assert f"measured in fp32 on {held.num_rows({0})} of {held.num_rows({0})} and " in log
    alone = tune(make({"data.sources": ["general"], "eval.max_rows": 0, "data.rows": rows}, name="alone"), stop_at=1)
    general = evaluate(run / "final", data=alone / "data").score
    assert general.num_bytes == found["general"].num_bytes
    assert general.bits_per_byte == pytest.approx(comparison["after/general"], rel=1e-6)


def test_shorter_rows_leave_the_models_context(make: Make, trained: Path) -> None:
    run = tune(make({"train.seq_len": 16}))
    model = load_model(run / "final").model
    assert model.config == load_model(trained / "run" / "final").model.config
    assert read_metrics(run / "metrics.jsonl")[0]["tokens_per_step"] == 4 * 16
    last = [r for r in read_metrics(run / "metrics.jsonl") if r["type"] == "validation"][-1]
    with pytest.raises(ConfigError, match="train.seq_len 33 must be at most the base's context, 32"):
        load_finetune(make({"train.seq_len": 33}))
    assert evaluate(run).score.num_tokens > 0
    assert last["bits_per_byte"] > 0


def test_what_is_named_is_trained_and_nothing_else(make: Make, trained: Path) -> None:
    before = load_file(trained / "run" / "final" / "model.safetensors")
    for changes, moves in (
        (
            {"trainable": ["layers.0.mlp.*", "norm.weight"]},
            lambda name: "layers.0.mlp" in name or name == "model.norm.weight",
        ),
        ({"freeze": ["embed_tokens.*", "layers.0.*"]}, lambda name: "embed" not in name and "layers.0." not in name),
        ({"lora": LORA, "trainable": ["norm.weight"]}, lambda name: "_proj" in name or name == "model.norm.weight"),
    ):
        run = tune(make(changes, name=f"run{len(str(changes))}"))
        after = load_file(run / "final" / "model.safetensors")
        assert {name for name in after if not torch.equal(after[name], before[name])} == set(filter(moves, after))
    with pytest.raises(ConfigError, match="leave nothing to train"):
        tune(make({"freeze": ["*"]}, name="none"))


@pytest.mark.parametrize("lora", [None, LORA])
def test_new_tokens_begin_as_the_mean_of_their_pieces_and_open_in_transformers(
    make: Make, trained: Path, lora: dict | None
) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = ["CVE-", "statement"]
    changes = {"extend_vocab": {"tokens": tokens}, "optimizer.lr": 1e-4}
    run = tune(make(changes | ({"lora": lora} if lora else {}) | {"train.max_steps": 6, "eval.interval": 3}))
    base, final = load_model(trained / "run" / "final"), load_model(run / "final")
    old, new = base.model.embed_tokens.weight, final.model.embed_tokens.weight
    assert new.shape[0] == old.shape[0] + 2
    if lora:  # the old rows are frozen
        assert torch.equal(new[:-2], old)
    pieces = [base.tokenizer.encode(token, add_special_tokens=False) for token in tokens]
    means = torch.stack([old[ids].mean(0) for ids in pieces])
    assert (new[-2:] - means).norm() < 0.5 * means.norm()
    assert not torch.equal(new[-2:], means)
    text = "A statement on CVE-2024-1 and <eos>, then statements."
    ids = final.tokenizer.encode(text)
    assert len(ids) < len(base.tokenizer.encode(text))
    assert final.tokenizer.decode(ids) == text
    theirs = transformers.AutoTokenizer.from_pretrained(run / "final")
    assert theirs.encode(text) == ids
    logits = transformers.AutoModelForCausalLM.from_pretrained(run / "final")(torch.tensor([ids])).logits
    torch.testing.assert_close(logits, final.model(torch.tensor([ids])), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "learning"),
    [
        ({"lora": LORA, "freeze": []}, 3712 + 2 * 32),
        ({"freeze": ["*"]}, 2 * 32),
        ({"lora": LORA, "trainable": ["embed_tokens.*"]}, None),
        ({}, None),
    ],
)
def test_new_rows_alone_are_counted_where_the_others_stay(make: Make, changes: dict, learning: int | None) -> None:
    """The whole embedding was said to be trained."""
    path = make({"extend_vocab": {"tokens": ["CVE-", "statement"]}} | changes)
    found = moving(load_finetune(path).value)
    text = "\n".join(check(load_any(path), lambda _: None))
    assert found.learning == (learning or found.trained)
    assert f"trained: {found.learning:,} of " in text


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"extend_vocab": {"tokens": ["CVE-"]}}])
def test_base_with_more_rows_than_tokens_keeps_them(make: Make, trained: Path, tmp_path: Path, changes: dict) -> None:
    """Networks like Qwen's have such rows; the run made a smaller one and ended in a traceback."""
    base = load_model(trained / "run" / "final")
    rows = base.tokenizer.vocab_size + 8
    wide = CyberSLM(replace(base.model.config, vocab_size=rows), seed=2)
    save_model(tmp_path / "wide", wide, base.tokenizer, {})
    run = tune(make(changes | {"base": str(tmp_path / "wide"), "train.max_steps": 4}))
    final = load_model(run / "final")
    assert final.model.config.vocab_size == rows
    assert final.tokenizer.vocab_size == base.tokenizer.vocab_size + len(changes.get("extend_vocab", ()))
    if "lora" in changes:
        assert contents(merge_adapter(tmp_path / "wide", run, tmp_path / "merged")) == contents(run / "final")


def test_only_new_rows_can_be_trained(make: Make, trained: Path) -> None:
    run = tune(make({"extend_vocab": {"tokens": ["statement"]}, "freeze": ["*"]}))
    before = load_file(trained / "run" / "final" / "model.safetensors")
    after = load_file(run / "final" / "model.safetensors")
    rows = after.pop("model.embed_tokens.weight")
    assert torch.equal(rows[:-1], before["model.embed_tokens.weight"])
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("lora", [None, LORA])
def test_run_goes_back_at_a_spike_to_its_own_weights(
    make: Make, monkeypatch: pytest.MonkeyPatch, lora: dict | None
) -> None:
    spikes_at(monkeypatch, 37)  # after as many steps as a spike is measured against
    changes = {"train.on_spike": "rollback", "train.ema_decay": 0.5, "train.max_steps": 40}
    changes |= {"checkpoint.interval": 18, "eval.interval": 18, "eval.max_rows": 2}
    run = tune(make(changes | ({"lora": lora} if lora else {})))
    assert [(record["spike"], record["step"]) for record in of_type(run, "rollback")] == [(37, 37)]
    assert [record["step"] for record in of_type(run, "train")] == list(range(1, 41))
    assert all(record["loss"] < 10 for record in of_type(run, "train"))


def test_recomputed_blocks_give_the_same_weights(make: Make) -> None:
    lora = {"rank": 4}  # dropout would be drawn again
    first = tune(make({"lora": lora}))
    second = tune(make({"lora": lora, "train.activation_checkpointing": True}, name="again"))
    wanted = load_file(first / "final" / "model.safetensors")
    for name, weight in load_file(second / "final" / "model.safetensors").items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-5, rtol=1e-4)


def test_memory_is_a_part_of_what_training_all_weights_takes(make: Make) -> None:
    full, adapted = (
        needed_memory(load_finetune(make(changes)).value, Dist())
        for changes in ({"device": "cpu"}, {"device": "cpu", "lora": {"rank": 4, "base_precision": "bf16"}})
    )
    trained = moving(load_finetune(make({"lora": LORA})).value).trained
    assert adapted.optimizer == 8 * trained
    assert adapted.gradients == 4 * trained
    assert full.optimizer > 5 * adapted.optimizer
    assert adapted.weights < full.weights
    assert adapted.activations < full.activations


def test_memory_of_adapters_counts_what_else_learns(make: Make) -> None:
    """All of a network's activations were counted for adapters, and no gradient of a head that has new rows."""

    def need(**changes: object) -> Needed:
        given = {"device": "cpu", "precision": "bf16", "lora": {"rank": 4}} | changes
        return needed_memory(load_finetune(make(given)).value, Dist())

    alone, whole = need(), need(trainable=["layers.*"])
    assert alone.activations < whole.activations
    assert need(trainable=["norm.weight"]).activations == alone.activations
    grown, head = need(extend_vocab={"tokens": ["CVE-"]}), 32 * load_finetune(make()).value.model.vocab_size
    assert grown.activations == alone.activations + 4 * (head + 32)
    assert grown.loss - alone.loss >= 2 * (head + 32)
    assert need(lora={"rank": 4, "base_precision": "fp32"}).loss == alone.loss + 2 * head


def test_learning_rate_is_warmed_up_again_from_zero(make: Make) -> None:
    run = tune(make())
    rates = [r["lr"] for r in read_metrics(run / "metrics.jsonl") if r["type"] == "train"]
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert rates[-1] == pytest.approx(3e-4)


def test_early_stopping_and_the_best_step_count_the_runs_own_text(make: Make) -> None:
    run = tune(make({"train.patience": 1, "train.min_delta": 10.0, "replay": {"path": "general"}, "eval.interval": 3}))
    manifest = files.verify(run / "final")
    scores = {
        r["step"]: r["bits_per_byte/domain"] for r in read_metrics(run / "metrics.jsonl") if r["type"] == "validation"
    }
    assert max(scores) < 12
    assert manifest["step"] == min(scores, key=lambda step: scores[step])


def test_check_tells_what_is_trained_and_what_it_needs(make: Make) -> None:
    text = "\n".join(check(load_any(make({"lora": LORA})), lambda _: None))
    assert "trained: 3,712 of " in text
    assert "adapters of rank 4 on q_proj" in text
    assert "hidden 3,712 (adamw" in text
    full = "\n".join(check(load_any(make()), lambda _: None))
    assert "of 28,320 parameters" in full or "trained: " in full


def test_resolved_configuration_runs_as_it_is(make: Make) -> None:
    run = tune(make({"lora": LORA}), stop_at=3)
    assert isinstance(kept_run(run / "config.yaml"), FinetuneRun)
    tune(run / "config.yaml")
    assert (run / "final").is_dir()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"num_layers": 3}}, "model.num_layers is the base's, 2, not 3: leave it out"),
        ({"model": {"max_seq_len": 16}}, "model.max_seq_len is the base's, 32, not 16: leave it out .*train.seq_len"),
        ({"tokenizer": {"vocab_size": 300}}, "tokenizer.vocab_size is the base's, .*: leave it out"),
        ({"scale": "1M"}, "scale is for train"),
        ({"base": "nowhere"}, "base: .*nowhere is not a folder"),
        ({"lora": LORA, "optimizer": {"name": "muon"}}, "optimizer.name: muon is for whole matrices"),
        ({"lora": LORA, "freeze": ["norm.*"]}, "freeze: with lora the base is frozen already"),
        ({"lora": LORA, "distributed": {"strategy": "fsdp"}}, "fsdp can't cut up a base that is partly frozen"),
        ({"lora": {"targets": ["lm_head"]}}, "lora: targets has 'lm_head'|lora.targets has 'lm_head'"),
        ({"replay": {"path": "general", "weight": 1.0}}, "weight must be above 0 and below 1"),
        ({"replay": {"path": "general", "validation": "general"}}, "replay.validation is given, so name the domain's"),
        ({"extend_vocab": {}}, "tokens is empty and file is null"),
        (
            {"extend_vocab": {"tokens": ["statement"]}, "lora": LORA, "optimizer": {"weight_decay": 0.1}},
            "optimizer.weight_decay would move the old rows",
        ),
        ({"extend_vocab": {"tokens": ["ab", "ab"]}}, "extend_vocab: 'ab' is there twice"),
    ],
)
def test_what_cant_be_is_refused_before_any_work(make: Make, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_finetune(make(changes))


def test_the_other_verb_is_named(make: Make) -> None:
    """``train`` called a fine-tuning file's keys unknown, and ``finetune`` missed one in a training run's file."""
    path = make({"lora": LORA})
    with pytest.raises(ConfigError, match=rf"tuned.yaml: names a base, .*: use  cyberslm finetune {path}"):
        load_run(path)
    config = yaml.safe_load(path.read_text())
    del config["base"], config["lora"]
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=rf"names no base: .*; from scratch it is  cyberslm train {path}"):
        load_finetune(path)
    assert load_run(path).value.folder.name == "tuned"


def test_folder_of_a_training_run_is_refused(make: Make, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    with pytest.raises(ConfigError, match="holds a run of another kind"):
        tune(make({"out_dir": str(tmp_path / "copy" / "run"), "base": str(trained / "run")}))
    with pytest.raises(ConfigError, match="lies in out_dir, which this run is to fill"):
        tune(make({"out_dir": str(tmp_path / "copy" / "run"), "base": str(tmp_path / "copy" / "run")}))
