"""Fixtures for all tests, and settings that must be in place before torch or vLLM start their threads."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# Two or more processes share few cores in many tests; each with its own thread pool would only get in the others' way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything

ROOT = Path(__file__).resolve().parent.parent


def load_script(path: Path, name: str) -> ModuleType:
    """Import a file that is not part of a package, such as a recipe."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, for their fixtures; those marked gpu are skipped without a CUDA device."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(ROOT).with_suffix("").as_posix()))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data next to the repository (VERL_LIKE_SHARED_DATA or ../shared/data); the test is skipped where absent."""
    folder = Path(os.environ.get("VERL_LIKE_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the real data sets in {folder} (set VERL_LIKE_SHARED_DATA to another folder)")
    return folder


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory of Hugging Face folders: a random Qwen2 (heads of size 32, as vLLM's CPU build needs) + char tokenizer.

    make_tiny_model(hidden_size=64, num_layers=2, seed=1) -> Path. The tokenizer knows "0123456789+-*= ".
    """
    recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")

    def make(*, hidden_size: int = 64, num_layers: int = 2, seed: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("tiny_qwen2")
        tokenizer = recipe.build_tokenizer()
        model = recipe.build_model(tokenizer, hidden_size=hidden_size, num_layers=num_layers, seed=seed)
        recipe.save_checkpoint(folder, model, tokenizer)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: Callable[..., Path]) -> Path:
    """One random tiny Qwen2 folder, shared by the session. Do not write into it."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tiny_model: Path) -> Path:
    """The same folder, for tests that only need its character tokenizer."""
    return tiny_model
