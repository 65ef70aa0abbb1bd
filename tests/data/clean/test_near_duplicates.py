"""Near copies are found, texts of one template are not mistaken for them, and nothing depends on order or workers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from clean_material import advisory, hexdump, log, prose, run, vocabulary, with_words_changed
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data.clean import sketch as sketching
from cyberslm.data.clean import words
from cyberslm.data.clean.clusters import SketchStore
from cyberslm.data.clean.config import ExactDuplicatesConfig, NearDuplicatesConfig, StepConfig
from cyberslm.data.clean.duplicates import is_held_out
from cyberslm.data.clean.entry import Entry
from cyberslm.data.clean.pipeline import Cleaned, Pipeline
from cyberslm.data.clean.words import CATALOGUE, IDENTIFIER, NAME, PLAIN, TOKEN, kind
from cyberslm.data.sources import copy_digest
from cyberslm.errors import ConfigError, StorageError


def entries_of(texts: list[str], source: str = "data.sources[0]") -> list[Entry]:
    return [Entry(text, source, f"{at:05}.txt") for at, text in enumerate(texts)]


def near(tmp_path: Path, **values: object) -> Pipeline:
    return Pipeline([StepConfig(near_duplicates=NearDuplicatesConfig(**values))], scratch=tmp_path)


def names(cleaned: list[Cleaned]) -> list[str]:
    return [each.entry.name for each in cleaned]


def slow_jaccard(one: str, other: str, size: int) -> float:
    """The similarity written out: multisets of shingles of case-folded words."""
    from collections import Counter

    def bag(text: str) -> Counter[tuple[str, ...]]:
        words = [word.casefold() for word in TOKEN.findall(text)]
        return Counter(tuple(words[at : at + size]) for at in range(len(words) - size + 1))

    a, b = bag(one), bag(other)
    return (a & b).total() / (a | b).total()


@pytest.mark.parametrize("length", [40, 80, 200, 1000])
@pytest.mark.parametrize("replacement", ["words of the corpus", "one word"])
def test_copies_with_five_percent_of_the_words_changed_are_found(tmp_path: Path, length: int, replacement: str) -> None:
    rng = random.Random(length)
    words = vocabulary(rng)
    originals = [prose(rng, words, length) for _ in range(200)]
    pool = words if replacement == "words of the corpus" else ["something"]
    copies = [with_words_changed(rng, pool, text, share=0.05) for text in originals]
    entries = entries_of(originals + copies)
    kept = names(run(near(tmp_path), entries))
    assert kept[:200] == [entry.name for entry in entries[:200]]
    assert len(kept) - 200 <= 0.05 * 200


def test_advisories_of_one_template_are_all_kept(tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = {re.search(r"CVE-\S+", text)[0]: text for text in (advisory(rng) for _ in range(400))}
    pipeline = near(tmp_path)
    assert len(run(pipeline, entries_of(list(texts.values())))) == len(texts)
    assert pipeline.duplicates["near_duplicates"].template_pairs > 0
    assert pipeline.duplicates["near_duplicates"].templates


def test_templates_without_catalogue_numbers_are_kept_apart_by_version_or_product(tmp_path: Path) -> None:
    rng = random.Random(2)
    base = re.sub(r"CVE-[0-9-]+", "this flaw", advisory(rng))
    versions = [re.sub(r"before [\d.]+", f"before {at}.{at}.0", base) for at in range(100)]
    names_ = ["".join(rng.choices("bdfgklmnprst", k=6)) for _ in range(50)]
    products = [base.replace("the service", f"the {name} service") for name in dict.fromkeys(names_)]
    assert len(run(near(tmp_path), entries_of(versions))) == 100
    assert len(run(near(tmp_path), entries_of(products))) == len(products)


def test_copies_are_found_among_thousands_of_one_template(tmp_path: Path) -> None:
    """They share their buckets with the whole family, so those that name the same things must be compared first."""
    rng = random.Random(3)
    words = vocabulary(rng)
    texts = list({re.search(r"CVE-\S+", text)[0]: text for text in (advisory(rng) for _ in range(700))}.values())
    copies = [with_words_changed(rng, words, text, share=0.05) for text in texts[:100]]
    kept = run(near(tmp_path), entries_of(texts + copies))
    assert len(texts) <= len(kept) <= len(texts) + 5


def test_ignoring_identifiers_merges_a_template(tmp_path: Path) -> None:
    rng = random.Random(4)
    assert len(run(near(tmp_path, identifiers="ignore"), entries_of([advisory(rng) for _ in range(20)]))) < 5


def test_texts_that_differ_in_dates_only_are_copies(tmp_path: Path) -> None:
    rng = random.Random(5)
    page = prose(rng, vocabulary(rng), 100)
    dated = [
        f"Printed on {when}\n{page}" for when in ("2024-05-01", "17.11.2023", "2024-05-02T10:11:12Z", "03/04/2022")
    ]
    assert len(run(near(tmp_path), entries_of(dated))) == 1


@pytest.mark.parametrize(
    "make",
    [
        log,
        lambda rng: hexdump(rng.randbytes(2000)),
        lambda rng: "\n".join(",".join(str(rng.randint(0, 1)) for _ in range(8)) for _ in range(200)),
        lambda rng: "\n".join(",".join(str(rng.randint(0, 9)) for _ in range(8)) for _ in range(250)),
    ],
    ids=["log", "hexdump", "bits", "digits"],
)
def test_data_of_one_kind_is_not_taken_for_copies(tmp_path: Path, make: Callable[[random.Random], str]) -> None:
    rng = random.Random(6)
    assert len(run(near(tmp_path), entries_of([make(rng) for _ in range(60)]))) == 60


def test_unspaced_scripts_are_compared_by_character(tmp_path: Path) -> None:
    rng = random.Random(7)
    text = "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(200))
    changed = text[:90] + "\u4e00\u4e01" + text[92:]
    other = "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(200))
    assert names(run(near(tmp_path), entries_of([text, changed, other]))) == ["00000.txt", "00002.txt"]


def test_the_result_does_not_depend_on_order_or_workers(tmp_path: Path) -> None:
    rng = random.Random(8)
    words = vocabulary(rng)
    texts = [prose(rng, words, 60) for _ in range(80)] + [advisory(rng) for _ in range(80)]
    texts += [with_words_changed(rng, words, text, share=0.05) for text in rng.choices(texts, k=80)]
    texts += rng.choices(texts, k=20)
    entries = entries_of(texts)
    expected_pipeline = near(tmp_path)
    expected = sorted(run(expected_pipeline, entries))
    for workers in (1, 2):
        shuffled = rng.sample(entries, len(entries))
        pipeline = near(tmp_path)
        assert sorted(run(pipeline, shuffled, workers=workers)) == expected
        assert pipeline.duplicates == expected_pipeline.duplicates
        assert {k: c.summary() for k, c in pipeline.counts.items()} == {
            k: c.summary() for k, c in expected_pipeline.counts.items()
        }


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(0, 40), order=st.randoms(use_true_random=False))
def test_cleaning_what_is_clean_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, order: random.Random
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    rng = random.Random(seed)
    words = vocabulary(rng, 200)
    texts: list[str] = []
    for _ in range(size):
        source = rng.choice(texts) if texts and rng.random() < 0.6 else prose(rng, words, rng.randint(5, 60))
        texts.append(with_words_changed(rng, words, source, share=rng.choice([0, 0.05, 0.1, 0.2])))
    entries = entries_of(texts)
    order.shuffle(entries)
    once = run(near(scratch), entries)
    again = run(near(scratch), [each.entry for each in once])
    assert [each.entry for each in again] == [each.entry for each in once]


def test_every_dropped_text_is_near_a_text_that_is_kept(tmp_path: Path) -> None:
    """A chain of small changes joins unlike ends into one cluster, but only what is like a kept text goes."""
    rng = random.Random(9)
    words = vocabulary(rng)
    chain = [prose(rng, words, 100)]
    for _ in range(12):
        chain.append(with_words_changed(rng, words, chain[-1], share=0.05))
    entries = entries_of(chain)
    pipeline = near(tmp_path)
    cleaned = run(pipeline, entries)
    kept = [each.entry.text for each in cleaned]
    assert 1 < len(kept) < len(chain)
    assert len({each.group for each in cleaned}) == 1
    for entry in entries:
        assert entry.text in kept or max(slow_jaccard(entry.text, text, 3) for text in kept) >= 0.6


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.4))
def test_compared_similarity_is_the_true_one(seed: int, share: float) -> None:
    rng = random.Random(seed)
    words = vocabulary(rng, 50)
    one = prose(rng, words, rng.randint(20, 80))
    other = with_words_changed(rng, words, one, share=share)
    sketcher = sketching.Sketcher(threshold=0.6, shingle_words=3, permutations=128, min_words=20)
    made = [sketcher.sketch(text) for text in (one, other)]
    if None in made:
        return
    truth = slow_jaccard(one, other, 3)
    a, b = (sketching.Comparable(np.frombuffer(each.words, np.uint32), 3) for each in made if each)
    for threshold in (truth - 1e-9, truth + 1e-9):
        expected = "copy" if threshold <= truth else "different"
        assert sketching.compare(a, b, threshold=threshold, templates=False) == expected


@pytest.mark.parametrize("action", ["drop", "report"])
def test_near_copies_stay_on_one_side_of_the_split(tmp_path: Path, action: str) -> None:
    rng = random.Random(10)
    words = vocabulary(rng)
    originals = [prose(rng, words, 60) for _ in range(150)]
    copies = [with_words_changed(rng, words, text, share=0.05) for text in originals]
    entries = entries_of(originals + copies)
    cleaned = run(near(tmp_path, action=action), entries)
    assert len(cleaned) == 300 if action == "report" else len(cleaned) < 160
    group_of = {each.entry.name: each.group for each in cleaned}
    sides = {name: is_held_out(group.key, 0.3) for name, group in group_of.items()}
    for at in range(150):
        original, copy = f"{at:05}.txt", f"{at + 150:05}.txt"
        if copy in sides and original in sides and group_of[original] == group_of[copy]:
            assert sides[original] == sides[copy]
    together = sum(group_of.get(f"{at:05}.txt") == group_of.get(f"{at + 150:05}.txt") for at in range(150))
    assert together >= 0.95 * 150 if action == "report" else together == 0
    assert {True, False} == set(sides.values())


def test_a_text_without_copies_splits_as_it_does_without_cleaning(tmp_path: Path) -> None:
    rng = random.Random(11)
    texts = [prose(rng, vocabulary(rng), 30) for _ in range(50)]
    for pipeline in (near(tmp_path), Pipeline([], scratch=tmp_path)):
        for each in run(pipeline, entries_of(texts)):
            assert is_held_out(each.group.key, 0.4) == is_held_out(copy_digest(each.entry.text), 0.4)
            assert each.group.key == copy_digest(each.entry.text)[:16]


def test_the_copy_of_a_preferred_source_is_kept(tmp_path: Path) -> None:
    text = prose(random.Random(12), vocabulary(random.Random(12)), 50)
    entries = [Entry(text, "data.sources[0]", "a.txt"), Entry(text + " more", "data.validation[0]", "z.txt")]
    step = StepConfig(near_duplicates=NearDuplicatesConfig())
    pipeline = Pipeline([step], scratch=tmp_path, sources=["data.validation[0]", "data.sources[0]"])
    cleaned = run(pipeline, entries)
    assert [each.entry.name for each in cleaned] == ["z.txt"]
    assert cleaned[0].group.source == "data.validation[0]"


def test_near_copies_outweigh_equal_ones_in_the_group(tmp_path: Path) -> None:
    text = prose(random.Random(13), vocabulary(random.Random(13)), 50)
    steps = [
        StepConfig(near_duplicates=NearDuplicatesConfig(action="report")),
        StepConfig(exact_duplicates=ExactDuplicatesConfig(action="report")),
    ]
    for order in (steps, steps[::-1]):
        cleaned = run(Pipeline(order, scratch=tmp_path), entries_of([text, text, text + " more"]))
        assert len({each.group.key for each in cleaned}) == 1


def test_near_copied_paragraphs_are_cut_and_short_ones_are_left(tmp_path: Path) -> None:
    rng = random.Random(14)
    words = vocabulary(rng)
    shared = prose(rng, words, 60)
    one = f"Title\n\n{shared}\n\n{prose(rng, words, 40)}"
    other = f"Title\n\n{prose(rng, words, 40)}\n\n{with_words_changed(rng, words, shared, share=0.05)}"
    cleaned = run(near(tmp_path, level="paragraph"), entries_of([one, other]))
    assert cleaned[0].entry.text == one
    assert cleaned[1].entry.text == "\n\n".join(other.split("\n\n")[:2]) + "\n\n"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("CVE-2024-3094", CATALOGUE), ("MS17-010", CATALOGUE), ("KB5034441", CATALOGUE), ("T1059.001", CATALOGUE),
        ("GHSA-ab12-cd34-ef56", CATALOGUE), ("d" * 64, CATALOGUE), ("1.2.3", IDENTIFIER), ("10.0.0.1", IDENTIFIER),
        ("usr/bin", IDENTIFIER), ("log4j", IDENTIFIER), ("2024-05-01", PLAIN), ("10:11:12", PLAIN), ("Apache", NAME),
        ("attacker", PLAIN), ("well-known", PLAIN),
    ],
)  # fmt: skip
def test_kinds_of_words(word: str, expected: int) -> None:
    assert kind(word) == expected


def test_too_few_permutations_for_the_threshold_are_refused() -> None:
    with pytest.raises(ConfigError, match="permutations: 1 are too few"):
        sketching.bands_for(0.3, 1)
    assert sketching.bands_for(1.0, 16) == (1, 16)


def test_a_long_text_is_numbered_in_parts_as_if_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = prose(random.Random(1), vocabulary(random.Random(1)), 200)
    numbers = words.Numbers(words.marked_number)
    whole = words.numbers_of(text, words.TOKEN, numbers, np.uint32)
    monkeypatch.setattr(words, "_PART", 7)
    assert np.array_equal(words.numbers_of(text, words.TOKEN, numbers, np.uint32), whole)
    assert whole.size == len(words.TOKEN.findall(text))


@pytest.mark.parametrize("unit", ["0", "A-", "a.", "/", "1:", "CVE-2024-"])
def test_long_hostile_words_are_read_in_linear_time(unit: str) -> None:
    """A word of a million characters that almost is an identifier; quadratic search would not come back."""
    sketcher = sketching.Sketcher(threshold=0.6, shingle_words=3, permutations=16, min_words=3)
    sketch = sketcher.sketch(f"AB-{unit * (1_000_000 // len(unit))}/x one two three four five")
    assert sketch is not None


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    store = SketchStore(tmp_path, num_bands=1)
    with Path("/dev/full").open("wb", buffering=0) as full:
        store._columns[0] = full
        with pytest.raises(StorageError, match="free some space"):
            store.add(sketching.Sketch(bytes(8), bytes(4), bytes(16)))
    store.close()


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"cyberslm\[data\]"):
        near(tmp_path)


def test_scratch_files_hold_no_text_and_are_gone_at_the_end(tmp_path: Path) -> None:
    run(near(tmp_path), entries_of([prose(random.Random(15), vocabulary(random.Random(15)), 50)] * 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "texts", [[], [""], ["", "", "   "], ["..."], ["a " * 30], ["\ud800 x"] * 2, ["\0" * 50, "\0" * 51]]
)
def test_odd_texts_pass(tmp_path: Path, texts: list[str]) -> None:
    kept = run(near(tmp_path), entries_of(texts))
    assert len(kept) == len({text.strip() for text in texts})
