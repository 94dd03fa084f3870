"""What an engine is asked stands in its row (config/engines.py): its name is compared in its own files alone."""

from __future__ import annotations

import ast

from tests.architecture.source import package_sources
from verl_like.config.engines import AUTO, ENGINES

# The readers of other programs' settings: these names are theirs
ELSEWHERE = "verl_like/kit/coming_from/"


def compared_names(tree: ast.AST) -> set[str]:
    """Engines' names among the constants of comparisons and of cases."""
    sides = [
        side
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.MatchValue)
        for side in ast.walk(node)
        if isinstance(side, ast.Constant)
    ]
    return {side.value for side in sides if isinstance(side.value, str) and side.value in ENGINES.keys() - {AUTO}}


def known_elsewhere() -> set[str]:
    """Places outside an engine's own files where its name is compared."""
    return {
        f"{source.name}: {name}"
        for source in package_sources()
        if not source.name.startswith(ELSEWHERE)
        for name in compared_names(source.tree)
        if name not in source.name
    }


def test_no_engine_is_known_by_name_outside_its_own_files() -> None:
    assert not known_elsewhere()


def test_a_planted_comparison_is_found() -> None:
    assert compared_names(ast.parse('rollout.name in ("hf", "other")')) == {"hf"}
    assert compared_names(ast.parse('match name:\n case "vllm":\n  pass')) == {"vllm"}
    assert compared_names(ast.parse('{"vllm": 1}["vllm"]')) == set()
