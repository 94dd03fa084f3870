"""The package's source, parsed once, for the rules in this folder."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "verl_like"


@dataclass(frozen=True)
class Import:
    module: str  # full dotted name, relative imports resolved
    line: int
    type_checking_only: bool


@dataclass(frozen=True)
class Source:
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def name(self) -> str:
        """Path below the repository root, with forward slashes."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name; a package is named without its __init__."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def package(self) -> str:
        """See `package_of`."""
        return package_of(".".join(self.path.relative_to(PACKAGE).with_suffix("").parts))

    def imports(self) -> Iterator[Import]:
        """All imports, lazy ones inside functions included."""
        guarded = {id(n) for block in self._type_checking_blocks() for n in ast.walk(block)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{self._base(node)}.{alias.name}" for alias in node.names]
            else:
                continue
            for module in names:
                yield Import(module, node.lineno, id(node) in guarded)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))

    def _type_checking_blocks(self) -> Iterator[ast.If]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield node

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.path.relative_to(ROOT).with_suffix("").parts[: -node.level]
        return ".".join([*parts, node.module] if node.module else parts)


def package_of(module: str) -> str:
    """First folder below verl_like, or the module's own name ("batch"); of plugins and kit the second one as well."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first in ("plugins", "kit") and rest and rest[0] != "__init__" else first


def parse(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path, ast.parse(text, str(path)), text.count("\n"))


@functools.cache
def package_sources() -> tuple[Source, ...]:
    return tuple(parse(path) for path in sorted(PACKAGE.rglob("*.py")))


def tracked_files() -> list[Path]:
    """Files under version control; where there is no git (an unpacked archive), the source files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    folders = ["verl_like", "tests", "recipes", "docs", "scripts", "docker", "constraints"]
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
