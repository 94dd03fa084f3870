"""The images, without a Docker engine: what is copied is there, and the package installs from what is copied before it.

The downloads of their RUN lines are proved elsewhere: the closure for cards is resolved by `make twin-wheels`, and the
CPU image runs scripts/setup_env.sh, as `make setup` does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, tracked_files
from tests.twin.wheels import closure

FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
FIRST = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(FROM, image) and so on; continued lines are joined, comments left out."""
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in plain.splitlines() if line.strip()]


def faults(text: str) -> list[str]:
    """What of a Dockerfile would not build the same tomorrow, or leaves rubbish in the image."""
    found = []
    for word, rest in instructions(text):
        if word not in FIRST:
            found.append(f"no instruction {word}")
        elif word == "FROM" and not re.search(r":\w*\d", rest):
            found.append(f"{rest}: no version")
        elif word == "RUN" and "apt-get install" in rest:
            wanted = ("apt-get update &&", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
            found += [f"apt-get without {each}" for each in wanted if each not in rest]
        elif word == "RUN" and "pip install" in rest:
            found += [] if "-c constraints/" in rest else [f"{each}: no version" for each in loose_packages(rest)]
            found += [] if "--no-cache-dir" in rest else ["pip without --no-cache-dir"]
    return found


def loose_packages(command: str) -> list[str]:
    """Packages of a pip command without a version; the project itself is none."""
    words = [word.strip('"') for word in command.split()[2:] if not word.startswith("-")]
    return [word for word in words if "==" not in word and not word.startswith(".")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_is_clean(file: Path) -> None:
    assert faults(file.read_text()) == []
    if tool := shutil.which("hadolint"):
        subprocess.run([tool, str(file)], check=True)


def test_the_lint_can_fail() -> None:
    bad = (
        "FROM ubuntu\nMAINTAINER me\nRUN apt-get install git\nRUN pip install torch_memory_saver \\\n  sglang==1 -e .\n"
    )
    assert faults(bad) == [
        "ubuntu: no version",
        "no instruction MAINTAINER",
        *(
            f"apt-get without {x}"
            for x in ("apt-get update &&", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
        ),
        "torch_memory_saver: no version",
        "pip without --no-cache-dir",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_package_installs_from_what_is_copied_before(file: Path, tmp_path: Path) -> None:
    """Without its dependencies; in the CPU image scripts/setup_env.sh gives this very command."""
    tree = tmp_path / "image"
    copy_until_install(file.read_text(), tree)
    install = ["install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    install += ["--prefix", str(tmp_path / "prefix")]  # without --ignore-installed pip takes the own one away
    done = subprocess.run([*PIP, *install, "-e", str(tree)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "prefix/bin/verl-like").is_file()


def copy_until_install(text: str, tree: Path) -> None:
    """Do what COPY says until the RUN line that installs the package. Files that are not tracked are in no image."""
    tracked = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    for word, rest in instructions(text):
        if word == "RUN" and ("-e " in rest or "setup_env.sh" in rest):
            assert "setup_env.sh" not in rest or (tree / "scripts/setup_env.sh").is_file()
            assert all((tree / name).is_file() for name in re.findall(r"-c (\S+)", rest))
            return
        if word != "COPY":
            continue
        *sources, target = rest.split()
        for source in sources:
            found = [name for name in tracked if name == source or name.startswith(f"{source}/")]
            assert found, f"COPY {source}: no such file under version control"
            for name in found:
                inside = name if len(sources) > 1 or target == "./" else f"{target}{name.removeprefix(source)}"
                (tree / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / inside)
    raise AssertionError("no RUN line installs the package")


def test_what_images_install_is_what_was_looked_up() -> None:
    """SGLang's image names its versions itself: those of the tables of tests/twin/wheels."""
    text = (ROOT / "docker/Dockerfile.sglang").read_text()
    for name, version in re.findall(r'"?(sglang|torch[-_]memory[-_]saver)==([\w.]+)', text):
        assert (closure.RESULT.parent / f"{closure.normal(name)}-{version}.txt").is_file(), f"make twin-wheels: {name}"
    vllm = (ROOT / "docker/Dockerfile.vllm").read_text()
    assert f"vLLM {closure.pins((ROOT / 'constraints/cuda.txt').read_text())['vllm'].rpartition('.')[0]}" in vllm
    (extras,) = re.findall(r"\.\[([\w,]+)\]", vllm)
    assert set(extras.split(",")) <= set(closure.EXTRAS.split(","))
