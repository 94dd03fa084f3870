"""`verl-like doctor`: versions, devices, Ray, sandbox, room, and what is missing."""

from __future__ import annotations

import argparse
import sys

_MARKS = {"ok": " ", "info": " ", "warn": "!", "missing": "x"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One switch."""
    parser.add_argument("--start-ray", action="store_true", help="start a Ray of our own and stop it again")


def run(arguments: argparse.Namespace) -> None:
    """Print the findings as they come; exit status 1 when something is missing without which nothing runs."""
    from verl_like import __version__
    from verl_like.kit.forecast.machine import examine

    print(f"verl_like {__version__}")
    section, wrong = "", []
    for finding in examine(start_ray=arguments.start_ray):
        if finding.section != section:
            section = finding.section
            print(f"\n{section}")
        print(f"{_MARKS[finding.status]} {finding.name:<16} {finding.text}", flush=True)
        if finding.status in ("warn", "missing"):
            wrong.append(finding)
    print("\nnothing is missing" if not wrong else f"\n{len(wrong)} to look at")
    for finding in wrong:
        print(
            f"{_MARKS[finding.status]} {finding.name}: {finding.text}" + (f" -> {finding.fix}" if finding.fix else "")
        )
    if any(finding.status == "missing" for finding in wrong):
        sys.exit(1)
