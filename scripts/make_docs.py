"""Write docs/settings.md from the dataclasses: every setting of `cyberslm train`, its type, default and meaning.

python scripts/make_docs.py
"""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path

from cyberslm.config import documented_fields
from cyberslm.recipes.config import TrainRun

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting of `cyberslm train`, made from the code by `scripts/make_docs.py`. In YAML a dotted key is a",
        "section and a key; on the command line it is `section.key=value`. Order: defaults < `extends:` < file <",
        "command line. Relative paths count from the file they are written in, on the command line from the working",
        "folder.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, field in documented_fields(TrainRun).items():
        default = "required" if field.default is MISSING else f"`{_cell(_plain(field.default))}`"
        lines.append(f"| `{key}` | {_cell(field.type)} | {default} | {field.doc} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
