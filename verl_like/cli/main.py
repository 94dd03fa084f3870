"""Entry point of `verl-like`: a table of verbs. Only the verb that was asked for is imported, so that help is quick."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_like import __version__
from verl_like.ending import orderly_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Subcommand of verl-like.

    folder, module: place of its `add_arguments(parser)`, and of its `run(arguments)` unless the former sets another
        one; module None: of the verb's name.
    mixed: options may stand between its positional arguments.
    passes_on: words behind -- are no arguments of its own, and arrive as `passed`.
    leaves: it has closed all that it opened, so that its process need not look through what it imported, for most of a
        second, before it ends.
    """

    name: str
    help: str
    examples: tuple[str, ...]
    mixed: bool = True
    passes_on: bool = False
    leaves: bool = False
    folder: str = "verl_like.kit.verbs"
    module: str | None = None


VERBS = (
    Verb(
        name="quickstart",
        help="train a tiny model on additions with GRPO, no download: about 4 minutes on 2 cores",
        examples=("verl-like quickstart", "verl-like quickstart --rollout hf trainer.total_training_steps=50"),
    ),
    Verb(
        name="train",
        folder="verl_like.cli",
        help="train a language model; takes the keys of verl's main_ppo",
        examples=(
            "verl-like train algorithm=grpo data.train_files=train.parquet actor_rollout_ref.model.path=MODEL",
            "verl-like train --config-path runs --config-name config trainer.total_epochs=3",
            "verl-like train --cfg job --resolve preset=dapo",
        ),
    ),
    Verb(
        name="sft",
        folder="verl_like.trainer",
        module="sft_trainer",
        help="train a language model on given answers; takes the keys of verl's sft_trainer",
        examples=(
            "verl-like sft data.train_files=train.parquet model.path=MODEL",
            "verl-like sft data.train_files=train.parquet data.prompt_key=question data.response_key=answer "
            "model.path=MODEL optim.lr=1e-5 data.max_length=2048",
        ),
    ),
    Verb(
        name="preference",
        folder="verl_like.plugins.preference",
        module="__main__",
        help="train a language model or a reward model on pairs of answers: DPO, IPO, KTO, ORPO, SimPO, Bradley-Terry",
        examples=(
            "verl-like preference data.train_files=pairs.parquet model.path=MODEL",
            "verl-like preference data.train_files=pairs.parquet model.path=MODEL preference.loss=reward optim.lr=1e-5",
            "verl-like preference preference.rollouts=checkpoints/run model.path=MODEL",
        ),
    ),
    Verb(
        name="serve",
        folder="verl_like.plugins.tinker_server",
        module="start",
        help="serve one base model to clients of the Tinker protocol, each with adapters of its own",
        examples=(
            "verl-like serve model.path=MODEL",
            "verl-like serve model.path=MODEL serve.model_name=Qwen/Qwen3-8B serve.host=0.0.0.0 serve.api_keys=keys",
        ),
    ),
    Verb(
        name="plan",
        folder="verl_like.cli",
        help="check a command line of train and tell what it would do: no workers, no weights, nothing written",
        examples=(
            "verl-like plan algorithm=grpo data.train_files=train.parquet actor_rollout_ref.model.path=MODEL",
            "verl-like plan --config-path runs --config-name config && verl-like train --config-path runs ...",
        ),
        leaves=True,
    ),
    Verb(
        name="explain",
        help="tell what a key means, who reads it, and what it does in your configuration",
        examples=(
            "verl-like explain actor_rollout_ref.actor.clip_ratio_low",
            "verl-like explain critic.ppo_epochs algorithm=grpo",
            "verl-like explain algorithm.filter_groups",
        ),
    ),
    Verb(
        name="export",
        help="make a Hugging Face folder of a checkpoint, ours or verl's",
        examples=(
            "verl-like export checkpoints/run my_model --dtype bfloat16",
            "verl-like export checkpoints/run/global_step_40 my_adapter --lora apart",
            "verl-like export verl_run/global_step_100/actor my_model",
        ),
    ),
    Verb(
        name="eval",
        help="answer and grade validation sets with a checkpoint or any model",
        examples=(
            "verl-like eval checkpoints/run",
            "verl-like eval checkpoints/run/global_step_40 -n 8 --samples answers.jsonl",
            "verl-like eval Qwen/Qwen2.5-0.5B-Instruct --config-path checkpoints/run --config-name config",
            "verl-like eval MODEL data.val_files=test.parquet data.max_prompt_length=512 data.max_response_length=1024",
        ),
    ),
    Verb(
        name="replay",
        help="make a recorded step of a run again, in one process, and compare loss, gradient and every column",
        examples=("verl-like replay checkpoints/run 12", "verl-like replay checkpoints/run 12 trainer.device=cpu"),
    ),
    Verb(
        name="bisect",
        help="find the first step, phase and tensor in which two recorded runs part",
        examples=("verl-like bisect checkpoints/run_a checkpoints/run_b",),
    ),
    Verb(
        name="chat",
        help="talk to a checkpoint or any model",
        examples=(
            "verl-like chat checkpoints/run",
            "verl-like chat my_model --engine vllm --temperature 0",
            "verl-like chat checkpoints/run/global_step_40 --prompt 'What is 37 + 58?'",
        ),
    ),
    Verb(
        name="report",
        help="write one HTML file about a run",
        examples=("verl-like report checkpoints/run", "verl-like report checkpoints/run --out run.html"),
    ),
    Verb(
        name="compare",
        help="write one HTML file about several runs",
        examples=("verl-like compare checkpoints/first checkpoints/second --out both.html",),
    ),
    Verb(
        name="diff",
        help="tell in which keys two runs differ",
        examples=(
            "verl-like diff checkpoints/first checkpoints/second",
            "verl-like diff checkpoints/first/global_step_20 checkpoints/first/global_step_40",
            "verl-like diff checkpoints/first my_config.yaml",
        ),
    ),
    Verb(
        name="import",
        module="import_settings",
        help="turn ROLL's YAML or Colossal-RL's arguments into a command line of train, and tell what was refused",
        examples=(
            "verl-like import roll rlvr_config.yaml",
            "verl-like import roll rlvr_config.yaml --out run.sh",
            "verl-like import colossal --num-episodes 10 -m MODEL -d train.jsonl -t 4 -i 4 -rt boxed",
        ),
        mixed=False,
    ),
    Verb(
        name="data",
        help="list and prepare data sets, and show files as the trainer reads them",
        examples=(
            "verl-like data list",
            "verl-like data prepare gsm8k --out ~/data/gsm8k",
            "verl-like data prepare countdown -- --template chat",
            "verl-like data show data/gsm8k/train.parquet --model Qwen/Qwen2.5-0.5B-Instruct --row 3",
        ),
        mixed=False,
        passes_on=True,
    ),
    Verb(
        name="doctor",
        help="tell versions, devices, Ray, sandbox level and shared memory of this machine, and what is missing",
        examples=("verl-like doctor", "verl-like doctor --start-ray"),
    ),
    Verb(
        name="selfcheck",
        help="show that loss and gradient are right on your model, however a batch is cut",
        examples=("verl-like selfcheck", "verl-like selfcheck --rows 24 -- actor_rollout_ref.model.path=MODEL"),
        mixed=False,
    ),
    Verb(
        name="check-template",
        help="show what the chat template does to turns of a conversation",
        examples=("verl-like check-template MODEL", "verl-like check-template MODEL --chat-template my.jinja"),
    ),
    Verb(
        name="bench",
        help="measure the trainer on fixed shapes",
        examples=("verl-like bench grpo --model 0.5b --workload w1", "verl-like bench sync --help"),
        mixed=False,
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run the verb. What is wrong with a configuration ends with status 1 and its text."""
    with orderly_end():  # from here on, and the rest is imported below
        from verl_like.config.errors import ConfigError
        from verl_like.config.parser import Parser, meant

        words = sys.argv[1:] if argv is None else list(argv)
        top = _parser()
        if not words or words[0].startswith("-"):
            top.parse_args(words)
            top.error("name a COMMAND")
        name, *rest = words
        verb = next((verb for verb in VERBS if verb.name == name), None)
        if verb is None:
            top.error(f"there is no command {name!r}{meant(name, [verb.name for verb in VERBS])}")
        parser = Parser(
            prog=f"verl-like {name}",
            description=f"{verb.help[0].upper()}{verb.help[1:]}.",
            examples=verb.examples,
            mixed=verb.mixed,
        )
        module = importlib.import_module(f"{verb.folder}.{verb.module or name.replace('-', '_')}")
        parser.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(parser)
        end = rest.index("--") if verb.passes_on and "--" in rest else len(rest)
        arguments = parser.parse_args(rest[:end])
        arguments.passed = rest[end + 1 :]
        run: Callable[[argparse.Namespace], None] = arguments.run
        try:
            run(arguments)
        except ConfigError as error:
            sys.exit(f"error: {error}")
        except Exception as error:
            if name in ("train", "sft", "preference") or isinstance(error, BrokenPipeError):  # they tell of it
                raise
            from verl_like.observe.logs import told_in_a_line

            with told_in_a_line(f"verl-like {name}"):
                raise
    if argv is None and verb.leaves:
        os._exit(0)


def _parser() -> argparse.ArgumentParser:
    from verl_like.config.parser import Parser

    width = max(len(verb.name) for verb in VERBS)
    lines = [f"  {verb.name:<{width}}  {verb.help}" for verb in VERBS]
    parser = Parser(
        prog="verl-like",
        usage="verl-like COMMAND ...",
        description="Train language models with PPO and GRPO, and look at what came of it.",
        epilog="\n".join(["commands:", *lines, "", "verl-like COMMAND --help shows options and examples."]),
    )
    parser.add_argument("--version", action="version", version=f"verl_like {__version__}")
    return parser
