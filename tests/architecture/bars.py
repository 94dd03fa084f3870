"""Figures of the package beside the bars that it is held to: `python -m tests.architecture.bars`.

The tests of this folder hold most of these figures where they are. This prints all of them, and those that no test
holds: a step's modules, files that name a key, the time of `verl-like --help`.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple
from unittest.mock import patch

from tests.architecture.source import PACKAGE, ROOT, Source, package_of, package_sources
from tests.architecture.test_budget import MOST_LINES, SMALL, code_lines, ring_of
from tests.architecture.test_engines import known_elsewhere
from tests.architecture.test_imports import circles_of
from tests.architecture.test_private_names import TESTS, files_of_tests, private_lines
from tests.conftest import load_script
from tests.e2e.support import overrides, write_task
from verl_like.config.schema import keys
from verl_like.kit.docs.readers import readers
from verl_like.trainer.compose import compose
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.run import run

_HELP = ("-c", "from verl_like.cli.main import main; main(['--help'])")


class Bar(NamedTuple):
    """One figure, and the bar it is held to ("" where there is none)."""

    name: str
    figure: str
    bar: str = ""


def key_bars(sources: Sequence[Source]) -> Iterator[Bar]:
    """Yield how many files a key stands in, on average and at the 90th percentile.

    Counted by name: keys with a name of their own, which is that of one declared key and has an underscore (a single
    word, `name` or `seed`, means other things too). A file names it that declares it in a class, reads an attribute of
    that name, or has it in a string that is no documentation, alone or behind dots. Variables and arguments of that
    name are not counted, nor text tables, presets and documentation. Where 6.9 were counted once (words of .py files,
    text tables and presets), this counts 5.0, and those words of today's files are 6.7.

    Counted by type: files that read it, as the scan behind docs/configuration.md follows them, and its declaration.
    """
    named = naming_files(sources)
    leaves = Counter(path.rpartition(".")[2] for path in keys())
    counts = sorted(len(named[leaf]) for leaf, times in leaves.items() if times == 1 and "_" in leaf)
    yield Bar(
        f"files that name a key ({len(counts)} keys with a name of their own)", _mean_and_tail(counts), "3.0 on average"
    )
    read = sorted(1 + len(modules) for modules in readers().values())
    yield Bar(f"files that declare or read a key (all {len(read)}, types followed)", _mean_and_tail(read))


def naming_files(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Word -> files that name it as a key is named; see `key_bars`."""
    named: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        prose = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute):
                named[node.attr].add(source.name)
            elif isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        named[field.target.id].add(source.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                for words in re.findall(r"[\w.]+", node.value):
                    named[words.rstrip(".").rpartition(".")[2]].add(source.name)
    return named


def _mean_and_tail(counts: list[int]) -> str:
    return f"{statistics.mean(counts):.2f}, p90 {counts[len(counts) * 9 // 10]}"


def size_bars(sources: Sequence[Source]) -> Iterator[Bar]:
    """Yield lines of code by ring, small files, lengths of functions and files."""
    lines, small = Counter[str](), Counter[str]()
    for source in sources:
        lines[ring_of(source)] += code_lines(source)
        small[ring_of(source)] += source.num_lines < SMALL and source.path.name != "__init__.py"
    yield Bar("lines of code, all rings", f"{lines.total():,}", "49,000")
    for ring in MOST_LINES:
        yield Bar(f"lines of code, {ring}", f"{lines[ring]:,}", "33,000" if ring == "core" else "")
        yield Bar(f"files under {SMALL} lines, {ring}", str(small[ring]), "45" if ring == "core" else "")
    lengths = sorted((f.end_lineno or f.lineno) - f.lineno + 1 for source in sources for f in source.functions())
    yield Bar("lines of a function, p99", str(lengths[len(lengths) * 99 // 100]), "45")
    yield Bar("lines of a function, longest", str(lengths[-1]), "80")
    yield Bar("lines of a file, longest", str(max(source.num_lines for source in sources)), "600")


def shape_bars(sources: Sequence[Source]) -> Iterator[Bar]:
    """Yield circles, arrows, names of engines, docstrings, private names read by tests."""
    yield Bar("import circles", str(len(circles_of(sources))), "0")
    yield Bar("arrows up", str(len(pairs_both_ways(sources))), "1")
    yield Bar("comparisons with an engine's name outside its own files", str(len(known_elsewhere())), "1")
    public = [node for source in sources for node in public_names(source.tree)]
    share = sum(ast.get_docstring(node) is not None for node in public) / len(public)
    yield Bar("public names with a docstring", f"{share:.1%} of {len(public):,}", "87%")
    private = sum(len(private_lines(ast.parse(path.read_text()))) for path in files_of_tests())
    yield Bar(f"lines of {TESTS.name} that read private names", str(private), "40")


def pairs_both_ways(sources: Sequence[Source]) -> set[tuple[str, str]]:
    """Packages that import each other: one of the two arrows goes up."""
    arrows = {
        (source.package, package_of(module.removeprefix("verl_like.")))
        for source in sources
        for item in source.imports()
        if (module := item.module).startswith("verl_like.")
    }
    return {(one, other) for one, other in arrows if one < other and (other, one) in arrows}


def public_names(tree: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield classes, functions and methods without an underscore before their own or their class's name."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_names(node)


class Watch:
    """Functions that run while `is_on`, in this thread and those begun later; not the bodies that an import runs."""

    def __init__(self) -> None:
        self.is_on, self.codes = False, set[CodeType]()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            self.codes.add(frame.f_code)

    def __enter__(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    def files(self) -> set[Path]:
        """Files of the package with such a function."""
        return {path for code in self.codes if (path := Path(code.co_filename)).is_relative_to(PACKAGE)}

    def num_lines(self) -> int:
        """Lines with code of the functions themselves."""
        own = (code for code in self.codes if Path(code.co_filename).is_relative_to(PACKAGE))
        return len({(code.co_filename, line) for code in own for *_, line in code.co_lines() if line})


def step_bars() -> Iterator[Bar]:
    """Yield modules and lines of the second of two GRPO steps (one process, hf engine, a grader of one's own).

    Whole files count of which any function runs inside `PPOTrainer.step`: all that samples, scores, trains and syncs
    in this process, with logs, metrics, health and memory; files of the grading processes are not seen. The bar was
    set for a list made by hand of what someone reads who follows a prompt from the start to the next weights
    (65 modules and 14,787 lines at the commit where this counts 138 and 23,775, and 5,776 lines of functions).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        recipe = load_script(ROOT / "recipes" / "quickstart" / "model.py", "quickstart_model")
        tokenizer = recipe.build_tokenizer()
        recipe.save_checkpoint(model, recipe.build_model(tokenizer, hidden_size=64, num_layers=2), tokenizer)
        config = compose(overrides(write_task(folder), model, folder / "out", trainer__total_training_steps=2))
        take_step, watch = PPOTrainer.step, Watch()

        def step(self: PPOTrainer) -> dict[str, float]:
            watch.is_on = self.state.step == 1
            metrics = take_step(self)
            watch.is_on = False
            return metrics

        with watch, patch.object(PPOTrainer, "step", step):
            run(config)
    own = {source.path: source.num_lines for source in package_sources()}
    yield Bar("modules of a GRPO step, executed in one process", str(len(watch.files())), "42")
    yield Bar("lines of these modules", f"{sum(own[path] for path in watch.files()):,}", "10,000")
    yield Bar("lines of the functions that ran in them", f"{watch.num_lines():,}")


def time_bars() -> Iterator[Bar]:
    """Yield what verl_like.config imports, and the seconds of CPU of `verl-like --help` (best of five)."""
    script = "import sys, verl_like.config; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    foreign = {*loaded.stdout.split()} - {*sys.stdlib_module_names, "verl_like", "__main__"}
    yield Bar("packages that verl_like.config imports", ", ".join(sorted(foreign)) or "the standard library's", "these")
    seconds = []
    for _ in range(5):
        began = cpu_of_children()
        subprocess.run([sys.executable, *_HELP], cwd=ROOT, capture_output=True, check=True)
        seconds.append(cpu_of_children() - began)
    yield Bar("seconds of CPU of verl-like --help", f"{min(seconds):.2f}", "0.3")


def cpu_of_children() -> float:
    """Seconds that processes which have ended, and were waited for, spent."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    """Print all figures, a line each."""
    logging.disable(logging.INFO)  # the run's
    sources = package_sources()
    for bars in (key_bars(sources), size_bars(sources), shape_bars(sources), step_bars(), time_bars()):
        for bar in bars:
            print(f"{bar.name:<75} {bar.figure}" + (f"   (bar: {bar.bar})" if bar.bar else ""), flush=True)


if __name__ == "__main__":
    main()
