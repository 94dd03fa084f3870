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


def test_the_recipe_works_as_it_is_written(tmp_path: Path) -> None:
    """One fresh interpreter (it imports torch): the recipe's own test, the configuration, and the test of the docs."""
    for name in ("verl_like", "docs", "tests/unit/algorithms"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    function, change, test, row = steps()
    place = re.match(r"# at the end of (\S+)\n", function)
    assert place is not None
    with (tmp_path / place[1]).open("a") as file:
        file.write("\n\n" + function)
    edited, *lines = change.splitlines()
    old = "\n".join(line[2:] for line in lines if line.startswith("-"))
    new = "\n".join(line[2:] for line in lines if line.startswith("+"))
    enums = tmp_path / edited.removeprefix("# ")
    assert old in enums.read_text()
    enums.write_text(enums.read_text().replace(old, new, 1))
    name = re.match(r"# (\S+)\n", test)
    assert name is not None
    (tmp_path / name[1]).write_text(test)
    with (tmp_path / "docs" / "algorithms.md").open("a") as file:
        file.write("\n" + row)
    (tmp_path / "composes.py").write_text(
        "import sys, pytest\n"
        "from verl_like.trainer.compose import compose\n"
        "assert compose(['algorithm.adv_estimator=best_of_group', 'actor_rollout_ref.rollout.n=2'])\n"
        f"tests = [{name[1]!r}, 'tests/unit/algorithms/test_registry.py']\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *tests]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "composes.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
