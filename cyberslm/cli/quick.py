"""A quick start for verbs that only use a model: torch without the parts that they never touch.

A quarter of ``import torch`` registers how operators behave for its compiler and exporter, and distributions. Here
these modules are names only, and each is loaded when somebody first looks into it; all of them before the compiler is.
Names that another release of torch doesn't have change nothing. Python's search for garbage, which finds none among
modules, is put off while they are loaded and spared at the end of the process, where it would take longest.

Only the command line does this, never an import of the package.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LATER = ("torch._meta_registrations", "torch.export", "torch.distributions")
COMPILER = "torch._dynamo"


@contextmanager
def quick_imports() -> Iterator[None]:
    """For what is imported within: torch with those of `LATER` as names only, unless it is there, and no search."""
    searching = gc.isenabled()
    gc.disable()
    try:
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, _Finder())
            import torch

            _let_draw(torch)
            yield
            gc.freeze()  # modules stay: no later search need look at them
        else:
            yield
    finally:
        if searching:
            gc.enable()


def _load_all() -> None:
    for module in [sys.modules.get(name) for name in LATER]:
        if isinstance(module, _Name):
            module.load_now()


def _let_draw(torch: ModuleType) -> None:
    """Generators want a metaclass, which among much else what comes later would give them."""
    try:
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)
        torch.Generator()
    except (ImportError, AttributeError, RuntimeError):  # another release of torch
        _load_all()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == COMPILER:
            _load_all()
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(parent, _Name):  # a module of its own wants it first
            parent.load_now()
            spec = getattr(sys.modules.get(fullname), "__spec__", None)
            if spec is not None:  # which has loaded it
                spec.loader = _There(sys.modules[fullname], spec.loader)
                return spec
        if fullname not in LATER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _There(Loader):
    """Gives a module that is loaded already, once, as it is."""

    def __init__(self, module: ModuleType, real: Loader | None) -> None:
        self._module, self._real = module, real

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real


class _Later(Loader):
    """Makes a `_Name` in place of a module."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Name(spec.name, self._real)

    def exec_module(self, module: ModuleType) -> None:
        pass


_loading = threading.RLock()


class _Name(ModuleType):
    """A module that is loaded when something is looked for in it that isn't there."""

    def __init__(self, name: str, loader: Loader) -> None:
        super().__init__(name)
        self._later = loader

    def load_now(self) -> None:
        """Unless it is loaded, or this thread is about it; another thread is waited for."""
        with _loading:
            loader = self.__dict__.pop("_later", None)
            if loader is None:
                return
            self.__loader__ = loader
            if self.__spec__ is not None:
                self.__spec__.loader = loader
            try:
                loader.exec_module(self)
            except BaseException:
                self._later = loader
                raise
            self.__class__ = ModuleType  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):
            self.load_now()
            if type(self) is ModuleType or name in self.__dict__:
                return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
