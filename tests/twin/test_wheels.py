"""What is called of vLLM, SGLang, FlashAttention and Liger is in their GPU wheels: committed tables, read offline.

`make twin-wheels` writes the tables (tests/twin/wheels/). A line of them that says MISSING is a failure here, with the
place where the name is now; a use that the tables do not have yet asks for new ones.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.twin.wheels import closure
from tests.twin.wheels.__main__ import FOLDER, PACKAGES, ROOT, table
from tests.twin.wheels.uses import uses

TABLES = sorted(path for path in FOLDER.glob("*-*.txt"))
# Where the way of a use may end before its last name: methods of tensors, modules, dictionaries and sets, and what
# torch.compile leaves on a function. Everything before these names was found.
NOT_THEIRS = {
    *(".view", ".view().flatten", ".view().flatten().to", ".long", ".long().cumsum", ".load_weights"),
    *(".keys", ".pop", ".update", ".items", ".values", ".clear", ".modules", "._torchdynamo_orig_callable"),
    ".close",  # of the writer of a snapshot of the load, which one of two functions makes
}


def package_of(path: Path) -> str:
    """vllm of vllm-0.26.0.txt."""
    return path.stem.rpartition("-")[0]


def lines(text: str) -> dict[str, str]:
    """Use -> where it was found."""
    return dict(line.split(" -> ", 1) for line in text.splitlines() if not line.startswith("#"))


@pytest.fixture(scope="module")
def ours() -> dict[str, list[str]]:
    """Uses by package, as tables write them."""
    found = uses(ROOT / "verl_like")
    return {
        package: [str(use) for module in modules for use in found.get(module, [])]
        for package, (_, modules) in PACKAGES.items()
    }


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_use_is_in_the_table_and_found(path: Path, ours: dict[str, list[str]]) -> None:
    text = path.read_text(encoding="utf-8")
    assert missing(text) == [], f"moved or gone in {path.stem}: use what is there, then `make twin-wheels`"
    assert list(lines(text)) == ours[package_of(path)], "uses have changed: `make twin-wheels` looks them up"
    untold = {place.partition(" untold: ")[2] for place in lines(text).values() if " untold: " in place}
    assert untold <= NOT_THEIRS, "types that the source does not tell: add them to TYPES of archive.py"


def missing(text: str) -> list[str]:
    """Lines of a table whose name or argument is not there."""
    return [f"{use} -> {place}" for use, place in lines(text).items() if "MISSING" in place]


def test_there_is_a_table_of_every_version() -> None:
    kept = {f"{package}-{version}" for package, (versions, _) in PACKAGES.items() for version in versions if version}
    assert kept <= {path.stem for path in TABLES}
    assert {package_of(path) for path in TABLES} == set(PACKAGES)
    pinned = closure.pins((ROOT / "constraints" / "cuda.txt").read_text())
    assert {f"{name}-{pinned[name]}" for name in ("vllm", "liger-kernel")} <= kept, "the stack that is installed"


# The finder itself, on small packages of ours and theirs.

OURS = """
def start(llm):
    from vllm.entrypoints.llm import LLM
    import vllm.tools as tools

    made = LLM("m", seed=1)
    made.sleep(level=1)
    options = {"deep": True}
    tools.look(made, **options)
    return getattr(tools, "newer", None)
"""
THEIRS = {
    "vllm/__init__.py": "",
    "vllm/tools.py": "from vllm.within import look\n",
    "vllm/within.py": "def look(llm, deep=False): ...\n",
    "vllm/base.py": "class Sleeper:\n    def sleep(self, level: int = 1): ...\n",
    "vllm/entrypoints/llm.py": (
        "from vllm.base import Sleeper\nclass LLM(Sleeper):\n    def __init__(self, model, *, seed=0): ...\n"
    ),
}


SLEEP = "vllm.entrypoints.llm.LLM().sleep(level)"


def found(tmp_path: Path, **changes: str) -> dict[str, str]:
    """The table of the small packages, files of theirs exchanged."""
    (tmp_path / "ours").mkdir(exist_ok=True)
    (tmp_path / "ours" / "start.py").write_text(OURS)
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in THEIRS.items():
            archive.writestr(name, changes.get(Path(name).stem, text))
    names = {"LLM", "look", "newer", "sleep"}
    wanted = [use for use in uses(tmp_path / "ours")["vllm"] if use.path.rpartition(".")[2] in names]
    wanted = [use for use in wanted if ".tools." in use.path or use.keywords is not None]
    return lines(table(wheel, wanted))


def test_names_are_followed_through_imports_objects_and_bases(tmp_path: Path) -> None:
    assert found(tmp_path) == {
        "vllm.entrypoints.llm.LLM().sleep(level)": "vllm/base.py:2",
        "vllm.entrypoints.llm.LLM(_, seed)": "vllm/entrypoints/llm.py:2",
        "vllm.tools.look(_, deep)": "vllm/within.py:1",
        "vllm.tools.newer if there": "absent",
    }


@pytest.mark.parametrize(
    ("file", "text", "use", "said"),
    [
        ("tools", "", "vllm.tools.look(_, deep)", "vllm.tools has no look; now in vllm.within.look"),
        ("within", "def look(llm, deeper=False): ...\n", "vllm.tools.look(_, deep)", "takes no argument deep"),
        ("base", "class Sleeper:\n    def nap(self): ...\n", SLEEP, "has no sleep"),
        (
            "base",
            "class Sleeper:\n    def sleep(self): ...\n",
            "vllm.entrypoints.llm.LLM().sleep(level)",
            "argument level",
        ),
        (
            "llm",
            "class LLM:\n    def __init__(self, *, seed=0): ...\n    def sleep(self, level): ...\n",
            "vllm.entrypoints.llm.LLM(_, seed)",
            "takes 0 positional arguments, not 1",
        ),
    ],
)
def test_a_moved_renamed_or_changed_function_is_told(tmp_path: Path, file: str, text: str, use: str, said: str) -> None:
    place = found(tmp_path, **{file: text})[use]
    assert place.startswith("absent MISSING: " if "no" in said.split()[:3] and "takes" not in said else "MISSING: ")
    assert said in place


def test_a_function_renamed_in_a_tables_source_fails(ours: dict[str, list[str]]) -> None:
    """The planted fault: a name of the committed table that is no use of ours any more, and one that is gone."""
    text = (FOLDER / "vllm-0.26.0.txt").read_text(encoding="utf-8")
    use = "vllm.v1.core.sched.request_queue.create_request_queue(_)"
    assert use in lines(text) and missing(text) == []
    renamed = text.replace(f"{use} -> ", f"{use} -> absent MISSING: no create_request_queue; now in vllm.q -> ")
    assert missing(renamed) == [
        f"{use} -> absent MISSING: no create_request_queue; now in vllm.q -> {lines(text)[use]}"
    ]
    assert list(lines(text.replace("create_request_queue", "make_request_queue"))) != ours["vllm"]


# The closure for cards.


def test_every_pin_of_the_cuda_stack_has_a_linux_wheel_or_is_source_only() -> None:
    pinned = closure.pins((ROOT / "constraints" / "cuda.txt").read_text())
    rows = closure.rows(closure.RESULT.read_text(encoding="utf-8"))
    stale = {n: (pinned[n], version) for n, (version, _) in rows.items() if n in pinned and pinned[n] != version}
    assert not stale, f"pins have changed: `make twin-wheels`: {stale}"
    unpinned = {name for name in rows if name not in pinned}
    assert all(name.startswith(("nvidia-", "cuda-")) or name in ("triton", "tzdata") for name in unpinned), unpinned
    source_only = {name for name, (_, tags) in rows.items() if "source" in tags.values()}
    assert source_only == {"antlr4-python3-runtime"}
    for name, (_, tags) in rows.items():
        assert set(tags) == set(closure.PYTHONS)
        for python, tag in tags.items():
            assert tag in ("-", "source") or fits(tag, python), f"{name}: {tag} on {python}"
    assert {n for n in ("torch", "vllm", "ray", "transformers") if "-" in rows[n][1].values()} == set()


def fits(tag: str, python: str) -> bool:
    """True for a wheel that Linux on x86-64 takes with this Python."""
    interpreter, abi, platform = tag.split("-")
    ours = int(python.partition(".")[2])
    of_it = any(
        each.startswith("py3") or each == f"cp3{ours}" or (abi == "abi3" and int(each.removeprefix("cp3")) <= ours)
        for each in interpreter.split(".")
        if not each.startswith("py2")
    )
    return of_it and (platform == "any" or ("linux" in platform and "x86_64" in platform))


def test_the_check_of_tags_can_fail() -> None:
    assert fits("cp312-cp312-manylinux_2_28_x86_64", "3.12") and fits("cp39-abi3-manylinux2014_x86_64", "3.13")
    assert fits("py2.py3-none-any", "3.11") and not fits("cp312-cp312-manylinux_2_28_x86_64", "3.13")
    assert not fits("cp313-abi3-manylinux2014_x86_64", "3.11") and not fits("py3-none-macosx_11_0_arm64", "3.12")
    assert closure.tags_of("a_b-1.0.tar.gz") == "source" and closure.tags_of("a-1-py3-none-any.whl") == "py3-none-any"
