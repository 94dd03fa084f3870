"""Turn cuda into cpu in every process of a run: with this folder on PYTHONPATH and TWIN set to the number of devices.

Python imports this file at its start. torch is not imported for it: the twin comes with torch's own first import.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of torch alone, which enters the twin when torch has been imported."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "torch" or self._loader is not None:
            return None
        self._loader = True  # the others are asked
        spec = importlib.util.find_spec("torch")
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._loader.exec_module(module)
        from tests.twin import as_cpu

        as_cpu.enter(int(os.environ["TWIN"]))


if os.environ.get("TWIN"):
    sys.meta_path.insert(0, _AfterTorch())
