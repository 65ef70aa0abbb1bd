"""One dial for the size of a run: near its target, explicit settings first, the same at every start."""

from __future__ import annotations

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
from cyberslm.recipes.config import TrainRun, load_run
from cyberslm.recipes.scale import Dial, derive
from cyberslm.training.config import NO_LIMIT


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_dim", 160),
        ("model.num_layers", 3),
        ("model.ffn_hidden_dim", 100),
        ("tokenizer.vocab_size", 700),
        ("train.global_batch_size", 3),
        ("train.max_steps", 77),
        ("optimizer.name", "adamw"),
        ("scheduler.name", "cosine"),
    ],
)
def test_what_is_given_stays_and_the_rest_goes_around_it(key: str, value: object) -> None:
    found = derive(Dial.of("2M"), {key: value}, rate=1e11)
    assert key not in found
    if key.startswith(("model.", "tokenizer.")) and key != "model.ffn_hidden_dim":
        assert sizes(found, {key: value}).num_parameters == pytest.approx(2e6, rel=0.35)
    assert ("optimizer.muon_lr" in found) == (key != "optimizer.name")


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


def test_another_dial_is_another_run(dialled: Path) -> None:
    train(dialled)
    with pytest.raises(ConfigError, match="model.num_layers"):
        train(dialled, "scale=600k")


def test_time_is_a_budget_without_a_limit_of_steps(make_run: MakeRun) -> None:
    path = make_run()
    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({"out_dir": own["out_dir"], "data": own["data"], "scale": "10min"}), "utf-8")
    one, two = (load_run(path, [f"threads={number}"]).value for number in (1, 4))
    assert (one.train.max_time, one.train.max_steps) == ("600s", NO_LIMIT)
    assert one.model.num_parameters < two.model.num_parameters


def test_text_that_is_repeated_too_often_is_warned_of(make_run: MakeRun) -> None:
    warned = [
        any(
            "text teaches little" in line
            for line in check(load_run(make_run({"train.max_steps": steps})), lambda _: None)
        )
        for steps in (5, 4000)
    ]
    assert warned == [False, True]
