"""Readers of each key, found in the source: the table behind docs/configuration.md and the liveness test.

The scan follows types: annotated arguments and attributes, plain assignments, and attribute chains through the config
dataclasses. An attribute of the same name anywhere in the package is taken to hold any of the config types it is given
somewhere (`spec.config`). A read of a shared dataclass (optim, fsdp_config) counts for every section that uses it.
Standard library only.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from verl_like.config.base import ConfigNode
from verl_like.config.ppo import PPOConfig
from verl_like.config.schema import keys

Kinds = frozenset[type]
_NONE: Kinds = frozenset()
PACKAGE = Path(__file__).resolve().parents[2]
# Inside config/ only these use values; rules merely check them.
_CONFIG_READERS = ("batch_plan.py", "distillation.py", "fsdp.py", "micro_batches.py", "placement.py", "roles.py")


@functools.cache
def readers(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Key -> modules that read it, as dotted names below verl_like."""
    trees = {path: ast.parse(path.read_text()) for path in _sources(package)}
    scopes = {path: [_Nodes.of(scope) for scope in _scopes(tree)] for path, tree in trees.items()}
    attributes = _attribute_types(trees, scopes)
    reads: dict[tuple[type, str], set[str]] = defaultdict(set)
    for path, functions in scopes.items():
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        for nodes in functions:
            for owner, field in _Scope(nodes, attributes).reads():
                reads[owner, field].add(name)
    return {
        path: sorted({name for (owner, field), names in reads.items() if _owns(owner, key.owner) and field == key.name
                      for name in names})
        for path, key in keys().items()
    }  # fmt: skip


def _sources(package: Path) -> list[Path]:
    inside = package / "config"
    wanted = [path for path in sorted(package.rglob("*.py")) if inside not in path.parents]
    return wanted + [inside / name for name in _CONFIG_READERS if (inside / name).exists()]


def _owns(read_on: type, owner: type) -> bool:
    """ModelConfig read on an argument may be a CriticModelConfig, and the other way round."""
    return issubclass(owner, read_on) or issubclass(read_on, owner)


def _config_types() -> dict[str, type]:
    found: dict[str, type] = {}
    queue: list[type] = [PPOConfig]
    while queue:
        kind = queue.pop()
        found[kind.__name__] = kind
        queue += [f.type for f in fields(kind) if is_dataclass(f.type)]  # pyright: ignore
        queue += [base for base in kind.__bases__ if is_dataclass(base) and base is not ConfigNode]
    return found


TYPES = _config_types()


def _annotated(annotation: ast.expr | None) -> Kinds:
    """The config types named in an annotation, `OptimConfig | None` and quoted ones included."""
    if annotation is None:
        return _NONE
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return frozenset(TYPES[n.id] for n in ast.walk(annotation) if isinstance(n, ast.Name) and n.id in TYPES)


def _attribute_types(trees: dict[Path, ast.Module], scopes: dict[Path, list[_Nodes]]) -> dict[str, Kinds]:
    """Attribute name -> config types it holds somewhere: class annotations and `self.x = argument`."""
    types: dict[str, Kinds] = defaultdict(frozenset)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        types[field.target.id] |= _annotated(field.annotation)
    for _ in range(2):  # twice: self.b = self.a.section needs the type of self.a
        for functions in scopes.values():
            for nodes in functions:
                given = [(target, value) for target, value in nodes.assignments if isinstance(target, ast.Attribute)]
                scope = _Scope(nodes, types) if given else None
                for target, value in given:
                    assert scope is not None
                    types[target.attr] |= scope.kinds(value)
    return types


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    yield from (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


@dataclass(slots=True)
class _Nodes:
    """Nodes that are looked at in one function, found in one walk: a function is looked at several times."""

    arguments: list[ast.arg]
    assignments: list[tuple[ast.expr, ast.expr]]
    reads: list[ast.Attribute]

    @classmethod
    def of(cls, scope: ast.AST) -> _Nodes:
        found = cls([], [], [])
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Load):
                    found.reads.append(node)
            elif isinstance(node, ast.arg):
                found.arguments.append(node)
            else:
                found.assignments += _assignments(node)
        return found


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
        yield from ((node.target, item) for item in node.iter.elts)


class _Scope:
    """Names of one function with the config types they may hold."""

    def __init__(self, nodes: _Nodes, attributes: dict[str, Kinds]) -> None:
        self.nodes, self.attributes = nodes, attributes
        self.names: dict[str, Kinds] = defaultdict(frozenset)
        for node in nodes.arguments:
            self.names[node.arg] |= _annotated(node.annotation)
        for _ in range(2):
            for target, value in nodes.assignments:
                if isinstance(target, ast.Name):
                    self.names[target.id] |= self.kinds(value)

    def kinds(self, node: ast.expr) -> Kinds:
        """The config types an expression may have."""
        if isinstance(node, ast.Name):
            return self.names[node.id]
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            return frozenset().union(*(self.kinds(part) for part in parts))
        if not isinstance(node, ast.Attribute):
            return _NONE
        through = frozenset(_field_type(kind, node.attr) for kind in self.kinds(node.value)) - {None}
        return through or self.attributes.get(node.attr, _NONE)  # pyright: ignore

    def reads(self) -> Iterator[tuple[type, str]]:
        """(owner, field) of each attribute access on a config type in this scope."""
        for node in self.nodes.reads:
            yield from ((kind, node.attr) for kind in self.kinds(node.value) if _has(kind, node.attr))


@functools.cache
def _has(kind: type, name: str) -> bool:
    return any(field.name == name for field in fields(kind))  # pyright: ignore


@functools.cache
def _field_type(kind: type, name: str) -> Any:
    return next((f.type for f in fields(kind) if f.name == name and is_dataclass(f.type)), None)  # pyright: ignore
