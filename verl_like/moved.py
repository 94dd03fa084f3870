"""Names that modules had before: code and command lines that use them go on working, `python -m` included.

`import verl_like.bench.sync` gives the module verl_like.kit.bench.sync itself, not a copy of it. moved.txt is the list;
a row of a package holds for all in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0] + "."
_PLACES: dict[str, str] = {}
for _line in Path(__file__).with_suffix(".txt").read_text().splitlines():
    if not _line.startswith("#"):
        _old, _new = _line.split()
        _PLACES[_PACKAGE + _old] = _PACKAGE + _new


def place_of(name: str) -> str | None:
    """The name that a module of an old name has now; None for one that has not moved."""
    for end in range(len(name), len(_PACKAGE), -1):
        if end == len(name) or name[end] == ".":
            place = _PLACES.get(name[:end])
            if place is not None:
                return place + name[end:]
    return None


class _Loader:
    """Loads a module of an old name: by importing the new one."""

    def __init__(self, place: str) -> None:
        self._place = place

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._place)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has put the old name's there

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module at its new place, for `python -m`."""
        spec = importlib.util.find_spec(self._place)
        loader: Any = None if spec is None else spec.loader
        return None if loader is None else loader.get_code(self._place)


class _Finder:
    """Stands before the others: a moved package's folder would give its modules a second time, under old names."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        place = place_of(name) if name.startswith(_PACKAGE) else None
        if place is None:
            return None
        spec = importlib.util.find_spec(place)
        packages = None if spec is None else spec.submodule_search_locations
        loader: Any = _Loader(place)
        return spec and ModuleSpec(name, loader, origin=spec.origin, is_package=packages is not None)


sys.meta_path.insert(0, _Finder)
