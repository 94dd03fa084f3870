"""The figures that `bars` prints count what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.bars import naming_files, pairs_both_ways, public_names
from tests.architecture.source import ROOT, parse


def test_files_name_a_key_by_field_attribute_and_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.architecture.source.ROOT", tmp_path)
    lines = {
        "declares": 'class A:\n    own_key: int = 1\n    """other_key"""\n',
        "reads": "def f(a):\n    return a.own_key\n",
        "says": 'ERROR = "set a.b.own_key=1"\n',
        "has_a_variable": "def f(own_key=1):\n    return g(own_key=own_key)\n",
        "documents": 'def f():\n    """Reads own_key."""\n',
    }
    for name, text in lines.items():
        (tmp_path / f"{name}.py").write_text(text)
    named = naming_files([parse(path) for path in sorted(tmp_path.iterdir())])
    assert named["own_key"] == {"declares.py", "reads.py", "says.py"} and not named["other_key"]


def test_packages_that_import_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.architecture.source.ROOT", tmp_path)
    monkeypatch.setattr("tests.architecture.source.PACKAGE", tmp_path / "verl_like")
    for name, text in {
        "one/a": "import verl_like.two.b",
        "two/b": "def f():\n    from verl_like.one import c",
        "two/d": "import verl_like.three",
    }.items():
        path = tmp_path / "verl_like" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert pairs_both_ways([parse(path) for path in sorted(tmp_path.rglob("*.py"))]) == {("one", "two")}


def test_public_names_are_those_outside_others_insides(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n def b(self):\n  def c(): ...\n def _d(self): ...\nclass _E:\n def f(self): ...\n"
    )
    assert [node.name for node in public_names(parse(tmp_path / "a.py").tree)] == ["A", "b"]


_WATCHED = """
import subprocess
import sys
from tests.architecture.bars import Watch
from verl_like.text import table_rows

watch, before = Watch(), sys.getprofile()
with watch:
    table_rows("a | b")
    assert not watch.files()
    watch.is_on = True
    table_rows("a | b")
    watch.is_on = False
assert {path.name for path in watch.files()} == {"text.py"} and watch.num_lines() > 1
assert sys.getprofile() is before
"""


def test_a_watch_sees_functions_of_the_package_while_it_is_on() -> None:
    """In a process of its own: where torch has compiled something, Python 3.11 hangs under a profile function."""
    subprocess.run([sys.executable, "-c", _WATCHED], cwd=ROOT, check=True, timeout=120)
