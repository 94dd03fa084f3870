"""Steps by the run's own driver, workers and mesh, from rollouts and scores that are given: what a proof compares.

The configuration is the user's in float32, with fewer and shorter rows, and a learning rate whose steps float32 can
tell apart. There is no rollout engine.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from verl_like.algorithms.kl import KLController
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Rollouts, Scores, merge_metrics
from verl_like.config import PPOConfig
from verl_like.config.actor import OldLogProbs
from verl_like.config.batch_plan import BatchPlan, sampler_is_trainer
from verl_like.config.pools import MAIN_POOL, named_pools
from verl_like.config.roles import CRITIC, REF, needs_critic, roles_of
from verl_like.models.loading import load_tokenizer
from verl_like.observe.timing import StepClock
from verl_like.trainer.costs import ModelCosts
from verl_like.trainer.facts import resolve_world
from verl_like.trainer.folders import profile_dir
from verl_like.trainer.own_code import trainer_class
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.roles import ActorHandle, CriticHandle, ReferenceHandle, RoleHandle, handle_options
from verl_like.trainer.state import TrainState
from verl_like.trainer.workers import Launcher, Pools
from verl_like.user_code import external_modules
from verl_like.workers.spec import WorkerSpec

RATE = 1e-3  # of learning: changes of weights that float32 holds to three digits and more
_TIMEOUT_S = 600.0
Handle = TypeVar("Handle", bound=RoleHandle)
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealStep:
    """Outcome of a step that the driver and the workers made."""

    evaluated: Evaluated
    experience: Experience  # of the rows that are trained on
    mean_kl: float  # of the penalty in the reward; 0 without it
    kl_coef: float  # of that penalty, for the next step
    minibatches: dict[str, list[dict[str, Metric]]]  # by role: the metrics of each optimizer step, over all ranks
    denominators: dict[str, list[set[Denominators]]]  # by role, of each optimizer step: as the ranks get them
    weights: dict[str, dict[str, Tensor]]  # by role, after the step: float32, as a rollout engine would get them


def small(config: PPOConfig, ranks: int, folder: str) -> PPOConfig:
    """The configuration with at most two mini-batches, two epochs and four responses to a prompt, on `ranks`.

    folder: for the workers' logs, which are not the run's.
    """
    policy, critic, trainer = config.actor_rollout_ref, config.critic, config.trainer
    batch = config.data.train_batch_size
    n, with_critic = min(policy.rollout.n, 4), needs_critic(critic, config.algorithm)
    pools = _pools(config, ranks)
    sizes = {ranks, *(pool["n_gpus_per_node"] for pool in pools.values())}
    part = math.lcm(*sizes) * (2 if n > 1 else 4)  # prompts of a mini-batch
    cuts = policy.actor.ppo_mini_batch_size < batch or (with_critic and critic.ppo_mini_batch_size < batch)
    whole, longest = part * (2 if cuts else 1), config.data.max_prompt_length + config.data.max_response_length

    def micro(prefix: str) -> dict[str, Any]:
        """Several micro-batches to a mini-batch on each rank, cut by tokens or by rows as in the run."""
        sizes = {"micro_batch_size_per_gpu": 4, "micro_batch_size": None, "max_token_len_per_gpu": longest}
        return {f"{prefix}_{name}": size for name, size in sizes.items()}

    def cut(section: Section) -> Section:
        few: Any = section
        prompts = part if few.ppo_mini_batch_size < batch else whole
        return dataclasses.replace(
            few,
            ppo_mini_batch_size=prompts,
            ppo_epochs=min(few.ppo_epochs, 2),
            optim=_optim(few.optim, 1.5 * RATE if few is critic else RATE),
            **micro("ppo"),
        )

    rollout = dataclasses.replace(
        policy.rollout,
        name="recorded",
        n=n,
        n_redundant=0,
        enable_rollout_routing_replay=False,
        skip_rollout=False,
        tensor_model_parallel_size=1,
        **micro("log_prob"),
    )
    ref = dataclasses.replace(policy.ref, **micro("log_prob"))
    critic = cut(critic)
    critic = dataclasses.replace(critic, **micro("forward"))
    actor = cut(policy.actor)
    if sampler_is_trainer(config):  # not here, where the given rollouts have log-probs of their own
        actor = dataclasses.replace(actor, old_log_probs=OldLogProbs.recompute)
    return dataclasses.replace(
        config,
        actor_rollout_ref=dataclasses.replace(policy, hybrid_engine=True, actor=actor, ref=ref, rollout=rollout),
        critic=critic,
        algorithm=dataclasses.replace(config.algorithm, use_pf_ppo=False),
        data=dataclasses.replace(config.data, train_batch_size=whole),
        reward_model=dataclasses.replace(config.reward_model, enable=False),
        trainer=dataclasses.replace(
            trainer,
            nnodes=1,
            n_gpus_per_node=ranks,
            launcher="ray" if ranks > 1 or pools else "local",
            mode="sync",
            placement=pools,
            log_dir=folder,
            critic_warmup=0,
            profile_steps=None,
            save_freq=-1,
            save_each_epoch=False,
            test_freq=-1,
            test_each_epoch=False,
            max_skipped_updates=-1,
            total_training_steps=trainer.total_training_steps or 10,
            rpc_timeout=_TIMEOUT_S,
        ),
    )


def _pools(config: PPOConfig, ranks: int) -> dict[str, Any]:
    """The pools of trainer.placement beside the main one that critic or reference are in, each of at most `ranks`."""
    present = {CRITIC, REF} & roles_of(config).keys()
    return {
        pool.name: {"roles": sorted(present.intersection(pool.roles)), "n_gpus_per_node": min(pool.world_size, ranks)}
        for pool in named_pools(config.trainer.placement)
        if pool.name != MAIN_POOL and present.intersection(pool.roles)
    }


def _optim(optim: Any, rate: float) -> Any:
    """A learning rate that falls, so that a schedule that stands still shows in the second step."""
    falls = {"warmup_style": "cosine", "total_training_steps": 10, "num_cycles": 0.5, "lr_warmup_steps": 0}
    return dataclasses.replace(optim, lr=rate if optim.lr > 0 else 0.0, optimizer="adamw", **falls)


def real_steps(config: PPOConfig, rollouts: Rollouts, scores: Scores, *, count: int) -> list[RealStep]:
    """Make steps of a configuration of `small`, all from the same rows. Raises what a run would raise."""
    device, ranks = resolve_world(config)
    plan = BatchPlan.build(config, ranks, len(set(rollouts.group_B.tolist())))
    data, model = config.data, config.actor_rollout_ref.model
    spec = WorkerSpec(
        config=config,
        plan=plan,
        tokenizer_size=len(load_tokenizer(data.tokenizer or model.path, model.trust_remote_code)),
        max_model_len=rollouts.prompt_ids_BP.shape[1] + rollouts.response_ids_BR.shape[1],
        profile_dir=str(profile_dir(config)),
        external_modules=external_modules(),
    )
    with Launcher(config) as launcher, launcher(spec, device) as groups:
        pools, costs = Pools(groups, plan, _TIMEOUT_S), ModelCosts.of(config, plan)

        def role(kind: type[Handle], cost: Any) -> Handle | None:
            if kind.role not in plan.roles:
                return None
            return kind(pools.of(kind.role), plan, **handle_options(config.trainer, plan, kind.role, cost))

        actor, critic = role(ActorHandle, costs.actor), role(CriticHandle, costs.critic)
        assert actor is not None
        around = cast(Any, _Around(rollouts, scores))
        trainer = trainer_class(config)(
            config=config,
            plan=plan,
            state=TrainState(step=0, weight_version=0, kl=KLController.from_config(config.algorithm.kl_ctrl)),
            total_steps=count + 1,
            source=around,
            pools=pools,
            actor=actor,
            reference=role(ReferenceHandle, costs.actor),
            critic=critic,
            weights=around,
            rewards=around,
            validator=around,
            checkpoints=around,
            report=around,
            recorder=around,
            stop=around,
        )
        trained: Mapping[str, RoleHandle] = {"actor": actor} | ({} if critic is None else {"critic": critic})
        kept = {name: _Kept(handle) for name, handle in trained.items()}
        return [_step(trainer, around, kept) for _ in range(count)]


def _step(trainer: PPOTrainer, around: _Around, kept: dict[str, _Kept]) -> RealStep:
    """Make the trainer's next step."""
    trainer.step()
    return RealStep(
        evaluated=around.stages["evaluated"],
        experience=around.stages["experience"],
        mean_kl=around.measured.get("critic/kl", 0.0),
        kl_coef=trainer.state.kl_coef,
        minibatches={name: each.minibatches for name, each in kept.items()},
        denominators={name: each.denominators for name, each in kept.items()},
        weights={name: _weights_of(each.handle, str(trainer.config.trainer.log_dir)) for name, each in kept.items()},
    )


class _Around:
    """Stands in for what surrounds a step in a run: the same rows and scores each time; no reports, checkpoints, sync.

    stages, measured: of the last step, as a recorder gets them, and its metrics.
    """

    stages: Mapping[str, Any]
    measured: Mapping[str, float]
    stopping = None  # of rules of health
    clock, saved_on_error = StepClock, nullcontext

    def __init__(self, rollouts: Rollouts, scores: Scores) -> None:
        self._rollouts, self._scores, self.health = rollouts, scores, self

    def next_batch(self, _: int) -> tuple[Rollouts, _Around]:
        return self._rollouts, self

    def result(self) -> Scores:
        return self._scores

    def keep(self, _: int, stages: Mapping[str, Any], __: Mapping[str, Any]) -> None:
        self.stages = stages

    def step(self, *given: Any) -> dict[str, float]:
        self.measured = given[3]
        return {}

    def _no_metrics(self, *_: Any) -> dict[Any, Any]:
        return {}

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    metrics = rows_to_keep = _no_metrics
    wait = update_begins = step_ended = validated = complete = sync = weights_changed = _nothing


def _weights_of(handle: RoleHandle, folder: str) -> dict[str, Tensor]:
    """Weights of a role in a file of `folder`, in memory only while they are read.

    The ranks write it: an answer of that size would stay in the memory of driver, rank and Ray's store.
    """
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        found = dict(handle.call_all("write_weights", file.name)[0])
        if any(isinstance(each, Tensor) for each in found.values()):  # the ranks are on another machine
            return found
        sizes = [math.prod(shape) for shape in found.values()]
        flat = torch.from_file(file.name, size=sum(sizes), dtype=torch.float32)
    return {name: part.view(shape) for (name, shape), part in zip(found.items(), flat.split(sizes), strict=True)}


class _Kept:
    """Keeps the denominators of each optimizer step of a role's update, and the metrics; the handle averages these."""

    def __init__(self, handle: RoleHandle) -> None:
        self.handle, self.minibatches = handle, list[dict[str, Metric]]()
        self.denominators = list[set[Denominators]]()
        handle.call = functools.partial(self._call, handle.call)

    def _call(self, call: Any, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        answers = call(method, per_rank)
        if method == "update":
            self.minibatches = [merge_metrics(parts) for parts in zip(*answers, strict=True)]
            steps = zip(*(minibatches for (minibatches,) in per_rank), strict=True)
            self.denominators = [{by for _, by in shares} for shares in steps]
        return answers
