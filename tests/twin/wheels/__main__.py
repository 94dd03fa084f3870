"""Renews the tables of this folder: `make twin-wheels`. Downloads 1.5 GB, one archive at a time, and keeps none.

    python -m tests.twin.wheels                     # the pinned versions and the newest of each, then the closure
    python -m tests.twin.wheels --folder DIR        # reads DIR/*.whl and *.tar.gz, downloads nothing
    python -m tests.twin.wheels --only tables       # or closure

A table has one line for each use, `used from us -> where it is found`; a line with MISSING names what is not there, and
where the name is defined now. tests/twin/test_wheels.py reads the tables, and fails on such a line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.twin.wheels import closure
from tests.twin.wheels.archive import Archive
from tests.twin.wheels.uses import Use, uses

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
# Package -> the versions whose tables are kept ("" is the newest), and the modules in it that are ours to look for.
PACKAGES = {
    "vllm": (("0.26.0", "0.32.0", ""), ("vllm",)),  # the pinned one for devices, the newest that is allowed
    "sglang": (("0.5.23", ""), ("sglang",)),
    "liger-kernel": (("0.8.5", ""), ("liger_kernel",)),
    "flash-attn": (("",), ("flash_attn", "flash_attn_interface")),
    "torch-memory-saver": (("",), ("torch_memory_saver",)),
}
_LEAST_FREE = 3 * 2**30
_LINUX = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)] + ["manylinux2014_x86_64"]


def table(archive: Path, wanted: list[Use]) -> str:
    """Text of one archive's table."""
    found = Archive(archive)
    lines = [f"{use} -> {found.look_up(use)}" for use in wanted]
    head = f"# {version_of(archive)}: used from us -> found (file:line). Written by `make twin-wheels`."
    return "\n".join([head, *lines]) + "\n"


def version_of(archive: Path) -> str:
    """vllm-0.26.0 of vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl."""
    name = archive.name.removesuffix(".tar.gz")
    package, version = name.split("-")[:2]
    return f"{package.replace('_', '-')}-{version}"


@contextmanager
def downloaded(package: str, version: str) -> Iterator[Path]:
    """The Linux wheel for Python 3.12, or the source archive where there is none; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="twin-wheels-") as folder:
        if (free := shutil.disk_usage(folder).free) < _LEAST_FREE:
            raise SystemExit(f"{free / 2**30:.1f} GiB are free in {folder}, {_LEAST_FREE >> 30} are needed: set TMPDIR")
        pin = f"{package}=={version}" if version else package
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, pin]
        of_linux = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        of_linux += [word for tag in ("cp312", "abi3", "none") for word in ("--abi", tag)]
        of_linux += [word for tag in _LINUX for word in ("--platform", tag)]
        done = subprocess.run([*command, *of_linux], capture_output=True, text=True)
        if done.returncode:  # its metadata are built with the torch that is here; nothing is compiled
            environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
            source = [*command, "--no-binary", ":all:", "--no-build-isolation"]
            done = subprocess.run(source, capture_output=True, text=True, env=environment)
        files = [path for path in Path(folder).iterdir() if path.suffix in (".whl", ".gz")]
        if done.returncode or len(files) != 1:
            raise SystemExit(f"{pin} could not be downloaded:\n{done.stderr[-2000:]}")
        yield files[0]


def renew(folder: Path | None) -> None:
    """Write all tables anew, and remove those of versions that are not kept."""
    ours = uses(ROOT / "verl_like")
    written: set[Path] = set()
    for package, (versions, modules) in PACKAGES.items():
        wanted = [use for module in modules for use in ours.get(module, [])]
        for version in versions if folder is None else [""]:
            if folder is not None:
                prefix = package.replace("-", "_")
                for archive in sorted([*folder.glob(f"{prefix}-*.whl"), *folder.glob(f"{prefix}-*.tar.gz")]):
                    written.add(_write(archive, wanted))
                continue
            with downloaded(package, version) as archive:
                written.add(_write(archive, wanted))
    for old in set(FOLDER.glob("*-*.txt")) - written:
        old.unlink()


def _write(archive: Path, wanted: list[Use]) -> Path:
    path = FOLDER / f"{version_of(archive)}.txt"
    path.write_text(table(archive, wanted), encoding="utf-8")
    missing = path.read_text(encoding="utf-8").count("MISSING")
    print(f"{path.name}: {len(wanted)} uses, {missing} missing", flush=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="archives that are there already")
    parser.add_argument("--only", choices=("tables", "closure"), help="one half of the work")
    arguments = parser.parse_args()
    if arguments.only != "closure":
        renew(arguments.folder)
    if arguments.only != "tables":
        closure.renew(ROOT)


if __name__ == "__main__":
    main()
