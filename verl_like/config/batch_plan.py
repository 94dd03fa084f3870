"""BatchPlan: every size derived from the configuration, computed once.

Units are verl's. `data.train_batch_size` and `*.ppo_mini_batch_size` count prompts over all processes, each answered
`rollout.n` times; `*_per_gpu` micro sizes count sequences of one process; `*_max_token_len_per_gpu` count tokens of one
process (times the Ulysses size, because that many processes share a sequence). Deprecated global micro sizes count
sequences over all processes and are divided by the data-parallel size here. docs/batch_sizes.md explains with numbers.
"""

import math
from dataclasses import dataclass

from verl_like.config.actor import ActorConfig
from verl_like.config.algorithm import AlgorithmConfig
from verl_like.config.correction import RolloutCorrectionConfig, rejects
from verl_like.config.critic import CriticConfig
from verl_like.config.enums import OPTIMAL_BASELINE_ESTIMATORS, OldLogProbs
from verl_like.config.errors import raise_if_any
from verl_like.config.loss_knobs import SELECTING_LOSSES
from verl_like.config.micro_batches import MicroBatchRule, cuts
from verl_like.config.ppo import PPOConfig
from verl_like.config.row_groups import actor_group, critic_group, reference_group, unequal_groups

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sizes of one training step. Counts of the critic are 0 when there is none."""

    world_size: int
    prompts_per_step: int
    prompts_per_draw: int
    draws_until_full: bool
    responses_per_prompt: int
    sequences_per_step: int
    data_parallel_size: int
    actor_ranks_per_row: int
    ref_ranks_per_row: int
    critic_ranks_per_row: int
    reward_ranks_per_row: int
    rollout_replicas: int
    tensor_parallel_size: int
    sequences_per_rank: int
    actor_mini_batches: int
    actor_mini_batch_prompts: int
    actor_mini_batch_sequences: int
    critic_mini_batches: int
    critic_mini_batch_prompts: int
    critic_mini_batch_sequences: int
    actor_micro: MicroBatchRule
    log_prob_micro: MicroBatchRule
    ref_micro: MicroBatchRule
    critic_micro: MicroBatchRule
    critic_forward_micro: MicroBatchRule
    reward_micro: MicroBatchRule
    optimizer_steps_per_rollout: int
    critic_optimizer_steps_per_rollout: int
    old_log_probs: str
    needs_reference: bool
    reference_outputs: frozenset[str]  # what the driver asks of the reference before the update; full_kl of both models
    needs_critic: bool
    needs_reward_model: bool
    steps_per_epoch: int | None
    total_training_steps: int | None
    optimizer_steps_total: int | None
    critic_optimizer_steps_total: int | None
    warnings: tuple[str, ...]  # what a user would miss at the end of this run

    @classmethod
    def build(cls, config: PPOConfig, world_size: int, num_train_prompts: int | None = None) -> "BatchPlan":
        """All sizes of this run.

        world_size: training processes over all machines. num_train_prompts: rows of the training set after filtering;
        None leaves the lengths open unless trainer.total_training_steps is set.
        Raises ConfigError listing every size that does not fit.
        """
        problems: list[str] = []
        actor, rollout, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.critic
        prompts, n = config.data.train_batch_size, rollout.n
        groups = actor_group(config), reference_group(config), critic_group(config)
        needed = True, needs_reference(config), needs_critic(critic, config.algorithm)
        shares = [group.share(problems if used else [], world_size) for group, used in zip(groups, needed, strict=True)]
        data_parallel, outputs = shares[0], _reference_outputs(config)
        if "full_kl" in outputs or (actor.use_kl_loss and actor.kl_loss_type == "full"):
            problems += unequal_groups(groups[0], groups[1], in_driver="full_kl" in outputs)
        replicas = _share(
            problems, world_size, f"{_ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
        )
        mini_batches = _mini_batches(problems, prompts, f"{_ACTOR}.ppo_mini_batch_size", actor.ppo_mini_batch_size)
        updates = mini_batches * actor.ppo_epochs
        with_critic = needs_critic(config.critic, config.algorithm)
        critic_mini = (
            _mini_batches(problems, prompts, "critic.ppo_mini_batch_size", critic.ppo_mini_batch_size)
            if with_critic
            else 0
        )
        critic_updates = critic_mini * critic.ppo_epochs
        draw = _draw(problems, config, num_train_prompts)
        per_epoch, total = _lengths(problems, config, num_train_prompts)
        rules = _micro_rules(problems, config, world_size, data_parallel)
        old_log_probs = _old_log_probs(problems, config, updates)
        raise_if_any(problems)
        actor_steps = None if total is None else max(0, total - config.trainer.critic_warmup) * updates
        return cls(
            world_size=world_size,
            prompts_per_step=prompts,
            prompts_per_draw=draw,
            draws_until_full=draws_until_full(config),
            responses_per_prompt=n,
            sequences_per_step=prompts * n,
            data_parallel_size=data_parallel,
            actor_ranks_per_row=groups[0].ranks,
            ref_ranks_per_row=groups[1].ranks,
            critic_ranks_per_row=groups[2].ranks,
            reward_ranks_per_row=config.reward_model.ulysses_sequence_parallel_size,
            rollout_replicas=replicas,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            sequences_per_rank=math.ceil(prompts * n / data_parallel),
            actor_mini_batches=mini_batches,
            actor_mini_batch_prompts=actor.ppo_mini_batch_size,
            actor_mini_batch_sequences=actor.ppo_mini_batch_size * n,
            critic_mini_batches=critic_mini,
            critic_mini_batch_prompts=critic.ppo_mini_batch_size if with_critic else 0,
            critic_mini_batch_sequences=critic.ppo_mini_batch_size * n if with_critic else 0,
            optimizer_steps_per_rollout=updates,
            critic_optimizer_steps_per_rollout=critic_updates,
            old_log_probs=old_log_probs,
            needs_reference=needs_reference(config),
            reference_outputs=outputs,
            needs_critic=with_critic,
            needs_reward_model=config.reward_model.enable,
            steps_per_epoch=per_epoch,
            total_training_steps=total,
            optimizer_steps_total=actor_steps,
            critic_optimizer_steps_total=None if total is None else total * critic_updates,
            warnings=_missing(config),
            **rules,
        )

    def rows(self) -> list[tuple[str, str]]:
        """What the table shows: (quantity, value with its unit)."""
        step = (
            f"{self.prompts_per_step:,} prompts x {self.responses_per_prompt} = {self.sequences_per_step:,} sequences"
        )
        rows = [
            ("training step", step),
            *self._draw_rows(),
            ("processes", f"{self.world_size} ({self.data_parallel_size} data parallel)"),
            ("rollout", f"{self.rollout_replicas} replicas x {self.tensor_parallel_size} tensor parallel"),
            ("per process", f"about {self.sequences_per_rank:,} sequences"),
            (
                "actor update",
                self._updates(
                    self.actor_mini_batches,
                    self.actor_mini_batch_prompts,
                    self.actor_mini_batch_sequences,
                    self.optimizer_steps_per_rollout,
                ),
            ),
            ("actor micro-batch", str(self.actor_micro)),
            ("old log-probs", _OLD_LOG_PROBS_TEXT[self.old_log_probs]),
        ]
        if self.old_log_probs == OldLogProbs.recompute:
            rows.append(("log-prob micro-batch", str(self.log_prob_micro)))
        if self.needs_reference:
            rows.append(("reference micro-batch", str(self.ref_micro)))
        if self.needs_critic:
            update = self._updates(
                self.critic_mini_batches,
                self.critic_mini_batch_prompts,
                self.critic_mini_batch_sequences,
                self.critic_optimizer_steps_per_rollout,
            )
            rows += [
                ("critic update", update),
                ("critic micro-batch", str(self.critic_micro)),
                ("critic forward", str(self.critic_forward_micro)),
            ]
        if self.needs_reward_model:
            rows.append(("reward micro-batch", str(self.reward_micro)))
        return rows + self._length_rows()

    def _draw_rows(self) -> list[tuple[str, str]]:
        if not self.draws_until_full:
            return []
        text = f"up to {self.prompts_per_draw:,} prompts at once, until {self.prompts_per_step:,} groups fill the batch"
        return [("prompts in flight", text)]

    def table(self) -> str:
        """The plan as aligned text, for the start of a run."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join(["batch plan", *lines, *(f"  WARNING: {warning}" for warning in self.warnings)])

    @staticmethod
    def _updates(mini_batches: int, prompts: int, sequences: int, updates: int) -> str:
        cut = f"{mini_batches} mini-batches of {prompts:,} prompts ({sequences:,} sequences)"
        return f"{cut}, {updates} optimizer steps"

    def _length_rows(self) -> list[tuple[str, str]]:
        rows = [("steps per epoch", f"{self.steps_per_epoch:,}")] if self.steps_per_epoch is not None else []
        if self.total_training_steps is not None:
            updates = f"{self.optimizer_steps_total:,} optimizer steps of the actor"
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
    if trainer.save_freq == -1:
        warnings.append(
            f"nothing will be saved (trainer.save_freq={trainer.save_freq}): the trained weights are lost at the end; "
            "set trainer.save_freq=20, or another number of steps"
        )
    if not config.data.val_files:
        warnings.append("the policy is never validated (data.val_files is empty); set data.val_files")
    elif trainer.test_freq == -1:
        when = "before the first step only" if trainer.val_before_train else "never"
        warnings.append(
            f"the policy is validated {when} (trainer.test_freq={trainer.test_freq}); set trainer.test_freq=5, or "
            "another number of steps"
        )
    return tuple(warnings)


def needs_reference(config: PPOConfig) -> bool:
    """A KL term, in the loss or in the reward, needs the frozen reference."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def _reference_outputs(config: PPOConfig) -> frozenset[str]:
    """The exact KL (full) stays in the worker: as loss it needs no pass before the update, in the reward one number."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    in_reward = {algorithm.kl_penalty} if algorithm.use_kl_in_reward else set()
    in_loss = {actor.kl_loss_type} if actor.use_kl_loss else set()
    outputs = {"full_kl" if kind == "full" else "log_probs" for kind in in_reward}
    return frozenset(outputs | {"log_probs" for kind in in_loss if kind != "full"})


def needs_critic(critic: CriticConfig, algorithm: AlgorithmConfig) -> bool:
    """critic.enable decides; left open, the advantage estimator does."""
    return algorithm.adv_estimator == "gae" if critic.enable is None else critic.enable


def _share(problems: list[str], world_size: int, key: str, size: int) -> int:
    if world_size % size:
        fix = f"must divide the number of processes (trainer.nnodes x trainer.n_gpus_per_node = {world_size})"
        problems.append(f"{key}={size}: {fix}")
    return max(1, world_size // size)


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


def draws_until_full(config: PPOConfig) -> bool:
    """Whether a step goes on drawing prompts until its batch is full: every prompt of an epoch is drawn then."""
    rules, extra = config.algorithm.filter_groups, config.actor_rollout_ref.rollout.scheduler.additional_prompts
    return extra.enable or (rules.enable and rules.resample)


def prompts_in_flight(config: PPOConfig) -> int:
    """Prompts that a step has at once, at most: data.train_batch_size and the additional ones, or data.gen_batch_size
    where dynamic sampling draws again and that is more."""
    rules, data = config.algorithm.filter_groups, config.data
    extra = config.actor_rollout_ref.rollout.scheduler.additional_prompts
    draw = (data.gen_batch_size or 0) if rules.enable and rules.resample else 0
    return max(draw, data.train_batch_size + (extra.max if extra.enable else 0))


def _draw(problems: list[str], config: PPOConfig, num_train_prompts: int | None) -> int:
    """Prompts in flight, checked against the data."""
    data, count = config.data, prompts_in_flight(config)
    if num_train_prompts is not None and data.train_batch_size <= num_train_prompts < count:
        key = f"data.gen_batch_size={data.gen_batch_size}"
        if count != data.gen_batch_size:
            extra = config.actor_rollout_ref.rollout.scheduler.additional_prompts
            key = f"{_ROLLOUT}.scheduler.additional_prompts.max={extra.max} beside {data.train_batch_size} prompts"
        problems.append(f"{key}: there are only {num_train_prompts} training prompts; lower it, or add data")
    return count


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """The pass of old log-probs also gives each token's sum of squared probabilities."""
    return algorithm.adv_estimator in OPTIMAL_BASELINE_ESTIMATORS


def two_policies(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether the policy loss compares with the rollout engine's policy, not with the trainer's before the update."""
    return correction.bypass_mode or actor.old_log_probs == OldLogProbs.rollout


def uses_sampler_log_probs(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether the old log-probs are the rollout engine's own.

    With two policies they are, unless weights are divided by their mean over the batch: that mean is taken before the
    update, of the trainer's log-probs.
    """
    by_batch = correction.rollout_is is not None and correction.rollout_is_batch_normalize
    return two_policies(actor, correction) and not (correction.loss_type == "reinforce" and by_batch)


def takes_own_log_probs(config: PPOConfig) -> bool:
    """Whether the update's first forward pass gives the old log-probs: every probability ratio is 1 then."""
    actor = config.actor_rollout_ref.actor
    if uses_sampler_log_probs(actor, config.algorithm.rollout_correction) or _driver_needs(config):
        return False
    one_update = actor.ppo_mini_batch_size >= config.data.train_batch_size and actor.ppo_epochs == 1
    return actor.old_log_probs == OldLogProbs.detach or (actor.old_log_probs == OldLogProbs.auto and one_update)


def _old_log_probs(problems: list[str], config: PPOConfig, updates: int) -> str:
    """Resolve auto; refuse what would be wrong."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    choice, key = actor.old_log_probs, f"{_ACTOR}.old_log_probs"
    needs = _driver_needs(config)
    if correction.bypass_mode and choice not in (OldLogProbs.auto, OldLogProbs.rollout):
        fix = "bypass_mode takes the sampler's; leave old_log_probs out"
        problems.append(f"algorithm.rollout_correction.bypass_mode=True with {key}={choice}: {fix}")
    if two_policies(actor, correction):
        if needs_sum_pi_squared(config.algorithm):
            fix = "it needs the trainer's probabilities; leave bypass_mode and old_log_probs out"
            problems.append(f"algorithm.adv_estimator={config.algorithm.adv_estimator} with {key}=rollout: {fix}")
        return str(OldLogProbs.rollout if uses_sampler_log_probs(actor, correction) else OldLogProbs.recompute)
    if choice == OldLogProbs.auto:
        return str(OldLogProbs.detach if updates == 1 and not needs else OldLogProbs.recompute)
    if choice == OldLogProbs.detach and updates > 1:
        problems.append(f"{key}=detach: holds for one update per step, here are {updates}; use recompute or rollout")
    if choice == OldLogProbs.detach and needs:
        problems.append(f"{key}=detach: {needs} needs them earlier; use recompute")
    return str(choice)


def _driver_needs(config: PPOConfig) -> str | None:
    """The first setting that needs old log-probs before the update, or None."""
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    if algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward=True"
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss in SELECTING_LOSSES:
        return f"{_ACTOR}.policy_loss.loss_mode={loss}, which selects tokens by them before the update,"
    if needs_sum_pi_squared(algorithm):
        return f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if rejects(correction):  # rejected tokens leave the denominators, which are counted before any backward pass
        return "a rejection of algorithm.rollout_correction"
    if correction.rollout_is is not None and correction.rollout_is_batch_normalize:
        return "algorithm.rollout_correction.rollout_is_batch_normalize=True"
    return None


def _micro_rules(
    problems: list[str], config: PPOConfig, world_size: int, data_parallel: int
) -> dict[str, MicroBatchRule]:
    """Rules of all passes. Only what the run has is checked; the reward model may have processes of its own."""
    reward = config.reward_model
    pool = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else world_size
    found = problems if reward.enable else []
    share = _share(found, pool, "reward_model.ulysses_sequence_parallel_size", reward.ulysses_sequence_parallel_size)
    rules = {}
    for name, cut in cuts(config).items():
        if name == "reward_micro":
            rules[name] = cut.rule(found, max(1, share))
        else:
            rules[name] = cut.rule(problems if in_use(config, name) else [], data_parallel)
    return rules


def in_use(config: PPOConfig, name: str) -> bool:
    """Whether this run has the pass with this name in `cuts`."""
    if name in ("actor_micro", "log_prob_micro"):
        return True
    if name == "ref_micro":
        return needs_reference(config)
    return config.reward_model.enable if name == "reward_micro" else needs_critic(config.critic, config.algorithm)
