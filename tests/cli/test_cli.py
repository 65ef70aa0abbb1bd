"""The command line as people meet it: help, exit codes, messages. Most calls run in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from calling import Cli
from conftest import MakeRun

VERBS = (
    "init",
    "doctor",
    "check",
    "plot",
    "train",
    "generate",
    "eval",
    "data prepare",
    "data inspect",
    "tokenizer train",
    "tokenizer report",
)


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_starts_nothing_and_needs_no_torch(verb: str, tmp_path: Path) -> None:
    """G56: --help started a training run."""
    code = (
        "import sys\n"
        "from cyberslm.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "assert not {'torch', 'numpy', 'yaml', 'sentencepiece'} & set(sys.modules)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, *verb.split(), "--help"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert said.stdout.startswith("Usage:")
    assert list(tmp_path.iterdir()) == []


def test_version(call: Cli) -> None:
    assert call("--version").out.startswith("cyberslm 0.")


def test_train_then_generate(call: Cli, make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    said = call("train", path)
    assert said.code == 0
    lines = said.err.splitlines()
    assert any(line.startswith("model: ") and "parameters" in line for line in lines)
    assert any(line.startswith("step 5/5 | loss ") and "tok/s" in line and "eta" in line for line in lines)
    assert any("validation loss" in line and "ppl" in line and "bits/byte | best" in line for line in lines)
    assert "\r" not in said.err
    assert "\x1b" not in said.err
    final = path.parent / "run" / "final"
    assert lines[-1] == f"next:  cyberslm generate {final} --prompt 'TEXT'"
    said = call("generate", final, "--prompt", "The ", "--max-new-tokens", 5, "--seed", 1)
    assert said.code == 0
    assert said.out.startswith("The ")


def test_quiet_prints_nothing(call: Cli, make_run: MakeRun) -> None:
    said = call("train", make_run({"train.max_steps": 5}), "--quiet")
    assert (said.code, said.out, said.err) == (0, "", "")


def test_generate_streams_what_it_would_print_whole(call: Cli, trained: Path) -> None:
    arguments = ("generate", trained / "run", "--prompt", "The", "--max-new-tokens", 20, "--seed", 3)
    streamed, whole = call(*arguments, "--stream"), call(*arguments, "--no-stream")
    assert streamed.out == whole.out
    assert call(*arguments).out == whole.out


def test_generate_reads_stdin_and_files(call: Cli, trained: Path, tmp_path: Path) -> None:
    prompt = "The class é"
    (tmp_path / "p.txt").write_text(prompt, encoding="utf-8")
    more = ("--max-new-tokens", 4, "--temperature", 0)
    given = call("generate", trained / "run", "--prompt", prompt, *more).out
    assert call("generate", trained / "run", "--prompt", "-", *more, stdin=prompt.encode()).out == given
    assert call("generate", trained / "run", "--prompt-file", tmp_path / "p.txt", *more).out == given
    assert given.startswith(prompt)


def test_generate_json_gives_one_object_per_prompt(call: Cli, trained: Path) -> None:
    said = call("generate", trained / "run", "--prompt", "a", "--prompt", "b c", "--json", "--max-new-tokens", 3)
    records = [json.loads(line) for line in said.out.splitlines()]
    assert [record["prompt"] for record in records] == ["a", "b c"]
    assert all({"text", "finish_reason", "ids"} < set(record) for record in records)


def test_eval_shows_the_model_beside_the_yardsticks(call: Cli, trained: Path) -> None:
    said = call("eval", trained / "run")
    assert said.code == 0
    for name in ("unigram", "gzip", "xz after training text", "this model"):
        assert name in said.out
    found = json.loads(call("eval", trained / "run", "--json").out)
    assert f"{found['bits_per_byte']:.4f}" in said.out
    assert set(found["yardsticks"]) == {"unigram", "gzip", "xz after training text"}


def test_check_shows_sizes_and_the_first_batch_and_trains_nothing(call: Cli, make_run: MakeRun) -> None:
    path = make_run()
    said = call("check", path)
    assert said.code == 0
    assert "num_kv_heads: 1" in said.out
    assert "parameters (" in said.out
    assert "tokens: 128 per step, " in said.out
    assert "row 0: " in said.out
    assert not (path.parent / "run" / "checkpoints").exists()


def test_tokenizer_report_prints_a_table_or_json_and_draws(call: Cli, trained: Path, tmp_path: Path) -> None:
    final = trained / "run" / "final"
    said = call("tokenizer", "report", trained / "run.yaml", "--against", final, "--plot", tmp_path / "r.png")
    assert said.code == 0
    assert "tokens per indicator" in said.out
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    said = call("tokenizer", "report", final, trained / "text", "--json")
    (line,) = said.out.splitlines()
    assert json.loads(line)["sources"][str(trained / "text")]["not_restored"] == 0
    said = call("tokenizer", "report", final, "--sample-bytes", "0")
    assert (said.code, said.err) == (2, "error: --sample-bytes must be at least 1, not 0\n")
    assert call("tokenizer", "report", tmp_path / "absent").code == 2


def test_data_prepare_and_tokenizer_train_do_their_parts(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run({"train.max_steps": 5})
    said = call("tokenizer", "train", path, "--out", tmp_path / "tok")
    assert said.code == 0
    assert (tmp_path / "tok" / "tokenizer.model").exists()
    said = call("data", "prepare", path, f"tokenizer.path={tmp_path / 'tok'}")
    assert said.code == 0
    assert "prepared:" in said.out
    again = call("data", "prepare", path, f"tokenizer.path={tmp_path / 'tok'}")
    assert "is up to date" in again.err
    assert call("train", path, f"tokenizer.path={tmp_path / 'tok'}").code == 0


def test_dry_run_shows_and_keeps_nothing(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run({"data.steps": [{"length": {"min_characters": 200}}], "data.redact": {}})
    said = call("data", "prepare", path, "--dry-run")
    assert said.code == 0
    assert "data: would keep" in said.out
    assert "data: redacted" in said.out
    assert "length" in said.out
    assert [item.name for item in (tmp_path / "run").iterdir()] == []


def test_slices_are_merged_from_the_command_line(
    call: Cli, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = make_run()
    assert call("data", "prepare", path).code == 0
    whole = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())["data_sha256"]
    for part in ("1/2", "2/2"):
        said = call("data", "prepare", path, "out_dir=other", "--slice", part)
        assert (said.code, said.out.startswith("slice: ")) == (0, True)
    assert call("data", "prepare", path, "out_dir=other", "--merge").code == 0
    merged = json.loads((Path("other") / "data" / "manifest.json").read_text())["data_sha256"]
    assert merged == whole
    assert "holds no slices: make them with" in call("data", "prepare", path, "out_dir=third", "--merge").err
    assert "write it as I/N, such as 1/4" in call("data", "prepare", path, "--slice", "half").err
    assert "give one of --dry-run, --slice and --merge" in call("data", "prepare", path, "--merge", "--dry-run").err


def test_merge_leaves_the_shards_of_a_run_that_has_begun(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    """--merge replaced them, and the run could not go on."""
    path = make_run()
    assert call("train", path, "--stop-at", "5").code == 0
    before = (tmp_path / "run" / "data" / "manifest.json").read_bytes()
    (tmp_path / "text" / "more.txt").write_text("another file")
    assert call("data", "prepare", path, "--slice", "1/1").code == 0
    said = call("data", "prepare", path, "--merge")
    assert said.code == 2
    assert "holds a run that began with other data" in said.err
    assert (tmp_path / "run" / "data" / "manifest.json").read_bytes() == before


def test_scratch_of_a_killed_dry_run_is_swept(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    """It stood in the way of every later one."""
    path = make_run()
    (tmp_path / "run" / ".scratch-abc.cyberslm-partial").mkdir(parents=True)
    assert call("data", "prepare", path, "--dry-run").code == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_init_writes_a_yaml_that_checks_and_trains(
    call: Cli, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    monkeypatch.chdir(tmp_path)
    assert call("init", "text", "--out", "my.yaml").code == 0
    written = (tmp_path / "my.yaml").read_text()
    assert "# Peak learning rate" in written
    refused = call("init", "text", "--out", "my.yaml")
    assert refused.code == 2
    assert "--force" in refused.err
    assert call("check", "my.yaml").code == 0
    steps = ("train.max_steps=3", "scheduler.warmup_steps=1", "train.global_batch_size=2", "train.micro_batch_size=2")
    assert call("train", "my.yaml", *steps, "logging.plots=false").code == 0
    assert call("generate", "runs/text", "--prompt", "x", "--max-new-tokens", 2).code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  max_stepz: 5\n", r"run.yaml:\d+: unknown key 'max_stepz'.*did you mean 'max_steps'"),
        ("lr: 1e-3\n", r"run.yaml:\d+: unknown key 'lr'.*optimizer"),
        ("learning_rte: 1e-3\n", r"run.yaml:\d+: unknown key 'learning_rte'"),
        ("optimizer:\n  lr: fast\n", r"run.yaml:\d+.*lr"),
        ("optimizer:\n  lr: '1e-4'\n", r"run.yaml:\d+.*lr"),
        ("seed: 010\n", r"run.yaml:\d+.*seed"),
        ("seed: 1\nseed: 2\n", r"run.yaml:\d+.*'seed'"),
        ("model:\n  dropout: .nan\n", r"run.yaml:\d+.*dropout"),
        ("logging:\n  plots: no\n", r"run.yaml:\d+.*plots.*true or false"),
        ("model:\n  num_heads: 5\n", r"run.yaml:\d+.*hidden_dim 384 is not a multiple of num_heads 5"),
        ("- a\n", r"run.yaml"),
        ("a: &x [1]\nb: *x\n", r"run.yaml:\d+"),
        ("train: {max_steps: 5\n", r"run.yaml:\d+"),
    ],
)
def test_bad_configuration_is_one_error_with_its_place_and_no_work(
    call: Cli, tmp_path: Path, text: str, words: str
) -> None:
    """G52, G53: misspelt keys were ignored and defaults used; 1e-4 was read as text."""
    path = tmp_path / "run.yaml"
    path.write_text("out_dir: run\n" * (not text.startswith("- ")) + text)
    said = call("train", path)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    assert __import__("re").search(words, said.err.replace("\n", " ")), said.err
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", ["1e-4", "3e-4", "0.0001", "1.0e-4"])
def test_learning_rate_in_any_spelling_is_a_number(make_run: MakeRun, value: str) -> None:
    from cyberslm.recipes.config import load_run

    path = make_run()
    path.write_text(path.read_text().replace("lr: 0.003", f"lr: {value}"))
    assert load_run(path).value.optimizer.lr == float(value)
    assert load_run(path, [f"optimizer.lr={value}"]).value.optimizer.lr == float(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_stepz=3", "did you mean 'max_steps'"),
        ("optimizer.lr=fast", "lr"),
        ("train.max_steps", "="),
        ("logging.plots=no", "true or false"),
    ],
)
def test_bad_override_is_refused_by_the_same_rules(call: Cli, make_run: MakeRun, override: str, words: str) -> None:
    """G54: overrides bypassed validation."""
    said = call("train", make_run(), override)
    assert said.code == 2
    assert "command line" in said.err
    assert words in said.err


def test_missing_files_are_named(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    said = call("train", tmp_path / "absent.yaml")
    assert (said.code, "absent.yaml" in said.err) == (2, True)
    said = call("train", make_run({"data.sources": ["nowhere"]}))
    assert said.code == 2
    assert "data.sources" in said.err
    assert "nowhere" in said.err


def test_empty_corpus_is_its_own_error(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run({"data.sources": ["empty"]})
    (tmp_path / "empty").mkdir()
    assert call("train", path).code == 2
    (tmp_path / "empty" / "a.txt").write_text(" \n\n")
    said = call("train", path)
    assert said.code == 2
    assert "no text" in said.err
    assert not (tmp_path / "run" / "data").exists()


def test_bad_json_line_is_fatal_with_its_place_or_counted(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run({"train.max_steps": 5})
    with (tmp_path / "text" / "more.jsonl").open("a") as file:
        file.write("{broken\n")
    said = call("train", path)
    assert said.code == 2
    assert "more.jsonl:21" in said.err
    said = call("train", path, "data.on_bad_input=skip")
    assert said.code == 0
    assert "skipped: 1 " in said.err


def test_binary_file_is_named(call: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run()
    (tmp_path / "text" / "image.txt").write_bytes(bytes(range(256)))
    said = call("train", path)
    assert said.code == 2
    assert "image.txt" in said.err


def test_impossible_vocabulary_names_what_works(call: Cli, make_run: MakeRun) -> None:
    said = call("train", make_run({"tokenizer.vocab_size": 5}))
    assert said.code == 2
    assert "vocab_size" in said.err
    said = call("train", make_run({"tokenizer.vocab_size": 32_000}))
    assert said.code == 2
    assert "largest workable size" in said.err
    assert "tokenizer.vocab_size" in said.err


def test_folder_of_another_run_is_refused(call: Cli, make_run: MakeRun) -> None:
    path = make_run({"train.max_steps": 5})
    assert call("train", path).code == 0
    said = call("train", path, "model.num_layers=3")
    assert said.code == 2
    assert "model.num_layers: 2 there, 3 now" in said.err


def test_damaged_model_folder_names_the_file(call: Cli, trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained / "run" / "final", tmp_path / "m")
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    for verb in (("generate", tmp_path / "m", "--prompt", "x"), ("eval", tmp_path / "m")):
        said = call(*verb)
        assert said.code == 2
        assert "model.safetensors" in said.err
        assert said.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a prompt"),
        (("--prompt", "x", "--temperature", "-1"), "temperature must be"),
        (("--prompt", "x", "--temperature", "nan"), "temperature must be"),
        (("--prompt", "x", "--top-p", "1.5"), "top_p must be above 0 and at most 1"),
        (("--prompt", "x", "--top-k", "-3"), "top_k must be"),
        (("--prompt", "x", "--max-new-tokens", "0"), "max_new_tokens must be"),
        (("--prompt", "x", "--max-new-tokens", "900"), "do not fit the model's context of 32"),
        (("--prompt", "x", "--seed", "-4"), "seed must be"),
        (("--prompt", "word " * 200), "context of 32"),
        (("--prompt", "x", "--prompt-file", "y"), "not both"),
        (("--prompt", "x", "--prompt", "y", "--stream"), "--stream shows one prompt's text"),
        (("--prompt", "x", "--json", "--stream"), "--stream shows one prompt's text"),
        (("--prompt", "x", "--device", "tpu"), "device must be auto, cpu or cuda, not 'tpu'"),
        (("--prompt-file", "absent.txt"), "absent.txt can't be read"),
    ],
)
def test_bad_request_is_refused_before_any_token(call: Cli, trained: Path, arguments: tuple, words: str) -> None:
    said = call("generate", trained / "run", *arguments)
    assert said.code == 2
    assert words in said.err
    assert said.out == ""


def test_unknown_option_and_verb_exit_with_2(call: Cli) -> None:
    assert call("train", "x.yaml", "--nonsense").code == 2
    assert call("trian").code == 2
    assert call("train").code in (0, 2)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cyberslm", "--debug", "train", str(tmp_path / "absent.yaml")]
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "Traceback" in said.stderr


def test_closed_pipe_ends_quietly(trained: Path) -> None:
    """G56: `| head` gave a traceback."""
    command = (
        f"{sys.executable} -m cyberslm generate {trained / 'run'} --prompt x --max-new-tokens 30 --stream | head -c 1"
    )
    said = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert said.stderr == ""


def test_full_or_closed_output_is_an_error_or_nothing_but_no_traceback(trained: Path) -> None:
    command = f"{sys.executable} -m cyberslm generate {trained / 'run'} --prompt x --max-new-tokens 3"
    for redirect, code in ((">/dev/full", 1), (">&-", 0)):
        said = subprocess.run(["bash", "-c", f"{command} {redirect}"], check=False, capture_output=True, text=True)
        assert "Traceback" not in said.stderr
        assert said.returncode == code, said.stderr


def test_missing_tokenizer_is_named(call: Cli, make_run: MakeRun) -> None:
    said = call("train", make_run({"tokenizer": {"path": "nowhere"}}))
    assert said.code == 2
    assert "tokenizer.path" in said.err


def test_starter_leaves_the_models_vocabulary_to_the_tokenizer(
    call: Cli, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init` wrote the reference model's 32,000 rows beside a tokenizer of 2,048."""
    make_run()
    monkeypatch.chdir(tmp_path)
    call("init", "text", "--out", "my.yaml")
    said = call("check", "my.yaml")
    assert "vocabulary 2,048" in said.out
    assert "# vocab_size: 32000" in (tmp_path / "my.yaml").read_text()


def test_run_inside_the_folder_of_its_text_works(
    call: Cli, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cd text; cyberslm init .` made a run that read its own files as text."""
    make_run()
    monkeypatch.chdir(tmp_path / "text")
    assert call("init", ".", "--out", "my.yaml").code == 0
    steps = ("train.max_steps=2", "scheduler.warmup_steps=1", "train.global_batch_size=2", "logging.plots=false")
    assert call("check", "my.yaml").code == 0
    assert call("train", "my.yaml", *steps, "--stop-at", 1).code == 0
    assert call("train", "my.yaml", *steps).code == 0


def test_out_of_memory_names_what_to_lower(call: Cli, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("cyberslm.recipes.train.run_training", greedy)
    said = call("train", make_run())
    assert said.code == 1
    assert "train.micro_batch_size" in said.err


def test_sigterm_while_preparing_exits_143_and_leaves_nothing_half_written(make_run: MakeRun, tmp_path: Path) -> None:
    """SIGTERM during preparation ended the process at once and left a staging folder behind."""
    path = make_run()
    code = (
        "import os, signal, sys\n"
        "from cyberslm import cli\n"
        "from cyberslm.data.shards import ShardWriter\n"
        "ShardWriter.add = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.run()\n"
    )
    said = subprocess.run([sys.executable, "-c", code, "train", path], check=False, capture_output=True, text=True)
    assert said.returncode == 143
    assert "Traceback" not in said.stderr
    assert "stopped by SIGTERM" in said.stderr
    left = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert left == {".lock", "checkpoints", "train.log", ".data.cyberslm-partial"}
    going_on = subprocess.run(
        [sys.executable, "-m", "cyberslm", "data", "prepare", path], check=True, capture_output=True, text=True
    )
    assert "kept the tokenizer that an earlier start trained" in going_on.stderr
