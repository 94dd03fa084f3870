"""Build and load the native half of the twin (native.cpp), which must be in the process before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")


def missing() -> str:
    """Name what the twin needs and this machine lacks, in a word; "" where nothing is missing."""
    return "" if _compiler() else "a C++ compiler (g++ or clang++)"


def load() -> None:
    """Load the library, compiled unless it is there (5 s), and torch. Raises RuntimeError where torch came first."""
    if "torch" in sys.modules:
        raise RuntimeError("the twin's library must be loaded before torch: load it first")
    library = ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")
    library.twin_enter()


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, [os.environ.get("CXX") or "g++", "g++", "clang++"])), None)


def _library() -> Path:
    """The compiled library, one for each torch and source, in the folder of temporary files."""
    found, compiler = importlib.util.find_spec("torch"), _compiler()
    if found is None or found.origin is None or not compiler:
        raise RuntimeError(f"the twin needs torch and {missing() or 'a C++ compiler'}")
    torch = Path(found.origin).parent
    state = SOURCE.read_bytes() + f"{torch} {importlib.metadata.version('torch')}".encode()
    name = f"verl_like_twin_{os.getuid()}_{hashlib.sha256(state).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        links = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
        command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", *includes, "-o", str(made), str(SOURCE), *links]
        subprocess.run(command, check=True)
        made.rename(library)  # at once: another process may be waiting for it
    return library
