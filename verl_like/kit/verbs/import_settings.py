"""`verl-like import roll FILE` and `import colossal ARGS`: another project's settings as a command line of train."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_like.kit.coming_from.colossal import ColossalRun, add_flags
from verl_like.kit.coming_from.importing import (
    CARRIED,
    NOTHING,
    REFUSED,
    UNKNOWN,
    Imported,
    Item,
    text_of,
    translate,
    write,
)
from verl_like.kit.coming_from.roll import RollFile

_REFUSED_STATUS = 3
_NAMES = 4  # of settings that share a reason
_WIDTH = 60  # of a value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand for each project."""
    projects = parser.add_subparsers(metavar="PROJECT", required=True)
    roll = projects.add_parser("roll", help="a YAML file of ROLL, with the files that its defaults name", mixed=True)
    roll.add_argument("file", metavar="FILE.yaml", type=Path)
    roll.set_defaults(run=_roll)
    colossal = projects.add_parser("colossal", help="the arguments of Colossal-RL's rl_example.py", mixed=True)
    add_flags(colossal)
    colossal.set_defaults(run=_colossal)
    for each in (roll, colossal):
        each.add_argument(
            "--out", type=Path, metavar="FILE", help="write a shell script, or a YAML file (.yaml), instead"
        )
        each.add_argument("--all", action="store_true", help="also name each setting that needs nothing")


def _roll(arguments: argparse.Namespace) -> None:
    _show(translate(RollFile(arguments.file)), str(arguments.file), arguments)


def _colossal(arguments: argparse.Namespace) -> None:
    own = ("run", "out", "all", "inside", "passed")
    flags = {name: text for name, text in vars(arguments).items() if name not in own}
    _show(translate(ColossalRun(flags, arguments.inside)), "rl_example.py", arguments)


def _show(done: Imported, origin: str, arguments: argparse.Namespace) -> None:
    """The report, then the command line or the file, unless train would refuse it; status 3 where something was refused
    or is unknown.
    """
    lines = report(done, origin, every=arguments.all)
    try:
        done.check()
        if arguments.out is not None:
            write(done, arguments.out, lines)  # before a line is printed: `| head` would end the process first
    finally:
        print("\n".join(lines) + "\n")
    print(done.command() if arguments.out is None else f"written: {arguments.out}")
    if done.of(REFUSED) or done.of(UNKNOWN):
        sys.exit(_REFUSED_STATUS)


def report(done: Imported, origin: str, *, every: bool = False) -> list[str]:
    """List what became of each setting, the refused ones first, a note once below all that it is about.

    every: also name each setting that needs nothing.
    """
    lists = {status: done.of(status) for status in (CARRIED, REFUSED, UNKNOWN, NOTHING)}
    counts = ", ".join(f"{len(items)} {status}" for status, items in lists.items())
    lines = [f"{done.project}: {origin}: {counts}"]
    lines += _by_reason("refused: no counterpart, or not available yet", lists[REFUSED], every)
    lines += _by_reason("unknown", lists[UNKNOWN], every)
    for title, items in (
        ("carried", [item for item in lists[CARRIED] if not item.assumed]),
        ("left out there, where the default is not ours", [item for item in lists[CARRIED] if item.assumed]),
    ):
        lines += ["", title] if items else []
        for note in dict.fromkeys(item.note for item in items):
            lines += [f"  {_left(item)}  ->  {_right(item)}" for item in items if item.note == note]
            lines += [f"      {note}"] if note else []
    return lines + _by_reason("needs nothing", lists[NOTHING], every)


def _by_reason(title: str, items: list[Item], every: bool) -> list[str]:
    lines = ["", title] if items else []
    for note in dict.fromkeys(item.note for item in items):
        same = [item for item in items if item.note == note]
        names = [_left(item) for item in (same if every else same[:_NAMES])]
        more = f" and {len(same) - len(names)} more (--all names them)" if len(same) > len(names) else ""
        stands = dict.fromkeys(_right(item) for item in same if item.settings)
        for_it = f"; in its place: {', '.join(stands)}" if stands else ""
        lines += [f"  {', '.join(names)}{more}", *([f"      {note}{for_it}"] if note else [])]
    return lines


def _left(item: Item) -> str:
    text = " ".join(text_of(item.value).split())
    shown = text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
    return f"{item.name}={shown}" + (" (the default there)" if item.assumed else "")


def _right(item: Item) -> str:
    """Write the settings in one line: the report stands as comments in the script that is written."""
    return " ".join(" ".join(f"{key}={text_of(value)}".split()) for key, value in item.settings.items())
