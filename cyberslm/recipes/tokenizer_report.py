"""``cyberslm tokenizer report``: which tokenizers are compared, on which text, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import find_inputs
from cyberslm.data.sources import read_documents
from cyberslm.errors import ConfigError
from cyberslm.recipes.finetune import load_any
from cyberslm.recipes.tokenizer import Say
from cyberslm.recipes.use import find_model
from cyberslm.text.passages import PassageSample
from cyberslm.text.report import TokenizerReport, measure
from cyberslm.text.tokenizer import Tokenizer, open_tokenizer, tokenizer_file

YAML = (".yaml", ".yml")


def report(
    subject: Path, texts: Sequence[str], *, against: Sequence[Path], sample_bytes: int, say: Say
) -> list[TokenizerReport]:
    """The report of ``subject`` (a configuration, model, run or tokenizer) and of each tokenizer in ``against``.

    ``texts`` are files, folders or globs, by default a configuration's sources; from each, evenly spread passages of
    at most ``sample_bytes`` are measured.
    """
    if sample_bytes < 1:
        raise ConfigError(f"--sample-bytes must be at least 1, not {sample_bytes}")
    data = DataConfig(on_bad_input="skip")
    if subject.suffix in YAML:
        run = load_any(subject).value
        data = replace(run.data, on_bad_input="skip")
        texts = texts or run.data.sources
    opened = [(str(path), find_tokenizer(path)) for path in (subject, *against)]
    sources = {text: _passages(text, data, sample_bytes, say) for text in texts}
    return [measure(name, tokenizer, sources) for name, tokenizer in opened]


def find_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer meant by a configuration, a model or run folder, or a tokenizer's file or folder.

    One that isn't lossless is opened too: its report says what it loses.
    """
    if path.suffix in YAML:
        run = load_any(path).value
        if run.tokenizer.path is not None:
            return open_tokenizer(run.tokenizer.path, add_bos=run.tokenizer.add_bos, lossless=False)
        made = [folder for folder in (run.prepared / "tokenizer", run.folder / "tokenizer") if folder.is_dir()]
        if not made:
            raise ConfigError(f"{path} has no tokenizer yet: make it with  cyberslm tokenizer train {path}")
        return open_tokenizer(made[0], lossless=False)
    if path.is_dir() and not any((path / name).is_file() for name in ("tokenizer.model", "tokenizer.json")):
        path = find_model(path)
    return open_tokenizer(tokenizer_file(path), lossless=False)


def table(reports: Sequence[TokenizerReport]) -> Iterator[str]:
    """The reports side by side, one column each."""
    names = [f"[{number}]" for number in range(1, len(reports) + 1)]
    for name, each in zip(names, reports, strict=True):
        yield f"{name} {each.name}: {each.vocab_size:,} pieces, sha256 {each.sha256[:12]}"
        for loss in each.losses:
            yield f"    not exact: {loss}"
    first = reports[0]
    yield _row("bytes per token", names)
    for source in first.sources:
        yield _row(f"  {source}", [f"{each.sources[source].bytes_per_token:.2f}" for each in reports])
    yield _row("tokens per word", names)
    for source in first.sources:
        yield _row(f"  {source}", [f"{each.sources[source].fertility:.2f}" for each in reports])
    yield _row("tokens per indicator", names)
    for kind in first.indicators:
        yield _row(f"  {kind}", [f"{each.indicators[kind].tokens:.1f}" for each in reports])
    yield _row("learned pieces that the text uses", names)
    for title, share in (("never", "unused"), ("less than 10 times", "rare")):
        shares = [None if each.use is None else getattr(each.use, share) for each in reports]
        yield _row(f"  {title}", ["-" if value is None else f"{value:.1%}" for value in shares])
    yield _row("texts that don't come back", names)
    for source in first.sources:
        yield _row(f"  {source} (passages)", [f"{each.sources[source].not_restored:,}" for each in reports])
    yield _row(f"  of {first.probes} probes", [f"{len(each.probes_not_restored):,}" for each in reports])
    for name, each in zip(names, reports, strict=True):
        if each.probes_not_restored:
            yield f"{name} loses {', '.join(each.probes_not_restored[:8])}" + (
                ", ..." if len(each.probes_not_restored) > 8 else ""
            )


def _row(title: str, cells: Sequence[str]) -> str:
    shown = title if len(title) <= 42 else "..." + title[-39:]
    return f"{shown:44}" + "".join(f"{cell:>10}" for cell in cells)


def _passages(text: str, data: DataConfig, sample_bytes: int, say: Say) -> list[str]:
    sample = PassageSample(sample_bytes)
    counts = Counts()
    for file in find_inputs([text], key="TEXT").files:
        for document in read_documents(file, data, counts):
            sample.add(document.text)
    for why, number in sorted(counts.skipped.items()):
        say(f"{text}: skipped {number:,} ({why})")
    if sample.bytes_used < sample.bytes_seen:
        say(f"{text}: measured on {sample.bytes_used:,} of {sample.bytes_seen:,} bytes, evenly spread")
    if not sample.bytes_used:
        raise ConfigError(f"{text} holds no text to measure on")
    return sample.passages()
