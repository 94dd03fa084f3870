"""Command line of a run: hydra's form of keys, the user's YAML, `--cfg job`. For main_ppo and `verl-like`."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.config.parser import Parser
from verl_like.gc_settings import starting
from verl_like.observe.logs import told_in_a_line
from verl_like.trainer.compose import checked, compose, compose_tree, to_config
from verl_like.trainer.config_files import ENTRIES, entry_file, with_suffix, yaml_path

logger = logging.getLogger(__name__)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add keys, and the options that name the user's YAML file."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for instance actor_rollout_ref.rollout.n=8")
    parser.add_argument("--config-path", "-cp", "--config-dir", "-cd", help="folder of your YAML file")
    parser.add_argument("--config-name", "-cn", help="name of your YAML file")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that main_ppo takes."""
    add_config_arguments(parser)
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed configuration and stop")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: show values instead of interpolations")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)


def run_main(run: Callable[[PPOConfig], None], argv: Sequence[str] | None = None) -> None:
    """Compose from the command line and run. `--cfg job` prints the configuration instead.

    A faulty configuration ends the program with the list of faults and exit status 1, without a traceback.
    """
    parser = Parser(
        prog="python -m verl_like.trainer.main_ppo",
        description="Train a language model with PPO or GRPO.",
        epilog="Keys are verl's: docs/configuration.md lists them all with meaning, unit and default.",
    )
    add_run_arguments(parser)
    run_parsed(run, parser.parse_intermixed_args(sys.argv[1:] if argv is None else list(argv)))


@starting()
def run_parsed(run: Callable[[PPOConfig], None], arguments: argparse.Namespace) -> None:
    """Run `run_main`, from parsed arguments."""
    try:
        if arguments.multirun:
            raise ConfigError(["--multirun is not supported: start one run per setting"])
        files = user_files(arguments)
        if arguments.cfg:
            _show(arguments, files)
            return
        with told_in_a_line("the start"):
            config = compose(arguments.overrides, files)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    run(config)


def user_files(arguments: argparse.Namespace) -> list[Path]:
    """Find the YAML file that --config-path and --config-name mean, if any.

    Raises ConfigError where it is not there.
    """
    name = arguments.config_name
    if name is None and arguments.config_path is None:
        return []
    if name is None:
        folder = Path(arguments.config_path)
        names = f"{folder.parent} --config-name={folder.stem}" if folder.suffix else f"{folder} --config-name=NAME"
        raise ConfigError([f"--config-path={folder} without --config-name: give --config-path={names}"])
    path = with_suffix(Path(arguments.config_path or "config").expanduser() / name)
    if path.stem in ENTRIES and path.parent.name == "config" and not path.is_file():
        return []  # verl's own entry config, in the folder where its scripts name it
    if not path.is_file() and (entry := entry_file(path.name)):
        return [entry]
    backend = re.fullmatch("ppo_(veomni|torchtitan)_trainer", path.stem)
    if backend and not path.is_file():
        text = f"--config-name={name}: training by {backend[1]} is not available; leave it out, with the keys of that"
        raise ConfigError([f"{text} backend: FSDP trains here (actor.strategy=fsdp2)"])
    return [yaml_path(Path(arguments.config_path or "."), name)]


def _show(arguments: argparse.Namespace, files: list[Path]) -> None:
    """Print the configuration, then say what is wrong with it, as far as that is known without model and data."""
    tree, changes, warnings = compose_tree(arguments.overrides, files)
    if arguments.resolve:
        to_config(tree)  # which tells what cannot be resolved
    sys.stdout.write(OmegaConf.to_yaml(tree, resolve=arguments.resolve))
    config = to_config(tree)
    for warning in warnings + checked(config, changes):
        logger.warning("config: %s", warning)
    per_node = config.trainer.n_gpus_per_node
    if not isinstance(per_node, str):
        BatchPlan.build(config, config.trainer.nnodes * per_node)
