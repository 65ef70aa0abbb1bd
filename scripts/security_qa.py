#!/usr/bin/env python3
"""Make question and answer pairs, and preferences between answers, from the records of the demo corpus.

    python scripts/demo_corpus.py corpora/demo       # first: the corpus
    python scripts/security_qa.py corpora/demo       # then: corpora/demo/qa/

Every answer is text of the corpus: a CWE weakness' name, id or description, an ATT&CK technique's. Nothing is invented,
so a model that learns them learns to answer in a form, from what it read. A fifth of the CWE ids, by a hash of the id,
is held out: they are in no training file, and `cwe_mcq.py` asks about them alone.

    OUT/train.jsonl              {"messages": [...]}                      for data.format: chat
    OUT/held-out.jsonl           the same about held-out ids              to validate on
    OUT/preferences.jsonl        {"prompt", "chosen", "rejected"}         for data.format: preference
    OUT/preferences-held-out.jsonl
    OUT/cwe-train.jsonl          the corpus' CWE texts without held-out ids: a base that hasn't seen them
    OUT/cwe-held-out.jsonl       the held-out texts
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ONE_IN = 5
MAX_ANSWER = 400
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
CWE = re.compile(r"CWE-(\d+): (.+?)\.\n(.+)")
ATTACK = re.compile(r"(.+?) - (T\d{4}(?:\.\d{3})?): (.+)")


class Record(NamedTuple):
    """A weakness or technique: its id such as CWE-79, its name and what it is."""

    key: str
    name: str
    about: str
    text: str

    @property
    def held_out(self) -> bool:
        return held_out(self.key)


def held_out(key: str) -> bool:
    """Whether an id such as CWE-79 is kept out of training; ATT&CK techniques never are."""
    digest = hashlib.sha256(f"held out {key}".encode()).digest()
    return key.startswith("CWE-") and int.from_bytes(digest[:4], "big") % ONE_IN == 0


def records(corpus: Path) -> Iterator[Record]:
    """The weaknesses and techniques of a corpus folder, in its order."""
    for name, pattern in (("cwe", CWE), ("misp", ATTACK)):
        path = corpus / "text" / f"{name}.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found = pattern.match(record["text"])
            if found is None or (name == "misp" and "attack-pattern" not in record["id"]):
                continue
            first, second, about = found.groups()
            key, title = (f"CWE-{first}", second) if name == "cwe" else (second, first)
            yield Record(key, title, _short(about), record["text"])


def pairs(record: Record) -> Iterator[tuple[str, str]]:
    """Questions about a record with their answers."""
    kind = "weakness" if record.key.startswith("CWE-") else "technique"
    yield f"What is {record.key}?", f"{record.key} is the {kind} {record.name}. {record.about}"
    yield f"Which {kind} is this? {record.about}", f"{record.key}: {record.name}."
    yield f"What is the id of the {kind} {record.name}?", f"It is {record.key}."


def preferences(found: list[Record]) -> Iterator[dict[str, str]]:
    """The right answer over another record's: answers of one form, of which one is true."""
    for number, record in enumerate(found):
        same = [each for each in found if each.key[:2] == record.key[:2] and each.name != record.name]
        if not same:
            continue
        digest = hashlib.sha256(f"other {number} {record.key}".encode()).digest()
        other = same[int.from_bytes(digest[:4], "big") % len(same)]
        for (question, chosen), (_, rejected) in zip(pairs(record), pairs(other), strict=True):
            if chosen != rejected:
                yield {"prompt": question, "chosen": chosen, "rejected": rejected}


def make(corpus: Path, out: Path) -> dict[str, int]:
    """Write all files; returns how many lines each has."""
    found = list(records(corpus))
    kept, apart = ([r for r in found if r.held_out == wanted] for wanted in (False, True))
    weak, weak_apart = ([r for r in each if r.key.startswith("CWE-")] for each in (kept, apart))
    files = {
        "train": [_chat(*pair) for record in kept for pair in pairs(record)],
        "held-out": [_chat(*pair) for record in apart for pair in pairs(record)],
        "preferences": list(preferences(weak)),
        "preferences-held-out": list(preferences(weak_apart)),
        "cwe-train": [{"text": record.text, "id": record.key} for record in weak],
        "cwe-held-out": [{"text": record.text, "id": record.key} for record in weak_apart],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        partial = out / f".{name}.partial"
        partial.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        partial.replace(out / f"{name}.jsonl")
    return {name: len(lines) for name, lines in files.items()}


def _chat(question: str, answer: str) -> dict[str, object]:
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _short(text: str) -> str:
    """The first sentences, of at most MAX_ANSWER characters."""
    said = ""
    for sentence in SENTENCE.split(text.split("\n")[0].strip()):
        if said and len(said) + len(sentence) >= MAX_ANSWER:
            break
        said = f"{said} {sentence}".strip()
    return said[:MAX_ANSWER]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make question and answer pairs from the demo corpus.")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="what scripts/demo_corpus.py made")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: CORPUS/qa")
    args = parser.parse_args(argv)
    try:
        made = make(args.corpus, args.out or args.corpus / "qa")
    except OSError as error:
        print(
            f"error: {error.filename}: {error.strerror}; make the security corpus first: scripts/demo_corpus.py",
            file=sys.stderr,
        )
        return 1
    for name, count in made.items():
        print(f"{name:22} {count:6,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
