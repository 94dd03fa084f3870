"""Everything registered is documented, every yaml composes, every package has tests, versions agree."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, package_sources, parse
from verl_like.algorithms.advantages import ADVANTAGES
from verl_like.algorithms.policy_losses import POLICY_LOSSES
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


def test_every_package_is_tested() -> None:
    packages = {source.package for source in package_sources() if source.path.parent != PACKAGE}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if "architecture" not in path.parts)
    missing = [name for name in sorted(packages) if f"verl_like.{name}" not in tests]
    assert not missing, f"no test imports {missing}"


def test_declared_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = (
        project["dependencies"] + project["optional-dependencies"]["dev"] + project["optional-dependencies"]["cpu"]
    )
    names = {normal(re.split(r"[<>=!~ ;\[]", requirement)[0]) for requirement in declared}
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
# brought by torch or by math-verify, or a peer that a benchmark compares with where it is installed
UNDECLARED = {"triton", "latex2sympy2_extended", "trl", "hypothesis"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [requirement for group in extras.values() for requirement in group]
    declared = {normal(re.split(r"[<>=!~ ;\[]", requirement)[0]) for requirement in wanted}
    tops = {item.module.partition(".")[0] for source in package_sources() for item in source.imports()}
    third_party = tops - set(sys.stdlib_module_names) - {"verl_like"} - UNDECLARED
    imported = {normal(DISTRIBUTIONS.get(name, name)) for name in third_party}
    assert imported <= declared, f"pyproject.toml does not declare {sorted(imported - declared)}"
    needed = {normal(re.split(r"[<>=!~ ;\[]", requirement)[0]) for requirement in project["dependencies"]}
    assert needed - imported <= {"jinja2"}, "declared and never imported"  # transformers' chat templates want jinja2


def test_the_page_of_the_package_index_has_no_links_into_the_repository() -> None:
    readme = ROOT / tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert not re.findall(r"\]\((?!https?://)", readme.read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").rglob("*.py")), ids=lambda path: path.name)
def test_recipes_parse(script: Path) -> None:
    assert parse(script).tree.body
