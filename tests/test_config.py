from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from cyberslm.config import PathStr, differences, documented_fields, dump, load, parse, template, to_mapping
from cyberslm.config.scalars import resolve, write
from cyberslm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the network."""

    num_heads: int = field(default=6, metadata={"alias": "num_attention_heads"})
    """Query heads per layer."""
    hidden_dim: int = field(default=384, metadata={"alias": ("hidden_size", "d_model")})
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of one head; worked out when null."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden_dim % self.num_heads:
            raise ConfigError(f"num_heads must divide hidden_dim {self.hidden_dim}, got {self.num_heads}")
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_dim // self.num_heads)
        if self.dropout >= 1:
            raise ValueError("nothing is left at this dropout")


@dataclass(frozen=True, kw_only=True)
class Source:
    path: PathStr
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Data:
    sources: list[Source] = field(default_factory=list)
    """Where the text comes from."""
    weights: dict[str, float] = field(default_factory=dict)
    extra: tuple[PathStr, ...] = ()
    rows: int | Literal["all"] = "all"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 3e-4
    """Peak learning rate, reached after warm-up and held until the decay begins, whatever the schedule's shape is."""
    betas: tuple[float, float] = (0.9, 0.95)
    steps: Annotated[int, Field(ge=1)] = 100
    warmup: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int = 8
    """Rank of the update."""
    targets: list[str] = field(default_factory=lambda: ["q_proj"])


@dataclass(frozen=True, kw_only=True)
class Run:
    seed: int = 0
    """Seed of everything random."""
    name: str = "run"
    output: PathStr = "runs/x"
    compile: bool = False
    note: str | None = None
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))
    """How weights move."""
    lora: Lora | None = None
    """Low-rank adapters; off when null."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    vocab_size: int
    """Number of ids."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    base: Path = Path("x")


@dataclass(frozen=True, kw_only=True)
class NeedsShards:
    shards: Shards


def read(folder: Path, text: str | bytes, cls: type = Run, overrides: tuple[str, ...] = (), name: str = "x.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path, cls, overrides)


def refusal(folder: Path, text: str | bytes, cls: type = Run, overrides: tuple[str, ...] = ()) -> str:
    """The whole message, with the temporary folder cut out."""
    with pytest.raises(ConfigError) as caught:
        read(folder, text, cls, overrides)
    return str(caught.value).replace(f"{folder}/", "")


# What is read


def test_values_of_every_kind_are_read_into_frozen_dataclasses(tmp_path):
    loaded = read(
        tmp_path,
        """
seed: 1_000_000
compile: true
model: {hidden_size: 64, num_heads: 4, activation: gelu, dropout: 0}
data:
  sources:
    - path: a.txt
    - {path: /abs/b.txt, weight: 2}
  weights: {no: 0.5, 12: 1}
  extra: [../up.txt, ~/home.txt]
  rows: 10
optimizer: {betas: [0.8, 1e-1], lr: 1e-4}
lora:
  rank: 1e1
""",
    )
    run = loaded.value
    assert (run.seed, run.compile, run.model.hidden_dim, run.model.head_dim) == (1_000_000, True, 64, 16)
    assert run.data.sources == [Source(path=f"{tmp_path}/a.txt"), Source(path="/abs/b.txt", weight=2.0)]
    assert run.data.weights == {"no": 0.5, "12": 1.0}
    assert run.data.extra == (str(tmp_path.parent / "up.txt"), str(Path.home() / "home.txt"))
    assert run.optimizer == Optimizer(lr=1e-4, betas=(0.8, 0.1))
    assert run.lora == Lora(rank=10)
    assert isinstance(run.model.dropout, float)
    assert isinstance(run.lora.rank, int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 2


def test_loaded_says_what_was_given_by_canonical_name(tmp_path):
    text = "model:\n  hidden_size: 96\ndata:\n  weights: {a: 1}\nlora: null\noptimizer:\n"
    loaded = read(tmp_path, text, overrides=("model.num_attention_heads=2", "seed=3"))
    assert loaded.given == {"model.hidden_dim", "model.num_heads", "data.weights", "lora", "seed"}
    assert loaded.path == tmp_path / "x.yaml"
    assert loaded.text == text


def test_an_empty_section_means_no_settings_and_an_explicit_null_turns_an_optional_section_off(tmp_path):
    assert read(tmp_path, "model:\n  # num_heads: 4\n").value == Run()
    assert read(tmp_path, "lora: {rank: 4}", overrides=("lora=null",)).value.lora is None
    assert refusal(tmp_path, "model: null") == (
        "x.yaml:1: model must be a section (a mapping of its settings), got null"
    )


def test_a_section_keeps_what_its_parent_set_differently(tmp_path):
    """A file that sets one key of ``optimizer`` must not lose the learning rate that ``Run`` gives its optimizer."""
    run = read(tmp_path, "optimizer: {steps: 7}\nmodel: {num_heads: 2}").value
    assert run.optimizer == Optimizer(lr=1e-5, steps=7)
    assert run.model.head_dim == 192


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbfseed: 4\r\nname: a b\r\n").value.name == "a b"


# Scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("null", None),
        ("~", None),
        ("", None),
        ("1e-4", 1e-4),
        ("3.E+2", 300.0),
        (".5", 0.5),
        ("1_000_000", 1_000_000),
        ("1__0", "1__0"),
        ("-0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", "010"),
        ("-007.5", "-007.5"),
        ("12:30:45", "12:30:45"),
        ("2024-01-02", "2024-01-02"),
        ("1.2.3", "1.2.3"),
        ("inf", "inf"),
        ("=", "="),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text, value):
    got = resolve(text)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("text", [".nan", ".inf", "-.INF", "1e999", "9" * 5000, "0x" + "f" * 5000, "1." + "0" * 5000])
def test_numbers_that_are_not_finite_or_absurdly_long_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"finite|characters"):
        resolve(text)
    message = refusal(tmp_path, f"seed: 1\noptimizer:\n  lr: {text}\n")
    assert message.startswith("x.yaml:3: ")
    assert message.count("\n") == 0
    assert len(message) < 200


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_written_scalars_read_back_the_same_under_both_yaml_versions(value):
    for back in (resolve(write(value)), yaml.safe_load(write(value))):
        assert (back, type(back)) == (value, type(value))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_text_survives_dump_and_load(tmp_path, text):
    run = Run(name=text, note=text, data=Data(weights={text: 1.0}), lora=Lora(targets=[text, "x"]))
    assert read(tmp_path, dump(run)).value == dataclasses.replace(run, output=f"{tmp_path}/runs/x")
    assert yaml.safe_load(dump(run))["name"] == text


@pytest.mark.parametrize(
    "word", ["1e4", "0o17", "010", "no", "NULL", "~", "1_0", "a: b", "#x", "-", "&a", "*a", ".5", "\t"]
)
def test_text_that_looks_like_something_else_is_quoted(tmp_path, word):
    assert write(word).startswith('"')
    assert read(tmp_path, dump(Run(name=word))).value.name == word


# What is refused, and how it is said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  num_head: 4\n", "x.yaml:2: unknown key 'num_head' in model; did you mean 'num_heads'?"),
        ("model:\n  num-heads: 4\n", "x.yaml:2: unknown key 'num-heads' in model; did you mean 'num_heads'?"),
        ("model:\n  hidden_sise: 4\n", "x.yaml:2: unknown key 'hidden_sise' in model; did you mean 'hidden_size'?"),
        ("model: {lr: 1}", "x.yaml:1: unknown key 'lr' in model; 'lr' belongs under 'optimizer'"),
        ("lr: 1", "x.yaml:1: unknown key 'lr' at the top level; 'lr' belongs under 'optimizer'"),
        ("model:\n  seed: 1", "x.yaml:2: unknown key 'seed' in model; 'seed' belongs at the top level"),
        ("modle: {}", "x.yaml:1: unknown key 'modle' at the top level; did you mean 'model'?"),
        (
            "model.num_heads: 3",
            "x.yaml:1: unknown key 'model.num_heads' at the top level; "
            "nest the settings of a section under its name instead of writing a dot",
        ),
        ("lora: {zzz: 1}", "x.yaml:1: unknown key 'zzz' in lora; known keys: rank, targets"),
        (
            "data:\n  sources:\n    - path: a\n      wieght: 2",
            "x.yaml:4: unknown key 'wieght' in data.sources[0]; did you mean 'weight'?",
        ),
        ("data:\n  sources:\n    - {}", "x.yaml:3: missing required key 'path' in data.sources[0]"),
        (
            "data: {sources: a.txt}",
            "x.yaml:1: data.sources must be a list (each entry a section (a mapping of its settings)), got 'a.txt'",
        ),
        ("compile: no", "x.yaml:1: compile must be true or false, got 'no'; write true or false"),
        ("compile: 1", "x.yaml:1: compile must be true or false, got 1"),
        (
            "seed: 010",
            "x.yaml:1: seed must be an integer, got '010'; "
            "a leading zero is ambiguous, so remove it (or write 0o for octal)",
        ),
        ("seed: 1.5", "x.yaml:1: seed must be an integer, got 1.5"),
        ("seed: 1e23", "x.yaml:1: seed must be an integer, got 1e23"),
        ("seed: true", "x.yaml:1: seed must be an integer, got true"),
        ("seed:", "x.yaml:1: seed must be an integer, got null; give a value or remove the key"),
        ("name: 123", "x.yaml:1: name must be text, got 123; put it in quotes to make it text"),
        ("name:", 'x.yaml:1: name must be text, got null; for empty text write ""'),
        ("note: true", "x.yaml:1: note must be text or null, got true; put it in quotes to make it text"),
        ("output: ''", "x.yaml:1: output must be a path, got ''"),
        ("optimizer: {lr: '0.1'}", "x.yaml:1: optimizer.lr must be a number, got '0.1'; remove the quotes"),
        ("optimizer: {lr: nan}", "x.yaml:1: optimizer.lr must be a number, got 'nan'; numbers must be finite"),
        ("optimizer:\n  steps: 0", "x.yaml:2: optimizer.steps must be greater than or equal to 1, got 0"),
        ("optimizer:\n  warmup: 0", "x.yaml:2: optimizer.warmup must be greater than or equal to 1, got 0"),
        ("optimizer: {warmup: x}", "x.yaml:1: optimizer.warmup must be an integer or 'auto' or null, got 'x'"),
        ("optimizer:\n  betas:\n  - 0.9\n  - high", "x.yaml:4: optimizer.betas[1] must be a number, got 'high'"),
        ("optimizer: {betas: 0.9}", "x.yaml:1: optimizer.betas must be a list of a number, then a number, got 0.9"),
        ("data: {rows: most}", "x.yaml:1: data.rows must be an integer or 'all', got 'most'"),
        ("data:\n  weights:\n    a: 1\n    b: x", "x.yaml:4: data.weights.b must be a number, got 'x'"),
        (
            "model: {activation: swiglue}",
            "x.yaml:1: model.activation must be one of 'swiglu', 'gelu', got 'swiglue'; did you mean 'swiglu'?",
        ),
        (
            "model:\n  hidden_size: 2\n  num_attention_heads: 2\n  d_model: 3",
            "x.yaml:4: 'hidden_size' and 'd_model' are the same setting in model; keep one",
        ),
        (
            "seed: 1\nmodel:\n  hidden_dim: 10\n  num_attention_heads: 4\n",
            "x.yaml:4: model.num_heads must divide hidden_dim 10, got 4",
        ),
        ("seed: 1\nmodel:\n  hidden_dim: 10\n", "x.yaml:2: model.num_heads must divide hidden_dim 10, got 6"),
        ("model:\n  dropout: 1.0\n", "x.yaml:1: model: nothing is left at this dropout"),
        ("model: 3", "x.yaml:1: model must be a section (a mapping of its settings), got 3"),
        ("seed: {a: 1}", "x.yaml:1: seed must be an integer, got a mapping"),
    ],
)
def test_a_wrong_setting_is_named_with_its_line_and_the_way_out(tmp_path, text, message):
    assert refusal(tmp_path, text) == message


def test_missing_required_keys_name_their_section(tmp_path):
    assert refusal(tmp_path, "shards: {dtype: uint32}", NeedsShards) == (
        "x.yaml:1: missing required key 'vocab_size' in shards"
    )
    assert refusal(tmp_path, "{}", NeedsShards) == "x.yaml:1: missing required key 'vocab_size' in shards"
    assert refusal(tmp_path, "dtype: uint32", Shards) == "x.yaml:1: missing required key 'vocab_size' at the top level"
    assert read(tmp_path, "{vocab_size: 3, base: a/b}", Shards).value == Shards(vocab_size=3, base=Path("a/b"))


def test_all_problems_of_a_file_and_its_overrides_come_in_one_message(tmp_path):
    text = "optimizer:\n  lr: fast\nsead: 1\nmodel:\n  num_head: 2\n  dropout: x\nname: a\nname: b\n"
    assert refusal(tmp_path, text, overrides=("train.lr=1", "seed=x")).splitlines() == [
        "x.yaml:2: optimizer.lr must be a number, got 'fast'",
        "x.yaml:3: unknown key 'sead' at the top level; did you mean 'seed'?",
        "x.yaml:5: unknown key 'num_head' in model; did you mean 'num_heads'?",
        "x.yaml:6: model.dropout must be a number, got 'x'",
        "x.yaml:8: key 'name' is given twice (first on line 7); keep one",
        "command line: seed=x: seed must be an integer, got 'x'",
        "command line: train.lr=1: unknown key 'train' at the top level; "
        "known keys: compile, data, lora, model, name, note, optimizer, output, seed",
    ]


def test_a_flood_of_problems_is_cut_short(tmp_path):
    lines = refusal(tmp_path, "".join(f"key{i}: 1\n" for i in range(3000))).splitlines()
    assert len(lines) == 51
    assert lines[-1] == "... and 2950 more"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: is empty; write settings as 'key: value'"),
        ("# only a comment\n", "x.yaml: is empty; write settings as 'key: value'"),
        ("- a\n", "x.yaml:1: must hold settings as 'key: value', got a list"),
        ("hello", "x.yaml:1: must hold settings as 'key: value', got 'hello'"),
        ("seed: 1\nmodel: &m {}\n", 
         "x.yaml:2: anchors and aliases (& and *) are not read; write the value out or quote it"),
        ("seed: 1\n---\nseed: 2\n", "x.yaml:2: a second document starts here; a configuration is one document"),
        ("a: !!python/name:os.system",
         "x.yaml:1: tags (such as tag:yaml.org,2002:python/name:os.system) are not read; remove it"),
        ("a: !!str 1", "x.yaml:1: tags (such as tag:yaml.org,2002:str) are not read; remove it"),
        ("model:\n\tseed: 1\n", "x.yaml:2: a tab where YAML wants spaces; indent with spaces"),
        ("? [a]\n: 1\n", "x.yaml:1: a key must be a single word, got a list"),
        ("seed: 1\nname: a: b\n", "x.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: \x07\n", "x.yaml:2: character 0x0007 is not allowed in YAML; remove it"),
        (b"a: 1\nb: \xff\n", "x.yaml:2: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("name: \"\\uD800\"", "x.yaml:1: '\\ud800' holds half of a surrogate pair, which is not a character"),
        ("seed: 1\x1b[31m".replace("\x1b", "\\e"), "x.yaml:1: seed must be an integer, got '1\\\\e[31m'"),
        ('name: a\n"\\e[31m": 1', "x.yaml:2: unknown key '\\x1b[31m' at the top level; known keys: "
         "compile, data, lora, model, name, note, optimizer, output, seed"),
        ("a" * (1 << 20), "x.yaml: larger than 1,048,576 bytes, the limit for a configuration file"),
    ],
)  # fmt: skip
def test_text_that_is_not_a_plain_tree_is_refused_with_its_line(tmp_path, text, message):
    text = text + "\n" * ("larger" in message) if isinstance(text, str) else text
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize("opening", ["[", "{", "[\n", "- ", "? ", "{a: ", "a:\n"])
def test_nesting_without_end_is_refused_before_anything_is_built(tmp_path, opening):
    text = "".join(" " * i + "a:\n" for i in range(900)) if opening == "a:\n" else "a:\n " + opening * 5000
    assert "nested more than 32 levels deep" in refusal(tmp_path, text)


def test_nesting_up_to_the_limit_is_read(tmp_path):
    assert "must be an integer" in refusal(tmp_path, "seed: " + "[" * 31 + "]" * 31)


def test_an_alias_bomb_is_refused_at_its_first_anchor(tmp_path):
    bomb = "a: &a [x, x, x]\n" + "".join(f"{c}: &{c} [*a, *a]\n" for c in "bcdefgh")
    assert refusal(tmp_path, bomb).startswith("x.yaml:1: anchors")


def test_hostile_text_never_raises_anything_but_config_errors(tmp_path):
    random.seed(7)
    seedtext = 'seed: 1\nmodel: {num_heads: 2}\ndata:\n  sources:\n    - path: "a"\n  extra: [b, c]\n'
    for _ in range(300):
        text = list(seedtext)
        for _ in range(random.randrange(1, 6)):
            text[random.randrange(len(text))] = random.choice("\t\n:-[]{}&*!|>'\"%@`#,?\\\x00\x85\u2028a1 ")
        with contextlib.suppress(ConfigError):
            read(tmp_path, "".join(text))


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "real.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"no such file: .*/rael.yaml; did you mean 'real.yaml'\?"):
        load(tmp_path / "rael.yaml", Run)
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(tmp_path, Run)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load("x" * 300, Run)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=r"loop.yaml"):
        load(tmp_path / "loop.yaml", Run)


# Layers


def test_defaults_give_way_to_extends_then_file_then_command_line(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "b.yaml").write_text(
        "seed: 1\nname: base\nnote: base\nmodel: {hidden_size: 96}\ndata: {extra: [b.txt], weights: {a: 1, b: 2}}\n"
        "lora: {rank: 2}\noutput: out\n"
    )
    text = (
        "extends: base/b.yaml\nname: file\nnote: file\n"
        "model: {d_model: 48, num_heads: 3}\ndata: {weights: {b: 3}}\nlora:\n"
    )
    loaded = read(tmp_path, text, overrides=("note=cli", "model.hidden_dim=24"))
    run = loaded.value
    assert (run.seed, run.name, run.note, run.model.hidden_dim, run.model.num_heads) == (1, "file", "cli", 24, 3)
    assert run.data.weights == {"a": 1.0, "b": 3.0}
    assert run.lora == Lora(rank=2)
    assert run.data.extra == (f"{tmp_path}/base/b.txt",)
    assert run.output == f"{tmp_path}/base/out"
    assert loaded.text == text
    assert "data.extra" in loaded.given


def test_a_problem_in_a_base_file_names_that_file(tmp_path):
    (tmp_path / "b.yaml").write_text("\nsead: 1\nname: 3\n")
    assert refusal(tmp_path, "extends: b.yaml\nname: ok\n") == (
        "b.yaml:2: unknown key 'sead' at the top level; did you mean 'seed'?"
    )


def test_chains_of_extends_are_bounded_and_acyclic(tmp_path):
    for i in range(9):
        (tmp_path / f"f{i}.yaml").write_text(f"extends: f{i + 1}.yaml\n" if i < 8 else "seed: 8\n")
    assert load(tmp_path / "f1.yaml", Run).value.seed == 8
    with pytest.raises(ConfigError, match=r"f7.yaml:1: more than 8 files in a chain"):
        load(tmp_path / "f0.yaml", Run)
    (tmp_path / "f8.yaml").write_text("\nextends: sub/../f4.yaml\n")
    with pytest.raises(ConfigError, match=r"f4.yaml:1: extends .*f5.yaml, which extends this file in turn"):
        load(tmp_path / "f5.yaml", Run)
    assert refusal(tmp_path, "extends: gone.yaml") == "x.yaml:1: extends a file that does not exist: gone.yaml"
    assert refusal(tmp_path, "extends: [a]") == "x.yaml:1: extends must be the path of one YAML file, got a list"
    assert "extends must be the path" in refusal(tmp_path, "extends:")


def test_override_values_follow_the_scalar_rules_and_other_text_is_literal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = (
        *("compile=True", "optimizer.lr=1e-3", "name=*.txt: #1", 'note="12"', "data.extra=[a, ~/b]", "output=o/../p"),
        *("model={num_heads: 2}", "data.weights.w=2", "data.rows=5", "seed=1", "seed=2"),
    )
    run = read(tmp_path, "model: {hidden_dim: 64}", overrides=overrides).value
    assert (run.compile, run.optimizer.lr, run.name, run.note, run.seed) == (True, 1e-3, "*.txt: #1", "12", 2)
    assert run.data == Data(extra=(f"{tmp_path}/a", str(Path.home() / "b")), weights={"w": 2.0}, rows=5)
    assert run.output == f"{tmp_path}/p"
    assert (run.model.hidden_dim, run.model.num_heads) == (64, 2)
    assert read(tmp_path, "note: x", overrides=("note=",)).value.note is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("seed", "not a setting; write key=value"),
        ("--seed=1", "settings take no dashes; write seed=..."),
        ("model.=1", "a key is missing; write section.key=value"),
        ("model.num_head=3", "unknown key 'num_head' in model; did you mean 'num_heads'?"),
        ("num_heads=3", "unknown key 'num_heads' at the top level; 'num_heads' belongs under 'model'"),
        ("model.hidden-dim=3", "unknown key 'hidden-dim' in model; did you mean 'hidden_dim'?"),
        ("seed=.inf", "numbers must be finite, got .inf"),
        ("seed.x=1", "seed must be an integer, got a mapping"),
        (
            "data.sources.0=a",
            "data.sources must be a list (each entry a section (a mapping of its settings)), got a mapping",
        ),
        ("data.extra=[a", "not valid YAML while parsing a flow sequence: expected ',' or ']', but got '<stream end>'"),
        ("data.extra=[&a b]", "anchors and aliases (& and *) are not read; write the value out or quote it"),
        ("model.num_heads=5", "model.num_heads must divide hidden_dim 384, got 5"),
    ],
)
def test_a_wrong_override_is_quoted(tmp_path, argument, message):
    assert refusal(tmp_path, "{}", overrides=(argument,)) == f"command line: {argument}: {message}"


# parse, dump, template, differences


def test_parse_is_as_strict_and_names_where_it_was(tmp_path):
    run = Run(model=Model(num_heads=4), lora=Lora(), data=Data(sources=[Source(path="/a")], extra=("/b",)), output="/o")
    assert parse(json.loads(json.dumps(to_mapping(run))), Run, where="config.json") == run
    for mapping, message in [
        ({"model": {"num_head": 1}}, "config.json: unknown key 'num_head' in model; did you mean 'num_heads'?"),
        ({"seed": "1"}, "config.json: seed must be an integer, got '1'"),
        ({"seed": True}, "config.json: seed must be an integer, got True"),
        ({"optimizer": {"lr": math.nan}}, "config.json: numbers must be finite, got nan"),
        ({"seed": 1 << 300}, "config.json: an integer of 301 bits; at most 256 are read"),
        ({"name": "\ud800"}, "config.json: '\\ud800' holds half of a surrogate pair, which is not a character"),
        ({1: 2}, "config.json: keys must be text, got 1"),
        ({"name": b"x"}, "config.json: must be made of mappings, lists, text, numbers, true, false and null, got b'x'"),
        ([], "config.json: must be a mapping, got list"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parse(mapping, Run, where="config.json")
        assert str(caught.value).splitlines()[0] == message


def test_parse_refuses_endless_nesting():
    deep: dict[str, object] = {}
    for _ in range(900):
        deep = {"model": deep}
    with pytest.raises(ConfigError, match="nested more than 32 levels deep"):
        parse(deep, Run, where="x")


_RUNS = st.builds(
    Run,
    seed=st.integers(-(2**63), 2**63),
    compile=st.booleans(),
    output=st.just("/o"),
    optimizer=st.builds(
        Optimizer,
        lr=st.floats(allow_nan=False, allow_infinity=False),
        betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    ),
    data=st.builds(
        Data,
        sources=st.lists(
            st.builds(Source, path=st.sampled_from(["/a", "/b c: d"]), weight=st.floats(0, 9)), max_size=2
        ),
        rows=st.sampled_from([3, "all"]),
    ),
    lora=st.one_of(st.none(), st.builds(Lora, targets=st.lists(st.sampled_from(["a", "1", "no"]), max_size=3))),
)


@given(_RUNS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_dump_and_template_load_back_equal(tmp_path, run):
    assert read(tmp_path, dump(run)).value == run
    values = {key: value for key, value in _leaves(run).items() if value != _leaves(Run()).get(key)}
    assert read(tmp_path, template(Run, values)).value == run


def _leaves(config: object, prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        leaves |= _leaves(value, f"{prefix}{f.name}.") if dataclasses.is_dataclass(value) else {prefix + f.name: value}
    return {key: value for key, value in leaves.items() if key != "lora"}


def test_dump_is_plain_yaml_for_other_readers():
    run = Run(optimizer=Optimizer(lr=1e-4), data=Data(sources=[Source(path="/a b", weight=1e-7)]))
    assert "lr: 0.0001\n" in dump(run)
    assert '- {path: "/a b", weight: 1.0e-07}' in dump(run)
    assert yaml.safe_load(dump(run)) == to_mapping(run)
    with pytest.raises(ConfigError, match="must be finite"):
        dump(Run(optimizer=Optimizer(lr=math.inf)))


def test_a_template_explains_every_setting_and_keeps_optional_sections_in_comments(tmp_path):
    text = template(Run, {"seed": 5, "data.extra": ["/x"]}, header="Run with:\n  cyberslm train x.yaml")
    assert text.startswith("# Run with:\n#   cyberslm train x.yaml\n\n# Seed of everything random.\nseed: 5\n")
    assert "# Sizes of the network.\nmodel:\n  # Query heads per layer.\n  num_heads: 6\n" in text
    assert "  # Width of one head; worked out when null.\n  head_dim: null\n" in text
    assert "# How weights move.\noptimizer:\n" in text
    assert "  lr: 1.0e-05\n" in text
    assert "lora: null\n# lora:\n#   # Rank of the update.\n#   rank: 8\n#   targets: [q_proj]\n" in text
    assert max(map(len, text.splitlines())) <= 110
    loaded = read(tmp_path, text)
    assert loaded.value == Run(seed=5, data=Data(extra=("/x",)), output=f"{tmp_path}/runs/x")
    live = template(Run, {"lora.rank": 4})
    assert "lora:\n  # Rank of the update.\n  rank: 4\n" in live
    uncommented = text.replace("lora: null\n", "").replace("# lora:", "lora:").replace("#   rank: 8", "  rank: 9")
    assert read(tmp_path, uncommented).value.lora == Lora(rank=9)


def test_a_required_setting_is_left_for_the_user_to_fill(tmp_path):
    text = template(NeedsShards)
    assert "  # Number of ids.\n  vocab_size:  # required: an integer\n" in text
    assert "shards.vocab_size must be an integer, got null" in refusal(tmp_path, text, NeedsShards)
    filled = read(tmp_path, template(NeedsShards, {"shards.vocab_size": 9}), NeedsShards).value
    assert filled == NeedsShards(shards=Shards(vocab_size=9))


def test_a_template_refuses_values_for_unknown_settings():
    for key in ("model", "data.sources[].path", "sead"):
        with pytest.raises(ConfigError, match="no setting"):
            template(Run, {key: 1})


def test_documented_fields_come_from_the_source():
    docs = documented_fields(Run)
    assert docs["seed"] == ("int", 0, "Seed of everything random.")
    assert docs["model.head_dim"] == ("int | null", None, "Width of one head; worked out when null.")
    assert docs["model.activation"].type == "'swiglu' | 'gelu'"
    assert docs["optimizer.lr"].default == 1e-5
    assert docs["output"].type == "path"
    assert docs["data.extra"].type == "list[path]"
    assert docs["data.rows"].type == "int | 'all'"
    assert docs["data.weights"].type == "dict[str, float]"
    assert docs["data.sources"].type == "list[Source]"
    assert docs["data.sources[].path"] == ("path", dataclasses.MISSING, "")
    assert docs["lora.rank"].doc == "Rank of the update."
    assert "model" not in docs


def test_differences_are_dotted():
    one = Run(seed=1, model=Model(num_heads=4))
    other = Run(seed=1, model=Model(num_heads=2), lora=Lora(), data=Data(extra=("/x",)))
    assert differences(one, one) == {}
    assert differences(one, other) == {
        "model.num_heads": (4, 2),
        "model.head_dim": (96, 192),
        "data.extra": ([], ["/x"]),
        "lora": (None, {"rank": 8, "targets": ["q_proj"]}),
    }
    with pytest.raises(TypeError):
        differences(one, one.model)


@dataclass(frozen=True, kw_only=True)
class Hidden:
    inner: list[list[Lora]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Either:
    inner: Lora | int = 3


@pytest.mark.parametrize("cls", [Hidden, Either])
def test_a_dataclass_that_could_not_be_checked_strictly_is_a_programming_error(tmp_path, cls):
    with pytest.raises(TypeError, match="a section can't be read"):
        read(tmp_path, "inner: 3", cls)


def test_config_imports_no_torch():
    code = "import sys, cyberslm.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_follows_lies_under_what_is_given_and_is_there_when_values_are_checked_together(tmp_path: Path) -> None:
    """A width was held against the default heads, though heads were to follow from it."""
    path = tmp_path / "x.yaml"
    path.write_text("d_model: 160\nactivation: gelu")
    seen = []

    def follow(given: dict[str, object]) -> dict[str, object]:
        seen.append(dict(given))
        return {"num_heads": 5, "activation": "swiglu"}

    with pytest.raises(ConfigError, match="num_heads must divide"):
        load(path, Model)
    loaded = load(path, Model, ["dropout=0.5"], follow=follow)
    assert seen == [{"hidden_dim": 160, "activation": "gelu", "dropout": 0.5}]
    assert (loaded.value.num_heads, loaded.value.head_dim, loaded.value.activation) == (5, 32, "gelu")
    assert loaded.given == {"hidden_dim", "activation", "dropout", "num_heads"}


def test_what_cannot_follow_is_put_where_it_was_given(tmp_path: Path) -> None:
    def follow(given: dict[str, object]) -> dict[str, object]:
        raise ConfigError("hidden_dim is odd")

    path = tmp_path / "x.yaml"
    path.write_text("dropout: 0.5\nd_model: 161")
    with pytest.raises(ConfigError, match=r"x.yaml:2: hidden_dim is odd"):
        load(path, Model, follow=follow)
    with pytest.raises(ConfigError, match="dropout must be") as caught:
        load(path, Model, ["dropout=much"], follow=follow)
    assert "odd" not in str(caught.value)
