"""Cost of the driver itself in a step: seconds and memory of everything between the engines and the update.

    verl-like bench driver                                 # 1,024 prompts x 8, mean 2,300 tokens, at most 4,096
    verl-like bench driver --mean 8000 --longest 32768
    verl-like bench driver --prompts 64                     # in seconds

The trainer's own functions on made-up responses (log-normal lengths): no model, no workers. Ranks are played by this
process, which takes everything apart and together again as it would travel (pickle). Seconds are of CPU, the least of
the rounds. The unit of the ratios is one copy of the batch's own numbers (ids, log-probs, versions, mask), measured in
the same run. Exit code 1 when a bar is missed. `make bench-driver`, which CI runs, asks for less than twice the copies
that a small batch was seen to take.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.reward_shaping import RunningMoments, shape_rewards
from verl_like.batch import Evaluated, Experience, Prompt, PromptRow, Rollouts, Scores, Sequences, whole_episodes
from verl_like.cluster.worker_group import PendingResult, WorkerGroup
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import ACTOR
from verl_like.episodes.episode import Episode, Turn
from verl_like.episodes.rows import assemble_rollouts
from verl_like.kit.bench.bars import bar
from verl_like.kit.bench.fake_time import tokens_of
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.observe.memory import peak_bytes, reset_peak
from verl_like.observe.metrics import domain_metrics, rollout_metrics, sequence_balance_metrics
from verl_like.rollout.client import Events
from verl_like.rollout.rollout_engine import Completion, Sampled
from verl_like.trainer.compose import compose
from verl_like.trainer.dispatch import RowBalance
from verl_like.trainer.roles import ActorHandle, UpdateRules

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "gae", "optimal_token_baseline")
BYTES_A_TOKEN = 4 + 4 + 4 + 1  # id, log-prob of the engine, version, mask
_STEP = ("receive", "assemble", "scores", "old log-probs", "make_experience grpo", "update", "reporting")
_MESSAGE = 32  # responses that travel together
_RANKS, _SIGMA = 64, 0.6
_CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Targets of one batch of 8,192 responses: seconds of a step, and its peak memory in bytes of the batch (ratio), or
    in all."""

    longest: int
    seconds: float
    times_batch: float | None = None
    gib: float | None = None


BARS = (Bars(longest=4096, seconds=3.0, times_batch=3.0), Bars(longest=32_768, seconds=12.0, gib=8.0))


@dataclass(slots=True)
class Phases:
    """Seconds of CPU and additional peak memory of each phase that was run."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run the work, and note the seconds and the peak of memory above what was held before."""
        gc.collect()
        before = reset_peak(_CPU) or 0  # nothing is known where there is no Linux
        start = time.process_time()  # what others take of the machine is not the driver's
        result = work()
        self.seconds[name] = time.process_time() - start
        self.peak_bytes[name] = max(0, (peak_bytes(_CPU) or 0) - before)
        return result


def main(arguments: argparse.Namespace) -> Report:
    """Play one step's driver work on batches of this shape; exit code 1 where a bar is missed."""
    torch.set_num_threads(arguments.threads)
    lengths = response_lengths(arguments.prompts * arguments.n, arguments.mean, arguments.longest)
    rounds = [measure(lengths, arguments) for _ in range(arguments.rounds)]
    names = list(rounds[0][0].seconds)
    seconds = {name: min(phases.seconds[name] for phases, _ in rounds) for name in names}
    peaks = {name: max(phases.peak_bytes[name] for phases, _ in rounds) for name in names}
    copy = min(copied for _, copied in rounds)
    tokens, held = sum(lengths), max(phases.peak_bytes["whole step"] for phases, _ in rounds)
    rows = []
    for name in names:
        of_phase = {"copies": seconds[name] / copy, "peak, MiB": peaks[name] / 2**20}
        rows.append(Row(name=name, seconds=seconds[name], figures=of_phase))
    step = sum(seconds[name] for name in _STEP)
    seconds["whole step"] = step
    notes = [
        f"{tokens:,} tokens in {len(lengths)} responses, the longest {max(lengths)}; {_RANKS} ranks. A copy of the "
        f"batch ({tokens * BYTES_A_TOKEN / 2**20:,.0f} MiB) takes {copy:.4f} s; `copies` are such."
    ]
    figures = {"copies": step / copy, "step_seconds": step, "bytes_to_batch": held / (tokens * BYTES_A_TOKEN)}
    met = True
    for bars in BARS:
        if len(lengths) == 8192 and arguments.longest == bars.longest:
            lines = [bar("seconds of a step", step, bars.seconds)]
            if bars.times_batch is not None:
                lines.append(bar("peak by the bytes of the batch", figures["bytes_to_batch"], bars.times_batch))
            if bars.gib is not None:
                lines.append(bar("peak, GiB", held / 2**30, bars.gib))
            met = not any(line.endswith("MISSED.") for line in lines)
            notes += lines
    if arguments.most_copies is not None:
        notes.append(bar("step by a copy", step / copy, arguments.most_copies))
        met = met and step / copy <= arguments.most_copies
    work = {"prompts": arguments.prompts, "n": arguments.n, "mean": arguments.mean, "longest": arguments.longest}
    report = Report(bench="driver", work=work | {"threads": arguments.threads}, rows=rows, figures=figures, notes=notes)
    report = finish(report, arguments.json, arguments.compare)
    print("verdict: " + ("met" if met else "MISSED"), flush=True)
    if not met:
        sys.exit(1)
    return report


def measure(lengths: Sequence[int], arguments: argparse.Namespace) -> tuple[Phases, float]:
    """All phases once; and the seconds of one copy of the batch."""
    source, n = random.Random(2), arguments.n
    prompts = [_prompt(number, source) for number in range(arguments.prompts)]
    messages = _messages(lengths)
    phases, alone = Phases(), Phases()
    config = config_of("grpo", arguments)
    _Driver(config, arguments, phases).step(prompts, messages, n)
    phases.seconds["whole step"] = sum(phases.seconds[name] for name in _STEP)
    whole = _Driver(config, arguments, alone)
    alone.run("whole step", lambda: whole.step(prompts, messages, n, nested=True))
    phases.peak_bytes["whole step"] = alone.peak_bytes["whole step"]
    return phases, _copy_seconds(sum(lengths))


def config_of(estimator: str, arguments: argparse.Namespace) -> PPOConfig:
    """The configuration of a run with this batch."""
    settings = {
        "algorithm.adv_estimator": estimator,
        "data.train_files": "unused.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": arguments.prompts,
        "data.max_prompt_length": 512,
        "data.max_response_length": arguments.longest,
        "actor_rollout_ref.model.path": "unused",
        "actor_rollout_ref.rollout.n": arguments.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, arguments.prompts // 4),
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "trainer.total_training_steps": 1,
    }
    return compose([f"{key}={value}" for key, value in settings.items()])


class _Driver:
    """Driver's work of one step, phase by phase."""

    def __init__(self, config: PPOConfig, arguments: argparse.Namespace, phases: Phases) -> None:
        self.config, self.arguments, self.phases = config, arguments, phases
        plan = BatchPlan.build(config, _RANKS)
        options: dict[str, Any] = {"balance": True, "timeout_s": 60.0, "share_prompts": True}
        self.actor = ActorHandle(cast(WorkerGroup, _Ranks()), plan, **options)
        self.plan = plan

    def step(self, prompts: list[Prompt], messages: list[bytes], n: int, *, nested: bool = False) -> None:
        """Play the driver's part of a step.

        nested: all of it, in one phase of the caller's; otherwise each phase alone, and further estimators.
        """
        run = (lambda name, work: work()) if nested else self.phases.run
        completions = run("receive", lambda: _received(messages))
        rollouts = run("assemble", partial(_assembled, prompts, completions, n))
        del completions
        scores = run("scores", lambda: self._scores(rollouts))
        shaped = self._shaped(rollouts, scores)
        evaluated = run("old log-probs", lambda: self.actor.log_probs(rollouts))
        experience = run("make_experience grpo", lambda: self._experience("grpo", rollouts, scores, evaluated, shaped))
        run("update", partial(self._update, experience))
        del experience
        run("reporting", lambda: self._report(rollouts, scores))
        if nested:
            return
        for name in ESTIMATORS[1:]:
            given, shape = evaluated, rollouts.response_ids_T.shape
            if name == "gae":
                given = evaluated.replace(values_T=torch.zeros(shape))
            elif name == "optimal_token_baseline":
                given = evaluated.replace(sum_pi_squared_T=torch.full(shape, 0.5))
            run(
                f"make_experience {name}",
                lambda name=name, given=given: self._experience(name, rollouts, scores, given, shaped),
            )

    def _scores(self, rollouts: Rollouts) -> Scores:
        count = len(rollouts)
        scores = Scores(
            score_B=(torch.arange(count) % 3 == 0).float(),
            valid_B=torch.ones(count, dtype=torch.bool),
            extras=[{"acc": float(i % 3 == 0)} for i in range(count)],
            failures=[None] * count,
        )
        whole_episodes(rollouts, scores)
        self._shaped(rollouts, scores)
        return scores

    def _shaped(self, rollouts: Rollouts, scores: Scores) -> Tensor:
        config, longest = self.config, self.config.data.max_response_length
        found = shape_rewards(config.algorithm, config.reward_model, rollouts, scores, RunningMoments(), longest)
        return found.reward_B

    def _experience(
        self, estimator: str, rollouts: Rollouts, scores: Scores, evaluated: Evaluated, reward_B: Tensor
    ) -> Experience:
        config = self.config
        algorithm = config.algorithm if estimator == "grpo" else config_of(estimator, self.arguments).algorithm
        actor = config.actor_rollout_ref.actor
        return make_experience(algorithm, actor, rollouts, scores, evaluated, kl_coef=0.0, reward_B=reward_B)[0]

    def _update(self, experience: Experience) -> None:
        rules = UpdateRules(
            prompts_per_mini_batch=self.plan.roles[ACTOR].mini_batch_prompts,
            epochs=1,
            shuffle=False,
            seed=1,
            max_response_length=self.config.data.max_response_length,
            actor=self.config.actor_rollout_ref.actor,
        )
        self.actor.update(experience, rules, 1)

    def _report(self, rollouts: Rollouts, scores: Scores) -> None:
        tokens = rollouts.num_tokens_B()
        shares = RowBalance(share_prompts=True).shares(rollouts, _RANKS)
        domain_metrics(rollouts, scores)
        rollout_metrics(rollouts, 512)
        sequence_balance_metrics(tokens.tolist(), shares)


class _Ranks:
    """A worker group in this process: arguments and answers travel by pickle, as they do between processes."""

    world_size = _RANKS

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> PendingResult:
        answers = []
        for arguments in per_rank:
            (given,) = pickle.loads(pickle.dumps(arguments, protocol=pickle.HIGHEST_PROTOCOL))
            answers.append(pickle.loads(pickle.dumps(_answer(given), protocol=pickle.HIGHEST_PROTOCOL)))
        return _Done(answers)


class _Done:
    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self.answers


def _answer(given: Any) -> Any:
    """Log-probs for rows; for mini-batches of an update, no metrics."""
    if isinstance(given, Sequences):
        column = torch.full(given.response_ids_T.shape, -1.0)
        return Evaluated(response_length_B=given.response_length_B, old_log_probs_T=column)
    return [{} for _ in given]


def response_lengths(count: int, mean: int, longest: int) -> list[int]:
    """Log-normal lengths (deviation of the logarithm 0.6), cut at `longest`."""
    source, centre = random.Random(1), math.log(mean) - _SIGMA**2 / 2
    return [min(longest, max(1, round(source.lognormvariate(centre, _SIGMA)))) for _ in range(count)]


def _prompt(number: int, source: random.Random) -> Prompt:
    row = PromptRow(index=number, data_source=f"bench/{number % 2}", messages=[], ground_truth="1")
    return Prompt(ids=[number] * source.randint(100, 400), row=row, group=number, position=number)


def _messages(lengths: Sequence[int]) -> list[bytes]:
    """Pickle responses of these lengths, as the links to the replicas deliver them."""
    ended = [
        Completion(
            request_id=str(number),
            sampled=Sampled(
                token_ids=tokens_of(number, length),
                log_probs=np.full(length, -1.0, dtype=np.float32),
                weight_versions=np.zeros(length, dtype=np.int32),
            ),
            finish_reason="stop",
        )
        for number, length in enumerate(lengths)
    ]
    parts = [ended[start : start + _MESSAGE] for start in range(0, len(ended), _MESSAGE)]
    return [pickle.dumps(("events", Events(completions=part), []), protocol=pickle.HIGHEST_PROTOCOL) for part in parts]


def _received(messages: Sequence[bytes]) -> list[Completion]:
    return [completion for message in messages for completion in pickle.loads(message)[1].completions]


def _assembled(prompts: list[Prompt], completions: Sequence[Completion], n: int) -> Rollouts:
    episodes = [
        [Episode(turns=(Turn.of(prompt.ids, c),)) for c in completions[place * n : place * n + n]]
        for place, prompt in enumerate(prompts)
    ]
    return assemble_rollouts(prompts, episodes)


def _copy_seconds(tokens: int) -> float:
    """The fastest of five copies of as many bytes as the batch has, to memory that is mapped already."""
    given, target = torch.ones(tokens * BYTES_A_TOKEN, dtype=torch.uint8), None
    taken = []
    for _ in range(6):
        start = time.process_time()
        target = given.clone() if target is None else target.copy_(given)
        taken.append(time.process_time() - start)
    return min(taken[1:])
