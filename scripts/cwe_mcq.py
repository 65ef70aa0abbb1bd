#!/usr/bin/env python3
"""Make a multiple-choice set from CWE: given what a weakness is, which of four related weaknesses is it?

    python scripts/cwe_mcq.py corpora/demo/cwe-mcq.jsonl --wheels corpora/wheels
    cyberslm eval runs/sft/final --mcq corpora/demo/cwe-mcq.jsonl

The choices are the weakness' name and three others with the same parent, in an order drawn from a fixed seed. Only ids
that `security_qa.py` holds out of training are asked about; ``--all`` asks about every id, which a model trained on the
demo corpus has read. Chance is 25 %. The catalogue travels in the wheel that the demo corpus is made from: hashed and
read in place, never imported.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import demo_corpus
from security_qa import held_out

SEED = 7
MIN_CHARACTERS = 60
CHOICES = 4


def questions(catalogue: bytes, *, everything: bool = False) -> Iterator[dict[str, object]]:
    """One record for each weakness that has three siblings."""
    draw = random.Random(SEED)
    root = ET.fromstring(catalogue, ET.XMLParser(target=demo_corpus._NoDoctype()))
    name, text, parents = {}, {}, {}
    children: dict[str, set[str]] = defaultdict(set)
    for weakness in root.iterfind("{*}Weaknesses/{*}Weakness"):
        if weakness.get("Status") == "Deprecated":
            continue
        key = weakness.attrib["ID"]
        name[key] = weakness.attrib["Name"].strip()
        text[key] = demo_corpus.prose(weakness.find("{*}Description")).replace("\n", " ")
        relations = weakness.iterfind("{*}Related_Weaknesses/{*}Related_Weakness")
        parents[key] = [each.attrib["CWE_ID"] for each in relations if each.get("Nature") == "ChildOf"]
        for parent in parents[key]:
            children[parent].add(key)
    for key in sorted(name, key=int):
        near = sorted({other for parent in parents[key] for other in children[parent]} - {key}, key=int)
        if len(near) < CHOICES - 1 or len(text[key]) < MIN_CHARACTERS:
            continue
        choices = [name[key], *(name[other] for other in draw.sample(near, CHOICES - 1))]
        draw.shuffle(choices)
        if everything or held_out(f"CWE-{key}"):
            prompt = f"Weakness description: {text[key]}\nWeakness name:"
            yield {"id": f"CWE-{key}", "prompt": prompt, "choices": choices, "answer": choices.index(name[key])}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a multiple-choice set from CWE.")
    parser.add_argument("out", type=Path, metavar="FILE.jsonl")
    parser.add_argument(
        "--wheels", type=Path, default=Path("corpora/wheels"), metavar="DIR", help="where wheels are kept"
    )
    parser.add_argument("--all", action="store_true", help="ask about every weakness, not only those held out")
    args = parser.parse_args(argv)
    try:
        args.wheels.mkdir(parents=True, exist_ok=True)
        if obstacle := demo_corpus.fetch(args.wheels):
            raise demo_corpus.Stop(f"{obstacle}, and {args.wheels} lacks the wheels")
        wheel = demo_corpus.pinned(args.wheels)["cwe2"][2]
        with zipfile.ZipFile(wheel) as archive:
            [(_, catalogue)] = demo_corpus.members(archive, r"/cwec_v[\d.]+\.xml$")
        lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in questions(catalogue, everything=args.all)]
        demo_corpus.write_whole(args.out, "".join(lines).encode())
    except (demo_corpus.Stop, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(lines)} questions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
