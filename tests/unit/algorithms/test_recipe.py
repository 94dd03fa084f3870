"""CONTRIBUTING.md's recipe for a new advantage estimator, step by step and word for word, in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]


def steps() -> list[str]:
    """The code of the recipe's section, block by block."""
    section = re.search(r"## Adding an advantage estimator.*?(?=\n## )", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert section is not None
    return [textwrap.dedent(block) for block in re.findall(r"```\w+\n(.*?)```", section[0], re.S)]


# What follows from the row, seen from outside.
FOLLOWS = """
import pathlib, sys, pytest
from verl_like.config.rules import check
from verl_like.kit.docs.configuration import with_tables
from verl_like.kit.explaining import explain
from verl_like.trainer.compose import compose

keys = ["algorithm.adv_estimator=best_of_group", "actor_rollout_ref.rollout.n=2"]
warned = check(compose([*keys, "algorithm.gamma=0.9"]), frozenset({"algorithm.gamma"}))
assert "algorithm.gamma has no effect in this run: algorithm.adv_estimator does not read it" in " ".join(warned), warned
try:
    compose(["algorithm.adv_estimator=best_of_grup"])
except ValueError as error:
    assert "Did you mean 'best_of_group'?" in str(error), error
else:
    raise AssertionError("a misspelt name is accepted")
said = dict(explain("algorithm.adv_estimator", keys))
assert "best_of_group" in said["range"] and said["best_of_group"].startswith("1 for the best responses"), said
page = pathlib.Path("docs/algorithms.md")
page.write_text(with_tables(page.read_text()))
assert "| `best_of_group` | 1 for the best responses of a group, 0 for the others | an example |" in page.read_text()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", TEST, "tests/unit/algorithms/test_registry.py"]))
"""


def test_the_recipe_works_as_it_is_written(tmp_path: Path) -> None:
    """One fresh interpreter (it imports torch): the recipe's own test, the configuration, explain, and the page."""
    for name in ("verl_like", "docs", "tests/unit/algorithms"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    function, row, test = steps()
    place, table, name = (re.match(r"# (?:at the end of )?([\w/.]+)", block) for block in (function, row, test))
    assert place is not None and table is not None and name is not None
    with (tmp_path / place[1]).open("a") as file:
        file.write("\n\n" + function)
    head = re.search(r"\[\w+\]\n", row)
    assert head is not None
    rows = (tmp_path / table[1]).read_text()
    assert rows.count(head[0]) == 1
    (tmp_path / table[1]).write_text(rows.replace(head[0], head[0] + row[head.end() :]))
    (tmp_path / name[1]).write_text(test)
    (tmp_path / "follows.py").write_text(FOLLOWS.replace("TEST", repr(name[1])))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "follows.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
