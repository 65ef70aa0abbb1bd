"""Slices: what one of several machines read and redacted, and their merge, which goes on as if one had done it all.

Tasks are dealt out in turn, so n machines get parts of about equal size. A slice is a published folder of parts and
knows the settings it was made with; a merge takes exactly the n slices of one corpus.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cyberslm.data.config import DataConfig
from cyberslm.data.corpus import Progress, Reading, make_redactor, read_parts, settings_of
from cyberslm.data.inputs import InputFile
from cyberslm.data.parts import Part, Task, find_files, make_tasks, read_meta
from cyberslm.data.resume import key_of, listed
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.files import Kept, forget, looks_published, publish, verify

SLICE_FORMAT = "cyberslm-slice/1"
MAX_SLICES = 100_000


def prepare_slice(config: DataConfig, target: Path, *, number: int, count: int, progress: Progress) -> bool:
    """Publish ``target`` with the parts of slice ``number`` (from 1) of ``count``, for another machine to merge.

    False if it is there already, made with the same settings and files. Raises ConfigError when redaction would draw
    another key on each machine.
    """
    if not 1 <= number <= count <= MAX_SLICES:
        raise ConfigError(f"--slice {number}/{count}: give i/n with i from 1 to n, and n up to {MAX_SLICES:,}")
    if config.redact is not None and config.redact.key_file is None:
        raise ConfigError("data.redact.key_file is not set: slices need one key, so that pseudonyms agree")

    found = find_files(config)
    tasks, settings = list(make_tasks(found.files)), settings_of(config)
    facts: dict[str, object] = {
        "format": SLICE_FORMAT,
        "slice": [number, count],
        "settings": settings,
        "num_parts": len(tasks),
        "files_sha256": _digest(found.files),
        "passed_over": {key: dict(reasons) for key, reasons in found.passed_over.items()},
    }
    own = tasks[number - 1 :: count]
    if _is_current(target, facts, own):
        forget(target)
        return False
    key = key_of(config, settings, facts, listed(file for task in own for file in task.files))

    def fill(staging: Path) -> Mapping[str, object]:
        kept = Kept(staging, key)
        if kept.refused:
            progress("refused", 0, 0)
        read_parts(config, found, kept, staging, progress, slices=(number, count))
        return facts

    publish(target, fill, replace=target.exists(), keep=True)
    return True


def merged_reading(config: DataConfig, slices: Sequence[Path]) -> Reading:
    """The parts of all slices, where they are. Raises IntegrityError for one that is damaged or doesn't fit."""
    manifests = {folder: verify(folder) for folder in slices}
    first = next(iter(manifests.values()))
    wanted, count = settings_of(config), len(slices)
    for folder, manifest in manifests.items():
        if manifest.get("format") != SLICE_FORMAT:
            raise IntegrityError(f"{folder} is no slice of prepared data")
        if manifest["settings"] != wanted:
            raise IntegrityError(f"{folder} was made with other settings, redaction key or evaluation files")
        if any(manifest[name] != first[name] for name in ("num_parts", "files_sha256", "passed_over")):
            raise IntegrityError(f"{folder} was made from another list of files than {slices[0]}")
    given = sorted(tuple(manifest["slice"]) for manifest in manifests.values())
    if given != [(number, count) for number in range(1, count + 1)]:
        listed = ", ".join(f"{number}/{of}" for number, of in given)
        raise IntegrityError(f"the slices in {slices[0].parent} are {listed}: give each of 1/n to n/n once")
    of = {manifest["slice"][0] - 1: folder for folder, manifest in manifests.items()}
    parts = tuple(Part(of[number % count], number) for number in range(first["num_parts"]))
    passed_over = {key: Counter(reasons) for key, reasons in first["passed_over"].items()}
    return Reading(parts, passed_over, make_redactor(config)[0])


def _is_current(target: Path, facts: Mapping[str, object], tasks: Sequence[Task]) -> bool:
    """Whether a whole slice is there, made with these facts from these files as they are now."""
    if not looks_published(target):
        return False
    try:
        manifest = verify(target)
        read = [facts for task in tasks for facts in read_meta(Part(target, task.number)).files]
    except (IntegrityError, OSError):
        return False
    now = [(file.key, file.name, file.size, file.mtime_ns) for task in tasks for file in task.files]
    then = [(each["source"], each["path"], each["size"], each["mtime_ns"]) for each in read]
    return then == now and all(manifest.get(name) == value for name, value in facts.items())


def _digest(found: Sequence[InputFile]) -> str:
    """SHA-256 of the list of files, in their order and with their sizes."""
    listed = json.dumps([(file.key, file.name, file.size) for file in found])
    return hashlib.sha256(listed.encode()).hexdigest()
