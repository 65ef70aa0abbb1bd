"""A quick start: torch without what a finished model never touches, and with it as soon as somebody does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BEGIN = """
import gc, sys
from cyberslm.cli import quick
def names():
    return {name for name in quick.LATER if isinstance(sys.modules.get(name), quick._Name)}
"""


def said(code: str, *arguments: object) -> str:
    """What a new process says that runs ``code`` after `BEGIN`."""
    command = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_generate_loads_none_of_it_and_says_the_same(trained: Path) -> None:
    arguments = ("generate", trained / "run/final", "--prompt", "The", "--seed", 3, "--max-new-tokens", 20)
    code = "from cyberslm.cli.main import app; app(sys.argv[1:], standalone_mode=False); print(len(names()))"
    text, left = said(code, *arguments).rsplit("\n", 2)[:2]
    assert left == "3"
    assert said("import torch\n" + code, *arguments) == f"{text}\n0\n"


def test_what_is_looked_into_is_loaded_and_nothing_else() -> None:
    code = """
with quick.quick_imports():
    import torch
print(torch.distributions.Normal(0.0, 1.0).mean.item(), sorted(names()))
print(torch.rand(1, generator=torch.Generator().manual_seed(0)).item() < 1, hasattr(torch.export, "nothing"), names())
"""
    assert said(code) == (
        "0.0 ['torch._meta_registrations', 'torch.export']\nTrue False {'torch._meta_registrations'}\n"
    )


def test_a_module_inside_is_found_and_is_one() -> None:
    """It was in the middle of its own loading."""
    code = """
with quick.quick_imports():
    import torch
import torch.distributions.normal as inside
import torch.export.unflatten
same = inside.Normal is torch.distributions.Normal
print(inside is torch.distributions.normal, same, inside.__spec__.name)
print(sorted(names()))
"""
    assert said(code) == "True True torch.distributions.normal\n['torch._meta_registrations']\n"


def test_threads_that_look_at_once_all_find_it() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with quick.quick_imports():
    import torch
with ThreadPoolExecutor(8) as pool:
    print(len({id(found) for found in pool.map(lambda _: torch.distributions.Normal, range(8))}))
"""
    assert said(code) == "1\n"


def test_all_is_there_when_the_compiler_is_loaded() -> None:
    code = """
with quick.quick_imports():
    import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    print(torch.nn.functional.silu(torch.empty(3, 2)).shape[0], torch.empty(2, 2).triu().shape, names())
"""
    assert said(code) == "3 torch.Size([2, 2]) set()\n"


def test_a_torch_that_is_there_already_stays_as_it_is() -> None:
    code = """
import torch
with quick.quick_imports():
    print(gc.isenabled())
print(gc.isenabled(), names(), any(isinstance(finder, quick._Finder) for finder in sys.meta_path))
"""
    assert said(code) == "False\nTrue set() False\n"


def test_another_release_of_torch_is_loaded_whole() -> None:
    """One without the name that gives generators their metaclass; they could not be made."""
    code = """
with quick.quick_imports():
    import torch
quick._let_draw(type(sys)("torch"))
print(torch.Generator().initial_seed() > 0, names())
"""
    assert said(code) == "True set()\n"
