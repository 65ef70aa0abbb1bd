"""The validators are written from the specifications, not from the grammars."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable

import pytest
import yaml

from cyberslm.errors import GenerationError
from cyberslm.generation.constrain import Constraint
from cyberslm.generation.demand import Demand
from cyberslm.generation.engine import Engine
from cyberslm.generation.presets import PRESETS, preset


def metrics(*lines: str) -> list[str]:
    return " ".join(lines).split()


V31 = metrics("AV:NALP AC:LH PR:NLH UI:NR S:UC C:HLN I:HLN A:HLN")
V31_MORE = metrics(
    "E:XUPFH RL:XOTWU RC:XURC CR:XLMH IR:XLMH AR:XLMH",
    "MAV:XNALP MAC:XLH MPR:XNLH MUI:XNR MS:XUC MC:XNLH MI:XNLH MA:XNLH",
)
V40 = metrics("AV:NALP AC:LH AT:NP PR:NLH UI:NPA VC:HLN VI:HLN VA:HLN SC:HLN SI:HLN SA:HLN")
V40_MORE = metrics(
    "E:XAPU CR:XHML IR:XHML AR:XHML MAV:XNALP MAC:XLH MAT:XNP MPR:XNLH MUI:XNPA MVC:XNLH MVI:XNLH MVA:XNLH MSC:XNLH",
    "MSI:XSNLH MSA:XSNLH S:XNP AU:XNY R:XAUI V:XDC RE:XLMH U:*",
)
COLOURS = {"X", "Clear", "Green", "Amber", "Red"}


def check_vector(text: str, version: str, base: list[str], more: list[str], *, optional: bool) -> None:
    head, *parts = text.split("/")
    assert head == f"CVSS:{version}"
    values = dict(part.split(":") for part in parts)
    assert len(values) == len(parts)
    known = dict(metric.split(":") for metric in [*base, *(more if optional else [])])
    assert list(values) == [name for name in known if name in values]
    assert {metric.split(":")[0] for metric in base} <= set(values)
    for name, value in values.items():
        assert value in COLOURS if known[name] == "*" else len(value) == 1 and value in known[name]


def check_moment(text: str) -> None:
    assert datetime.datetime.fromisoformat(text).utcoffset() == datetime.timedelta(0)
    assert re.fullmatch(r"\S{10}T\S{8}\.\d{3}Z", text)


def check_comparison(text: str) -> None:
    path, value = re.fullmatch(r"([a-z0-9-]+:[a-z]+(?:\.(?:'[A-Z0-9-]+'|[A-Z0-9]+))?) = '([^'\\]+)'", text).groups()
    if path == "ipv4-addr:value":
        ipaddress.IPv4Address(value)
    elif path == "domain-name:value":
        assert all(re.fullmatch(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", label) for label in value.split("."))
        assert "." in value
    elif path == "email-addr:value":
        assert value.count("@") == 1
    elif path == "url:value":
        assert value.startswith(("http://", "https://"))
    else:
        size = {"file:hashes.MD5": 32, "file:hashes.'SHA-1'": 40, "file:hashes.'SHA-256'": 64}[path]
        assert re.fullmatch(f"[0-9a-f]{{{size}}}", value)


def check_indicator(text: str, *, optional: bool) -> None:
    made = json.loads(text)
    assert (made["type"], made["spec_version"], made["pattern_type"]) == ("indicator", "2.1", "stix")
    kind, _, number = made["id"].partition("--")
    assert kind == "indicator"
    assert str(uuid.UUID(number)) == number
    assert uuid.UUID(number).version == 4
    for name in ("created", "modified", "valid_from"):
        check_moment(made[name])
    assert made["pattern"][0] + made["pattern"][-1] == "[]"
    for comparison in re.split(" AND | OR ", made["pattern"][1:-1]):
        check_comparison(comparison)
    assert optional or not {"description", "confidence"} & set(made)
    assert made["name"]


def check_sigma(text: str, *, optional: bool) -> None:
    rule = yaml.safe_load(text)
    assert {"title", "id", "status", "description", "date", "logsource", "detection", "level"} <= set(rule)
    assert uuid.UUID(rule["id"]).version == 4
    assert isinstance(rule["date"], datetime.date)
    assert rule["status"] in ("stable", "test", "experimental")
    assert rule["level"] in ("informational", "low", "medium", "high", "critical")
    assert {"category", "product"} <= set(rule["logsource"]) <= {"category", "product", "service"}
    named = set(re.findall("selection|filter", rule["detection"]["condition"]))
    assert named == set(rule["detection"]) - {"condition"}
    assert all(isinstance(rule["detection"][name], dict) for name in named)
    assert optional or not {"tags", "falsepositives"} & set(rule)


def check_verdict(text: str) -> None:
    made = json.loads(text)
    assert list(made) == ["verdict", "confidence", "reason"]
    assert made["verdict"] in ("benign", "suspicious", "malicious", "unknown")
    assert type(made["confidence"]) is int
    assert 0 <= made["confidence"] <= 100
    assert 1 <= len(made["reason"]) <= 300


IDS = {"attack": "T1059, T1059.001: PowerShell\nT1003 xT9999", "cwe": "CWE-79 | CWE-787"}
CHECKS: dict[str, Callable[[str, bool], None]] = {
    "cvss31": lambda text, optional: check_vector(text, "3.1", V31, V31_MORE, optional=optional),
    "cvss40": lambda text, optional: check_vector(text, "4.0", V40, V40_MORE, optional=optional),
    "stix-indicator": lambda text, optional: check_indicator(text, optional=optional),
    "sigma": lambda text, optional: check_sigma(text, optional=optional),
    "verdict": lambda text, _: check_verdict(text),
    "attack": lambda text, _: check_choice(text, {"T1059", "T1059.001", "T1003"}),
    "cwe": lambda text, _: check_choice(text, {"CWE-79", "CWE-787"}),
}
BUDGETS = {"stix-indicator": 900, "sigma": 700, "verdict": 250}


def check_choice(text: str, among: set[str]) -> None:
    assert text in among


def made_by(engine: Engine, name: str, *, optional: bool, count: int, seed: int = 1) -> list[str]:
    demand = Demand(preset(name, ids=IDS.get(name, ()), optional=optional))
    answers = engine.generate(
        "alert", demand=demand, temperature=1.0, n=count, seed=seed, max_new_tokens=BUDGETS.get(name, 200)
    )
    assert [made.valid for made in answers] == [True] * count
    return [made.text for made in answers]


def test_every_preset_is_checked() -> None:
    assert set(CHECKS) == set(PRESETS)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", list(PRESETS))
def test_what_a_preset_makes_passes_its_specification(untrained: Engine, name: str, optional: bool) -> None:
    for text in made_by(untrained, name, optional=optional, count=2):
        CHECKS[name](text, optional)


@pytest.mark.slow
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", list(PRESETS))
def test_a_thousand_answers_pass_their_specifications(untrained: Engine, name: str, optional: bool) -> None:
    for seed in range(9):
        for text in made_by(untrained, name, optional=optional, count=8, seed=seed):
            CHECKS[name](text, optional)


def test_optional_parts_come_only_where_asked_for(untrained: Engine) -> None:
    plain = made_by(untrained, "cvss40", optional=False, count=6)
    assert {text.count("/") for text in plain} == {len(V40)}
    assert max(text.count("/") for text in made_by(untrained, "cvss40", optional=True, count=6)) > len(V40)


def test_an_indicator_over_given_identifiers_holds_no_others(untrained: Engine) -> None:
    source = "10.0.0.7 and hxxp://evil[.]com/a(b) are bad, 1.3.6.1.4.1 is an object; d41d8cd98f00b204e9800998ecf8427e"
    known = {
        "ipv4-addr:value = '10.0.0.7'",
        "domain-name:value = 'evil.com'",
        "url:value = 'http://evil.com/a(b'",
        "file:hashes.MD5 = 'd41d8cd98f00b204e9800998ecf8427e'",
    }
    demand = Demand(preset("stix-indicator", ids=source))
    for made in untrained.generate("a", demand=demand, temperature=1.0, n=4, seed=1, max_new_tokens=900):
        assert made.valid
        check_indicator(made.text, optional=False)
        assert set(re.split(" AND | OR ", json.loads(made.text)["pattern"][1:-1])) <= known


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("cvs", "", "no preset 'cvs'; presets: cvss31"),
        ("cwe", "", "the preset cwe needs ids"),
        ("attack", "T12 and CWE-79", "the preset attack needs ids"),
        ("cvss31", "CWE-79", "takes no list of ids"),
    ],
)
def test_a_preset_that_cannot_be_made_is_refused(name: str, ids: str, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        preset(name, ids=ids)


def test_presets_are_constraints_of_their_kinds() -> None:
    kinds = {name: preset(name, ids=IDS.get(name, ())).kind for name in PRESETS}
    assert kinds == {
        "cvss31": "regex",
        "cvss40": "regex",
        "stix-indicator": "json_schema",
        "sigma": "grammar",
        "verdict": "json_schema",
        "attack": "choice",
        "cwe": "choice",
    }
    assert isinstance(preset("cwe", ids=["CWE-1"]), Constraint)
