"""scripts/demo_corpus.py on wheels of a few lines, made here: no network, no real package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "demo_corpus.py"
CATALOGUE = """<?xml version="1.0"?>{doctype}
<Weakness_Catalog xmlns="http://cwe.mitre.org/cwe-7" xmlns:x="http://www.w3.org/1999/xhtml"><Weaknesses>
<Weakness ID="1" Name="Loose Bolt " Status="Draft">
 <Description>The product holds a plate
   with a bolt that nobody has tightened, see [REF-12] for the torque.</Description>
 <Extended_Description><x:p>A first paragraph &amp;lt; about bolts.</x:p><x:ul><x:li><x:div>left one</x:div></x:li>
   <x:li>right <x:b>one</x:b></x:li></x:ul></Extended_Description>
 <Potential_Mitigations><Mitigation><Description>Tighten every bolt twice.</Description></Mitigation>
 </Potential_Mitigations>
 <Demonstrative_Examples><Demonstrative_Example><Intro_Text>First the setting.</Intro_Text>
   <Example_Code>bolt.turn(0)</Example_Code><Body_Text>Then the fall.</Body_Text>
 </Demonstrative_Example></Demonstrative_Examples>
</Weakness>
<Weakness ID="2" Name="Loose Nut" Status="Draft">
 <Description>The product holds its wheel by one nut, and the nut turns freely under load after a while.</Description>
 <Potential_Mitigations><Mitigation><Description>Tighten every bolt twice.</Description></Mitigation>
 </Potential_Mitigations>
</Weakness>
<Weakness ID="3" Name="Old Rivet" Status="Deprecated">
 <Description>An entry long enough to be kept, but deprecated, so it must never be in the corpus.</Description>
</Weakness></Weaknesses></Weakness_Catalog>"""
CHECK = {
    "Provider": "aws",
    "CheckID": "gate_closed",
    "CheckTitle": "Gate is **closed** at night",
    "Description": "The gate of `<region>` is inspected; *if open*, an alarm &amp; a lamp start.",
    "Risk": "An open gate lets **sheep** out.\n- loss of [wool](https://example.org/w)",
    "Remediation": {
        "Code": {"Other": "1. Walk to the gate\n```bash\nshut\n```\n2. Shut it"},
        "Recommendation": {"Text": "Shut it."},
    },
    "Notes": "Farm",
}
GATHERED = "Ada is a group that gathers stamps from every country it visits and then sells all of them again."
CLUSTERS: dict[str, list[dict[str, str]]] = {
    "threat-actor": [
        {"uuid": "u1", "value": "Ada", "description": GATHERED + " (Citation: Stamp (2014) Weekly)"},
        {
            "uuid": "u2",
            "value": "Bea",
            "description": "[Bea](https://example.org) uses <code>tar</code><br/>" + "to pack cats " * 4,
        },
        {"uuid": "u3", "value": "Short", "description": "Too short."},
        {
            "uuid": "u4",
            "value": "Broken",
            "description": "A ligature was lost in this tra\x81c report on the group " + "w " * 20,
        },
        {"uuid": "u5", "value": "Silent"},
    ],
    "tool": [{"uuid": "u6", "value": "Ada", "description": GATHERED}],
    "malpedia": [{"uuid": "u7", "value": "Denied", "description": "words that must not be used " * 5}],
}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a fresh module whose pip reports a missing network unless a test says otherwise."""
    spec = importlib.util.spec_from_file_location("demo_corpus_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    pip_says(monkeypatch, "after connection broken by 'NewConnectionError'")
    return module


def pip_says(monkeypatch: pytest.MonkeyPatch, stderr: str, returncode: int = 1) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def wheel(folder: Path, package: str, files: dict[str, str]) -> str:
    """Write ``package``-1.0 into ``folder``; returns its line of the requirements file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{package}-1.0.dist-info/licenses/LICENSE": f"terms of {package}"}.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return f"{package}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def wheels(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the three wheels, pinned."""
    folder = tmp_path / "wheels"
    pins = wheel(folder, "cwe2", {"cwe2/db/cwec_v1.0.xml": CATALOGUE.format(doctype="")})
    pins += wheel(folder, "prowler", {"prowler/a/gate_closed.metadata.json": json.dumps(CHECK)})
    clusters = {f"p/clusters/{name}.json": json.dumps({"values": values}) for name, values in CLUSTERS.items()}
    pins += wheel(folder, "pymispgalaxies", clusters)
    monkeypatch.setattr(demo, "PINS", tmp_path / "pins.txt")
    (tmp_path / "pins.txt").write_text("# a comment\n" + pins)
    return folder


def documents(path: Path) -> dict[str, str]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert all(set(entry) == {"text", "source", "id"} and entry["source"] == path.stem for entry in entries)
    return {entry["id"]: entry["text"] for entry in entries}


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_cwe_is_prose_with_shared_texts_once_and_nothing_deprecated(demo, wheels, tmp_path):
    assert demo.main([str(tmp_path / "out")]) == 0
    found = documents(tmp_path / "out/text/cwe.jsonl")
    assert list(found) == ["CWE-1", "CWE-2"]
    assert found["CWE-1"].split("\n") == [
        "CWE-1: Loose Bolt.",
        "The product holds a plate with a bolt that nobody has tightened, see for the torque.",
        "A first paragraph &lt; about bolts.",
        "- left one",
        "- right one",
        "Tighten every bolt twice.",
        "First the setting.",
        "Then the fall.",
    ]
    assert "Tighten" not in found["CWE-2"]


def test_prowler_loses_markup_and_keeps_placeholders(demo, wheels, tmp_path):
    demo.main([str(tmp_path / "out")])
    assert documents(tmp_path / "out/text/prowler.jsonl") == {
        "aws/gate_closed": "Gate is closed at night\n"
        "The gate of `<region>` is inspected; if open, an alarm & a lamp start.\n"
        "An open gate lets sheep out.\n- loss of wool\n1. Walk to the gate\nshut\n2. Shut it\nShut it."
    }


def test_misp_loses_citations_repeats_short_damaged_and_denied_texts(demo, wheels, tmp_path):
    demo.main([str(tmp_path / "out")])
    found = documents(tmp_path / "out/text/misp.jsonl")
    assert found["threat-actor/u1"] == GATHERED
    assert found["threat-actor/u2"] == "Bea uses `tar`\n" + ("to pack cats " * 4).strip()
    assert list(found) == ["threat-actor/u1", "threat-actor/u2"]
    record = json.loads((tmp_path / "out/SOURCES.json").read_text())["sources"][2]
    assert (record["documents"], record["dropped"]) == (2, {"short": 1, "repeated": 1, "damaged": 1})


def test_record_and_notices_say_where_the_text_came_from(demo, wheels, tmp_path):
    demo.main([str(tmp_path / "out")])
    out, record = tmp_path / "out", json.loads((tmp_path / "out/SOURCES.json").read_text())
    assert record["corpus"] == "security"
    for source in record["sources"]:
        data = (out / f"text/{source['name']}.jsonl").read_bytes()
        assert (source["bytes"], source["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert source["text_bytes"] == sum(
            len(text.encode()) for text in documents(out / f"text/{source['name']}.jsonl").values()
        )
        assert source["wheel_sha256"] in (tmp_path / "pins.txt").read_text()
        assert f"terms of {source['package']}" in (out / f"NOTICES/{source['package']}.txt").read_text()
    assert "MITRE ATT&CK" in (out / "NOTICES/pymispgalaxies.txt").read_text()
    written = contents(out)
    written.pop("SOURCES.json")
    assert record["files"] == {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}


def test_two_folders_get_the_same_bytes(demo, wheels, tmp_path):
    demo.main([str(tmp_path / "a")])
    demo.main([str(tmp_path / "b")])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_second_run_touches_nothing_and_needs_no_wheels(demo, wheels, tmp_path, capsys):
    demo.main([str(tmp_path / "out")])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    for path in wheels.iterdir():
        path.unlink()
    capsys.readouterr()
    assert demo.main([str(tmp_path / "out")]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "nothing to do" in first
    assert last == f"corpus: security, in {tmp_path / 'out' / 'text'}"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_a_lost_file_is_made_again(demo, wheels, tmp_path):
    demo.main([str(tmp_path / "out")])
    before = contents(tmp_path / "out")
    (tmp_path / "out/text/misp.jsonl").unlink()
    assert demo.main([str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["text/cwe.jsonl", "text/topics.jsonl", "NOTICES/prowler.txt"])
def test_a_file_of_the_users_is_never_replaced(demo, wheels, tmp_path, capsys, name):
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert demo.main([str(tmp_path / "out")]) == 1
    assert f"{mine} is not as this script left it" in capsys.readouterr().err
    assert contents(tmp_path / "out") == {name: b"mine"}


def test_a_foreign_record_is_never_replaced(demo, wheels, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/SOURCES.json").write_text("[1]")
    assert demo.main([str(tmp_path / "out")]) == 1
    assert "was not written by this script" in capsys.readouterr().err
    assert contents(tmp_path / "out") == {"SOURCES.json": b"[1]"}


def test_a_wheel_with_the_wrong_hash_stops_before_anything_is_written(demo, wheels, tmp_path, capsys):
    path = wheels / "prowler-1.0-py3-none-any.whl"
    path.write_bytes(path.read_bytes() + b"x")
    assert demo.main([str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert hashlib.sha256(path.read_bytes()).hexdigest() in error
    assert not (tmp_path / "out").exists()


def test_a_wheel_spoiled_after_the_download_is_not_opened(demo, wheels, tmp_path, monkeypatch, capsys):
    """pip's own check is not the last: hashes are taken again before the wheels are read."""
    path = wheels / "cwe2-1.0-py3-none-any.whl"
    good = path.read_bytes()
    path.unlink()

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        path.write_bytes(good + b"x")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert demo.main([str(tmp_path / "out")]) == 1
    assert "find out why" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pip_is_asked_for_hashed_binary_wheels_only(demo, wheels, tmp_path, monkeypatch):
    path = wheels / "cwe2-1.0-py3-none-any.whl"
    good, commands = path.read_bytes(), []
    path.unlink()

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        path.write_bytes(good)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert demo.main([str(tmp_path / "out"), "--wheels", str(wheels)]) == 0
    [command] = commands
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "--no-input"]
    assert {"download", "--no-deps", "--only-binary", ":all:", "--require-hashes"} < set(command)
    assert command[-4:] == ["-r", str(tmp_path / "pins.txt"), "-d", str(wheels)]


@pytest.mark.parametrize(
    "stderr",
    [
        "WARNING: Retrying after connection broken by 'NewConnectionError(Connection refused)'\nERROR: No match",
        "WARNING: Retrying after connection broken by 'ProxyError(Cannot connect to proxy.)'",
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='x', port=443): Read timed out.",
        "ERROR: Could not find a version that satisfies the requirement cwe2==1.0 (from versions: none)",
    ],
)
def test_without_a_registry_the_language_reference_stands_in(demo, wheels, tmp_path, monkeypatch, capsys, stderr):
    (wheels / "cwe2-1.0-py3-none-any.whl").unlink()
    pip_says(monkeypatch, stderr)
    assert demo.main([str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert stderr.splitlines()[0] in said
    assert said.endswith(f"corpus: topics, in {tmp_path / 'out' / 'text'}\n")
    assert set(contents(tmp_path / "out")) == {"SOURCES.json", "NOTICES/python.txt", "text/topics.jsonl"}


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        (
            "WARNING: connection broken\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
            "not the pinned one",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "No space left"),
        ("", "exit code 1"),
    ],
)
def test_other_failures_of_pip_stop_the_run(demo, wheels, tmp_path, monkeypatch, capsys, stderr, told):
    (wheels / "cwe2-1.0-py3-none-any.whl").unlink()
    pip_says(monkeypatch, stderr)
    assert demo.main([str(tmp_path / "out")]) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_pip_the_language_reference_stands_in(demo, wheels, tmp_path, monkeypatch, capsys):
    (wheels / "cwe2-1.0-py3-none-any.whl").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main([str(tmp_path / "out")]) == 0
    assert "has no pip" in capsys.readouterr().out


def test_offline_gives_a_few_hundred_documents_with_their_indentation(demo, wheels, tmp_path):
    assert demo.main([str(tmp_path / "out"), "--offline"]) == 0
    found = documents(tmp_path / "out/text/topics.jsonl")
    assert 150 < len(found) < 600
    assert all(text.strip() and not text.endswith("\n") for text in found.values())
    assert any("\n   " in text for text in found.values())
    assert "Python Software Foundation" in (tmp_path / "out/NOTICES/python.txt").read_text(encoding="utf-8")


def test_topics_lose_no_paragraph_before_the_sieve(demo):
    from pydoc_data.topics import topics

    joined: dict[str, str] = {}
    for key, text in demo.read_topics():
        topic = key.rpartition("/")[0]
        joined[topic] = joined.get(topic, "") + text + "\n\n"
    assert joined.keys() == topics.keys()
    assert all(joined[topic].split() == topics[topic].split() for topic in topics)


def test_the_real_corpus_replaces_the_stand_in_and_leaves_other_files(demo, wheels, tmp_path):
    out = tmp_path / "out"
    demo.main([str(out), "--offline"])
    (out / "text/own.txt").write_text("own")
    assert demo.main([str(out)]) == 0
    names = set(contents(out))
    assert {"text/own.txt", "text/cwe.jsonl", "text/misp.jsonl", "text/prowler.jsonl"} < names
    assert not names & {"text/topics.jsonl", "NOTICES/python.txt"}
    assert json.loads((out / "SOURCES.json").read_text())["corpus"] == "security"


def test_an_edited_stand_in_is_not_removed(demo, wheels, tmp_path, capsys):
    out = tmp_path / "out"
    demo.main([str(out), "--offline"])
    (out / "text/topics.jsonl").write_text("edited")
    assert demo.main([str(out)]) == 1
    assert "topics.jsonl is not as this script left it" in capsys.readouterr().err
    assert (out / "text/topics.jsonl").read_text() == "edited"
    assert not (out / "text/cwe.jsonl").exists()


def test_the_stand_in_never_replaces_the_real_corpus(demo, wheels, tmp_path, capsys):
    out = tmp_path / "out"
    demo.main([str(out)])
    before = contents(out)
    (tmp_path / "pins.txt").write_text((tmp_path / "pins.txt").read_text() + "# another version\n")
    assert demo.main([str(out), "--offline"]) == 0
    assert "keeping the corpus" in capsys.readouterr().out
    assert contents(out) == before
    (out / "text/misp.jsonl").unlink()
    assert demo.main([str(out), "--offline"]) == 1
    assert "can't be made anew" in capsys.readouterr().err
    assert not (out / "text/topics.jsonl").exists()


def test_a_changed_script_or_pin_file_makes_the_corpus_again(demo, wheels, tmp_path, capsys):
    demo.main([str(tmp_path / "out")])
    (tmp_path / "pins.txt").write_text((tmp_path / "pins.txt").read_text() + "# another version\n")
    capsys.readouterr()
    assert demo.main([str(tmp_path / "out")]) == 0
    assert "nothing to do" not in capsys.readouterr().out


BOMB = '<!DOCTYPE b [<!ENTITY a "boom"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'


@pytest.mark.parametrize("doctype", [BOMB, "<!DOCTYPE b>", '<!DOCTYPE b SYSTEM "file:///etc/passwd">'])
def test_a_document_type_declaration_is_refused(demo, wheels, tmp_path, capsys, doctype):
    text = CATALOGUE.format(doctype=doctype).replace("nobody", "&c;" if doctype is BOMB else "nobody")
    pins = (tmp_path / "pins.txt").read_text().splitlines(keepends=True)
    (tmp_path / "pins.txt").write_text(wheel(wheels, "cwe2", {"cwe2/db/cwec_v1.0.xml": text}) + "".join(pins[2:]))
    assert demo.main([str(tmp_path / "out")]) == 1
    assert "document type declaration" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_member_that_unpacks_too_large_is_refused(demo, wheels, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "MEMBER_LIMIT", 1000)
    assert demo.main([str(tmp_path / "out")]) == 1
    assert "more than 1,000; refused" in capsys.readouterr().err


def test_a_wheel_without_the_expected_members_is_named(demo, wheels, tmp_path, capsys):
    pins = (tmp_path / "pins.txt").read_text().splitlines(keepends=True)
    (tmp_path / "pins.txt").write_text(wheel(wheels, "prowler", {"other.txt": "x"}) + pins[1] + pins[3])
    assert demo.main([str(tmp_path / "out")]) == 1
    assert "nothing inside matches" in capsys.readouterr().err


def test_a_failed_write_leaves_no_partial_file_and_no_record(demo, wheels, tmp_path, monkeypatch, capsys):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo.os, "fsync", full)
    assert demo.main([str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert contents(tmp_path / "out") == {}


def test_a_run_cut_short_is_finished_by_the_next(demo, wheels, tmp_path, monkeypatch):
    demo.main([str(tmp_path / "whole")])
    write, left = demo.write_whole, iter([True, True])

    def cut(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            raise OSError(5, "cut")
        write(path, data)

    monkeypatch.setattr(demo, "write_whole", cut)
    assert demo.main([str(tmp_path / "out")]) == 1
    assert len(contents(tmp_path / "out")) == 2
    monkeypatch.setattr(demo, "write_whole", write)
    assert demo.main([str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_shipped_pins_name_each_source_once(demo, tmp_path):
    assert set(demo.pinned(tmp_path)) == {source.package for source in demo.SOURCES}


@pytest.mark.slow
def test_real_pip_with_a_closed_port_falls_back(tmp_path):
    """The words pip uses for a missing network are its own; this asks the installed one, on a closed loopback port."""
    environment = {"PATH": "", "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"corpus: topics, in {tmp_path / 'out' / 'text'}"
