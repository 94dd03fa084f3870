"""Rules about the shape of the code: sizes, config objects, print, machine paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Source, package_sources, parse, tracked_files

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80
CONFIG_NAMES = {"config", "cfg", "actor_config", "critic_config", "rollout_config"}
MAY_PRINT = ("verl_like/cli/", "verl_like/kit/verbs/", "verl_like/kit/bench/", "verl_like/kit/datasets/")
HUGGING_FACE_CONFIG = {"verl_like/engine/state.py"}
BINARY = {".parquet", ".png", ".safetensors", ".gz"}
# First words of a docstring that answer a question nobody has asked, or that stand for a subject named nowhere.
NO_SUBJECT = re.compile(
    r"(As|How|It|Nothing|Of|See|That|The same|Those|What|When|Where|Whether|Which|Who|Why)\b",
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home/(?!user\b)\w+|Users/\w+|work/(?:main|shared))(?:/|\b)")


def test_files_stay_small() -> None:
    long = [f"{s.name}: {s.num_lines} lines" for s in package_sources() if s.num_lines > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines, find the seam: {long}"


def test_functions_stay_small() -> None:
    long = [
        f"{source.name}:{f.lineno} {f.name}: {length} lines"
        for source in package_sources()
        for f in source.functions()
        if (length := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, f"over {MAX_FUNCTION_LINES} lines, find the seam: {long}"


def is_config(node: ast.expr) -> bool:
    """Whether an expression looks like a config object: named config/cfg, or an attribute chain that starts at one."""
    if isinstance(node, ast.Name):
        return node.id in CONFIG_NAMES
    if isinstance(node, ast.Attribute):
        return node.attr in CONFIG_NAMES or (is_config(node.value) and not node.attr.endswith("kwargs"))
    return False


def config_misuse(source: Source) -> Iterator[str]:
    """`.get(` or getattr/hasattr/setattr on a config object, or assignment to one of its attributes."""
    for node in ast.walk(source.tree):
        where = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr == "get" and is_config(function.value):
                yield f"{where} calls .get on a config"
            named = isinstance(function, ast.Name) and function.id in {"getattr", "hasattr", "setattr"}
            if named and node.args and is_config(node.args[0]):
                yield f"{where} calls {ast.unparse(function)} on a config"
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in targets:
            if isinstance(target, ast.Attribute) and is_config(target.value):
                yield f"{where} assigns to {ast.unparse(target)}"


def test_config_is_read_by_attribute_and_never_changed() -> None:
    # models/ and the export in engine/ handle Hugging Face's own config objects, which are neither typed nor ours.
    ours = [s for s in package_sources() if s.package not in {"config", "models"} and s.name not in HUGGING_FACE_CONFIG]
    found = [line for source in ours for line in config_misuse(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "config.actor.lr = 1",
        "x = config.get('lr', 0)",
        "getattr(self.config.actor, 'lr', None)",
        "hasattr(cfg, 'lr')",
        "config.data.size += 1",
    ],
)
def test_planted_config_misuse_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(code)
    source = parse(tmp_path / "planted.py")
    object.__setattr__(source, "path", ROOT / "verl_like" / "planted.py")
    assert len(list(config_misuse(source))) == 1


def test_no_print() -> None:
    found = [
        f"{source.name}:{node.lineno}"
        for source in package_sources()
        if not source.name.startswith(MAY_PRINT)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert not found, f"use logging.getLogger(__name__): {found}"


def test_annotations_are_lazy_outside_config() -> None:
    missing = [
        source.name
        for source in package_sources()
        if source.package not in {"config", "__init__"}
        and any(True for _ in source.functions())
        and not any(item.module == "__future__.annotations" for item in source.imports())
    ]
    assert not missing, f"`from __future__ import annotations` is missing in {missing}"


def test_no_absolute_machine_paths() -> None:
    found = []
    for path in tracked_files():
        if path.suffix in BINARY or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def docstrings_without_subject(source: Source) -> Iterator[str]:
    """Yield the place and the first line of each docstring whose first word names neither an action nor a thing."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            if NO_SUBJECT.match(doc):
                yield f"{source.name}:{node.body[0].lineno}: {doc.splitlines()[0]}"


def test_docstrings_begin_with_their_subject() -> None:
    found = [line for source in package_sources() for line in docstrings_without_subject(source)]
    assert not found, "begin with a verb or a noun, and name the subject:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("doc", "is_found"),
    [
        ("Whether a row is graded.", True),
        ("The same, padded.", True),
        ("See EpisodeRunner.", True),
        ("True where a row is graded.", False),
        ("Whole rows, graded.", False),
        ("The sameness of two trees.", False),
    ],
)
def test_planted_docstrings(doc: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(f'def grade() -> None:\n    """{doc}"""\n')
    source = parse(tmp_path / "planted.py")
    object.__setattr__(source, "path", ROOT / "verl_like" / "planted.py")
    assert len(list(docstrings_without_subject(source))) == is_found
