"""Dotted names and files that docstrings and pages quote exist: code that was renamed is renamed in its prose too."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, Source, package_sources, tracked_files
from verl_like.config.schema import keys as all_keys

QUOTED = re.compile(r"`([^`\s]+)`")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"(?:[\w./-]+/)?[\w-]+\.py|[\w./-]+/[\w-]+\.(?:md|sh|txt|yaml)")
# Names of the reader's own files, of other programs, or of instances; whoever adds one says whose it is.
OTHERS = {"run.lock", "functions.NAME", "experts.gate_up_proj", "spec.config", "verl_like.log"}


def names_of(tree: ast.AST) -> dict[str, ast.AST]:
    """What a module or class binds: functions, classes, assignments, fields, imports."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id if isinstance(node, ast.Name) else node.attr, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
    return found


@functools.cache
def modules() -> dict[str, Source]:
    return {source.module: source for source in package_sources()}


@functools.cache
def keys() -> frozenset[str]:
    """Every key of the configuration and every tail of one: `actor.optim.lr`, `optim.lr`, `optim`."""
    whole = [key.split(".") for key in all_keys()]
    return frozenset(".".join(k[a:b]) for k in whole for a in range(len(k)) for b in range(a + 1, len(k) + 1))


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    trees = [ast.walk(source.tree) for source in package_sources()]
    return {node.name: node for nodes in trees for node in nodes if isinstance(node, ast.ClassDef)}


def resolves(name: str, folder: str) -> bool:
    """Whether a name is a module, or something bound in one; looked up from the package and from `folder`."""
    parts = name.removeprefix("verl_like.").split(".")
    if parts[0] in names_of(modules()["verl_like"].tree):
        return True
    if parts[0] in classes():
        return inside_class(classes()[parts[0]], parts[1:])
    for base in ("verl_like", folder):
        for cut in range(len(parts), 0, -1):
            module = ".".join([base, *parts[:cut]])
            if module in modules() and inside(modules()[module].tree, parts[cut:]):
                return True
            if (PACKAGE.parent / Path(*module.split("."))).is_dir() and cut == len(parts):
                return True
    return False


def inside(tree: ast.AST, parts: list[str]) -> bool:
    """Whether `parts` leads to something: a class's member may be inherited or set in a method, so one step counts."""
    if not parts:
        return True
    found = names_of(tree)
    return parts[0] in found and (len(parts) == 1 or inside_class(found[parts[0]], parts[1:]))


def inside_class(node: ast.AST, parts: list[str]) -> bool:
    if not isinstance(node, ast.ClassDef):
        return True  # an instance or an imported name: its own module's test looks there
    return parts[0] in names_of(node) or bool(node.bases)


def of_code(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from QUOTED.findall(ast.get_docstring(node) or "")


def unknown_in(source: Source) -> Iterator[str]:
    """Names in a module's docstrings that are nothing of ours, no key, no local name and no installed package's."""
    is_package = source.path.name == "__init__.py"
    folder = source.module if is_package else source.module.rpartition(".")[0]
    local = names_of(source.tree)
    for name in of_code(source):
        if FILE.fullmatch(name):
            if not any((base / name).exists() for base in (ROOT, PACKAGE, source.path.parent)):
                yield f"{source.name}: {name}"
        elif DOTTED.fullmatch(name) and name not in OTHERS:
            head = name.split(".")[0]
            known = name in keys() or resolves(name, folder) or head in local or arguments(source.tree, head)
            if not known and (head in PACKAGES or importlib.util.find_spec(head) is None):
                yield f"{source.name}: {name}"


def arguments(tree: ast.AST, name: str) -> bool:
    """Say whether some function takes an argument of this name."""
    return any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(tree))


PACKAGES = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"verl_like"}


def unknown_on(page: Path) -> Iterator[str]:
    """Names of our code on a page that do not exist. Other programs' keys stand there too: what looks like a key is
    left to the tests of docs/configuration.md."""
    for name in QUOTED.findall(page.read_text(encoding="utf-8")):
        parts = name.removeprefix("verl_like.").split(".")
        if not DOTTED.fullmatch(name) or name in keys() or name in OTHERS:
            continue
        ours = name.startswith("verl_like.") or (parts[0] in PACKAGES and is_code(parts))
        if ours and not resolves(name, "verl_like"):
            yield f"{page.relative_to(ROOT)}: {name}"


def is_code(parts: list[str]) -> bool:
    """Whether the second part is a module of the first, or a part is a class's name."""
    folder = PACKAGE / parts[0]
    module = (folder / f"{parts[1]}.py").exists() or (folder / parts[1]).is_dir()
    return module or any(part[0].isupper() for part in parts)


def test_names_in_docstrings_exist() -> None:
    found = [line for source in package_sources() for line in unknown_in(source)]
    assert not found, "\n".join(found)


def test_names_on_pages_exist() -> None:
    found = [line for page in tracked_files() if page.suffix == ".md" for line in unknown_on(page)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`trainer.roles.PolicyGroup`", "trainer.roles.PolicyGroup"),
        ("`verl_like.trainer.nothing`", "verl_like.trainer.nothing"),
        ("`rewards/no_such_file.py`", "rewards/no_such_file.py"),
        ("`trainer.loop.Loop.fly`", "trainer.loop.Loop.fly"),
        ("`trainer.total_epochs`, `optim.lr`, `trainer.build`, `rewards/manager.py`, `torch.nn.Linear`", None),
    ],
)
def test_a_planted_name_is_found(text: str, wrong: str | None) -> None:
    source = Source(PACKAGE / "trainer" / "planted.py", ast.parse(f'"""{text}"""'), 1)
    assert list(unknown_in(source)) == ([] if wrong is None else [f"verl_like/trainer/planted.py: {wrong}"])
