"""Facts about the repository itself: layers, names, documents, configurations."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyberslm.recipes.config import load_run
from cyberslm.recipes.finetune import load_any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cyberslm"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [
    {part.strip() for part in layer.split("|")}
    for layer in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
]
RANK = {unit: -place for place, units in enumerate(LAYERS) for unit in units}
BANNED = re.compile(
    r"^(pickle|cPickle|shelve|marshal|dill|joblib|socket|http|urllib|requests|httpx|ssl|ftplib|smtplib)\b"
)


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of every import, in function bodies too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = unit_of(path)
    for name in imports(ast.parse(path.read_text())):
        if name.split(".")[0] != "cyberslm" or here == "__init__":
            continue
        other = name.split(".")[1]
        assert other in RANK, f"{here} must not import the facade ({name})"
        assert other == here or RANK[other] < RANK[here], f"{here} must not import {other}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle_network_or_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for name in imports(tree):
        assert not BANNED.match(name), f"{path.name} imports {name}"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"{path.name}:{node.lineno}: python -O removes asserts"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.safe_load")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_opens_with_its_idea_and_stays_small(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"
    assert text.count("\n") <= 400


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads_and_says_how_to_run_it(path: Path, trained: Path) -> None:
    text = path.read_text()
    changes = [f"base={trained / 'run'}"] if "\nbase:" in text else []
    changes += ["train.seq_len=32"] if "\n  seq_len:" in text else []
    assert load_any(path, changes).value.train.max_steps > 0
    assert f"configs/{path.name}" in path.read_text().split("\nout_dir")[0]


def test_reference_recipe_is_the_reference_model() -> None:
    assert load_run(ROOT / "configs" / "cyberslm-33m.yaml").value.model.num_parameters == 33_531_264


def test_settings_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))["settings_page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == page, "run: python scripts/make_docs.py"


def test_every_setting_has_a_meaning() -> None:
    from cyberslm.config import documented_fields
    from cyberslm.recipes.finetune import FinetuneRun

    missing = [key for key, field in documented_fields(FinetuneRun).items() if len(field.doc or "") < 10]
    assert missing == []


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", ["demo", "test", "bench", "common.sh"])
def test_shell_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts" / name], check=True)


def test_ci_calls_the_readme_test_command() -> None:
    assert "./scripts/test" in (ROOT / ".ci" / "run").read_text()
    assert "\n./scripts/test\n" in (ROOT / "README.md").read_text()
    assert "\n./scripts/demo\n" in (ROOT / "README.md").read_text()


def test_example_of_the_network_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "network.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_does_nothing() -> None:
    code = (
        "import sys, cyberslm, cyberslm.cli\n"
        "heavy = {'torch', 'numpy', 'sentencepiece', 'pydantic', 'yaml', 'logging.config'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tokenizer_page_shows_the_preset_as_it_is() -> None:
    import yaml

    from cyberslm.text.config import SECURITY_SYMBOLS, TokenizerConfig

    page = (ROOT / "docs" / "tokenizer.md").read_text()
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["tokenizer"]["protected"]
    assert tuple(shown) == SECURITY_SYMBOLS == TokenizerConfig(protected=tuple(shown)).protected
