"""Steps that know the whole corpus, and the pipeline that runs them: exact copies, boilerplate, evaluation text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from clean_material import prose, run, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.config import documented_fields, dump, load
from cyberslm.data.clean import config as settings_of
from cyberslm.data.clean.config import (
    BoilerplateConfig,
    ContaminationConfig,
    ExactDuplicatesConfig,
    LengthConfig,
    NearDuplicatesConfig,
    QualityConfig,
    StepConfig,
    TripwiresConfig,
)
from cyberslm.data.clean.contamination import ContaminationStep, index_evaluation
from cyberslm.data.clean.counts import StepCounts, table
from cyberslm.data.clean.entry import Entry, Outcome, Survey
from cyberslm.data.clean.pipeline import Cleaned, Pipeline, _make
from cyberslm.data.clean.quality import QualityStep
from cyberslm.data.clean.texts import LengthStep
from cyberslm.data.workers import map_ordered
from cyberslm.errors import ConfigError, CyberSLMError, DataError, InputError


def files(texts: Sequence[str], source: str = "data.sources[0]") -> list[Entry]:
    return [Entry(text, source, f"{at:04}.txt") for at, text in enumerate(texts)]


def texts_of(cleaned: Iterable[Cleaned]) -> list[str]:
    return [each.entry.text for each in cleaned]


def exact(tmp_path: Path, **values: object) -> Pipeline:
    return Pipeline([StepConfig(exact_duplicates=ExactDuplicatesConfig(**values))], scratch=tmp_path)


def test_the_first_of_equal_documents_by_place_is_kept(tmp_path: Path) -> None:
    entries = [
        Entry("same", "data.sources[0]", "b.txt", 1),
        Entry(" same\r\n", "data.sources[0]", "a.txt", 9),
        Entry("same", "data.sources[0]", "a.txt", 10),
        Entry("other", "data.sources[0]", "c.txt", 1),
    ]
    pipeline = exact(tmp_path)
    kept = [each.entry.place() for each in run(pipeline, entries)]
    assert kept == ["a.txt:9", "c.txt:1"]
    counts = pipeline.counts["data.sources[0]", "exact_duplicates"]
    assert counts.dropped == {"copy (document)": 2}
    assert [key[-1] for key in counts.examples["copy (document)"]] == ["a.txt:10: of a.txt:9", "b.txt:1: of a.txt:9"]


@pytest.mark.parametrize(
    ("values", "left"),
    [({}, 4), ({"fold_case": True}, 3), ({"fold_space": True}, 3), ({"fold_case": True, "fold_space": True}, 1)],
)  # fmt: skip
def test_folding_makes_more_texts_equal(tmp_path: Path, values: dict[str, bool], left: int) -> None:
    assert len(run(exact(tmp_path, **values), files(["a b", "A b", "a\n b", "A\t\tB"]))) == left


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("ab \n", max_size=6), max_size=25),
    level=st.sampled_from(["document", "paragraph"]),
    order=st.randoms(use_true_random=False),
)
def test_exact_copies_go_once_and_for_all(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], level: str, order: random.Random
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    entries = files(texts)
    once = run(exact(scratch, level=level, min_characters=1), entries)
    shuffled = order.sample(entries, len(entries))
    assert sorted(once) == sorted(run(exact(scratch, level=level, min_characters=1), shuffled))
    again = run(exact(scratch, level=level, min_characters=1), [each.entry for each in once])
    assert texts_of(again) == texts_of(once)
    if level == "document":
        kept = [text.strip() for text in texts_of(once)]
        assert sorted(kept) == sorted({text.strip() for text in texts})
    else:
        blocks = Counter(block for text in texts_of(once) for block in _paragraphs(text))
        assert set(blocks) == {block for text in texts for block in _paragraphs(text)}
        assert max(blocks.values(), default=1) == 1


def _paragraphs(text: str) -> list[str]:
    blocks, lines = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            blocks.append("\n".join(lines).strip())
            lines = []
    return blocks


def test_copied_paragraphs_are_cut_where_they_come_later(tmp_path: Path) -> None:
    shared = "shared paragraph of some length"
    pipeline = exact(tmp_path, level="paragraph", min_characters=20)
    cleaned = run(pipeline, files([f"one\n\n{shared}\n\ntail", f"{shared}\n\ntwo", shared]))
    assert texts_of(cleaned) == [f"one\n\n{shared}\n\ntail", "two"]
    counts = pipeline.counts["data.sources[0]", "exact_duplicates"]
    assert counts.dropped == {"nothing but copied paragraphs": 1}
    assert counts.examples["copy (paragraph)"][0][-1] == "0001.txt:1: of 0000.txt:3"


def test_reporting_changes_nothing(tmp_path: Path) -> None:
    for level in ("document", "paragraph"):
        entries = files(["a long enough text"] * 3)
        pipeline = exact(tmp_path, level=level, action="report", min_characters=1)
        assert texts_of(run(pipeline, entries)) == [entry.text for entry in entries]
        assert pipeline.counts["data.sources[0]", "exact_duplicates"].noted == {f"copy ({level})": 2}


def boilerplate(tmp_path: Path, **values: object) -> Pipeline:
    return Pipeline([StepConfig(boilerplate=BoilerplateConfig(**values))], scratch=tmp_path)


HEADER, FOOTER = "Acme internal use only, do not forward", "Printed from the archive of the Acme team"


def bodies(number: int) -> list[str]:
    rng = random.Random(number)
    words = vocabulary(rng)
    return [prose(rng, words, 80) for _ in range(number)]


def test_headers_and_footers_are_cut_and_quoted(tmp_path: Path) -> None:
    wanted = bodies(40)
    pipeline = boilerplate(tmp_path)
    cleaned = run(pipeline, files([f"  {HEADER}\n{body}\n{FOOTER}" for body in wanted]))
    assert texts_of(cleaned) == wanted
    counts = pipeline.counts["data.sources[0]", "boilerplate"]
    assert counts.quoted == {HEADER: 40, FOOTER: 40}
    assert counts.changed == 40


@pytest.mark.parametrize("shown_in", [11, 13])
def test_a_line_is_boilerplate_above_the_share_only(tmp_path: Path, shown_in: int) -> None:
    texts = [f"{HEADER}\n{body}" if at < shown_in else body for at, body in enumerate(bodies(40))]
    cleaned = run(boilerplate(tmp_path, max_share=0.3), files(texts))
    assert (texts_of(cleaned) == texts) == (shown_in <= 12)


def test_boilerplate_is_per_source_and_needs_enough_documents(tmp_path: Path) -> None:
    few, other = [f"{HEADER}\n{body}" for body in bodies(19)], [f"{HEADER}\n{body}" for body in bodies(1)] + bodies(30)
    entries = files(few) + files(other, "data.sources[1]")
    assert texts_of(run(boilerplate(tmp_path), entries)) == few + other


def test_lines_that_differ_in_a_number_or_are_short_stay(tmp_path: Path) -> None:
    texts = [f"This page is about CVE-2024-{1000 + at}\n---------\n{body}" for at, body in enumerate(bodies(40))]
    assert texts_of(run(boilerplate(tmp_path), files(texts))) == texts


def test_a_page_header_is_cut_in_the_middle_too_and_nothing_but_boilerplate_goes(tmp_path: Path) -> None:
    long = "\n".join([HEADER, *(f"row {at} of a long table" for at in range(300)), HEADER, "the end of the table"])
    pipeline = boilerplate(tmp_path)
    cleaned = run(pipeline, files([long, *(f"{HEADER}\n{body}" for body in bodies(30)), HEADER]))
    assert HEADER not in "".join(texts_of(cleaned))
    assert len(cleaned) == 31
    assert pipeline.counts["data.sources[0]", "boilerplate"].dropped == {"nothing but boilerplate": 1}


def test_boilerplate_may_be_reported_only(tmp_path: Path) -> None:
    texts = [f"{HEADER}\n{body}" for body in bodies(30)]
    pipeline = boilerplate(tmp_path, action="report")
    assert texts_of(run(pipeline, files(texts))) == texts
    assert pipeline.counts["data.sources[0]", "boilerplate"].quoted == {HEADER: 30}


QUESTION = (
    "Which of these weaknesses lets an attacker who controls the length field read memory beyond the end of a buffer? "
    "A: use after free B: out of bounds read C: race condition D: path traversal"
)
FILLER = "Nothing in this sentence has to do with the question that the evaluation asks and it is quite long too."


def contamination(texts: Sequence[str], **values: object) -> ContaminationStep:
    config = ContaminationConfig(against=("eval.jsonl",), **values)
    entries = [Entry(text, "e", "eval.jsonl", line, record=True) for line, text in enumerate(texts, 1)]
    return ContaminationStep(config, index_evaluation(entries, config, key="against"))


@pytest.mark.parametrize(
    "copy",
    [
        QUESTION,
        QUESTION.upper(),
        QUESTION.replace(" ", "\n "),
        QUESTION.replace("?", "").replace(":", " - "),
        QUESTION[30:160],
    ],
)
@pytest.mark.parametrize("unit", ["words", "characters"])
def test_evaluation_text_is_found_whatever_case_space_and_punctuation(copy: str, unit: str) -> None:
    step = contamination([QUESTION], unit=unit)
    outcome = step.apply(files([f"{FILLER}\n{copy}\n{FILLER}"])[0])
    assert outcome.dropped == "evaluation text"
    (note,) = outcome.notes
    assert note.line == 2
    assert "eval.jsonl:1" in note.detail
    assert QUESTION[:20] not in note.detail


@pytest.mark.parametrize("unit", ["words", "characters"])
def test_other_text_is_not_found(unit: str) -> None:
    step = contamination([QUESTION], unit=unit)
    for text in (FILLER, "", QUESTION[:40], " ".join(QUESTION.split()[::-1])):
        assert step.apply(files([text])[0]) == Outcome(text)


def test_cutting_takes_out_the_run_and_leaves_the_rest() -> None:
    step = contamination([QUESTION], action="cut")
    outcome = step.apply(files([f"{FILLER} {QUESTION}\n{FILLER}"])[0])
    assert outcome.dropped is None
    assert outcome.text.split("\n") == [FILLER, "", FILLER]
    assert step.apply(files([outcome.text])[0]) == Outcome(outcome.text)
    assert step.apply(files([QUESTION])[0]).dropped == "nothing but evaluation text"


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["a", "B", "c,", "d.", "\u00df", "\u0130", "\u4e2d", "e\n"]), min_size=1, max_size=60
    ),
    unit=st.sampled_from(["words", "characters"]),
)
def test_cutting_is_final(parts: list[str], unit: str) -> None:
    """Letters whose lower case is longer move the places; what a cut brings together may be a run again."""
    step = contamination(["a b c a b c \u00df"], unit=unit, length=4, min_length=2, action="cut")
    outcome = step.apply(files([" ".join(parts)])[0])
    if outcome.dropped is None:
        assert step.apply(files([outcome.text])[0]) == Outcome(outcome.text)


def test_a_small_share_may_be_let_through() -> None:
    text = f"{QUESTION} {' '.join([FILLER] * 20)}"
    assert contamination([QUESTION], max_share=0.2).apply(files([text])[0]).dropped is None
    assert contamination([QUESTION], max_share=0.05).apply(files([text])[0]).dropped == "evaluation text"


def test_short_evaluation_texts_are_looked_for_whole_or_counted() -> None:
    step = contamination(["what is the default port of the secure shell", "yes"])
    assert step.index.too_short == ("eval.jsonl:2",)
    assert step.apply(files(["Q: What is the default port of the Secure Shell? 22"])[0]).dropped
    assert not step.apply(files(["What is the default port of the telnet service?"])[0]).dropped
    with pytest.raises(DataError, match="none of the 1 evaluation texts has 8 words"):
        contamination(["yes"])


def test_the_pipeline_runs_steps_in_order_and_counts_each(tmp_path: Path) -> None:
    steps = [
        StepConfig(tripwires=TripwiresConfig()),
        StepConfig(length=LengthConfig(min_characters=5)),
        StepConfig(exact_duplicates=ExactDuplicatesConfig()),
        StepConfig(contamination=ContaminationConfig(against=("e",))),
        StepConfig(length=LengthConfig(min_characters=10)),
    ]
    evaluation = [Entry(QUESTION, "e", "e")]
    pipeline = Pipeline(steps, scratch=tmp_path, evaluation=lambda paths, key: evaluation)
    with pytest.raises(InputError, match="survey"):
        next(pipeline.run(list))
    cleaned = run(pipeline, files(["abc", "abcdef", "long enough \u202e", "long enough \u202e", QUESTION]))
    assert texts_of(cleaned) == ["long enough \u202e"]
    seen = {step: counts.documents for (_, step), counts in pipeline.counts.items()}
    assert seen == {"tripwires": 5, "length": 5, "exact_duplicates": 4, "contamination": 3, "length 2": 2}
    shown = table(pipeline.counts)
    assert "bidi control: 2 in 2 documents, such as 0002.txt:1: U+202E" in shown
    assert all(len(line) < 200 for line in shown.splitlines())


def test_counts_merge_into_what_one_count_would_have_been(tmp_path: Path) -> None:
    outcomes = [
        (entry, Outcome(entry.text, "too short" if at % 3 else None)) for at, entry in enumerate(files(["x"] * 60))
    ]
    whole, parts = StepCounts(), [StepCounts() for _ in range(4)]
    for entry, outcome in outcomes:
        whole.add(entry, outcome)
    for at, (entry, outcome) in enumerate(random.Random(1).sample(outcomes, len(outcomes))):
        parts[at % 4].add(entry, outcome)
    merged = StepCounts()
    for part in parts[::-1]:
        merged.merge(part)
    assert merged == whole
    assert len(whole.examples["too short"]) == 5


def test_places_name_the_line_of_the_file_or_of_the_record() -> None:
    assert Entry("", "s", "a.txt", 7).place(3) == "a.txt:9"
    assert Entry("", "s", "a.jsonl", 7, record=True).place() == "a.jsonl:7"
    assert Entry("", "s", "a.jsonl", 7, record=True).place(3) == "a.jsonl:7 (line 3 of the text)"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A section with steps, as `data` is."""

    steps: tuple[StepConfig, ...] = ()
    """Cleaning steps, run in this order."""


def steps_in(tmp_path: Path, text: str) -> Steps:
    (tmp_path / "steps.yaml").write_text(text)
    return load(tmp_path / "steps.yaml", Steps).value


YAML = """
steps:
  - length: {min_characters: 40}
  - boilerplate: {}
  - near_duplicates: {threshold: 0.8, action: report}
"""


def test_steps_are_read_from_yaml_and_written_back(tmp_path: Path) -> None:
    loaded = steps_in(tmp_path, YAML)
    assert [step.name for step in loaded.steps] == ["length", "boilerplate", "near_duplicates"]
    assert loaded.steps[0].settings == LengthConfig(min_characters=40)
    assert steps_in(tmp_path, dump(loaded)) == loaded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {}", "an entry without a step"),
        ("- boilerplate:", "an entry without a step"),
        ("- {length: {}, quality: {}}", "length and quality in one entry"),
        ("- lenght: {}", "did you mean 'length'"),
        ("- near_duplicates: {threshold: 2}", "threshold: 2.0 is outside 0.3 to 1"),
        ("- quality: {max_wall: -1}", "max_wall: -1.0 is a share"),
        ("- length: {min_characters: 9, max_characters: 3}", "max_characters: 3 is below 9"),
        ("- contamination: {}", "against: is empty"),
        ("- contamination: {against: [x], length: 0}", "length: 0 is outside 1"),
    ],
)
def test_wrong_steps_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        steps_in(tmp_path, f"steps:\n  {text}\n")


def test_every_step_setting_has_a_meaning() -> None:
    docs = documented_fields(Steps)
    assert {field.name for field in fields(StepConfig)} <= {key.split(".")[1] for key in docs if "." in key}
    assert [key for key, field in docs.items() if len(field.doc) < 20] == []


def test_every_step_can_go_to_a_worker_process(tmp_path: Path) -> None:
    steps = [
        StepConfig(tripwires=TripwiresConfig()),
        StepConfig(unicode=settings_of.UnicodeConfig(mend=True)),
        StepConfig(quality=QualityConfig()),
        StepConfig(boilerplate=BoilerplateConfig()),
        StepConfig(exact_duplicates=ExactDuplicatesConfig(level="paragraph")),
        StepConfig(near_duplicates=NearDuplicatesConfig()),
        StepConfig(contamination=ContaminationConfig(against=("e",), action="cut")),
    ]
    entries = files([f"{HEADER}\n{body}" for body in bodies(40)] + [f"{FILLER} {QUESTION}"] * 2)
    results = []
    for workers in (1, 2):
        pipeline = Pipeline(steps, scratch=tmp_path, evaluation=lambda paths, key: [Entry(QUESTION, "e", "e")])
        results.append((run(pipeline, entries, workers=workers), pipeline.counts, pipeline.duplicates))
    assert results[0] == results[1]


def test_each_step_is_applied_to_a_document_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every survey used to apply the steps before it again, which took most of the time of a long list."""
    applied: Counter[str] = Counter()
    for kind in (LengthStep, QualityStep):
        real = kind.apply

        def counted(self, entry: Entry, *, real=real, name=kind.__name__) -> Outcome:
            applied[name] += 1
            return real(self, entry)

        monkeypatch.setattr(kind, "apply", counted)
    steps = [
        StepConfig(exact_duplicates=ExactDuplicatesConfig()),
        StepConfig(length=LengthConfig()),
        StepConfig(boilerplate=BoilerplateConfig()),
        StepConfig(quality=QualityConfig()),
        StepConfig(near_duplicates=NearDuplicatesConfig()),
    ]
    entries = files([f"{HEADER}\n{body}" for body in bodies(40)] + ["short"] * 3)
    pipeline = Pipeline(steps, scratch=tmp_path)
    cleaned = run(pipeline, entries)
    assert applied == {"LengthStep": 41, "QualityStep": 40}
    assert len(cleaned) == 40
    seen = {name: counts.documents for (_, name), counts in pipeline.counts.items()}
    assert seen == {"exact_duplicates": 43, "length": 41, "boilerplate": 40, "quality": 40, "near_duplicates": 40}


def test_running_twice_gives_the_same_counts(tmp_path: Path) -> None:
    steps = [StepConfig(length=LengthConfig()), StepConfig(exact_duplicates=ExactDuplicatesConfig())]
    entries, pipeline = files([*bodies(5), "short"]), Pipeline(steps, scratch=tmp_path)
    pipeline.survey(lambda: entries)
    found = [(list(pipeline.run(lambda: entries)), pipeline.counts) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][1]["data.sources[0]", "length"].dropped.total() == 1


@pytest.mark.parametrize("step", [field.name for field in fields(StepConfig)])
def test_the_settings_know_which_steps_need_the_whole_corpus(step: str, tmp_path: Path) -> None:
    against = {"against": ("e",)} if step == "contamination" else {}
    (kind,) = [hint for hint in get_args(get_type_hints(StepConfig)[step]) if hint is not type(None)]
    config = StepConfig(**{step: kind(**against)})
    made = _make(config, 0, scratch=tmp_path, sources=(), evaluation=lambda paths, key: [Entry(QUESTION, "e", "e")])
    assert config.corpus_wide == isinstance(made, Survey)


def _fails(item: int) -> int:
    if item == 5:
        raise DataError("item 5")
    return item * 2


def test_the_ordered_map_keeps_order_raises_and_does_not_run_ahead() -> None:
    taken = []

    def items() -> Iterable[int]:
        for item in range(1000):
            taken.append(item)
            yield item + 6

    mapped = iter(map_ordered(_fails, items(), workers=2))
    assert [next(mapped) for _ in range(5)] == [12, 14, 16, 18, 20]
    assert len(taken) < 20
    mapped.close()
    with pytest.raises(CyberSLMError, match="item 5"):
        list(map_ordered(_fails, range(10), workers=2))
