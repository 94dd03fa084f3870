"""`verl-like export CHECKPOINT OUT`: a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_like.config.errors import input_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the folder to make, and the form of the export."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint of ours (global_step_<n>), a run's folder (its newest one), or verl's folder of "
        "model_world_size_<W>_rank_<R>.pt files",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--role", choices=["actor", "critic"], default="actor", help="which model (actor)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="cast the weights (left out: as they are stored)"
    )
    parser.add_argument(
        "--lora",
        choices=["merge", "apart"],
        default="merge",
        help="merge: add an adapter into the weights; apart: write the adapter alone, as the peft library reads it",
    )
    parser.add_argument("--base", metavar="MODEL", help="the model under an adapter, where it moved since the run")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the model's own folder")
    parser.add_argument(
        "--trust-pickle", action="store_true", help="read verl's files with what torch does not know to be harmless"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the folder. Raises ConfigError, hence exit status 1, for what cannot be exported."""
    from verl_like.checkpoint.files import require_writable
    from verl_like.kit.export import Choices, export

    choices = Choices(
        dtype=arguments.dtype,
        merge=arguments.lora == "merge",
        base=arguments.base,
        trust_remote_code=arguments.trust_remote_code,
        trust_pickle=arguments.trust_pickle,
    )
    out = arguments.out.expanduser()
    with input_errors():
        require_writable("OUT", out.parent, make=False)
        lines = export(arguments.checkpoint.expanduser(), out, choices, arguments.role)
    print("\n".join([*lines, f"written to {out}; look at it with: verl-like chat {out}"]))
