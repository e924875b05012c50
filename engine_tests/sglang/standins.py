"""Stand-ins for what SGLang imports and its pools do not use, so that it loads without a GPU."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PACKAGES = frozenset({"torchvision", "tvm_ffi", "torch_memory_saver", "gguf"})


class _AnyClass(type):
    """Classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _AnyModule(ModuleType):
    """A module that has every class and function."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value: Any = _AnyClass(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Put the stand-ins before the real packages; who asks whether they exist is told no."""
    sys.meta_path.insert(0, _Finder())
    find_spec = importlib.util.find_spec

    def without_stand_ins(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.split(".")[0] in PACKAGES else find_spec(name, package)

    importlib.util.find_spec = without_stand_ins
