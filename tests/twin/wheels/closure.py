"""The closure of constraints/cuda.txt for each Python, resolved by pip without installing, and the wheel of each pin.

closure.txt is its committed result, one line for a package: version, and for each Python the tags of its Linux wheel,
`source` where only a source archive is there, or `-` where that Python does not need it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "dev,vllm,liger,wandb"  # what the image and `make setup` install of it, and Liger
RESULT = Path(__file__).with_name("closure.txt")


def renew(root: Path) -> None:
    """Resolve for every Python, and write closure.txt. Raises SystemExit where one is missing or has no solution."""
    found = {python: resolved(root, python) for python in PYTHONS}
    names = sorted({name for packages in found.values() for name in packages})
    lines = [f"# Closure of '.[{EXTRAS}]' under constraints/cuda.txt on Linux x86-64. Written by `make twin-wheels`."]
    lines.append(" | ".join(["package", *PYTHONS]))
    for name in names:
        versions = {packages[name][0] for packages in found.values() if name in packages}
        cells = [found[python].get(name, ("", "-"))[1] for python in PYTHONS]
        lines.append(" | ".join([f"{name}=={' or '.join(sorted(versions))}", *cells]))
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{RESULT.name}: " + ", ".join(f"{len(found[python])} packages on {python}" for python in PYTHONS))


def resolved(root: Path, python: str) -> dict[str, tuple[str, str]]:
    """Name -> (version, tags of the wheel or `source`) of what pip would install there."""
    if not shutil.which(f"python{python}") or subprocess.run([f"python{python}", "-V"], capture_output=True).returncode:
        raise SystemExit(f"python{python} does not start (PATH); the closure is resolved for {', '.join(PYTHONS)}")
    with tempfile.TemporaryDirectory(prefix="twin-closure-") as folder:
        here, report = Path(folder), Path(folder) / "report.json"
        subprocess.run([f"python{python}", "-m", "venv", str(here / "venv")], check=True)
        pip = [str(here / "venv/bin/python"), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", "-U", "pip"], check=True, capture_output=True)
        command = [*pip, "install", "--dry-run", "--ignore-installed", "-q", "--report", str(report)]
        command += ["-c", "constraints/cuda.txt", "setuptools", f"{root}[{EXTRAS}]"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"constraints/cuda.txt has no solution on Python {python}:\n{done.stderr[-3000:]}")
        installs = json.loads(report.read_text())["install"]
    found = {}
    for each in installs:
        name, version = normal(each["metadata"]["name"]), each["metadata"]["version"]
        if name != "verl-like":
            found[name] = (version, tags_of(each["download_info"]["url"].rpartition("/")[2]))
    return found


def tags_of(file: str) -> str:
    """cp312-cp312-manylinux_2_28_x86_64 of a wheel's name; `source` of any other archive's."""
    return "-".join(file.removesuffix(".whl").split("-")[-3:]) if file.endswith(".whl") else "source"


def pins(text: str) -> dict[str, str]:
    """Name -> version of a constraints file."""
    lines = [line.partition(";")[0].partition("#")[0].strip() for line in text.splitlines()]
    return {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}


def rows(text: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Name -> (version, tags by Python) of closure.txt."""
    lines = [line.split(" | ") for line in text.splitlines() if not line.startswith("#")]
    pythons = lines[0][1:]
    found = {}
    for first, *cells in lines[1:]:
        name, _, version = first.partition("==")
        found[name] = (version, dict(zip(pythons, cells, strict=True)))
    return found


def normal(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
