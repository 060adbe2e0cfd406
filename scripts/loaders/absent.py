"""Stand-ins for the packages that a loader imports and that its rotary code does not call."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock


class Kind(type):
    """The type of a class whose attributes are substitutes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Absent(ModuleType):
    """A module that has every attribute."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class if the name is a class's: others derive from it.
        value = Kind(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an Absent for every module of some packages."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.packages:
            return None
        origin = fullname + importlib.machinery.EXTENSION_SUFFIXES[0]
        return importlib.machinery.ModuleSpec(fullname, self, origin=origin, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*packages: str) -> None:
    """Let packages be imported that are not here."""
    sys.meta_path.append(Finder(packages))


def hide_from_transformers(*packages: str) -> None:
    """Let transformers know that they are not here: it asks the finders, and would use them."""
    from transformers.utils import import_utils

    asked = import_utils._is_package_available

    def available(name: str, return_version: bool = False) -> tuple[bool, str]:
        return (False, "N/A") if name in packages else asked(name, return_version)

    import_utils._is_package_available = available
