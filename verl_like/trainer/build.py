"""Construction of a trainer that is ready to fit, from a configuration. Cheap checks come first, processes last."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl_like.algorithms.kl import KLController
from verl_like.batch import Prompt
from verl_like.checkpoint.layout import recover
from verl_like.cluster.lifecycle import StopFlag, graceful_interrupt
from verl_like.cluster.worker_group import RUN_ID_VARIABLE
from verl_like.config import PPOConfig
from verl_like.config.errors import input_errors, problems_of, raise_if_any
from verl_like.config.micro_batches import Lowered
from verl_like.config.roles import ACTOR, ROLLOUT
from verl_like.config.schema import to_dict
from verl_like.data.dataset import Dataset, make_encoder
from verl_like.data.loader import PromptLoader, iterate_all
from verl_like.episodes.answering import Answering
from verl_like.episodes.collector import Collector
from verl_like.episodes.outcomes import Policies
from verl_like.gc_settings import settle
from verl_like.models.cost import ModelCost
from verl_like.models.loading import shares_prompts
from verl_like.observe.health_watch import HealthWatch
from verl_like.observe.live_display import build_progress
from verl_like.observe.run_folder import SAMPLES
from verl_like.observe.samples import SampleStore
from verl_like.observe.trackers import build_trackers
from verl_like.registry import part
from verl_like.rollout.sampling import train_sampling, validation_sampling
from verl_like.trainer.checkpoints import Checkpoints
from verl_like.trainer.costs import SpeedReport
from verl_like.trainer.dispatch import RowBalance
from verl_like.trainer.facts import Facts, required, train_loader
from verl_like.trainer.folders import log_dir, profile_dir
from verl_like.trainer.loop import Loop
from verl_like.trainer.own_code import trainer_class
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.recording import RecordedSource, Recorder
from verl_like.trainer.replica_group import Fleet
from verl_like.trainer.replicas import RolloutGroup, StandingRolloutGroup
from verl_like.trainer.reporting import Reporter
from verl_like.trainer.resume import check_data, fetch_resume, find_resume, processes_text
from verl_like.trainer.reward_check import grade_sample, refuse_unknown_numbers, try_rewards
from verl_like.trainer.reward_models import use_reward_model
from verl_like.trainer.roles import (
    ActorHandle,
    CriticHandle,
    ReferenceHandle,
    RoleHandle,
    TeacherHandle,
    handle_options,
)
from verl_like.trainer.start_checks import problems
from verl_like.trainer.start_messages import start_phase, worker_start_text
from verl_like.trainer.state import TrainState
from verl_like.trainer.validation import Validator
from verl_like.trainer.weights import Weights
from verl_like.trainer.workers import Pools, Workers
from verl_like.user_code import external_modules
from verl_like.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
Handle = TypeVar("Handle", bound=RoleHandle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Parts on the driver by which a run of one trainer.objective differs from others.

    facts: what the run is made of. problems: yields what is wrong with them. assemble: puts the trainer together, as
    `assemble` does.
    """

    facts: type[Facts]
    problems: Callable[[Any], Iterator[str]]
    assemble: Callable[..., Loop]


def objective_of(config: PPOConfig) -> Objective:
    """Return the parts of trainer.objective."""
    name = config.trainer.objective
    return Objective(facts=Facts, problems=problems, assemble=assemble) if name == "rl" else part("objective", name)()


def prepare(config: PPOConfig, stack: ExitStack, told: Iterable[str] = ()) -> Facts:
    """Check everything that needs no worker: own code, tools, model files, data, batch plan, graders.

    Graders are started and tried; what was started ends with `stack`. A start that is tried again takes the facts as
    they are.

    told: problems that are known already. Raises ConfigError with these and all that can be told besides.
    """
    objective = objective_of(config)
    facts = objective.facts(config, stack)
    raise_if_any([*told, *objective.problems(facts)])
    logger.info("%d process(es) on %s; %s", facts.plan.world_size, facts.device, facts.plan.table())
    raise_if_any(problems_of(lambda: facts.memory))  # which is logged before anything starts
    return facts


@contextmanager
def prepared(config: PPOConfig) -> Iterator[Facts]:
    """Run `prepare`, until the end of the context. Raises ConfigError: what is wrong."""
    with ExitStack() as stack:
        with input_errors(), start_phase("tokenizer, data, graders"):
            ready = prepare(config, stack)
            if (
                config.trainer.objective == "rl"
                and ready.rewards.rule_grades
                and not (ready.rewards.asks_judge or config.env.train.tags)
            ):
                try:
                    reports = grade_sample(ready.train, ready.rewards, ready.tokenizer)
                except ValueError as error:  # a grader of one's own may want answers of another form
                    logger.warning("%s", error)
                else:
                    refuse_unknown_numbers(config, reports)
        yield ready


@contextmanager
def started(
    ready: Facts,
    workers: Workers,
    confirm_folder: Callable[[], None] = lambda: None,
    kind: type[Loop] | None = None,
    *,
    again: bool = False,
    lowered: Mapping[str, Lowered] | None = None,
) -> Iterator[Loop]:
    """Start a trainer whose workers live as long as the context.

    Args:
        ready: the run, checked.
        workers: see `trainer.workers`, the one place that knows whether that is Ray.
        confirm_folder: see `Checkpoints`.
        kind: the trainer's class; None: that of trainer.trainer_class.
        again: an earlier start of this run, which saved a checkpoint, was lost: resume from the newest checkpoint of
            this run's folder, whatever trainer.resume_mode says.
        lowered: by role, sizes of micro-batches that earlier starts found too large.
    """
    config, inputs, plan = ready.config, ready, ready.plan
    inputs.tool_usage()  # what tools did in a step that was lost with an earlier start counts for no step
    with ExitStack() as stack:
        with input_errors():
            recover(Path(config.trainer.default_local_dir).expanduser())
            fetch_resume(config.trainer)
            resume = find_resume(config, newest=again)
            if resume is not None:
                check_data(resume, inputs.train)
                if other := processes_text(resume, plan.pools[0].world_size):
                    logger.warning("%s", other)
            run: dict[str, Any] = {"end_ids": inputs.eos_ids, "vision": inputs.vision, "resume": resume}
            checkpoints = Checkpoints(config.trainer, inputs.tokenizer, confirm=confirm_folder, **run)
            stack.callback(checkpoints.close)
        sizes: dict[str, Any] = {"tokenizer_size": len(ready.tokenizer), "max_model_len": ready.max_model_len}
        own: dict[str, Any] = {"profile_dir": str(profile_dir(config)), "external_modules": external_modules()}
        spec = WorkerSpec(config=config, plan=plan, lowered=dict(lowered or {}), **sizes, **own)
        engine = f", {config.actor_rollout_ref.rollout.name}" if config.trainer.objective == "rl" else ""
        with start_phase(f"{plan.world_size} worker(s): weights{engine}"):
            groups = stack.enter_context(workers(spec, ready.device))
        pools = Pools(groups, plan, config.trainer.rpc_timeout)
        logger.info("start: %s", worker_start_text(pools.ask("start_seconds")))
        for line in dict.fromkeys(itertools.chain.from_iterable(pools.ask("differences"))):
            logger.warning("%s", line)
        if config.trainer.objective == "rl":
            _use_reward_models(ready, pools)
        stop = stack.enter_context(graceful_interrupt())
        timeout = config.trainer.rpc_timeout
        peaks = {name: group.call_all("device_peak").wait(timeout=timeout) for name, group in groups.items()}
        speed = part("speed", "report").of(config, plan, ready.costs, peaks, ready.device, ready.memory.metrics())
        with input_errors():
            report = build_reporter(ready, speed, checkpoints.resume_step)
        stack.callback(report.close)
        loader = train_loader(config, inputs.train, plan)
        parts = (loader, pools, report, stop, checkpoints, stack)
        trainer = objective_of(config).assemble(ready, *parts, kind)
        stack.callback(settle(seldom=config.trainer.launcher != "local"))
        yield trainer


def _use_reward_models(ready: Facts, pools: Pools) -> None:
    """Give the graders the run's own models, and try those that had to wait for them."""
    rewards, tokenizers = ready.rewards, ready.reward_tokenizers or (ready.tokenizer, None)
    use_reward_model(ready.config, ready.plan, pools, rewards, tokenizers)
    if rewards.awaits_servers:
        with input_errors():
            try_rewards(ready.config, ready, rewards)


def build_reporter(ready: Facts, speed: SpeedReport, resumed_at: int | None) -> Reporter:
    """Build the run's trackers, live display and sample files.

    resumed_at: the step of the checkpoint it starts from.
    """
    config, plan, inputs = ready.config, ready.plan, ready
    settings, run_id = config.trainer, os.environ.get(RUN_ID_VARIABLE, "")
    shared = shares_prompts(config.actor_rollout_ref.model, config.actor_rollout_ref.actor.router)
    spread = RowBalance(even=settings.balance_batch, cost=ready.costs.actor, share_prompts=shared)
    progress = build_progress(
        enabled="console" in settings.logger, total_steps=plan.total_training_steps, first_step=resumed_at or 0
    )
    return Reporter(
        settings,
        build_trackers(settings, to_dict(config), log_dir(config), resumed_at=resumed_at, run_id=run_id),
        progress,
        inputs.tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        steps_per_epoch=required(plan.steps_per_epoch),
        plan=plan,
        spread=spread,
        speed=speed,
        store=SampleStore(log_dir(config) / SAMPLES, settings.sample_max_mb, resumed_at),
        report=part("report", "html")(log_dir(config), settings.report_freq),
        health=HealthWatch(settings.health, log_dir(config), resumed_at),
        first_step=(resumed_at or 0) + 1,
    )


def assemble(
    facts: Facts,
    loader: PromptLoader,
    pools: Pools,
    report: Reporter,
    stop: StopFlag,
    checkpoints: Checkpoints,
    stack: ExitStack,
    kind: type[PPOTrainer] | None,
) -> PPOTrainer:
    """Put the driver's parts around the worker groups; `stack` closes those that have to be."""
    config, plan, costs, rewards = facts.config, facts.plan, facts.costs, facts.rewards
    settings = config.trainer
    rollout = config.actor_rollout_ref.rollout
    skips, recorded = rollout.skip_rollout, rollout.engine.recorded
    pair = pools.of(ACTOR), pools.of(ROLLOUT)
    weights = Weights(*pair, timeout_s=settings.rpc_timeout, nobody_samples=recorded)
    sampling = {
        "timeout_s": settings.rpc_timeout,
        "max_running_requests": config.actor_rollout_ref.rollout.scheduler.max_running_requests,
        "has_weights": lambda: weights.version is not None,
    }
    pool = pools.of(ROLLOUT)
    standing = isinstance(pool, Fleet)
    replicas = StandingRolloutGroup(pool, **sampling) if standing else RolloutGroup(pool, plan, **sampling)
    pools.reachable, weights.reachable = replicas.paused, replicas.renewed

    shared = partial(handle_options, settings, plan)

    def models(role: type[Handle], cost: ModelCost | None, **options: Any) -> Handle | None:
        if role.role not in plan.roles:
            return None
        return role(pools.of(role.role), plan, **shared(role.role, cost), **options)

    actor = models(ActorHandle, costs.actor, on_change=weights.changed)
    critic = models(CriticHandle, costs.critic)
    frozen = {n: TeacherHandle(n, pools.of(n), plan, **shared(n, cost)) for n, cost in costs.teachers.items()}
    encoder = make_encoder(facts.data, facts.tokenizer)
    teaching = (config, facts.tokenizer, encoder, frozen)
    assert actor is not None
    how = answering(config, facts, validation=False)
    source = RecordedSource if skips or recorded else Collector
    collector = source(loader, rewards, replicas, how, config, plan.total_training_steps)
    stack.callback(replicas.close)
    stack.callback(collector.close)
    return (kind or trainer_class(config))(
        config=config,
        plan=plan,
        total_steps=required(plan.total_training_steps),
        state=TrainState(step=0, weight_version=0, kl=KLController.from_config(config.algorithm.kl_ctrl)),
        source=collector,
        pools=pools,
        actor=actor,
        reference=models(ReferenceHandle, costs.actor),
        critic=critic,
        teachers=part("teachers", "open")(*teaching) if config.distillation.enabled else None,
        recorder=Recorder(config, [role for role in (actor, critic) if role is not None]),
        weights=weights,
        rewards=rewards,
        validator=Validator(
            lambda: validation_batches(config, facts.val),
            answering(config, facts, validation=True),
            on_samples=report.validation_samples,
        ),
        checkpoints=checkpoints,
        report=report,
        stop=stop,
        on_scores=collector.feedback,
    )


def answering(config: PPOConfig, inputs: Facts, *, validation: bool) -> Answering:
    """Options by which prompts are answered, in training or in validation."""
    rollout = config.actor_rollout_ref.rollout
    guesses = rollout.speculative.method != "none" and rollout.engine.guesses
    sampling = (validation_sampling if validation else train_sampling)(rollout, inputs.eos_ids, inputs.tokenizer)
    return Answering(
        runner=inputs.runner,
        sampling=sampling,
        n=rollout.val_kwargs.n if validation else rollout.n,
        seed=config.trainer.seed if rollout.seed_per_request else None,
        purpose="val" if validation else "train",
        n_redundant=0 if validation else rollout.n_redundant,
        spread=rollout.scheduler.expand_n,
        greedy_too=config.algorithm.estimator.greedy and not validation,
        grade_at_end=rollout.scheduler.mode == "batch",
        priority=-1 if validation and config.asynchronous else 0,  # training goes on meanwhile, and can wait
        policies=Policies.from_config(rollout.outcomes, max_failure_fraction=config.reward_model.max_failure_fraction),
        tool_usage=inputs.tool_usage,
        drafts=None if validation or not guesses else part("drafts", "history")(rollout.speculative),
    )


def validation_batches(config: PPOConfig, dataset: Dataset | None) -> Iterable[list[Prompt]]:
    """Yield the whole validation set; empty without one."""
    if dataset is None:
        return ()
    data = config.data
    return iterate_all(dataset, data.val_batch_size, shuffle=data.validation_shuffle, seed=config.trainer.seed)
