"""Colossal-RL's command line (rl_example.py) as our settings: reading it, and the rules that need several flags."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from verl_like.config.errors import ConfigError
from verl_like.config.names import Row, plain_names, table, value_of
from verl_like.kit.coming_from.importing import CARRIED, NOTHING, REFUSED, Foreign, Outcome, carry

_PYTHON = {"None": None, "True": True, "False": False}
_GPUS_PER_NODE = 8
# Flags that other sizes are computed from.
_COUNT = re.compile(r"num_(trainers|inferencer|generations)|.*(batch_size|parallel_size|new_tokens)")
_ESTIMATORS = {"RLOO": "rloo", "REINFORCE_PPB": "reinforce_plus_plus_baseline"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the script, and NAME=VALUE for what is set inside it (grpo_config, plugin_config)."""
    for row in table("Colossal-RL"):
        flags = [name for name in row.names if name.startswith("-")]
        if flags:
            shown = {"nargs": "?", "const": "True"} if "--enable_profiling" in flags else {"metavar": "VALUE"}
            default = argparse.SUPPRESS
            parser.add_argument(*flags, dest=_name(row), default=default, help=_help(row), **shown)  # pyright: ignore
    parser.add_argument("inside", nargs="*", metavar="NAME=VALUE", help="an entry of grpo_config or plugin_config")


def _name(row: Row) -> str:
    """The setting of a line: its first name, without dashes."""
    return row.names[0].lstrip("-").replace("-", "_")


def _help(row: Row) -> str:
    return (", ".join(row.keys) or row.note or "nothing is to be set").replace("%", "%%")


class ColossalRun(Foreign):
    """A command line of rl_example.py, with that script's defaults."""

    project = "Colossal-RL"
    why_off: ClassVar = {"not DAPO": "DAPO takes no KL term, whatever is set"}

    def __init__(self, flags: Mapping[str, str], inside: Sequence[str] = ()) -> None:
        super().__init__({name: _value(text) for name, text in flags.items()})
        for pair in inside:
            name, equals, text = pair.partition("=")
            if not equals:
                raise ConfigError([f"{pair}: write NAME=VALUE for what is set inside the script, or a flag with --"])
            row = self.row_of(name)
            self.leaves[_name(row) if row else name] = _value(text)
        for name, value in self.leaves.items():
            if _COUNT.fullmatch(name) and value is not None and (type(value) is not int or value < 1):
                raise ConfigError([f"--{name.replace('_', '-')} {value}: give a whole number above 0"])
        self.algorithm: str = self("algo")
        if problems := self._broken_rules():
            raise ConfigError(problems)
        self.data_parallel = self("num_trainers") // (
            self("tensor_parallel_size", 1) * self("pipeline_parallel_size", 1)
        )
        self.update: int = self("train_batch_size") * max(1, self.data_parallel)
        self.step: int = self("num_inferencer") * self("inference_batch_size")

    def _broken_rules(self) -> list[str]:
        """Constraints of its README that its launcher asserts, with the numbers that break them. Sizes that nothing
        here depends on are none of them: see rule_step and idle."""
        trainers, split = self("num_trainers"), self("tensor_parallel_size", 1) * self("pipeline_parallel_size", 1)
        engine = self("inference_batch_size")
        at_once = self.leaves.get("inference_microbatch_size", min(8, engine))
        rules = {
            f"num_trainers={trainers} is no multiple of tensor x pipeline parallel size {split}": trainers % split,
            f"inference_batch_size={engine} is no multiple of inference_microbatch_size={at_once}": engine % at_once,
        }
        return [f"{text}: Colossal-RL's launcher refuses that too" for text, broken in rules.items() if broken]

    def row_of(self, name: str) -> Row | None:
        return next((row for row in table(self.project) if name in plain_names(row)), None)

    def group(self) -> dict[str, Any]:
        return {"preset": "coati_dapo" if self.algorithm == "DAPO" else "coati"}

    def is_on(self, name: str) -> bool:
        own = {"vllm": self("backend") == "vllm", "DAPO": self.algorithm == "DAPO"}
        return own[name] if name in own else bool(self(name))

    def idle(self, name: str) -> str:
        if name != "train_minibatch_size" or self.leaves.get(name) is None:
            return ""
        batch, mini, micro, group = (
            self(each) for each in ("train_batch_size", name, "train_microbatch_size", "num_generations")
        )
        if batch % mini == 0 and mini * group >= micro:
            return ""
        sizes = f"train_batch_size={batch}, train_minibatch_size={mini}, train_microbatch_size={micro}"
        return f"that launcher refuses {sizes}; here the gradients of all {batch} are summed up anyway"

    def rule_reward_type(self, name: str, value: str, keys: list[str]) -> dict[str, Any]:
        ends = {keys[1]: ["</answer>"], keys[2]: self.is_on("vllm")} if value == "think_answer_tags" else {}
        return {keys[0]: value, **ends}

    def rule_algo(self, name: str, value: str, keys: list[str]) -> Outcome | dict[str, Any]:
        if value not in ("GRPO", "DAPO", *_ESTIMATORS):
            return Outcome(REFUSED, note=f"choose one of GRPO, DAPO, {', '.join(_ESTIMATORS)}")
        return self.group() | ({keys[1]: _ESTIMATORS[value]} if value in _ESTIMATORS else {})

    def rule_eval_dataset(self, name: str, value: Any, keys: list[str]) -> dict[str, Any]:
        if value is None:
            return {keys[0]: []}
        try:
            files = value if isinstance(value, dict) else json.loads(str(value).replace("'", '"'))
            return carry(keys, 0) | {keys[0]: dict(files)}
        except (ValueError, TypeError) as error:
            raise ConfigError([f'--eval-dataset {value}: write {{"task": "path"}}']) from error

    def rule_processes(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        return _spread(self("num_trainers") + (0 if self("n_behind") else self._num_sampling), keys)

    def rule_behind(self, name: str, value: int, keys: list[str]) -> Outcome | dict[str, Any]:
        if not value:
            return Outcome(NOTHING)
        pool = ["actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node"]
        return {
            **carry(keys, value),
            keys[0]: "separate_async",
            "actor_rollout_ref.hybrid_engine": False,
            "algorithm.rollout_correction.rollout_is": "token",
            **_spread(self._num_sampling, pool),
        }

    @property
    def _num_sampling(self) -> int:
        return self("num_inferencer") * self("producer_tensor_parallel_size", 1)

    def rule_step(self, name: str, value: int, keys: list[str]) -> Outcome:
        if self.step % self.update == 0:
            return Outcome(CARRIED, {keys[0]: self.step})
        told = (
            f"{self.step} prompts between syncs are no multiple of the {self.update} of an update, which that launcher "
        )
        return Outcome(CARRIED, {keys[0]: self.update}, f"{told}refuses: a step takes one update's")

    def rule_update(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: self.update}

    def rule_engine_batch(self, name: str, value: int, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: value * self("num_generations")}

    def rule_top_k(self, name: str, value: Any, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: value if value is not None else 50 if self("backend") == "transformers" else -1}

    def rule_kl(self, name: str, value: float, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: value, keys[1]: True} if value else {keys[1]: False}

    def rule_cache_length(self, name: str, value: Any, keys: list[str]) -> Outcome | dict[str, Any]:
        if value is None and self.algorithm != "DAPO":
            return Outcome(NOTHING)
        return {keys[0]: min(1024, self("max_new_tokens") // 4) if value is None else value}

    def rule_save_dir(self, name: str, value: str, keys: list[str]) -> dict[str, Any]:
        return {keys[0]: f"{value.rstrip('/')}/{str(self('project')).replace(' ', '_')}"}


def _spread(count: int, keys: list[str]) -> dict[str, Any]:
    """Divide a number of processes into nodes and processes of each."""
    nodes = math.ceil(count / _GPUS_PER_NODE)
    return {keys[0]: nodes, keys[1]: count if nodes == 1 else _GPUS_PER_NODE}


def _value(text: str) -> Any:
    return _PYTHON[text] if text in _PYTHON else value_of(text)
