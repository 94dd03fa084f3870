"""`verl-like data`: list the data sets that can be prepared, prepare one, show a file as the trainer reads it."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_like.checkpoint.files import require_writable
from verl_like.config.errors import ConfigError, input_errors
from verl_like.config.parser import meant

if TYPE_CHECKING:
    from verl_like.kit.data_view import ShownRow

_COLOURS = ("\033[30;47m", "\033[30;46m")  # neighbouring tokens look different
_SPECIAL, _END = "\033[97;45m", "\033[0m"
_MEASURED = 2000  # rows that are tokenised for the lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the three subcommands."""
    actions = parser.add_subparsers(metavar="ACTION")
    parser.set_defaults(run=_list)
    listing = actions.add_parser("list", help="what can be prepared, and where it comes from")
    listing.set_defaults(run=_list)
    prepare = actions.add_parser(
        "prepare",
        help="download or generate a data set and write its parquet files",
        description="Options of the data set's own script stand behind --; `-- --help` shows them.",
    )
    prepare.add_argument("name", metavar="NAME", help="one of `verl-like data list`")
    prepare.add_argument("--out", type=Path, metavar="FOLDER", help="for the parquet files (data/NAME)")
    prepare.add_argument("--source", type=Path, metavar="PATH", help="its raw files, instead of a download")
    prepare.set_defaults(run=_prepare)
    show = actions.add_parser("show", help="rows of a file as tokens, with the chat template applied", mixed=True)
    show.add_argument("file", metavar="FILE", help="parquet, json, jsonl, csv or arrow")
    show.add_argument("--model", metavar="MODEL", help="whose tokenizer and template (actor_rollout_ref.model.path)")
    show.add_argument("--row", type=int, action="append", metavar="I", help="which row, from 0; repeatable (0)")
    show.add_argument("--ids", action="store_true", help="the ids of the tokens too")
    show.add_argument("overrides", nargs="*", metavar="key=value", help="data.* of your run, data.chat_template=...")
    show.set_defaults(run=_show)


def _list(arguments: argparse.Namespace) -> None:
    from verl_like.kit.datasets.catalogue import RECIPES
    from verl_like.kit.verbs.table import table

    print(table(("name", "what", "from"), [(each.name, each.what, each.origin) for each in RECIPES]))
    print("\nverl-like data prepare NAME writes data/NAME/*.parquet")


def _prepare(arguments: argparse.Namespace) -> None:
    from verl_like.kit.datasets.catalogue import RECIPES, prepare

    recipe = next((each for each in RECIPES if each.name == arguments.name), None)
    if recipe is None:
        known = [each.name for each in RECIPES]
        hint = meant(arguments.name, known) or f"; there are {', '.join(known)}"
        raise ConfigError([f"there is no data set {arguments.name}{hint}"])
    out = arguments.out or Path("data") / recipe.name
    with input_errors():
        require_writable("--out", out, make=False)
        files = prepare(recipe, out, arguments.source, arguments.passed)
    train = next((path for path in files if path.stem == "train"), files[0])
    keys = [f"data.{'train' if path.stem == 'train' else 'val'}_files={path}" for path in files]
    print(f"\nin a run: {' '.join(keys)}\nlook at it: verl-like data show {train} --model MODEL")


def _show(arguments: argparse.Namespace) -> None:
    from verl_like.kit.data_view import view
    from verl_like.trainer.compose import compose_with_warnings

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    model = [] if arguments.model is None else [f"actor_rollout_ref.model.path={arguments.model}"]
    config, _ = compose_with_warnings([*arguments.overrides, *model])
    found = view(config, arguments.file, arguments.row or [0], _MEASURED)
    sources = ", ".join(f"{name} {count:,}" for name, count in found.sources[:8])
    print(f"{arguments.file}: {found.num_rows:,} rows ({sources})")
    lengths = sorted(found.lengths)
    of = "" if len(lengths) == found.num_rows else f" of the first {len(lengths):,}"
    over = sum(length > found.limit for length in lengths)
    print(
        f"tokens of the prompts{of}: {lengths[0]:,} to {lengths[-1]:,}, median {lengths[len(lengths) // 2]:,}; "
        f"{over:,} longer than data.max_prompt_length={found.limit:,}"
    )
    if not found.has_template:
        print("the tokenizer has no chat template: the text of a user message is the prompt as it is")
    if found.adds:
        print(f"where a row has no system message the chat template adds: {found.adds!r}")
    for row in found.rows:
        print(f"\nrow {row.index}, {row.data_source}, {len(row.tokens):,} tokens")
        print(_tokens(row, ids=arguments.ids, colours=sys.stdout.isatty()))
        print(f"ground truth: {str(row.ground_truth)[:400]}")
        print(f"extra_info: {str(row.extra_info)[:400]}")
    if found.problem:
        raise ConfigError([f"a run refuses this file: {found.problem}"])


def _tokens(row: ShownRow, *, ids: bool, colours: bool) -> str:
    """Text with a bar between tokens, or each token on a background of its own; line ends are kept as such."""
    parts = []
    for number, (token, text, special) in enumerate(row.tokens):
        shown = f"{text}[{token}]" if ids else text
        if colours:
            colour = _SPECIAL if special else _COLOURS[number % 2]
            shown = "\n".join(f"{colour}{line}{_END}" if line else "" for line in shown.split("\n"))
        parts.append(shown)
    return ("" if colours else "|").join(parts)
