"""Question pairs, preferences and the multiple-choice set, as scripts make them: what is asked, what is kept apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def security_qa(monkeypatch: pytest.MonkeyPatch):
    return _script(monkeypatch, "security_qa")


@pytest.fixture
def cwe_mcq(monkeypatch: pytest.MonkeyPatch):
    return _script(monkeypatch, "cwe_mcq")


def _script(monkeypatch: pytest.MonkeyPatch, name: str):
    import importlib

    monkeypatch.syspath_prepend(str(SCRIPTS))
    for module in ("security_qa", "cwe_mcq", "demo_corpus"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


def write_corpus(folder: Path, weaknesses: int = 40) -> Path:
    texts = folder / "text"
    texts.mkdir(parents=True)
    cwe = [
        {"text": f"CWE-{n}: Flaw {n}.\nThe product does {n} wrong. It is bad.\nMore.", "id": f"CWE-{n}"}
        for n in range(1, weaknesses + 1)
    ]
    misp = [
        {"text": "Phishing - T1566.001: Adversaries send mail. They wait.", "id": "mitre-attack-pattern/1"},
        {"text": "A tool - T9999: no technique.", "id": "tool/2"},
        {"text": "No id: of any kind.", "id": "mitre-attack-pattern/3"},
    ]
    for name, records in (("cwe", cwe), ("misp", misp)):
        (texts / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_are_made_of_what_the_records_say(security_qa, tmp_path):
    assert security_qa.main([str(write_corpus(tmp_path))]) == 0
    said = [[turn["content"] for turn in each["messages"]] for each in lines(tmp_path / "qa" / "train.jsonl")]
    assert ["What is T1566.001?", "T1566.001 is the technique Phishing. Adversaries send mail. They wait."] in said
    assert not any("T9999" in question or "of any kind" in question for question, _ in said)
    kept = next(n for n in range(1, 40) if not security_qa.held_out(f"CWE-{n}"))
    assert [f"What is the id of the weakness Flaw {kept}?", f"It is CWE-{kept}."] in said


def test_held_out_ids_are_in_no_training_file(security_qa, tmp_path):
    security_qa.main([str(write_corpus(tmp_path))])
    apart = [n for n in range(1, 41) if security_qa.held_out(f"CWE-{n}")]
    assert 0 < len(apart) < 20
    for name in ("train", "preferences", "cwe-train"):
        text = (tmp_path / "qa" / f"{name}.jsonl").read_text()
        assert not any(f'CWE-{n}"' in text or f"CWE-{n}:" in text or f"CWE-{n} " in text for n in apart)
    assert len(lines(tmp_path / "qa" / "held-out.jsonl")) == 3 * len(apart)
    assert len(lines(tmp_path / "qa" / "cwe-held-out.jsonl")) == len(apart)


def test_a_preference_is_between_two_answers_to_one_question(security_qa, tmp_path):
    security_qa.main([str(write_corpus(tmp_path))])
    for pair in lines(tmp_path / "qa" / "preferences.jsonl"):
        assert pair["chosen"] != pair["rejected"]
        assert set(pair) == {"prompt", "chosen", "rejected"}


def test_the_same_corpus_gives_the_same_bytes(security_qa, tmp_path):
    corpus = write_corpus(tmp_path)
    for name in ("a", "b"):
        security_qa.main([str(corpus), "--out", str(tmp_path / name)])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_without_the_corpus_one_is_told_how_to_make_it(security_qa, tmp_path, capsys):
    assert security_qa.main([str(tmp_path)]) == 1
    assert "scripts/demo_corpus.py" in capsys.readouterr().err


def catalogue(count: int = 30) -> bytes:
    """Weaknesses that are all children of number 1, one of them deprecated."""
    related = '<Related_Weaknesses><Related_Weakness Nature="ChildOf" CWE_ID="1"/></Related_Weaknesses>'
    about = (
        "<Description>The product does something that is quite wrong in way number {n}, again and again.</Description>"
    )
    found = "".join(
        f'<Weakness ID="{n}" Name="Flaw {n}" Status="{"Deprecated" if n == 2 else "Draft"}">{about.format(n=n)}'
        f"{related if n > 1 else ''}</Weakness>"
        for n in range(1, count + 1)
    )
    text = f'<Weakness_Catalog xmlns="http://cwe.mitre.org/cwe-7"><Weaknesses>{found}</Weaknesses></Weakness_Catalog>'
    return text.encode()


def test_choices_are_siblings_and_the_answer_is_the_name(cwe_mcq):
    found = list(cwe_mcq.questions(catalogue(), everything=True))
    assert len(found) == 28
    for each in found:
        number = each["id"].removeprefix("CWE-")
        assert each["choices"][each["answer"]] == f"Flaw {number}"
        assert f"way number {number}," in each["prompt"]
        assert len(set(each["choices"])) == 4
        assert not {"Flaw 1", "Flaw 2"} & set(each["choices"])
    assert len({each["answer"] for each in found}) == 4
    assert found == list(cwe_mcq.questions(catalogue(), everything=True))


def test_only_held_out_ids_are_asked_about(cwe_mcq):
    found = {each["id"] for each in cwe_mcq.questions(catalogue())}
    assert found == {f"CWE-{n}" for n in range(3, 31) if cwe_mcq.held_out(f"CWE-{n}")}


def test_the_questions_can_be_asked(cwe_mcq, tmp_path):
    from cyberslm.evaluation.mcq import read_questions

    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in cwe_mcq.questions(catalogue(), everything=True)))
    assert len(read_questions(path)) == 28
