"""The validation sets of a configuration, answered by any model: `verl-like eval`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from verl_like.batch import Rollouts, Scores, whole_episodes
from verl_like.config import DataConfig, PPOConfig
from verl_like.config.errors import ConfigError, input_errors, raise_if_any
from verl_like.data.loader import PromptLoader
from verl_like.data.sampler import ResumableSampler
from verl_like.episodes.collector import Collector
from verl_like.kit.serving import served
from verl_like.models.location import file_problem
from verl_like.observe.samples import Sample, make_samples
from verl_like.observe.validation import report_names
from verl_like.plugins.agents.external import ExternalChat, NoEngine
from verl_like.plugins.http_json import ServiceError
from verl_like.rollout.client import RolloutClient
from verl_like.trainer import build
from verl_like.trainer.facts import Facts, required
from verl_like.trainer.start_checks import problems
from verl_like.trainer.validation import Validator

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """Result of one data source.

    n: prompts.
    mean: of the core variable (acc, where the reward gives it, else the reward).
    best: pass@k of 0/1 values, else the mean of the best of k; None where k is 1.
    failed: rewards that could not be computed; they are in no mean.
    """

    source: str
    n: int
    k: int
    variable: str
    mean: float | None
    best: float | None
    failed: int
    tokens: float
    cut: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation.

    metrics: all val-core/* and val-aux/* of a run's validation.
    seconds: of answering and grading.
    """

    sources: list[SourceResult]
    metrics: dict[str, float]
    samples: list[Sample]
    seconds: float


def evaluate(config: PPOConfig) -> Evaluation:
    """Answer and grade data.val_files as a run's validation does.

    Raises ConfigError for what is wrong with the inputs.
    """
    _check_alone(config)
    with ExitStack() as stack:
        with input_errors():
            facts = Facts(config, stack, trains=False)
            raise_if_any(problems(facts))
        dataset, device, rewards = required(facts.val), facts.device, facts.rewards
        how, rollout = build.answering(config, facts, validation=True), config.actor_rollout_ref.rollout
        if rollout.engine.endpoint:
            chat = _external(config, facts, stack)
            replica, how, device = _NoReplica(), dataclasses.replace(how, runner=chat), rollout.openai.url
        else:
            sizes = {"tokenizer_size": len(facts.tokenizer), "max_model_len": facts.max_model_len}
            replica = stack.enter_context(served(config, facts.hf_config, **sizes, device=device))
        order = ResumableSampler(len(dataset), shuffle=False, seed=0, identity=dataset.identity())
        collector = Collector(PromptLoader(dataset, order, 1), rewards, replica, how, config)
        stack.callback(collector.close)
        answered: list[tuple[Rollouts, Scores]] = []
        batches = partial(build.validation_batches, config, dataset)
        validator = Validator(batches, how, on_samples=lambda _, found: answered.extend(found))
        logger.info("%d prompts x %d answers on %s", len(dataset), how.n, device)
        began = time.perf_counter()
        try:
            metrics = validator.run(collector, 0)
        except ServiceError as error:
            raise ConfigError([str(error)]) from error
        seconds = time.perf_counter() - began
        samples = [each for pair in answered for each in make_samples(*pair, facts.tokenizer, 0)]
    sources = list(_results(metrics, answered, how.n))
    return Evaluation(sources=sources, metrics=metrics, samples=samples, seconds=seconds)


class _NoReplica:
    """Stand-in for the replicas (`episodes.collector.Replicas`) of episodes that ask no engine."""

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        """Wait for what `work` does elsewhere."""
        return work(NoEngine()).result()


def _external(config: PPOConfig, facts: Facts, stack: ExitStack) -> ExternalChat:
    """The model behind rollout.openai.url."""
    rollout, seed = config.actor_rollout_ref.rollout, config.trainer.seed
    with input_errors():
        chat = ExternalChat(rollout.openai, facts.tokenizer, seed if rollout.seed_per_request else None)
    stack.callback(chat.close)
    return chat


def _check_alone(config: PPOConfig) -> None:
    """Raise ConfigError where there are no validation sets, or the configuration cannot be evaluated in one process."""
    files, reward = config.data.val_files, config.reward_model
    if not files or (files == DataConfig().val_files and file_problem("data.val_files", files[0])):
        raise ConfigError(
            ["no validation set is named: give data.val_files=FILE, or the --config-path and --config-name of a run"]
        )
    if reward.enable:
        raise ConfigError(
            [
                f"reward_model.enable={reward.enable}: a reward model scores in the workers of a run. Set it to "
                "false to grade by rules, or use verl-like train trainer.val_only=True"
            ]
        )


def _results(metrics: dict[str, float], answered: Sequence[tuple[Rollouts, Scores]], k: int) -> Iterator[SourceResult]:
    names = report_names(row for rollouts, _ in answered for row in rollouts.rows)
    wholes = [whole_episodes(*each)[0] for each in answered]
    facts = [zip(w.rows, w.response_length_B.tolist(), w.cut_off_B.tolist(), strict=True) for w in wholes]
    told = [(names[row.validation_set, row.data_source], *numbers) for each in facts for row, *numbers in each]
    for source in dict.fromkeys(names.values()):
        lengths, cut = zip(*(numbers for name, *numbers in told if name == source), strict=True)
        variable = "acc" if f"val-core/{source}/acc/mean@{k}" in metrics else "reward"
        found = {
            name: value
            for part in ("val-core", "val-aux")
            for name in (f"mean@{k}", f"pass@{k}", f"best@{k}/mean")
            if (value := metrics.get(f"{part}/{source}/{variable}/{name}")) is not None
        }
        yield SourceResult(
            source=source,
            n=int(metrics[f"val-aux/{source}/num_prompts"]),
            k=k,
            variable=variable,
            mean=found.get(f"mean@{k}"),
            best=found.get(f"pass@{k}", found.get(f"best@{k}/mean")) if k > 1 else None,
            failed=int(metrics[f"val-aux/{source}/failed_rewards"]),
            tokens=sum(lengths) / len(lengths),
            cut=sum(cut) / len(cut),
        )
