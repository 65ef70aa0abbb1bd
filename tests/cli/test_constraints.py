from __future__ import annotations

import json
from pathlib import Path

import pytest

from cyberslm.cli.constraints import MAX_FILE_BYTES, FormOptions
from cyberslm.errors import GenerationError
from cyberslm.generation.constrain import Constraint
from cyberslm.generation.demand import NOTHING


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "given"


def test_no_option_asks_nothing() -> None:
    assert FormOptions().demands(["a", "b"]) == [NOTHING, NOTHING]


@pytest.mark.parametrize("option", ["json_schema", "grammar"])
def test_files_are_read(option: str, file: Path) -> None:
    text = json.dumps({"type": "string"}) if option == "json_schema" else 'start: "a"'
    file.write_text(text)
    (demand,) = FormOptions(**{option: file}).demands(["a"])
    assert demand.constraint == getattr(Constraint, option)(text)
    assert demand.ground is None


def test_texts_are_taken_as_they_are() -> None:
    assert FormOptions(regex="a+").demands(["p"])[0].constraint == Constraint.regex("a+")
    assert FormOptions(choice=["a", "b"]).demands(["p"])[0].constraint == Constraint.choice(["a", "b"])


def test_presets_with_their_lists_and_optional_parts(file: Path) -> None:
    file.write_text("CWE-79 and CWE-89")
    (listed,) = FormOptions(preset="cwe", preset_ids=file).demands(["p"])
    assert listed.constraint == Constraint.choice(["CWE-79", "CWE-89"])
    plain, more = (FormOptions(preset="cvss31", preset_optional=each).demands(["p"])[0] for each in (False, True))
    assert plain.constraint != more.constraint


def test_grounding_with_kinds_and_a_list(file: Path) -> None:
    file.write_text("evil.com\n\n  good.org \n")
    (demand,) = FormOptions(ground=True, allow=file).demands(["p"])
    assert demand.ground is not None
    assert demand.ground.allow == ("evil.com", "good.org")
    (one,) = FormOptions(ground_kinds=["cve"]).demands(["p"])
    assert one.ground is not None
    assert one.ground.kinds == ("cve",)


def test_a_grounded_indicator_chooses_among_its_prompts_identifiers() -> None:
    first, second = FormOptions(preset="stix-indicator", ground=True).demands(["10.0.0.7", "evil.com"])
    assert first.constraint is not None
    assert second.constraint is not None
    assert "ipv4-addr:value = '10" in first.constraint.source
    assert "domain-name" not in first.constraint.source
    assert "domain-name:value = 'evil" in second.constraint.source


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FormOptions(regex="a", choice=["b"]), "--regex and --choice each bind"),
        (FormOptions(preset_optional=True), "go with --preset"),
        (FormOptions(preset_ids=Path("x")), "go with --preset"),
        (FormOptions(allow=Path("x")), "--allow goes with --ground"),
        (FormOptions(json_schema=Path("missing")), "--json-schema missing can't be read: No such file"),
        (FormOptions(preset="nothing"), "no preset 'nothing'"),
        (FormOptions(preset="cwe"), "--preset cwe needs --preset-ids FILE"),
        (FormOptions(preset="attack", preset_ids=Path(__file__)), r"needs ids to choose from.*--preset-ids .*\.py"),
        (FormOptions(ground_kinds=["ip"]), "no kind 'ip'"),
    ],
)
def test_options_that_contradict_or_cannot_be_read_are_refused(options: FormOptions, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        options.demands(["p"])


def test_files_that_are_too_large_or_no_text_are_refused(file: Path) -> None:
    file.write_bytes(b"\xff")
    with pytest.raises(GenerationError, match="not UTF-8"):
        FormOptions(grammar=file).demands(["p"])
    with file.open("wb") as out:
        out.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(GenerationError, match="larger than"):
        FormOptions(grammar=file).demands(["p"])
