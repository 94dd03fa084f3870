"""Fixtures for all tests, and settings that must be in place before torch or vLLM start their threads."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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


# What starts Ray runs in one process of pytest-xdist, one after another: two clusters would starve each other.
WITH_RAY = (
    "tests/contracts/test_sampling.py",
    "tests/contracts/test_worker_group.py",
    "tests/e2e/test_extending.py::test_every_example_in_ray_workers",
    "tests/e2e/test_library.py::test_a_script_with_ray",
    "tests/e2e/test_loop.py::test_one_rank_and_two_make_the_same_run",
    "tests/e2e/test_main_job.py",
    "tests/e2e/test_reward_model.py",
    "tests/e2e/test_rows_shared_by_ranks.py",
    "tests/e2e/test_expert_parallel.py",
    "tests/e2e/test_tensor_parallel.py",
    "tests/e2e/test_sft.py::test_two_ranks_under_torchrun_make_the_same_run",
    "tests/e2e/test_slurm.py",
    "tests/e2e/test_two_nodes.py",
    "tests/e2e/test_wheel.py",
    "tests/unit/cluster/test_driver_ends.py",
)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist need not be installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one process, for their fixtures; the longest files of tests/minutes.txt begin.

    A long one that begins last would keep one core at work and the others idle.
    """
    from xdist.scheduler import LoadScopeScheduling

    from tests.worlds.ledger import read_table

    seconds = read_table()

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(WITH_RAY) else nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            longest = max(self.workqueue, key=lambda scope: (scope == "ray", seconds.get(scope, 0.0)))
            self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage is looked for among what is imported, and never again: an eighth of the collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Give it back, or libraries tell at the end of the process that it was leaked."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu or sglang are skipped where there is no CUDA device, or no SGLang."""
    for marker, reason in (("gpu", _no_gpu), ("sglang", _no_sglang)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (why := reason()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=why))


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device"


def _no_sglang() -> str:
    from verl_like.plugins.sglang import compat

    return "" if compat.installed() else "needs SGLang: WITH_SGLANG=1 bash scripts/setup_env.sh (Linux on x86-64)"


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """A file's runs leave no log and no process group to the files after it, of which other orders have others."""
    package = logging.getLogger("verl_like")
    before = package.handlers[:], package.level, package.propagate
    yield
    for handler in package.handlers:
        if handler not in before[0]:
            handler.close()
    package.handlers[:], package.level, package.propagate = before
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a test of this file left a process group")


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
