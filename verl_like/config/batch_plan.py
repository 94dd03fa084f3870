"""BatchPlan: every size derived from the configuration, computed once.

Units are verl's. `data.train_batch_size` and `*.ppo_mini_batch_size` count prompts over all processes, each answered
`rollout.n` times; `*_per_gpu` micro sizes count sequences of one process; `*_max_token_len_per_gpu` count tokens of one
process (times the Ulysses size, because that many processes share a sequence). Deprecated global micro sizes count
sequences over all processes and are divided by the data-parallel size here. docs/batch_sizes.md explains with numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_like.config.actor import ActorConfig, OldLogProbs, ReplayMode
from verl_like.config.algorithm import AlgorithmConfig
from verl_like.config.correction import RolloutCorrectionConfig, corrects, rejects
from verl_like.config.distillation import is_teacher
from verl_like.config.errors import raise_if_any
from verl_like.config.micro_batches import MicroBatchRule
from verl_like.config.placement import idle_placement, pools_of
from verl_like.config.pools import Pool
from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import (
    ACTOR,
    CRITIC,
    REF,
    REWARD,
    ROLLOUT,
    RoleConfig,
    compares_in_driver,
    compares_policies,
    roles_of,
)
from verl_like.config.rule import impossible
from verl_like.config.trainer import Parity

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """The sizes of one role. Of one that is never trained the counts of updates are 0, and `update` is None."""

    config: RoleConfig
    pool: Pool
    data_parallel_size: int  # groups of processes with rows of their own
    forward: MicroBatchRule
    update: MicroBatchRule | None
    mini_batches: int
    mini_batch_prompts: int
    mini_batch_sequences: int
    updates_per_step: int  # optimizer steps for each rollout batch

    @property
    def ranks_per_row(self) -> int:
        """Neighbouring processes with the same rows."""
        return self.config.ranks_per_row

    @property
    def update_text(self) -> str:
        """For the table."""
        cut = f"{self.mini_batches} mini-batches of {self.mini_batch_prompts:,} prompts"
        return f"{cut} ({self.mini_batch_sequences:,} sequences), {self.updates_per_step} optimizer steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sizes of one training step, of each role of the run, and of the pools of processes that host them."""

    pools: tuple[Pool, ...]  # the main one first
    samples: bool  # False where the data hold the answers
    roles: dict[str, RolePlan]
    prompts_per_step: int
    prompts_per_draw: int
    draws_until_full: bool
    asynchronous: str | None  # how old what is trained may be
    responses_per_prompt: int
    sequences_per_step: int
    rollout_replicas: int
    tensor_parallel_size: int
    sequences_per_rank: int
    old_log_probs: str
    reference_outputs: frozenset[str]  # what the driver asks of the reference before the update; full_kl of both models
    steps_per_epoch: int | None
    total_training_steps: int | None
    full_determinism: bool
    warnings: tuple[str, ...]  # what a user would miss at the end of this run
    critic_warmup: int

    @classmethod
    def build(cls, config: PPOConfig, world_size: int, num_train_prompts: int | None = None) -> BatchPlan:
        """All sizes of this run.

        world_size: processes of the main pool, over all machines. num_train_prompts: rows of the training set after
        filtering; None leaves the lengths open unless trainer.total_training_steps is set.
        Raises ConfigError listing every size that does not fit.
        """
        raise_if_any(impossible(config, "placement"))
        problems: list[str] = []
        rollout, prompts = config.actor_rollout_ref.rollout, config.data.train_batch_size
        pools, configs = pools_of(config, world_size), roles_of(config)
        roles = {role.name: _role_plan(problems, config, role, pools) for role in configs.values()}
        if REF in roles and compares_policies(config):
            problems += _unequal_groups(configs[ACTOR], configs[REF], in_driver=compares_in_driver(config))
        for teacher in configs.values() if config.distillation.compares else ():
            if is_teacher(teacher.name) and teacher.tensor != configs[ACTOR].tensor:
                mode, own = config.distillation.distillation_loss.loss_mode, configs[ACTOR]
                why = f"with loss_mode={mode} it must be {own.tensor_key}={own.tensor}: both read the same rows"
                problems.append(f"{teacher.tensor_key}={teacher.tensor}: {why}")
        sampling = _pool_with(pools, ROLLOUT)
        replicas = _share(
            problems, sampling, f"{_ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
        )
        draw = _draw(problems, config, num_train_prompts)
        per_epoch, total = _lengths(problems, config, num_train_prompts)
        old_log_probs = _old_log_probs(problems, config, roles[ACTOR].updates_per_step)
        raise_if_any(list(dict.fromkeys(problems)))
        return cls(
            pools=pools,
            samples=config.trainer.objective == "rl",
            roles=roles,
            prompts_per_step=prompts,
            prompts_per_draw=draw,
            draws_until_full=draws_until_full(config),
            asynchronous=_staleness(config) if config.asynchronous else None,
            responses_per_prompt=rollout.n,
            sequences_per_step=prompts * rollout.n,
            rollout_replicas=replicas,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            sequences_per_rank=math.ceil(prompts * rollout.n / roles[ACTOR].data_parallel_size),
            old_log_probs=old_log_probs,
            reference_outputs=_reference_outputs(config),
            steps_per_epoch=per_epoch,
            total_training_steps=total,
            full_determinism=config.trainer.full_determinism,
            warnings=(*_missing(config), *idle_placement(config)),
            critic_warmup=config.trainer.critic_warmup,
        )

    @property
    def world_size(self) -> int:
        """Processes of all pools."""
        return sum(pool.world_size for pool in self.pools)

    def pool_of(self, role: str) -> Pool:
        """The pool that hosts a role of this run."""
        return _pool_with(self.pools, role)

    def optimizer_steps(self, role: str) -> int | None:
        """Optimizer steps of a role in the whole run; None where the run's length is not known."""
        if self.total_training_steps is None:
            return None
        trained = self.total_training_steps - (self.critic_warmup if role == ACTOR else 0)
        return max(0, trained) * self.roles[role].updates_per_step

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the plan's table: (quantity, value with its unit)."""
        actor, critic = self.roles[ACTOR], self.roles.get(CRITIC)
        step = (
            f"{self.prompts_per_step:,} prompts x {self.responses_per_prompt} = {self.sequences_per_step:,} sequences"
        )
        rows = [
            ("training step", step),
            *self._draw_rows(),
            ("processes", f"{self.pools[0].world_size} ({actor.data_parallel_size} data parallel)"),
            *(
                (f"pool {pool.name}", f"{pool.world_size} processes: {', '.join(pool.roles)}")
                for pool in self.pools[1:]
            ),
            ("rollout", f"{self.rollout_replicas} replicas x {self.tensor_parallel_size} tensor parallel"),
            ("per process", f"about {self.sequences_per_rank:,} sequences"),
            ("actor update", actor.update_text),
            ("actor micro-batch", str(actor.update)),
            ("old log-probs", _OLD_LOG_PROBS_TEXT[self.old_log_probs]),
        ]
        if not self.samples:
            rows = [row for row in rows if row[0] not in ("rollout", "old log-probs")]
        if self.old_log_probs == OldLogProbs.recompute:
            rows.append(("log-prob micro-batch", str(actor.forward)))
        if REF in self.roles:
            rows.append(("reference micro-batch", str(self.roles[REF].forward)))
        rows += [(f"{name} micro-batch", str(p.forward)) for name, p in self.roles.items() if is_teacher(name)]
        if critic is not None:
            rows += [
                ("critic update", critic.update_text),
                ("critic micro-batch", str(critic.update)),
                ("critic forward", str(critic.forward)),
            ]
        if REWARD in self.roles:
            rows.append(("reward micro-batch", str(self.roles[REWARD].forward)))
        if self.full_determinism:
            rows.append(("determinism", "full: deterministic algorithms, which may be slower and take more memory"))
        return rows + self._length_rows()

    def _draw_rows(self) -> list[tuple[str, str]]:
        if not self.draws_until_full:
            return []
        if self.asynchronous is not None:
            running = self.prompts_per_draw * self.responses_per_prompt
            text = (
                f"{running:,} responses at once; a step trains {self.prompts_per_step:,} of the groups that have ended"
            )
            return [("under way", text), ("staleness", self.asynchronous)]
        text = f"up to {self.prompts_per_draw:,} prompts at once, until {self.prompts_per_step:,} groups fill the batch"
        return [("prompts in flight", text)]

    def table(self) -> str:
        """The plan as aligned text, for the start of a run."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join(["batch plan", *lines, *(f"  WARNING: {warning}" for warning in self.warnings)])

    def _length_rows(self) -> list[tuple[str, str]]:
        rows = [("steps per epoch", f"{self.steps_per_epoch:,}")] if self.steps_per_epoch is not None else []
        if self.total_training_steps is not None:
            updates = f"{self.optimizer_steps(ACTOR):,} optimizer steps of the actor"
            rows.append(("training steps", f"{self.total_training_steps:,} ({updates})"))
        return rows


_OLD_LOG_PROBS_TEXT = {
    "recompute": "recomputed by a forward pass",
    "rollout": "the sampler's own",
    "detach": "first forward of the update, detached (one update per step)",
}


def _missing(config: PPOConfig) -> tuple[str, ...]:
    """Results that a run of these settings does not leave behind."""
    trainer, warnings = config.trainer, []
    if trainer.val_only:
        return ()
    if trainer.save_freq == -1 and not trainer.save_each_epoch:
        warnings.append(
            f"nothing will be saved (trainer.save_freq={trainer.save_freq}): the trained weights are lost at the end; "
            "set trainer.save_freq=20, or another number of steps"
        )
    if not config.data.val_files:
        warnings.append("the policy is never validated (data.val_files is empty); set data.val_files")
    elif trainer.test_freq == -1 and not trainer.test_each_epoch:
        when = "validated before the first step only" if trainer.val_before_train else "never validated"
        warnings.append(
            f"the policy is {when} (trainer.test_freq={trainer.test_freq}); set trainer.test_freq=5, or "
            "another number of steps"
        )
    return tuple(warnings)


def _reference_outputs(config: PPOConfig) -> frozenset[str]:
    """The exact KL (full) stays in the worker: as loss it needs no pass before the update, in the reward one number."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    in_reward = {algorithm.kl_penalty} if algorithm.use_kl_in_reward else set()
    in_loss = {actor.kl_loss_type} if actor.use_kl_loss else set()
    outputs = {"full_kl" if kind == "full" else "log_probs" for kind in in_reward}
    return frozenset(outputs | {"log_probs" for kind in in_loss if kind != "full"})


def _role_plan(problems: list[str], config: PPOConfig, role: RoleConfig, pools: tuple[Pool, ...]) -> RolePlan:
    """The sizes of one role; what does not fit is appended to `problems`."""
    pool, prompts, mini = _pool_with(pools, role.name), config.data.train_batch_size, role.mini_batch_prompts
    data_parallel = role.data_parallel(problems, pool.world_size, pool.size_text)
    rules = {name: cut.rule(problems, data_parallel) for name, cut in role.passes.items()}
    trained = role.optim is not None
    mini_batches = _mini_batches(problems, prompts, f"{role.section}.ppo_mini_batch_size", mini) if trained else 0
    return RolePlan(
        config=role,
        pool=pool,
        data_parallel_size=data_parallel,
        forward=rules["forward"],
        update=rules.get("update"),
        mini_batches=mini_batches,
        mini_batch_prompts=mini,
        mini_batch_sequences=mini * config.actor_rollout_ref.rollout.n,
        updates_per_step=mini_batches * role.epochs,
    )


def _unequal_groups(actor: RoleConfig, reference: RoleConfig, *, in_driver: bool) -> list[str]:
    """Problems of the exact KL: both models read the same rows, and must cut them in the same way.

    in_driver: the driver asks for it by itself, before the update.
    """
    pairs = [("fsdp_config.tensor_parallel_size", actor.tensor, reference.tensor)]
    if in_driver:
        pairs.append(("ulysses_sequence_parallel_size", actor.ulysses, reference.ulysses))
        pairs.append(("fsdp_config.context_parallel_size", actor.context, reference.context))
    return [
        f"the exact KL (kl_penalty or kl_loss_type=full) needs one {key} for actor and ref, but they are {first} and "
        f"{second}"
        for key, first, second in pairs
        if first != second
    ]


def _pool_with(pools: tuple[Pool, ...], role: str) -> Pool:
    return next(pool for pool in pools if role in pool.roles)


def _share(problems: list[str], pool: Pool, key: str, size: int) -> int:
    if pool.world_size % size:
        problems.append(f"{key}={size}: must divide the number of processes ({pool.size_text})")
    return max(1, pool.world_size // size)


def _mini_batches(problems: list[str], prompts: int, key: str, mini: int) -> int:
    if mini > prompts:
        fix = f"is larger than data.train_batch_size={prompts}; set {key}={prompts} or less"
        problems.append(f"{key}={mini}: {fix}")
    elif prompts % mini:
        fix = f"must divide data.train_batch_size={prompts}; the nearest that does is {_nearest_divisor(prompts, mini)}"
        problems.append(f"{key}={mini}: {fix}")
    return max(1, prompts // mini)


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def _lengths(problems: list[str], config: PPOConfig, num_train_prompts: int | None) -> tuple[int | None, int | None]:
    """Steps per epoch (incomplete batches are dropped) and of the whole run; None where not known."""
    batch, total = config.data.train_batch_size, config.trainer.total_training_steps
    if num_train_prompts is None:
        return None, total
    per_epoch = num_train_prompts // batch
    if per_epoch == 0:
        fix = f"there are only {num_train_prompts} training prompts; lower it, or add data"
        problems.append(f"data.train_batch_size={batch}: {fix}")
    return per_epoch, per_epoch * config.trainer.total_epochs if total is None else total


def _staleness(config: PPOConfig) -> str:
    settings = config.async_training
    most = f"at most {settings.max_staleness} versions"
    beyond = {
        "wait": f"{most}: a step waits for what would be older",
        "continue": f"not bounded: what is older than {settings.max_staleness} versions goes on, and is trained",
        "drop": f"{most}: what is older is aborted, and not trained in this epoch",
    }
    return beyond[settings.beyond]


def draws_until_full(config: PPOConfig) -> bool:
    """Return True where a step draws prompts until its batch is full: every prompt of an epoch is drawn then."""
    rules, extra = config.algorithm.filter_groups, config.actor_rollout_ref.rollout.scheduler.additional_prompts
    return config.asynchronous or extra.enable or (rules.enable and rules.resample)


def prompts_in_flight(config: PPOConfig) -> int:
    """Prompts that a step has at once, at most: data.train_batch_size and the additional ones, or data.gen_batch_size
    where dynamic sampling draws again and that is more; of the asynchronous modes those that are not trained yet."""
    if config.asynchronous:
        return config.async_training.groups_running(config.data.train_batch_size)
    rules, data = config.algorithm.filter_groups, config.data
    extra = config.actor_rollout_ref.rollout.scheduler.additional_prompts
    draw = (data.gen_batch_size or 0) if rules.enable and rules.resample else 0
    return max(draw, data.train_batch_size + (extra.max if extra.enable else 0))


def _draw(problems: list[str], config: PPOConfig, num_train_prompts: int | None) -> int:
    """Prompts in flight, checked against the data."""
    data, count = config.data, prompts_in_flight(config)
    if num_train_prompts is not None and data.train_batch_size <= num_train_prompts < count:
        key = f"data.gen_batch_size={data.gen_batch_size}"
        if config.asynchronous:
            rate = f"async_training.over_sample_rate={config.async_training.over_sample_rate:g}"
            key = f"{rate} with data.train_batch_size={data.train_batch_size}: {count} prompts would be under way"
        elif count != data.gen_batch_size:
            extra = config.actor_rollout_ref.rollout.scheduler.additional_prompts
            key = f"{_ROLLOUT}.scheduler.additional_prompts.max={extra.max} beside {data.train_batch_size} prompts"
        problems.append(f"{key}: there are only {num_train_prompts} training prompts; lower it, or add data")
    return count


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """The pass of old log-probs also gives each token's sum of squared probabilities."""
    return algorithm.estimator.sum_pi_squared


def two_policies(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Return True where the policy loss compares with the rollout engine's policy, not the trainer's old one."""
    return correction.bypass_mode or actor.old_log_probs == OldLogProbs.rollout


def uncorrected(config: PPOConfig) -> bool:
    """Return True where responses of older policies would be trained as if the present one had sampled them."""
    correction = config.algorithm.rollout_correction
    corrected = corrects(correction) or two_policies(config.actor_rollout_ref.actor, correction)
    return config.asynchronous and not corrected


def uses_sampler_log_probs(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Return True where the old log-probs are the rollout engine's own.

    With two policies they are, unless weights are divided by their mean over the batch: that mean is taken before the
    update, of the trainer's log-probs.
    """
    by_batch = correction.rollout_is is not None and correction.rollout_is_batch_normalize
    return two_policies(actor, correction) and not (correction.loss_type == "reinforce" and by_batch)


def sampler_is_trainer(config: PPOConfig) -> bool:
    """Return True where the rollout engine's log-probs are the trainer's own, and so the old ones without a pass."""
    return (
        config.trainer.parity == Parity.exact
        and config.actor_rollout_ref.actor.old_log_probs == OldLogProbs.auto
        and not needs_sum_pi_squared(config.algorithm)
    )


def takes_own_log_probs(config: PPOConfig) -> bool:
    """Return True where the update's first forward pass gives the old log-probs: every probability ratio is 1 then."""
    actor = config.actor_rollout_ref.actor
    by_sampler = sampler_is_trainer(config) or uses_sampler_log_probs(actor, config.algorithm.rollout_correction)
    if by_sampler or driver_needs(config):
        return False
    one_update = actor.ppo_mini_batch_size >= config.data.train_batch_size and actor.ppo_epochs == 1
    return actor.old_log_probs == OldLogProbs.detach or (actor.old_log_probs == OldLogProbs.auto and one_update)


def _old_log_probs(problems: list[str], config: PPOConfig, updates: int) -> str:
    """Resolve auto; refuse what would be wrong."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    choice, key = actor.old_log_probs, f"{_ACTOR}.old_log_probs"
    needs = driver_needs(config)
    if correction.bypass_mode and choice not in (OldLogProbs.auto, OldLogProbs.rollout):
        fix = "bypass_mode takes the sampler's; leave old_log_probs out"
        problems.append(f"algorithm.rollout_correction.bypass_mode=True with {key}={choice}: {fix}")
    if two_policies(actor, correction):
        if needs_sum_pi_squared(config.algorithm):
            fix = "it needs the trainer's probabilities; leave bypass_mode and old_log_probs out"
            problems.append(f"algorithm.adv_estimator={config.algorithm.adv_estimator} with {key}=rollout: {fix}")
        return str(OldLogProbs.rollout if uses_sampler_log_probs(actor, correction) else OldLogProbs.recompute)
    if sampler_is_trainer(config):
        return str(OldLogProbs.rollout)
    if choice == OldLogProbs.auto:
        return str(OldLogProbs.detach if updates == 1 and not needs else OldLogProbs.recompute)
    if choice == OldLogProbs.detach and updates > 1:
        problems.append(f"{key}=detach: holds for one update per step, here are {updates}; use recompute or rollout")
    if choice == OldLogProbs.detach and needs:
        problems.append(f"{key}=detach: {needs} needs them earlier; use recompute")
    return str(choice)


def driver_needs(config: PPOConfig) -> str | None:
    """Name the first setting that needs old log-probs before the update; None where there is none."""
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    if config.asynchronous:  # the weights are trainer / sampler, of samplers of several versions
        return f"trainer.mode={config.trainer.mode}"
    if algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward=True"
    if config.actor_rollout_ref.actor.router_replay.mode == ReplayMode.R2:
        return f"{_ACTOR}.router_replay.mode=R2, which replays their routes,"
    loss = config.actor_rollout_ref.actor.policy_loss.loss
    if loss.selects:
        return f"{_ACTOR}.policy_loss.loss_mode={loss.name}, which selects tokens by them before the update,"
    if needs_sum_pi_squared(algorithm):
        return f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if rejects(correction):  # rejected tokens leave the denominators, which are counted before any backward pass
        return "a rejection of algorithm.rollout_correction"
    if correction.rollout_is is not None and correction.rollout_is_batch_normalize:
        return "algorithm.rollout_correction.rollout_is_batch_normalize=True"
    return None
