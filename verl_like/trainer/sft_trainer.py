"""Entry point: `python -m verl_like.trainer.sft_trainer data.train_files=... model.path=...`, with verl's names.

The run starts its own workers. Under torchrun, as verl's scripts start it, the first process of a machine is the run,
with as many workers as torchrun has processes there; the others end at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_like.ending import orderly_end
from verl_like.trainer.main_ppo import quiet_tokenizers, train

logger = logging.getLogger(__name__)
OBJECTIVE, _MODULE = "trainer.objective=sft", "verl_like.trainer.sft_trainer"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def of_torchrun(words: Sequence[str], environment: Mapping[str, str], module: str = _MODULE) -> list[str] | None:
    """Arguments of the run that torchrun asks for; None in a process that has nothing to do.

    module: that torchrun was given.

    Raises ValueError, with the command that does the same, where it asks for several machines.
    """
    here, everywhere = environment.get("LOCAL_WORLD_SIZE"), environment.get("WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environment or here is None or everywhere is None:
        return list(words)
    if here != everywhere:
        nodes = int(everywhere) // int(here)
        raise ValueError(
            f"torchrun with {nodes} machines: workers of several machines are Ray's. Run `ray start` on all, and on "
            f"one of them: python -m {module} trainer.nnodes={nodes} "
            f"trainer.n_gpus_per_node={here} ray_init.address=auto, with the keys given here"
        )
    if environment.get("LOCAL_RANK") != "0":
        return None
    given = any(word.lstrip("+").startswith("trainer.n_gpus_per_node=") for word in words)
    alone = [] if int(here) > 1 or any("trainer.launcher=" in word for word in words) else ["trainer.launcher=local"]
    return [*words, *([] if given else [f"trainer.n_gpus_per_node={here}", *alone])]


def of_script(words: Sequence[str]) -> list[str]:
    """Arguments without the number of processes and the folder that verl's scripts pass on behind the keys."""
    extra = [word for word in words if word.isdecimal() or (word.startswith("/") and "=" not in word)]
    if extra:
        logger.warning("no keys, and left out: %s", " ".join(extra))
    return [word for word in words if word not in extra]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of main_ppo, for `verl-like sft`."""
    from verl_like.trainer.command_line import add_run_arguments

    add_run_arguments(parser)


def run(arguments: argparse.Namespace, objective: str = OBJECTIVE) -> None:
    """Train on given answers, from parsed arguments."""
    from verl_like.trainer.command_line import run_parsed

    quiet_tokenizers()
    arguments.overrides = [objective, *of_script(arguments.overrides)]
    run_parsed(train, arguments)


def main(objective: str = OBJECTIVE, module: str = _MODULE) -> None:
    """Compose the configuration from the command line and train."""
    quiet_tokenizers()
    with orderly_end(), _told_by_torchrun():
        try:
            words = of_torchrun(sys.argv[1:], os.environ, module)
        except ValueError as error:
            sys.exit(f"error: {error}")
        if words is None:
            return
        for name in _TORCHRUN:
            os.environ.pop(name, None)  # the workers get their own
        from verl_like.trainer.command_line import run_main

        run_main(train, [objective, *of_script(words)])


@contextmanager
def _told_by_torchrun() -> Iterator[None]:
    """Give the error that ends the run to torchrun, whose own summary is the last that a user sees."""
    file = os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    try:
        yield
    except SystemExit as end:
        if file is not None and isinstance(end.code, str):
            told = {"message": end.code, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
