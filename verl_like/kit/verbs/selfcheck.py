"""`verl-like selfcheck ...`: a command line of main_ppo, checked instead of run: one gradient, then two whole steps."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl_like.config.errors import input_errors, raise_if_any
from verl_like.config.parser import Parser, number
from verl_like.trainer.command_line import add_config_arguments, user_files

if TYPE_CHECKING:
    from verl_like.config import PPOConfig

_LARGE = 2**28  # [bytes] of weights, whose largest tensors malloc may map anew each time (parallel/host_memory.py)
_KEEPS_ALL = "glibc.malloc.mmap_threshold=1600000000:glibc.malloc.trim_threshold=4000000000:glibc.malloc.tcache_count=0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verl-like selfcheck`."""
    parser.add_argument("--rows", type=number(1, kind=int), default=12, help="random rows of the mini-batch")
    parser.add_argument("--ranks", type=number(1, kind=int), default=2, help="of the data-parallel check; 1: none")
    add_config_arguments(parser)


def _not_of_a_plain_step(config: PPOConfig) -> Iterator[str]:
    if config.trainer.objective != "rl":
        yield f"trainer.objective={config.trainer.objective}: selfcheck is of reinforcement learning; leave it out"
    if config.distillation.enabled:
        yield "distillation.enabled=True: selfcheck knows no teachers; leave it out"


def _keep_large_tensors(model: str) -> None:
    """Begin again with a malloc that reuses blocks of every size, where this is the process's own command.

    glibc reads these settings when a process starts; the first part's children have them too. What a user set stays.
    """
    weights = sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))
    given = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if weights >= _LARGE and not given and platform.libc_ver()[0] == "glibc" and sys.argv[1:2] == ["selfcheck"]:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"GLIBC_TUNABLES": _KEEPS_ALL})


def run(arguments: argparse.Namespace) -> None:
    """Print two tables; exit status 1 when something differs from the plain model, or depends on how a batch is cut."""
    from verl_like.config import ModelConfig
    from verl_like.trainer.compose import compose

    keys = arguments
    if arguments.passed:  # behind --, as for the run itself: its options too
        line = Parser(prog="verl-like selfcheck --", mixed=True)
        add_config_arguments(line)
        before = argparse.Namespace(config_path=arguments.config_path, config_name=arguments.config_name)
        keys = line.parse_args([*arguments.overrides, *arguments.passed], before)
    with input_errors():
        files = user_files(keys)
        config = compose(keys.overrides, files)
        raise_if_any(_not_of_a_plain_step(config))
    model = config.actor_rollout_ref.model.path
    _keep_large_tensors(model)
    from verl_like.kit.selfcheck.check import SelfCheck
    from verl_like.kit.selfcheck.plain_adapters import with_noise
    from verl_like.kit.selfcheck.report import table
    from verl_like.kit.selfcheck.step_proof import prove_step, ranks_of_proof
    from verl_like.kit.selfcheck.tiny import DESCRIPTION, write_tiny_model
    from verl_like.models.location import missing_places

    with tempfile.TemporaryDirectory() as folder, input_errors():
        if model == ModelConfig().path and not Path(model).expanduser().exists():
            model = f"none given (actor_rollout_ref.model.path); {DESCRIPTION}"
            tiny = f"actor_rollout_ref.model.path={write_tiny_model(Path(folder))}"
            config = compose([*keys.overrides, tiny], files)
        raise_if_any(missing_places(config).values())
        ranks = ranks_of_proof(config, arguments.ranks)
        config = with_noise(config, Path(folder) / "adapters")
        findings, notes = SelfCheck(config=config, num_rows=arguments.rows).run(ranks=arguments.ranks)
        print("\n".join([f"model: {model}", *notes, table(findings)]), flush=True)
        if os.environ.get("GLIBC_TUNABLES") == _KEEPS_ALL:  # the steps' ranks keep no more than a run's
            del os.environ["GLIBC_TUNABLES"]
        steps, notes = prove_step(config, ranks=ranks)
    print("\n".join(["", *notes, table(steps)]))
    if not all(finding.passed for finding in (*findings, *steps)):
        sys.exit(1)
