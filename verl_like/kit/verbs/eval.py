"""`verl-like eval CHECKPOINT|MODEL`: the validation sets of a configuration, answered by any model."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from verl_like.config.errors import ConfigError
from verl_like.config.rules import risky
from verl_like.kit.verbs.table import table
from verl_like.models.location import check_model
from verl_like.trainer.command_line import add_config_arguments, user_files
from verl_like.trainer.compose import compose_with_warnings

if TYPE_CHECKING:
    from verl_like.kit.evaluation import SourceResult

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the configuration whose validation sets it answers."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder or hub name, a checkpoint, or a run's folder"
    )
    add_config_arguments(parser)
    parser.add_argument("-n", type=int, metavar="K", help="answers for each prompt, sampled: gives pass@k")
    parser.add_argument("--temperature", type=float, help="of these (1.0 with -n; else rollout.val_kwargs)")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all answers with their scores as jsonl")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all metrics, named as in a run's validation")


def run(arguments: argparse.Namespace) -> None:
    """Print a line for each data source. Raises ConfigError, hence exit status 1, for what is wrong with the inputs."""
    check_model(arguments.model)  # before torch is imported
    from verl_like.kit.evaluation import evaluate
    from verl_like.kit.serving import model_of, settings_for
    from verl_like.observe.samples import to_json

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    logging.getLogger("verl_like.kit.evaluation").setLevel(logging.INFO)
    for file in (arguments.samples, arguments.json):
        if file is not None and not file.expanduser().absolute().parent.is_dir():
            raise ConfigError([f"{file}: there is no folder {file.parent}"])
    with model_of(arguments.model) as model:
        keys = [*_sampling(arguments), *arguments.overrides]
        overrides, files = settings_for(model, keys, user_files(arguments))
        config, warnings = compose_with_warnings(overrides, files)
        of_training = {*risky(config)} - {*risky(config, "validation")}
        for warning in warnings if model.config_file is None else ():
            if warning not in of_training:
                logger.warning("config: %s", warning)
        done = evaluate(config)
    _print_table(done.sources)
    answers = sum(each.n * each.k for each in done.sources)
    print(f"\n{answers:,} answers of {arguments.model} in {done.seconds:.1f} s; failed rewards are in no mean")
    if arguments.samples is not None:
        text = "".join(to_json(sample) + "\n" for sample in done.samples)
        arguments.samples.expanduser().write_text(text, encoding="utf-8")
    if arguments.json is not None:
        arguments.json.expanduser().write_text(json.dumps(done.metrics, indent=1) + "\n")


def _print_table(sources: list[SourceResult]) -> None:
    k = sources[0].k
    header = ["data source", "n", "of", "mean", f"pass@{k}", "failed", "tokens", "cut off"]
    rows = [
        [
            *(each.source, f"{each.n:,}", each.variable, _number(each.mean), _number(each.best)),
            *(f"{each.failed:,}", f"{each.tokens:,.1f}", f"{each.cut:.1%}"),
        ]
        for each in sources
    ]
    if any(each.variable != "acc" for each in sources):  # pass@k is of what is right or wrong
        header[4] = f"best@{k}"
    if k == 1:
        rows, header = [row[:4] + row[5:] for row in rows], header[:4] + header[5:]
    print(table(header, rows, right=[column for column in range(1, len(header)) if header[column] != "of"]))


def _sampling(arguments: argparse.Namespace) -> list[str]:
    section = "actor_rollout_ref.rollout.val_kwargs"
    temperature = arguments.temperature if arguments.temperature is not None or arguments.n is None else 1.0
    keys = [] if arguments.n is None else [f"{section}.n={arguments.n}"]
    if temperature is not None:
        keys += [f"{section}.temperature={temperature}", f"{section}.do_sample={temperature > 0}"]
    return keys


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
