"""scripts/big_mix.py on packages of a few files, made here: no network, no real package."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SAID = "A page about nuts and bolts that is long enough for any reader."


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("big_mix", SCRIPTS / "big_mix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "big_mix", module)
    spec.loader.exec_module(module)
    return module


def debian(folder: Path, name: str, files: dict[str, str]) -> None:
    """A package made with dpkg-deb, with a link that points out of it."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("this system has no dpkg-deb to make a package with")
    root = folder / f"{name}-root"
    files = files | {
        "DEBIAN/control": f"Package: {name}\nVersion: 1:2-3\nArchitecture: all\nMaintainer: x\nDescription: y\n"
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "usr/share/link.html").symlink_to("/etc/hostname")
    command = ["dpkg-deb", "--build", "--root-owner-group", str(root), str(folder / f"{name}_1%3a2-3_all.deb")]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(root)


def test_files_are_taken_as_they_are_and_nothing_else(script: ModuleType, tmp_path: Path) -> None:
    debs = tmp_path / "cache" / "debs"
    debs.mkdir(parents=True)
    debian(
        debs,
        "git-doc",
        {
            "usr/share/doc/git-doc/a.html": f"<p>{SAID}</p>",
            "usr/share/doc/git-doc/b.txt": SAID,
            "usr/share/doc/git-doc/c.png": "x",
            "usr/share/doc/git-doc/copyright": "The terms.",
        },
    )
    debian(debs, "apache2-doc", {"usr/share/doc/apache2-doc/manual/en/mod.html": f"<p>{SAID}</p>"})
    out = tmp_path / "mix"
    assert script.main([str(out), "--cache", str(tmp_path / "cache"), "--offline"]) == 0
    found = sorted(path.relative_to(out / "text").as_posix() for path in (out / "text").rglob("*") if path.is_file())
    assert found == ["apache2-doc.zip", "git-doc/doc/git-doc/a.html", "git-doc/doc/git-doc/b.txt"]
    assert zipfile.ZipFile(out / "text" / "apache2-doc.zip").namelist() == ["doc/apache2-doc/manual/en/mod.html"]
    assert (out / "NOTICES" / "git-doc.txt").read_text() == "The terms."
    sources = {each["package"]: each for each in json.loads((out / "SOURCES.json").read_text())["sources"]}
    assert sources["git-doc"]["version"] == "1:2-3"
    assert sources["git-doc"]["files"] == 2


def test_what_is_missing_is_said_and_the_demo_stands_in(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mix"
    assert script.main([str(out), "--cache", str(tmp_path / "cache"), "--offline"]) == 0
    said = capsys.readouterr().out
    assert "left out: linux-doc-6.1 (--offline was given)" in said or "no apt-get or dpkg-deb" in said
    assert "left out: botocore (--offline was given)" in said
    assert len((out / "evaluation.jsonl").read_bytes().splitlines()) == script.EVALUATION_DOCUMENTS
    assert list((out / "demo" / "text").iterdir())


def test_a_folder_of_something_else_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert script.main([str(tmp_path / "mine"), "--offline"]) == 1
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_texts_are_found_at_any_depth_once_and_without_tags(script: ModuleType) -> None:
    first, second = f"<p>{SAID}</p>", f"{SAID} &lt;again&gt;"
    data = {"a": [{"documentation": first}, {"b": {"documentation": second, "documentation2": "no"}}]}
    data["c"] = {"documentation": first, "d": {"documentation": "short"}}
    assert sorted(script.api_texts(json.dumps(data).encode(), "documentation")) == [SAID, f"{SAID} <again>"]


def test_archives_have_the_same_bytes_each_time(script: ModuleType) -> None:
    files = [script.File("a/b.txt", b"one"), script.File("c.txt", b"two")]
    assert script.zipped(files) == script.zipped(files)
    with tarfile.open(fileobj=io.BytesIO(script.tarred(files))) as archive:
        assert [member.name for member in archive] == ["a/b.txt", "c.txt"]


def test_a_package_that_is_cut_off_is_named(script: ModuleType, tmp_path: Path, capsys) -> None:
    debs = tmp_path / "cache" / "debs"
    debs.mkdir(parents=True)
    debian(debs, "git-doc", {"usr/share/doc/git-doc/b.txt": SAID})
    (path,) = debs.glob("*.deb")
    path.write_bytes(path.read_bytes()[:-40])
    assert script.main([str(tmp_path / "mix"), "--cache", str(tmp_path / "cache"), "--offline"]) == 1
    assert "git-doc_1%3a2-3_all.deb" in capsys.readouterr().err
    assert not (tmp_path / "mix").exists()
