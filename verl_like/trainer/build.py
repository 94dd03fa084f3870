"""Construction of a trainer that is ready to fit, from a configuration. Cheap checks come first, processes last."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.algorithms.kl import KLController
from verl_like.batch import Prompt
from verl_like.checkpoint.layout import recover
from verl_like.cluster.lifecycle import StopFlag, graceful_interrupt
from verl_like.cluster.worker_group import RUN_ID_VARIABLE
from verl_like.config import DataConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import input_errors
from verl_like.config.paths import DATA_FILES
from verl_like.config.placement import has_further_pools
from verl_like.config.roles import ACTOR, ROLLOUT, needs_critic, roles_of
from verl_like.config.schema import to_dict
from verl_like.data.dataset import Dataset, make_encoder
from verl_like.data.foreign import build_dataset
from verl_like.data.loader import PromptLoader, iterate_all
from verl_like.data.prompt_truth import own_text
from verl_like.data.sampler import ResumableSampler, Sampler
from verl_like.data.templates import SYSTEM_PROMPTS
from verl_like.episodes.answering import Answering
from verl_like.episodes.collector import Collector
from verl_like.episodes.episode import EpisodeRunner, SingleTurn, Toolbox
from verl_like.episodes.outcomes import Policies
from verl_like.gc_settings import settle
from verl_like.models.cost import ModelCost
from verl_like.models.families import refuse_vision
from verl_like.models.loading import check_ulysses, end_token_ids, load_hf_config, load_tokenizer, shares_prompts
from verl_like.models.location import check_locations
from verl_like.models.tensor_plan import check_model
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.observe.health_watch import HealthWatch
from verl_like.observe.live_display import build_progress
from verl_like.observe.run_folder import SAMPLES
from verl_like.observe.samples import SampleStore
from verl_like.observe.trackers import build_trackers
from verl_like.registry import part
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.build import require_heads, require_quantization
from verl_like.rollout.sampling import train_sampling, validation_sampling
from verl_like.trainer.checkpoints import Checkpoints
from verl_like.trainer.costs import Forecast, ModelCosts, SpeedReport
from verl_like.trainer.dispatch import RowBalance
from verl_like.trainer.folders import log_dir, profile_dir
from verl_like.trainer.inputs import (
    check_adapters,
    check_vision,
    max_model_len,
    refuse_media,
    refuse_media_keys,
    refuse_missing_answers,
)
from verl_like.trainer.own_code import check_own_code, trainer_class
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.recording import RecordedSource, Recorder
from verl_like.trainer.replica_group import Fleet
from verl_like.trainer.replicas import RolloutGroup, StandingRolloutGroup
from verl_like.trainer.reporting import Reporter
from verl_like.trainer.resume import fetch_resume, find_resume, processes_text
from verl_like.trainer.reward_check import grade_sample, self_check, try_out
from verl_like.trainer.reward_models import load_reward_model, use_reward_model
from verl_like.trainer.roles import ActorHandle, CriticHandle, ReferenceHandle, RoleHandle
from verl_like.trainer.start_checks import check_machine, check_models, check_sampling
from verl_like.trainer.start_messages import start_phase, worker_start_text
from verl_like.trainer.state import TrainState
from verl_like.trainer.validation import Validator
from verl_like.trainer.weights import Weights
from verl_like.trainer.workers import Pools, Workers
from verl_like.user_code import external_modules
from verl_like.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
Handle = TypeVar("Handle", bound=RoleHandle)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a run that can be read and checked before any process is started."""

    tokenizer: PreTrainedTokenizerBase
    hf_config: PretrainedConfig
    train: Dataset
    val: Dataset | None
    eos_ids: tuple[int, ...]
    reward_tokenizers: tuple[Any, Any] | None  # of the policy's texts and of the reward model, where these differ
    runner: EpisodeRunner  # how a prompt becomes an episode, in training and in validation
    vision: VisionProcessor | None = None  # of a model that looks at images
    tool_usage: Callable[[], dict[str, float]] = dict  # metrics of its tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Run as far as it can be known and checked without workers; a start that is tried again takes it as it is.

    rewards: its graders run already.
    """

    config: PPOConfig
    device: str
    inputs: Inputs
    plan: BatchPlan
    costs: ModelCosts
    spec: WorkerSpec
    rewards: RewardManager
    memory: Forecast

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return self.plan.world_size


def prepare(config: PPOConfig, stack: ExitStack) -> Prepared:
    """Check everything that needs no worker: own code, tools, model files, data, batch plan, graders.

    Graders are started and tried; what was started ends with `stack`. Raises ValueError, OSError: what is wrong.
    """
    if config.actor_rollout_ref.rollout.engine.endpoint:
        raise ValueError(
            "actor_rollout_ref.rollout.name=openai: an endpoint takes no weights, so there is nothing to train or to "
            "validate in a run; `verl-like eval` asks it, or set name=vllm"
        )
    device, ranks_per_node = resolve_world(config)
    require_quantization(config.actor_rollout_ref.rollout, device)
    check_machine(config, device)
    check_own_code(config)
    toolbox: Toolbox | None = part("tools", "open")(config, stack)
    inputs = load_inputs(config, toolbox)
    require_heads(config.actor_rollout_ref.rollout, inputs.hf_config, device)
    check_sampling(config, inputs.tokenizer, inputs.hf_config, inputs.eos_ids)
    check_models(config, device)
    plan = BatchPlan.build(config, config.trainer.nnodes * ranks_per_node, len(inputs.train))
    loader = train_loader(config, inputs.train, plan)  # what is wrong with its sampler is said before anything starts
    if config.asynchronous and loader.learns:
        raise ValueError(
            f"trainer.mode={config.trainer.mode} with a data.sampler that learns from each batch: prompts are drawn "
            "before the batches that it would learn from; set trainer.mode=sync"
        )
    spec = WorkerSpec(
        config=config,
        plan=plan,
        tokenizer_size=len(inputs.tokenizer),
        max_model_len=max_model_len(config, inputs.hf_config),
        profile_dir=str(profile_dir(config)),
        external_modules=external_modules(),
    )
    costs = ModelCosts.of(config, plan)
    logger.info("%d process(es) on %s; %s", plan.world_size, device, plan.table())
    processes = (plan.pools[0].world_size, ranks_per_node)
    memory = part("forecast", "memory")(config, inputs.hf_config, costs, device, *processes)
    rewards = stack.enter_context(
        RewardManager(config.custom_reward_function, config.reward_model, config.data, inputs.tokenizer)
    )
    if toolbox is None or not toolbox.gives_reward:
        check_rewards(config, inputs, rewards)
    elif not rewards.rule_grades:
        raise ValueError(
            "the environment of actor_rollout_ref.rollout.multi_turn.environment_path scores episodes, but beside the "
            "reward model that counts nothing: set reward_model.rule_weight, or reward_model.enable=false"
        )
    return Prepared(
        config=config,
        device=device,
        inputs=with_own_loops(config, inputs, stack),
        plan=plan,
        costs=costs,
        spec=spec,
        rewards=rewards,
        memory=memory,
    )


def with_own_loops(config: PPOConfig, inputs: Inputs, stack: ExitStack) -> Inputs:
    """Add the agent loops of the run to the inputs, until `stack` is closed."""
    encoder, kind = make_encoder(with_system_prompt(config), inputs.tokenizer), inputs.hf_config.model_type
    return dataclasses.replace(
        inputs, runner=part("loops", "runner")(config, inputs.runner, encoder, kind, inputs.eos_ids, stack)
    )


@contextmanager
def prepared(config: PPOConfig) -> Iterator[Prepared]:
    """Run `prepare`, until the end of the context. Raises ConfigError: what is wrong."""
    with ExitStack() as stack:
        with input_errors(), start_phase("tokenizer, data, graders"):
            ready = prepare(config, stack)
            if ready.rewards.rule_grades and not (ready.rewards.asks_judge or config.env.train.tags):
                try:
                    grade_sample(ready.inputs.train, ready.rewards, ready.inputs.tokenizer)
                except ValueError as error:  # a grader of one's own may want answers of another form
                    logger.warning("%s", error)
        yield ready


@contextmanager
def started(
    ready: Prepared,
    workers: Workers,
    confirm_folder: Callable[[], None] = lambda: None,
    kind: type[PPOTrainer] | None = None,
    *,
    again: bool = False,
) -> Iterator[PPOTrainer]:
    """Start a trainer whose workers live as long as the context.

    Args:
        ready: the run, checked.
        workers: see `trainer.workers`, the one place that knows whether that is Ray.
        confirm_folder: see `Checkpoints`.
        kind: the trainer's class; None: that of trainer.trainer_class.
        again: an earlier start of this run, which saved a checkpoint, was lost: resume from the newest checkpoint of
            this run's folder, whatever trainer.resume_mode says.
    """
    config, inputs, plan, rewards = ready.config, ready.inputs, ready.plan, ready.rewards
    inputs.tool_usage()  # what tools did in a step that was lost with an earlier start counts for no step
    with ExitStack() as stack:
        with input_errors():
            recover(Path(config.trainer.default_local_dir).expanduser())
            fetch_resume(config.trainer)
            resume = find_resume(config, newest=again)
            if resume is not None and (other := processes_text(resume, plan.pools[0].world_size)):
                logger.warning("%s", other)
            run: dict[str, Any] = {"end_ids": inputs.eos_ids, "vision": inputs.vision, "resume": resume}
            checkpoints = Checkpoints(config.trainer, inputs.tokenizer, confirm=confirm_folder, **run)
            stack.callback(checkpoints.close)
        with start_phase(f"{plan.world_size} worker(s): weights, {config.actor_rollout_ref.rollout.name}"):
            groups = stack.enter_context(workers(ready.spec, ready.device))
        pools = Pools(groups, plan, config.trainer.rpc_timeout)
        logger.info("start: %s", worker_start_text(pools.ask("start_seconds")))
        tokenizers = inputs.reward_tokenizers or (inputs.tokenizer, None)
        use_reward_model(config, plan, pools, rewards, tokenizers)
        if rewards.awaits_servers:
            with input_errors():
                try_rewards(config, inputs, rewards)
        stop = stack.enter_context(graceful_interrupt())
        timeout = config.trainer.rpc_timeout
        peaks = {name: group.call_all("device_peak").wait(timeout=timeout) for name, group in groups.items()}
        speed = part("speed", "report").of(config, plan, ready.costs, peaks, ready.device, ready.memory.metrics())
        with input_errors():
            report = build_reporter(ready, speed, checkpoints.resume_step)
        stack.callback(report.close)
        loader = train_loader(config, inputs.train, plan)
        parts = (loader, ready.costs, rewards, pools, report, stop, checkpoints, stack)
        trainer = assemble(config, plan, inputs, *parts, kind or trainer_class(config))
        stack.callback(settle(seldom=config.trainer.launcher != "local"))
        yield trainer


def check_rewards(config: PPOConfig, inputs: Inputs, rewards: RewardManager) -> None:
    """Check that the graders can score the rows; raises ValueError, RewardFunctionError otherwise."""
    styles = [style for dataset in (inputs.train, inputs.val) if dataset for style in dataset.reward_styles()]
    rewards.check_rows(styles)
    for dataset in filter(None, (inputs.train, inputs.val)):
        refuse_missing_answers(config, dataset)
    rewards.warn_of_unknown_sources(source for source, _ in styles)
    if not rewards.awaits_servers:
        try_rewards(config, inputs, rewards)


def try_rewards(config: PPOConfig, inputs: Inputs, rewards: RewardManager) -> None:
    """Grade a few responses before the first step, as soon as the graders can."""
    try_out(inputs.train, rewards)
    if config.data.self_check_rows and rewards.rule_grades:
        self_check(inputs.train, rewards, inputs.tokenizer, config.data.self_check_rows)


def build_reporter(ready: Prepared, speed: SpeedReport, resumed_at: int | None) -> Reporter:
    """Build the run's trackers, live display and sample files.

    resumed_at: the step of the checkpoint it starts from.
    """
    config, plan, inputs = ready.config, ready.plan, ready.inputs
    settings, run_id = config.trainer, os.environ.get(RUN_ID_VARIABLE, "")
    shared = shares_prompts(config.actor_rollout_ref.model)
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
    config: PPOConfig,
    plan: BatchPlan,
    inputs: Inputs,
    loader: PromptLoader,
    costs: ModelCosts,
    rewards: RewardManager,
    pools: Pools,
    report: Reporter,
    stop: StopFlag,
    checkpoints: Checkpoints,
    stack: ExitStack,
    kind: type[PPOTrainer],
) -> PPOTrainer:
    """Put the driver's parts around the worker groups; `stack` closes those that have to be."""
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

    def models(role: type[Handle], cost: ModelCost | None, **options: Any) -> Handle | None:
        if role.role not in plan.roles:
            return None
        sharing = {"cost": cost, "share_prompts": shares_prompts(plan.roles[role.role].config.model)}
        shared = {"balance": settings.balance_batch, "timeout_s": settings.rpc_timeout}
        return role(pools.of(role.role), plan, **sharing, **shared, **options)

    actor = models(ActorHandle, costs.actor, on_change=weights.changed)
    critic = models(CriticHandle, costs.critic)
    assert actor is not None
    how = answering(config, inputs, validation=False)
    source = RecordedSource if skips or recorded else Collector
    collector = source(loader, rewards, replicas, how, config, plan.total_training_steps)
    stack.callback(replicas.close)
    stack.callback(collector.close)
    return kind(
        config=config,
        plan=plan,
        total_steps=required(plan.total_training_steps),
        state=TrainState(step=0, weight_version=0, kl=KLController.from_config(config.algorithm.kl_ctrl)),
        source=collector,
        pools=pools,
        actor=actor,
        reference=models(ReferenceHandle, costs.actor),
        critic=critic,
        recorder=Recorder(config, [role for role in (actor, critic) if role is not None]),
        weights=weights,
        rewards=rewards,
        validator=Validator(
            lambda: validation_batches(config, inputs.val),
            answering(config, inputs, validation=True),
            on_samples=report.validation_samples,
        ),
        checkpoints=checkpoints,
        report=report,
        stop=stop,
        on_scores=loader.feedback,
    )


def load_inputs(config: PPOConfig, toolbox: Toolbox | None = None, *, trains: bool = True) -> Inputs:
    """Load tokenizer, model configuration and datasets, and check them against each other.

    The prompts offer toolbox's tools. trains: False where the validation set alone is answered, and stands for the
    training set too.
    """
    model, data = config.actor_rollout_ref.model, with_system_prompt(config)
    check_locations(config, *(DATA_FILES if trains else DATA_FILES[1:]))
    key = "data.tokenizer" if data.tokenizer else "actor_rollout_ref.model.path"
    trust = model.trust_remote_code or data.trust_remote_code
    tokenizer = load_tokenizer(data.tokenizer or model.path, trust, key)
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    hf_config = load_hf_config(model, "actor_rollout_ref.model.path")
    eos_ids = end_token_ids(tokenizer, hf_config, model.path, "actor_rollout_ref.model.path")
    check_vision(config, hf_config)
    if needs_critic(config.critic, config.algorithm):
        refuse_vision(
            load_hf_config(config.critic.model, "critic.model.path"), "critic.model.path", "name a text model"
        )
    for role in roles_of(config).values():
        if role.kind == "policy":
            check_ulysses(model, hf_config, role.ulysses)
    check_tensor_parallel(config, hf_config)
    check_adapters(config)
    vocab_size = hf_config.get_text_config().vocab_size
    if (known := max(tokenizer.get_vocab().values()) + 1) > vocab_size:
        raise ValueError(
            f"actor_rollout_ref.model.path={model.path}: its vocabulary has {vocab_size} ids, but the tokenizer "
            f"({data.tokenizer or model.path}) knows {known}; set data.tokenizer to the model's own tokenizer"
        )
    reward_tokenizers = load_reward_model(config)
    seed = config.trainer.seed
    options: dict[str, Any] = {"seed": seed, "tools": () if toolbox is None else toolbox.schemas}
    vision = processor_of(model, hf_config)
    options |= {"vision": vision, "limit_images": config.actor_rollout_ref.rollout.limit_images}
    if config.env.train.tags:
        train, val = part("environments", "datasets")(config, make_encoder(data, tokenizer))
    else:
        val = build_dataset(data, data.val_files, tokenizer, split="val", **options) if data.val_files else None
        train = build_dataset(data, data.train_files, tokenizer, split="train", **options) if trains else required(val)
    part("loops", "check")((train, val), config.actor_rollout_ref.rollout)
    part("tools", "check")((train, val), toolbox)
    for split, dataset in (("train", train), ("val", val)):
        if dataset is not None and (trains or split == "val"):
            refuse_media(dataset, f"data.{split}_files", hf_config)
            dataset.check_rows()
    refuse_media_keys(data, hf_config)
    if adds := own_text(make_encoder(data, tokenizer)):
        logger.info("the chat template adds where there is no system message: %r", adds)
    if toolbox is None:
        runner: EpisodeRunner = SingleTurn()
    else:
        runner = part("tools", "runner")(config, tokenizer, eos_ids, toolbox, vision)
    return Inputs(
        tokenizer=tokenizer,
        hf_config=hf_config,
        train=train,
        val=val,
        eos_ids=eos_ids,
        reward_tokenizers=reward_tokenizers,
        vision=vision,
        runner=runner,
        tool_usage=dict if toolbox is None else toolbox.take_usage,
    )


def check_tensor_parallel(config: PPOConfig, hf_config: PretrainedConfig) -> None:
    """Check that each role's tensor_parallel_size can split its model.

    Raises ValueError, naming the key and the numbers, otherwise.
    """
    for role in roles_of(config).values():
        if role.tensor > 1 or role.kind == "policy":
            own = hf_config if role.kind == "policy" else load_hf_config(role.model)
            check_model(role.model, own, role.tensor, role.tensor_key)


def answering(config: PPOConfig, inputs: Inputs, *, validation: bool) -> Answering:
    """Options by which prompts are answered, in training or in validation."""
    rollout = config.actor_rollout_ref.rollout
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
    )


def with_system_prompt(config: PPOConfig) -> DataConfig:
    """Return data.*, with data.system_prompt=auto replaced by the prompt that belongs to reward_model.rule."""
    data, rule = config.data, config.reward_model.rule
    if data.system_prompt != "auto":
        return data
    if rule not in SYSTEM_PROMPTS:
        raise ValueError(
            f"data.system_prompt=auto with reward_model.rule={rule}: there is a default prompt for "
            f"{', '.join(SYSTEM_PROMPTS)} only; set data.system_prompt to a text, or to null"
        )
    return dataclasses.replace(data, system_prompt=rule)


def train_loader(config: PPOConfig, dataset: Dataset, plan: BatchPlan) -> PromptLoader:
    """Load the training prompts from the first one on, in the order of `train_sampler`."""
    size = plan.prompts_per_draw
    return PromptLoader(dataset, train_sampler(config, dataset, size), size, drop_last=not plan.draws_until_full)


def train_sampler(config: PPOConfig, dataset: Dataset, batch_size: int) -> Sampler:
    """Build the user's sampler, or one of rows by data.domain_weights, or of all rows alike.

    The seed is data.seed, or else trainer.seed.
    """
    data = config.data
    if data.sampler.class_path is not None:
        return part("sampler", "own")(data, dataset)
    seed = config.trainer.seed if data.seed is None else data.seed
    if not data.domain_weights:
        shuffle = data.shuffle and not config.env.train.tags  # groups take turns, and their starts are random as it is
        return ResumableSampler(len(dataset), shuffle=shuffle, seed=seed, identity=dataset.identity())
    weights, identity = data.domain_weights, dataset.identity()
    weighted = part("sampler", "weighted")
    sampler = weighted(dataset.domains(), weights, shuffle=data.shuffle, seed=seed, identity=identity)
    sampler.check_batch(batch_size)
    return sampler


def validation_batches(config: PPOConfig, dataset: Dataset | None) -> Iterable[list[Prompt]]:
    """Yield the whole validation set; empty without one."""
    if dataset is None:
        return ()
    data = config.data
    return iterate_all(dataset, data.val_batch_size, shuffle=data.validation_shuffle, seed=config.trainer.seed)


def resolve_world(config: PPOConfig) -> tuple[str, int]:
    """Resolve (device, ranks per node) of this run: trainer.device and trainer.n_gpus_per_node, with auto filled in."""
    settings = config.trainer
    device = str(settings.device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available() and config.ray_init.address is None:
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device here; set trainer.device=cpu or auto")
    if settings.n_gpus_per_node != "auto":
        return device, int(settings.n_gpus_per_node)
    if device == "cuda" and has_further_pools(config):
        raise ValueError(
            "trainer.n_gpus_per_node=auto takes every GPU of a machine, and there are further pools: set it to what is "
            "left for the main pool"
        )
    return device, torch.cuda.device_count() if device == "cuda" else 1


def required(known: T | None) -> T:
    """Return a value that is known in this case: a length that a plan built with the size of the data has, say."""
    assert known is not None
    return known
