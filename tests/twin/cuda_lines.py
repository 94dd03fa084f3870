"""Lines that only run with CUDA: which there are, and which of them the twin has run.

    python -m tests.twin.cuda_lines              # the table of places
    python -m tests.twin.cuda_lines FOLDER       # and what of it the processes have run that had TWIN_LINES=FOLDER

A line counts where a condition above it holds on CUDA alone, or where its function is one of WHOLE.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# functions and classes that a CPU never enters
WHOLE = {
    "verl_like/parallel/activation_offload.py": ("ActivationOffload", "_OnHost", "worth_moving"),
    "verl_like/models/attention.py": ("_varlen", "_torch_varlen", "_varlen_asks_for_shared_keys"),
    "verl_like/models/attention_sinks.py": ("VarlenKernel",),
    "verl_like/models/fused_triton.py": ("",),  # all of it
}
# place -> why the twin does not run it: the beginning of "file:function" is enough
NOT_RUN: dict[str, str] = {
    "verl_like/models/fused_triton.py:": "Triton's kernels and their launch: compiled ahead, interpreted in tests/unit",
    "verl_like/parallel/broken_pass.py:complete": "memory that ends on one rank of several: on CPUs alone",
    "verl_like/plugins/vllm/engine.py:VLLMRolloutEngine.__init__": "routes that vLLM's CUDA build returns: tests/gpu",
    "verl_like/parallel/broken_pass.py:forget": "for releases of torch without reset_iter_state",
    "verl_like/config/rules/": "rules of keys need no device: tests/unit/config/messages.jsonl has each",
}
APART = "verl_like/models/fused_triton.py:"  # not in the share: a kernel has no line that Python runs


def is_cuda_only(test: ast.expr, known: set[str]) -> bool:
    """True where `test` can only hold on CUDA. known: names that hold there alone, as source text."""
    if isinstance(test, ast.BoolOp):
        found = [is_cuda_only(value, known) for value in test.values]
        return any(found) if isinstance(test.op, ast.And) else all(found)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_cpu_only(test.operand, known)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        if isinstance(test.ops[0], ast.IsNot) and right == "None":
            return left in known
        wanted = {ast.Eq: "'cuda'", ast.NotEq: "'cpu'"}.get(type(test.ops[0]))
        return right == wanted and "device" in left
    text = ast.unparse(test)
    return (
        text in ("torch.cuda.is_available()", "torch.cuda.is_initialized()")
        or text.endswith(".is_cuda")
        or text in known
    )


def is_cpu_only(test: ast.expr, known: set[str]) -> bool:
    """True where `test` can only fail on CUDA."""
    if isinstance(test, ast.BoolOp):
        found = [is_cpu_only(value, known) for value in test.values]
        return all(found) if isinstance(test.op, ast.And) else any(found)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_cuda_only(test.operand, known)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        wanted = {ast.NotEq: "'cuda'", ast.Eq: "'cpu'"}.get(type(test.ops[0]))
        return ast.unparse(test.comparators[0]) == wanted and "device" in ast.unparse(test.left)
    return False


def _known(tree: ast.Module) -> set[str]:
    """Names that are set on CUDA alone: `x = ... if cuda else None`, `x = device.type == "cuda" and ...`."""
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            value, empty = node.value, False
            if isinstance(value, ast.IfExp) and ast.unparse(value.orelse) in ("None", "[]", "False"):
                value, empty = value.test, True
            if is_cuda_only(value, known) and (empty or not isinstance(value, ast.Name)):
                known.add(ast.unparse(node.targets[0]))
    return known


class _Finder:
    """Collector of one file's lines, by the function they are in."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.lines: dict[int, str] = {}
        self._name, self._known, self._whole = name, _known(tree), WHOLE.get(name, ())
        self._body(tree.body, "", "" in self._whole)

    def _body(self, body: Sequence[ast.stmt], where: str, inside: bool) -> None:
        for number, node in enumerate(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                path = f"{where}.{node.name}".lstrip(".")
                self._body(node.body, path, inside or path in self._whole)
                continue
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if inside and where and not is_text and not isinstance(node, ast.Global | ast.Nonlocal):
                self.lines[node.lineno] = where
            if isinstance(node, ast.If):
                on, off = (check(node.test, self._known) for check in (is_cuda_only, is_cpu_only))
                self._body(node.body, where, inside or on)
                self._body(node.orelse, where, inside or off)
                if off and not node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
                    self._body(body[number + 1 :], where, True)
                    return
                continue
            for field in ("body", "orelse", "finalbody"):
                self._body(getattr(node, field, None) or [], where, inside)
            for handler in getattr(node, "handlers", []):
                self._body(handler.body, where, inside)


@functools.cache
def cuda_lines() -> dict[str, dict[int, str]]:
    """Find the lines: file -> number -> function."""
    found = {}
    for path in sorted((ROOT / "verl_like").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        if "cuda" in text or name in WHOLE:
            lines = _Finder(name, ast.parse(text)).lines
            if lines:
                found[name] = lines
    return found


# --- what has run -----------------------------------------------------------------------------------------------------


def record(folder: str) -> None:
    """Write each of these lines that this process runs, once, to a file of its own in `folder`."""
    wanted = {str(ROOT / name): (name, set(lines)) for name, lines in cuda_lines().items()}
    out = os.open(Path(folder) / f"{os.getpid()}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    of_code: dict[CodeType, bool] = {}

    def has_any(code: CodeType) -> bool:
        lines = wanted[code.co_filename][1]
        return any(line in lines for _, _, line in code.co_lines())

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        name, lines = wanted[frame.f_code.co_filename]
        if event == "line" and frame.f_lineno in lines:
            lines.discard(frame.f_lineno)
            os.write(out, f"{name}:{frame.f_lineno}\n".encode())
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in wanted:
            return None
        if code not in of_code:
            of_code[code] = has_any(code)
        return on_line if of_code[code] else None

    threading.settrace(on_call)
    sys.settrace(on_call)


def have_run(folder: Path) -> set[tuple[str, int]]:
    """Read what the processes have written."""
    pairs = {line.rpartition(":")[::2] for path in folder.glob("*.txt") for line in path.read_text().splitlines()}
    return {(name, int(number)) for name, number in pairs}


def places(ran: set[tuple[str, int]]) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (file:function, number of its lines, those that have not run)."""
    for name, lines in cuda_lines().items():
        for where in dict.fromkeys(lines.values()):
            own = [line for line, function in lines.items() if function == where]
            yield f"{name}:{where}", len(own), [line for line in own if (name, line) not in ran]


def reason(place: str) -> str | None:
    """Why the twin does not run a place; None where it should."""
    return next((why for beginning, why in NOT_RUN.items() if place.startswith(beginning)), None)


def table(ran: set[tuple[str, int]]) -> tuple[str, float]:
    """Markdown table of all places, and the share of the lines that have run (without APART)."""
    rows, total, missing = ["| place | lines | not run | why |", "|---|---|---|---|"], 0, 0
    for place, count, left in places(ran):
        if not place.startswith(APART):
            total, missing = total + count, missing + len(left)
        rows.append(f"| `{place}` | {count} | {', '.join(map(str, left))} | {(reason(place) or '') if left else ''} |")
    return "\n".join(rows), 1 - missing / total


if __name__ == "__main__":
    text, share = table(have_run(Path(sys.argv[1])) if len(sys.argv) > 1 else set())
    print(text, f"\n{share:.1%} of the lines outside of Triton's kernels have run")
