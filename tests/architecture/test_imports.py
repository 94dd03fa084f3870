"""Imports go one way (CONTRIBUTING.md has the picture), and heavy packages stay in their own file."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Source, package_of, package_sources, parse

BASE = {
    "batch",
    "config",
    "ending",
    "gc_settings",
    "live_metrics",
    "heartbeat",
    "flat_columns",
    "remote_storage",
    "small_files",
    "text",
    "user_code",
}
ENGINE_LEVEL = BASE | {"models", "parallel"}
ROLE_LEVEL = ENGINE_LEVEL | {"algorithms", "engine", "rollout", "weight_sync", "checkpoint"}
TRAINER_LEVEL = ROLE_LEVEL | {
    "cluster",
    "observe",
    "data",
    "rewards",
    "services",
    "workers",
    "episodes",
    "registry",
}
# what a plugin may know of the trainer: the protocols of its parts
PLUGIN_LEVEL = BASE | {"data", "episodes", "models", "rewards", "rollout", "services"}
KIT_LEVEL = TRAINER_LEVEL | {"trainer"}
# package -> packages of ours that it may import (itself is always allowed)
ALLOWED: dict[str, set[str]] = {
    "__init__": {"moved", "observe", "trainer"},  # the names of a library, imported when they are first used
    "moved": set(),
    "registry": {"user_code"},
    "user_code": set(),
    "services": {"live_metrics", "user_code", "heartbeat"},
    "config": {"text", "user_code"},
    "ending": set(),
    "gc_settings": set(),
    "live_metrics": set(),
    "flat_columns": set(),
    "remote_storage": {"small_files", "text"},
    "small_files": set(),
    "heartbeat": set(),
    "text": set(),
    "batch": {"config", "flat_columns"},
    "algorithms": BASE | {"registry"},  # estimators that take verl's arguments
    "models": BASE | {"parallel"},
    "parallel": BASE | {"models"},
    "engine": ENGINE_LEVEL | {"checkpoint"},
    "rollout": ENGINE_LEVEL | {"registry"},
    "weight_sync": ENGINE_LEVEL | {"engine", "rollout"},
    "checkpoint": ENGINE_LEVEL,
    "data": ENGINE_LEVEL,
    "rewards": ENGINE_LEVEL | {"data", "registry", "services"},
    "episodes": BASE | {"algorithms", "data", "models", "rewards", "rollout", "services"},
    "observe": ENGINE_LEVEL | {"registry"},
    "cluster": BASE,
    "workers": ROLE_LEVEL | {"cluster", "observe", "registry", "services"},
    "trainer": TRAINER_LEVEL,
    "cli": TRAINER_LEVEL | {"trainer"},
    "plugins.games": {"batch", "config", "plugins.math_grading", "rewards", "user_code"},
    "plugins.drafts": {"config", "rollout"},
    "plugins.samplers": {"batch", "config", "data", "user_code"},
    "plugins.trackers": {"config", "live_metrics", "observe", "small_files"},
    "plugins.http_json": {"config", "services"},
    "plugins.reward_models": BASE
    | {"cluster", "data", "plugins.http_json", "plugins.vllm", "rewards", "services", "workers"},
    "plugins.math_grading": {"rewards"},
    "plugins.text_grading": {"plugins.math_grading", "rewards"},
    "plugins.code_grading": {"config", "plugins.http_json", "rewards", "services", "text"},
    "plugins.agents": PLUGIN_LEVEL | {"plugins.code_grading", "plugins.games", "plugins.http_json"},
    "plugins.teachers": {"batch", "config", "data", "models", "plugins.http_json"},
    "plugins.verl_agents": PLUGIN_LEVEL | {"algorithms", "plugins.agents", "plugins.math_grading"},
    # a trainer of its own, around the trainer's parts
    "plugins.sft": PLUGIN_LEVEL | {"algorithms", "observe", "trainer"},
    "plugins.preference": PLUGIN_LEVEL | {"algorithms", "plugins.sft", "trainer"},
    # clients in the place of a trainer, around its engine
    "plugins.tinker_server": PLUGIN_LEVEL
    | {"checkpoint", "cluster", "engine", "observe", "parallel", "plugins.vllm", "trainer"},
    "plugins.sglang": {"config", "models", "remote_storage", "rollout"},
    "plugins.vllm": {"config", "models", "registry", "remote_storage", "rollout"},
    "plugins": set(),
    "kit": set(),
    **dict.fromkeys(("kit.coming_from", "kit.data_view", "kit.datasets", "kit.docs", "kit.evaluation"), KIT_LEVEL),
    **dict.fromkeys(
        ("kit.explaining", "kit.export", "kit.forecast", "kit.readback", "kit.replaying", "kit.report"), KIT_LEVEL
    ),
    **dict.fromkeys(
        (
            "kit.bench",
            "kit.run_diff",
            "kit.selfcheck",
            "kit.serving",
            "kit.speed",
            "kit.stored_weights",
            "kit.verbs",
            "kit.why",
        ),
        KIT_LEVEL,
    ),
}
KIT_MAY_USE = ("kit.", "plugins.")  # any other part of the kit, and any plugin, beside its row
# what a package may use beyond the standard library, where that is restricted
THIRD_PARTY: dict[str, set[str]] = {
    "user_code": set(),
    "gc_settings": set(),
    "live_metrics": set(),
    "heartbeat": set(),
    "small_files": {"yaml", "safetensors"},
    "services": set(),
    "config": set(),
    "moved": set(),
    "registry": set(),
    "plugins.games": {"aiohttp", "numpy", "PIL"},  # packages of others: by name, in adapters.py
    "batch": {"torch"},
    "algorithms": {"torch"},
}
# external package -> where it may be imported: folders end with a slash
ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("verl_like/cluster/",),
    "vllm": ("verl_like/plugins/vllm/", "verl_like/kit/"),
    "sglang": ("verl_like/plugins/sglang", "verl_like/kit/"),
    "wandb": ("verl_like/plugins/trackers/",),
    **dict.fromkeys(("tensorboard", "mlflow", "swanlab", "trackio"), ("verl_like/plugins/trackers/",)),
    "hydra": ("verl_like/trainer/", "verl_like/kit/"),
    "omegaconf": (
        "verl_like/trainer/",
        "verl_like/kit/",
        "verl_like/plugins/agents/tools/",
        "verl_like/plugins/verl_agents/",
    ),
    "pydantic": ("verl_like/plugins/verl_agents/verl_shim/", "verl_like/plugins/tinker_server/bodies.py"),
    "flash_attn": ("verl_like/models/",),
    "aiohttp": (
        *("verl_like/plugins/agents/gateway/server.py", "verl_like/plugins/games/openenv.py"),
        *("verl_like/plugins/tinker_server/server.py", "verl_like/plugins/tinker_server/start.py"),
    ),
    "bm25s": ("verl_like/plugins/agents/tools/search.py",),
    "httpx": ("verl_like/plugins/agents/tools/http_service.py",),
    "httpx2": ("verl_like/plugins/agents/tools/mcp_client.py",),
    "mcp": ("verl_like/plugins/agents/tools/mcp_client.py", "verl_like/plugins/agents/tools/mcp_tools.py"),
    "liger_kernel": ("verl_like/models/",),
}
HEAVY = ("vllm", "sglang", "wandb", "tensorboard", "mlflow", "flash_attn", "liger_kernel")  # never at a module's top


def violations(source: Source) -> list[str]:
    """What in this file breaks the tables above."""
    found = []
    for item in source.imports():
        top, _, rest = item.module.partition(".")
        where = f"{source.name}:{item.line} imports {item.module}"
        if top == "verl_like":
            target, allowed = package_of(rest), ALLOWED[source.package] | {source.package, "__version__", ""}
            if source.package.startswith("kit.") and target.startswith(KIT_MAY_USE):
                continue
            if target not in allowed:
                found.append(f"{where}: {source.package} may import {sorted(ALLOWED[source.package])}")
        elif top not in sys.stdlib_module_names:
            if source.package in THIRD_PARTY and top not in THIRD_PARTY[source.package]:
                found.append(f"{where}: {source.package} may use {sorted(THIRD_PARTY[source.package])}")
            if top in ONLY_IN and not source.name.startswith(ONLY_IN[top]) and not item.type_checking_only:
                found.append(f"{where}: only {ONLY_IN[top]} may")
    return found


def test_every_package_has_a_rule() -> None:
    assert {source.package for source in package_sources()} <= set(ALLOWED)


def test_imports_go_one_way() -> None:
    found = [line for source in package_sources() for line in violations(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("config/new.py", "import torch"),
        ("config/new.py", "from verl_like import batch"),
        ("algorithms/new.py", "import transformers"),
        ("algorithms/new.py", "def f():\n    import ray"),
        ("engine/new.py", "from verl_like.trainer.ppo import PPOTrainer"),
        ("rollout/new.py", "from ..engine import fsdp"),
        ("workers/new.py", "import vllm"),
        ("engine/new.py", "import ray"),
        ("services/new.py", "from verl_like.rewards import graders"),
        ("services/new.py", "import torch"),
        ("trainer/new.py", "from verl_like.kit.report import writer"),
        ("rewards/new.py", "def f():\n    from verl_like.plugins.math_grading import latex"),
        ("rollout/new.py", "import verl_like.plugins"),
        ("rollout/new.py", "import vllm"),
        ("plugins/games/new.py", "from verl_like.trainer.ppo import PPOTrainer"),
        ("plugins/agents/new.py", "from verl_like.kit.export import export"),
    ],
)
def test_a_planted_import_is_found(file: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "verl_like" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(code)
    monkeypatch.setattr("tests.architecture.source.ROOT", tmp_path)
    monkeypatch.setattr("tests.architecture.source.PACKAGE", tmp_path / "verl_like")
    assert violations(parse(planted))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("verl_like.config", ["torch", "ray", "vllm", "omegaconf", "hydra", "transformers", "numpy"]),
        ("verl_like.algorithms.advantages", ["ray", "vllm", "transformers", "hydra", "torch.distributed.fsdp"]),
        ("verl_like.trainer.main_ppo", [*HEAVY, "torch", "transformers"]),
        ("verl_like.cli.main", [*HEAVY, "torch", "transformers", "numpy", "hydra", "pyarrow"]),
        ("verl_like.services.pool", [*HEAVY, "torch", "ray", "numpy", "verl_like.rewards"]),
        ("verl_like.plugins.agents.tools.toolbox", [*HEAVY, "torch", "ray", "numpy", "omegaconf", "pydantic", "verl"]),
        ("verl_like.plugins.agents.tools.service", [*HEAVY, "torch", "ray", "numpy", "omegaconf", "pydantic", "verl"]),
    ],
)
def test_importing_leaves_heavy_packages_out(module: str, absent: list[str]) -> None:
    script = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]", textwrap.shorten(run.stdout, 200)


def test_no_module_imports_itself_by_a_detour() -> None:
    """Circles make the order of imports matter; lazy imports and those for type checking only hide them."""
    circles = circles_of(package_sources())
    assert not circles, "\n".join(" -> ".join(circle) for circle in circles)


def test_a_planted_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "verl_like"
    package.mkdir()
    (package / "one.py").write_text("import verl_like.two")
    (package / "two.py").write_text("def f():\n    from verl_like.one import g")
    monkeypatch.setattr("tests.architecture.source.ROOT", tmp_path)
    monkeypatch.setattr("tests.architecture.source.PACKAGE", package)
    assert circles_of([parse(path) for path in sorted(package.iterdir())]) == [["verl_like.one", "verl_like.two"]]


def circles_of(sources: Sequence[Source]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, each in order of name."""
    graph = {source.module: set[str]() for source in sources}
    for source in sources:
        for item in source.imports():  # `from package import name`: the name may be a module or live in one
            if item.module == "verl_like.__version__":  # set before the package imports anything
                continue
            target = item.module if item.module in graph else item.module.rpartition(".")[0]
            if target in graph and target != source.module:
                graph[source.module].add(target)
    reached = {module: reachable(graph, module) for module in graph}
    groups = {tuple(sorted(m for m in reached[n] if n in reached[m])) for n in graph if n in reached[n]}
    return [list(group) for group in sorted(groups)]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Modules that `start` needs, directly or through others."""
    found, left = set[str](), [start]
    while left:
        for target in graph[left.pop()] - found:
            found.add(target)
            left.append(target)
    return found
