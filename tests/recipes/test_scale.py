"""One dial for the size of a run: near its target, explicit settings first, the same at every start."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest
import yaml
from conftest import MakeRun
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import train

from cyberslm.config import load
from cyberslm.errors import ConfigError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.recipes.check import check
from cyberslm.recipes.config import TrainRun, follow_scale, load_run
from cyberslm.recipes.data import write_tokenizer
from cyberslm.recipes.machine import cpu_threads
from cyberslm.recipes.scale import Dial, derive
from cyberslm.recipes.starter import BYTES_PER_TOKEN, starter
from cyberslm.recipes.train import run_training
from cyberslm.training.config import NO_LIMIT
from cyberslm.training.trackers import read_metrics


def sizes(found: dict[str, object], given: dict[str, object] | None = None) -> CyberSLMConfig:
    settings = {**found, **(given or {})}
    model = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    return CyberSLMConfig(**{"vocab_size": settings.get("tokenizer.vocab_size"), **model})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(st.floats(6, 9.3))
def test_parameters_are_near_the_target(exponent: float) -> None:
    target = 10**exponent
    model = sizes(derive(Dial(parameters=target), {}, rate=1e11))
    assert model.num_parameters == pytest.approx(target, rel=0.1)
    assert 0.5 <= model.num_layers / (2 * model.num_heads) <= 3


@settings(deadline=None, max_examples=20)
@given(st.floats(5.4, 9.3), st.floats(0, 0.1))
def test_larger_dial_never_gives_less(exponent: float, more: float) -> None:
    """At the step from one vocabulary to the next, 2.01M gave a smaller network than 2.00M."""
    less, found = (derive(Dial(parameters=10**each), {}, rate=1e11) for each in (exponent, min(9.3, exponent + more)))
    one, two = sizes(less), sizes(found)
    assert one.num_parameters <= two.num_parameters
    assert tokens_per_step(less) <= tokens_per_step(found) + two.max_seq_len
    assert less["tokenizer.vocab_size"] <= found["tokenizer.vocab_size"]  # type: ignore[operator]
    if one.vocab_size == two.vocab_size:
        assert one.hidden_dim <= two.hidden_dim
        assert less["optimizer.muon_lr"] >= found["optimizer.muon_lr"]  # type: ignore[operator]


def tokens_per_step(found: dict[str, object]) -> int:
    return int(str(found["train.global_batch_size"])) * int(str(found["model.max_seq_len"]))


def test_reference_size_gives_the_reference_shape() -> None:
    found = derive(Dial.of("33.5M"), {"tokenizer.vocab_size": 32_000, "model.qk_norm": False}, rate=1e11)
    assert sizes(found, {"tokenizer.vocab_size": 32_000}).num_parameters == 33_531_264


def test_more_parameters_mean_more_of_everything_and_a_lower_rate() -> None:
    found = [derive(Dial.of(text), {}, rate=1e11) for text in ("1M", "10M", "100M", "1B")]
    for key in ("model.hidden_dim", "train.max_steps", "tokenizer.vocab_size"):
        values = [each[key] for each in found]
        assert values == sorted(values)
    rates = [each["optimizer.muon_lr"] for each in found]
    assert rates == sorted(rates, reverse=True)


def test_time_buys_parameters_by_its_square_root_and_is_the_budget() -> None:
    short, long = (derive(Dial.of(text), {}, rate=2e11) for text in ("10min", "1000min"))
    assert sizes(long).num_parameters == pytest.approx(10 * sizes(short).num_parameters, rel=0.2)
    assert short["train.max_time"] == "600s"
    assert "train.max_steps" not in short


GIVEN = [
    ("model.hidden_dim", 160),
    ("model.num_layers", 3),
    ("model.num_heads", 5),
    ("model.num_kv_heads", 2),
    ("model.head_dim", 48),
    ("model.ffn_hidden_dim", 100),
    ("model.activation", "gelu"),
    ("tokenizer.vocab_size", 700),
    ("train.global_batch_size", 3),
    ("train.max_steps", 77),
    ("train.max_steps", 1),
    ("optimizer.name", "adamw"),
    ("scheduler.name", "cosine"),
]


@pytest.mark.parametrize(("key", "value"), GIVEN)
def test_what_is_given_stays_and_the_rest_goes_around_it(
    make_run: MakeRun, tmp_path: Path, key: str, value: object
) -> None:
    """A given width was held against the default heads, not against those that the dial would choose."""
    make_run()
    path = tmp_path / "dialled.yaml"
    path.write_text("out_dir: run\nscale: 2M\ndata:\n  sources: [text]\n", encoding="utf-8")
    run = load_run(path, [f"{key}={value}"]).value
    assert reduce(getattr, key.split("."), run) == value
    assert run.model.num_parameters == pytest.approx(2e6, rel=0.35)
    assert (run.optimizer.muon_lr is None) == (key == "optimizer.name")


def test_shape_that_is_given_whole_is_warned_of(make_run: MakeRun, dialled: Path) -> None:
    """`scale=10M` beside a file that gives every size did nothing and said nothing."""
    warned = [
        any("doesn't make the model" in line for line in check(loaded, lambda _: None))
        for loaded in (load_run(dialled), load_run(make_run({"train.max_steps": 5}), ["scale=10M"]))
    ]
    assert warned == [False, True]


def test_ungated_feed_forward_is_as_large_as_a_gated_one() -> None:
    gated, plain = (
        sizes(derive(Dial.of("33M"), given, rate=1e11), given) for given in ({}, {"model.activation": "gelu"})
    )
    assert plain.ffn_hidden_dim == 4 * plain.hidden_dim
    assert plain.num_parameters == gated.num_parameters


def test_muons_own_step_has_its_own_rate() -> None:
    assert derive(Dial.of("33M"), {"optimizer.muon_adjust": "original"}, rate=1e11)["optimizer.muon_lr"] == 0.02


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *(f"model.{name}" for name in ("hidden_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")),
                *("model.ffn_hidden_dim", "model.max_seq_len", "model.vocab_size", "tokenizer.vocab_size"),
                *("train.max_steps", "train.global_batch_size"),
            ]
        ),
        st.integers(-3, 70),
        max_size=4,
    ),
    st.sampled_from(["300k", "33M", "10min"]),
)
def test_any_given_sizes_are_derived_around_or_refused(given_sizes: dict[str, object], dial: str) -> None:
    """A width that no number of heads divides ended in a traceback."""
    refused, found = "model.", dict[str, object]()
    try:
        found = derive(Dial.of(dial), given_sizes, rate=1e11)
    except ConfigError as error:
        refused = str(error)
    assert refused.startswith("model.")
    assert not found.keys() & given_sizes.keys()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.hidden_dim=161", "model.head_dim must be even"),
        ("model.num_heads=0", "model.num_heads"),
        ("train.max_steps=0", "train.max_steps"),
        ("model.num_layers=many", "model.num_layers must be"),
        ("scale=10m", "scale must be"),
        ("train.micro_batch_size=x", "train.micro_batch_size must be an integer"),
    ],
)
def test_what_is_wrong_is_named_where_it_was_given(dialled: Path, override: str, named: str) -> None:
    given = [] if override.startswith("model.") else ["model.hidden_dim=160"]
    with pytest.raises(ConfigError) as caught:
        load_run(dialled, [*given, override])
    first, *rest = str(caught.value).splitlines()
    assert override in first or named.startswith("model.head_dim")
    assert named in first
    assert not rest


@pytest.mark.parametrize("text", ["10m", "33 M", "big", "", "-1M", "1e6", "100k", "3B", "1s", "5y"])
def test_dial_that_is_neither_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="scale must be"):
        Dial.of(text)


def test_ambiguous_unit_names_both_readings() -> None:
    with pytest.raises(ConfigError, match=r"10M is parameters, 10min is a time"):
        Dial.of("10m")


@pytest.fixture
def dialled(make_run: MakeRun) -> Path:
    """A run that says its data, its length and its dial."""
    path = make_run()
    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    own["tokenizer"] = {"vocab_size": 400}
    own["model"] = {"max_seq_len": 32}
    own["train"] = {"max_steps": 2, "global_batch_size": 2}
    own["scheduler"] = {"warmup_steps": 1}
    own = {key: own[key] for key in ("out_dir", "data", "tokenizer", "model", "train", "scheduler")}
    path.write_text(yaml.safe_dump({**own, "scale": "300k"}), encoding="utf-8")
    return path


def test_run_resolves_its_dial_and_repeats_it(dialled: Path) -> None:
    first = load_run(dialled).value
    assert first.model.num_parameters == pytest.approx(3e5, rel=0.1)
    train(dialled)
    resolved = dialled.parent / "run" / "config.yaml"
    assert load(resolved, TrainRun).value.model == load_run(resolved).value.model == first.model
    train(dialled)


def test_plain_number_is_parameters(dialled: Path) -> None:
    assert load_run(dialled, ["scale=300000"]).value.model == load_run(dialled, ["scale=300k"]).value.model


def test_begun_run_keeps_what_followed_from_its_time(make_run: MakeRun, tmp_path: Path) -> None:
    """On a machine with more cores, or with `threads` changed, a run in a time could not go on: it was a larger one."""
    make_run()
    path = tmp_path / "timed.yaml"
    given = (
        "out_dir: run\nscale: 1min\ndevice: cpu\nprecision: fp32\ndata: {sources: [text]}\nmodel: {max_seq_len: 32}\n"
    )
    path.write_text(f"{given}logging: {{plots: false, probe: false}}\ntrain: {{global_batch_size: 2}}\n", "utf-8")
    at_first = load_run(path, ["threads=1"]).value
    assert load_run(path, ["threads=64"]).value.model != at_first.model
    run_training(load_run(path, ["threads=1", "tokenizer.vocab_size=400"]), stop_at=1, quiet=True)
    again = load_run(path, ["threads=64", "tokenizer.vocab_size=400"])
    assert again.value.model.hidden_dim == at_first.model.hidden_dim
    assert run_training(again, stop_at=2, quiet=True).state.step == 2
    with pytest.raises(ConfigError, match="train.max_time: '60s' there, '86400s' now"):
        train(path, "threads=1", "tokenizer.vocab_size=400", "scale=1d")


def test_another_dial_is_another_run(dialled: Path) -> None:
    train(dialled)
    with pytest.raises(ConfigError, match="model.num_layers"):
        train(dialled, "scale=600k")


def test_time_is_a_budget_without_a_limit_of_steps(make_run: MakeRun) -> None:
    path = make_run()
    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({"out_dir": own["out_dir"], "data": own["data"], "scale": "10min"}), "utf-8")
    one, two = (load_run(path, ["device=cpu", f"threads={number}"]).value for number in (1, 4))
    assert (one.train.max_time, one.train.max_steps) == ("600s", NO_LIMIT)
    assert one.model.num_parameters < two.model.num_parameters


def test_processes_together_buy_more(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process has its share of the machine's cores, and there may be more machines."""
    given = {"scale": "10min", "device": "cpu", "precision": "fp32"}
    alone, apart = follow_scale(given | {"threads": 4}), follow_scale(given)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert follow_scale(given | {"threads": 1}) == alone
    assert follow_scale(given) == apart


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["many", "0", ""])
def test_number_of_processes_that_is_none_is_an_error_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    path = make_run()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"the environment's {name} must be a whole number from 1 on"):
        load_run(path, ["scale=10min"])
    with pytest.raises(ConfigError, match=name), cpu_threads(0):
        pass


def test_given_tokenizer_counts_with_its_vocabulary(make_run: MakeRun, tmp_path: Path) -> None:
    """A model around `tokenizer.path` was sized for the vocabulary that the dial would have chosen."""
    path = make_run()
    tokenizer = write_tokenizer(load_run(path).value, tmp_path / "tokenizer", lambda _: None)
    given = {"scale": "2M", "tokenizer.path": str(tokenizer)}
    found = follow_scale(given)
    assert "tokenizer.vocab_size" not in found
    assert sizes(found, {"model.vocab_size": 400}).num_parameters == pytest.approx(2e6, rel=0.12)
    with pytest.raises(ConfigError, match="tokenizer.path"):
        follow_scale(given | {"tokenizer.path": "nowhere"})


def test_million_parameters_train(make_run: MakeRun, tmp_path: Path) -> None:
    make_run()
    path = tmp_path / "dialled.yaml"
    path.write_text("out_dir: run\nscale: 1M\nprecision: fp32\ndata: {sources: [text]}\n", encoding="utf-8")
    few = ("train.max_steps=4", "train.global_batch_size=2", "tokenizer.vocab_size=400", "logging.probe=false")
    train(path, *few, "logging.plots=false", "eval.max_rows=2")
    losses = [
        record["loss"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "loss" in record and record["type"] == "train"
    ]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("scale", ["1M", "10min"])
def test_starter_writes_what_follows_from_the_dial(make_run: MakeRun, tmp_path: Path, scale: str) -> None:
    make_run()
    written = tmp_path / "written.yaml"
    written.write_text(starter(tmp_path / "text", out=written, scale=scale), encoding="utf-8")
    loaded = load_run(written)
    followed = follow_scale({"scale": scale, "train.max_steps": loaded.value.train.max_steps})
    assert loaded.value.scale is None
    assert {key: reduce(getattr, key.split("."), loaded.value) for key in followed} == followed
    tokens = loaded.value.train.max_steps * loaded.value.train.global_batch_size * loaded.value.model.max_seq_len
    text = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    assert loaded.value.train.max_steps == 2 or tokens * BYTES_PER_TOKEN <= 4 * text


def test_text_that_is_repeated_too_often_is_warned_of(make_run: MakeRun) -> None:
    warned = [
        any(
            "text teaches little" in line
            for line in check(load_run(make_run({"train.max_steps": steps})), lambda _: None)
        )
        for steps in (5, 4000)
    ]
    assert warned == [False, True]


def test_time_that_plans_for_too_little_text_is_warned_of(make_run: MakeRun, tmp_path: Path) -> None:
    make_run()
    path = tmp_path / "timed.yaml"
    given = "out_dir: run\nscale: 10min\nlogging: {probe: false}\ndata: {sources: [text]}\n"
    path.write_text(f"{given}tokenizer: {{vocab_size: 400}}\n", encoding="utf-8")
    assert any("text teaches little" in line for line in check(load_run(path), lambda _: None))
