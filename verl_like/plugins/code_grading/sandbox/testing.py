"""Tests made of assert statements, run against functions that live in another process."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from typing import Any

from verl_like.plugins.code_grading.sandbox import wire

_CHECK = "__check_one__"
_TEXT_CHARS = 300


class CandidateError(Exception):
    """An exception of the code under test that has no built-in type."""


class Remote:
    """A function of the code under test: called with plain data, answers with plain data."""

    def __init__(self, name: str, ask: Callable[[dict[str, Any]], Any]) -> None:
        self._name, self._ask = name, ask

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        answer = self._ask(
            {
                "name": self._name,
                "arguments": [wire.encode(argument) for argument in arguments],
                "keywords": {key: wire.encode(argument) for key, argument in keywords.items()},
            }
        )
        if not isinstance(answer, dict):
            raise CandidateError("the code under test ended its process")
        if "error" in answer:
            kind, text = answer["error"]
            raise _exception(str(kind), str(text))
        for mine, theirs in zip(arguments, answer["arguments"], strict=True):
            _update(mine, wire.decode(theirs))
        return wire.decode(answer["value"])


class Script:
    """The text of the tests, with every assert turned into a check that is reported and does not end the rest."""

    def __init__(self, text: str, on_check: Callable[[dict[str, Any]], None]) -> None:
        tree = ast.parse(text)
        self.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self._code = compile(ast.fix_missing_locations(_Rewrite().visit(tree)), "tests.py", "exec")
        self._on_check = on_check

    def run(self, names: dict[str, Any], entry: str) -> None:
        """Execute the script in `names`; then, as HumanEval has it, `check(entry)` if it defines `check`."""
        names[_CHECK] = self._check
        candidate = names.get(entry)
        exec(self._code, names)
        if candidate is not None and callable(names.get("check")):
            names["check"](candidate)

    def _check(self, condition: Callable[[], Any], text: str) -> None:
        try:
            passed, message = bool(condition()), ""
        except Exception as error:
            passed, message = False, f"{type(error).__name__}: {error}"[:_TEXT_CHARS]
        self._on_check({"passed": True} if passed else {"passed": False, "test": text, "message": message})


class _Rewrite(ast.NodeTransformer):
    """Rewriter of assert condition -> __check_one__(lambda: condition, "condition")."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        condition = ast.Lambda(args=nothing, body=node.test)
        text = ast.Constant(ast.unparse(node.test)[:_TEXT_CHARS])
        call = ast.Call(func=ast.Name(_CHECK, ast.Load()), args=[condition, text], keywords=[])
        return ast.copy_location(ast.Expr(call), node)


def _exception(kind: str, text: str) -> Exception:
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(text)
        except TypeError:  # UnicodeDecodeError and its like want more
            pass
    return CandidateError(f"{kind}: {text}")


def _update(mine: Any, theirs: Any) -> None:
    """Carry over what the function did to its argument."""
    if type(mine) is not type(theirs) or mine == theirs:
        return
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)
