"""Write docs/settings.md from the dataclasses: every setting of a run, its type, default and meaning.

python scripts/make_docs.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path

from cyberslm.config import FieldDoc, documented_fields
from cyberslm.model.config import CyberSLMConfig
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.finetune import FinetuneRun
from cyberslm.recipes.scale import Dial, derive

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
        *table(documented_fields(TrainRun)),
        "",
        "## Settings of `cyberslm finetune`",
        "",
        "All of the above, but that model and tokenizer are the base's (`model.dropout` and `model.attn_dropout` may",
        "be given), with other defaults where the table names them again, and these:",
        "",
        *table(finetune_fields()),
    ]
    return "\n".join([*lines, "", *scale_table()]) + "\n"


def finetune_fields() -> dict[str, FieldDoc]:
    """What a fine-tuning run has besides, or with another default."""
    known = documented_fields(TrainRun)
    return {key: field for key, field in documented_fields(FinetuneRun).items() if known.get(key) != field}


def table(fields: Mapping[str, FieldDoc]) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in fields.items():
        default = "required" if field.default is MISSING else f"`{_cell(_plain(field.default))}`"
        lines.append(f"| `{key}` | {_cell(field.type)} | {default} | {field.doc} |")
    return lines


def scale_table() -> list[str]:
    """What the dial gives where nothing else is given."""
    lines = [
        "## What `scale` gives",
        "",
        "`cyberslm check` shows the same for a configuration; docs/training.md says by which rules.",
        "",
        "| scale | parameters | width x layers | feed-forward | vocabulary | length | rows a step | steps | rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for text in ("1M", "3M", "10M", "33M", "100M", "350M", "1B"):
        found = derive(Dial.of(text), {}, rate=0.0)
        model = {key.removeprefix("model."): value for key, value in found.items() if key.startswith("model.")}
        vocabulary = found["tokenizer.vocab_size"]
        cells = (
            f"`{text}`",
            f"{CyberSLMConfig(vocab_size=vocabulary, **model).num_parameters:,}",
            f"{model['hidden_dim']} x {model['num_layers']}",
            model["ffn_hidden_dim"],
            f"{vocabulary:,}",
            model["max_seq_len"],
            found["train.global_batch_size"],
            f"{found['train.max_steps']:,}",
            f"{found['optimizer.muon_lr']:.2g}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
