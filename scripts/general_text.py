#!/usr/bin/env python3
"""Write general technical English to replay and to measure forgetting on: the language reference inside Python.

    python scripts/general_text.py corpora/general       # writes topics.jsonl; nothing is fetched

A stand-in that every machine has, 0.6 MB: who has general text of the kind that a model is to keep should name that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "id": name}) for name, text in sorted(topics.items())]
    partial = folder / ".topics.jsonl.partial"
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(folder / "topics.jsonl")
    print(f"wrote {folder / 'topics.jsonl'}: {len(lines)} documents")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(str(__doc__))
    main(Path(sys.argv[1]))
