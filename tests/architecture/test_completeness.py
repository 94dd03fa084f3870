"""Everything registered is documented, every yaml composes, every package has tests, versions agree."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, Source, package_sources, parse
from verl_like.algorithms.advantages import ADVANTAGES
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.registry import PARTS
from verl_like.trainer.compose import compose

YAML_ROOT = PACKAGE / "trainer" / "config"
GROUPS = [path.relative_to(YAML_ROOT) for path in sorted(YAML_ROOT.glob("*/*.yaml"))]
HEAVY_NAMES = re.compile(r"^([A-Za-z0-9_.-]+)==", re.MULTILINE)


@pytest.mark.parametrize("name", [*ADVANTAGES.names(), *POLICY_LOSSES.names()])
def test_registered_names_are_documented(name: str) -> None:
    documented = re.findall(r"`([\w-]+)`", (ROOT / "docs" / "algorithms.md").read_text())
    assert name in documented, f"docs/algorithms.md has no row for `{name}`"


def test_the_main_yaml_composes() -> None:
    assert compose(["data.train_files=a.parquet", "data.val_files=b.parquet"]).trainer.seed == 1


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_group_files_compose(group: Path) -> None:
    choice = group.with_suffix("").name
    package = {
        "actor": "actor_rollout_ref.actor",
        "ref": "actor_rollout_ref.ref",
        "rollout": "actor_rollout_ref.rollout",
        "preset": "_global_",
    }
    target = package.get(group.parts[0])
    override = f"{group.parts[0]}@{target}={choice}" if target else f"{group.parts[0]}={choice}"
    compose([override, "data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.rollout.n=2"])


def test_the_map_of_the_documentation_is_complete() -> None:
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= linked, f"docs/index.md does not link {sorted(pages - linked)}"
    assert all((ROOT / "docs" / page).exists() for page in linked)


RINGS = (PACKAGE.name, "plugins", "kit")  # modules directly in these are no packages


def test_every_package_is_tested() -> None:
    packages = {source.package for source in package_sources() if source.path.parent.name not in RINGS}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if "architecture" not in path.parts)
    missing = [name for name in sorted(packages) if f"verl_like.{name}" not in tests]
    assert not missing, f"no test imports {missing}"


def test_declared_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = (
        project["dependencies"] + project["optional-dependencies"]["dev"] + project["optional-dependencies"]["cpu"]
    )
    names = {requirement_name(requirement) for requirement in declared}
    pinned = {normal(name) for name in HEAVY_NAMES.findall((ROOT / "constraints" / "cpu.txt").read_text())}
    assert names <= pinned, f"constraints/cpu.txt lacks {sorted(names - pinned)}"
    assert not pinned & {"torchvision", "torchaudio", "torchcodec"}, "they break transformers on the CPU build of torch"


# name of the package in Python -> name under which it is installed, where they differ
DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "flash_attn_interface": "flash-attn",
    "flash_attn": "flash-attn",
    "yaml": "pyyaml",
}
UNDECLARED = {"triton", "latex2sympy2_extended"}  # brought by torch and by math-verify


installed = functools.cache(importlib.metadata.packages_distributions)


def distributions_of(module: str) -> set[str]:
    """What installs a module: by the table above, or as the installed packages say."""
    named = DISTRIBUTIONS.get(module)
    return {normal(name) for name in ([named] if named else installed().get(module, [module]))}


def imported_by(sources: Iterable[Source], *, always: bool) -> dict[str, str]:
    """Third-party modules with a file that imports them; always: as soon as that is imported, not in a function."""
    found: dict[str, str] = {}
    for source in sources:
        at_once = {node.lineno for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        for item in source.imports():
            if (not always or item.line in at_once) and not item.type_checking_only:
                found.setdefault(item.module.partition(".")[0], source.name)
    return {m: file for m, file in found.items() if m not in {*sys.stdlib_module_names, "verl_like", *UNDECLARED}}


def undeclared(sources: Sequence[Source]) -> list[str]:
    """Imports of no dependency and no extra for users; those at the top of a file, of no dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [group for name, group in project["optional-dependencies"].items() if name != "dev"]
    required = {requirement_name(requirement) for requirement in project["dependencies"]}
    known = required | {requirement_name(requirement) for group in extras for requirement in group}
    return [
        f"{file} imports {module}"
        for always, declared in ((True, required), (False, known))
        for module, file in imported_by(sources, always=always).items()
        if not distributions_of(module) & declared
    ]


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    found = undeclared(package_sources())
    assert not found, f"pyproject.toml does not declare: {found}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = imported_by(package_sources(), always=False)
    imported = {name for module in modules for name in distributions_of(module)}
    needed = {requirement_name(requirement) for requirement in project["dependencies"]}
    assert needed - imported <= {"jinja2"}, "declared and never imported"  # transformers' chat templates want jinja2
    assert set(PARTS["tracker"]) <= set(project["optional-dependencies"])  # named in messages of trackers


@pytest.mark.parametrize(
    "code", ["import pandas", "def f():\n    import hypothesis", "def f():\n    from yarl import URL"]
)
def test_a_planted_undeclared_import_is_found(code: str, tmp_path: Path) -> None:
    """Of an extra at the top of a file; of the tests' own packages; of what another package brings."""
    (tmp_path / "planted.py").write_text(code)
    source = parse(tmp_path / "planted.py")
    object.__setattr__(source, "path", ROOT / "verl_like" / "planted.py")
    assert undeclared([source])


def requirement_name(requirement: str) -> str:
    return normal(re.split(r"[<>=!~ ;\[]", requirement)[0])


def test_the_page_of_the_package_index_has_no_links_into_the_repository() -> None:
    readme = ROOT / tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert not re.findall(r"\]\((?!https?://)", readme.read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").rglob("*.py")), ids=lambda path: path.name)
def test_recipes_parse(script: Path) -> None:
    assert parse(script).tree.body
