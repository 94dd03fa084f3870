"""Speed report of a run: floors and utilisation of each step, and one sentence of advice."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from verl_like.batch import Experience, Rollouts
from verl_like.config import PPOConfig, resolve_dtype
from verl_like.config.batch_plan import BatchPlan, driver_needs
from verl_like.config.pools import MAIN_POOL
from verl_like.config.roles import ACTOR
from verl_like.kit.speed.advice import Settings, advise
from verl_like.kit.speed.roofline import RunShape, speed_line, speed_metrics
from verl_like.models.heads import dtype_of
from verl_like.models.loading import shares_prompts
from verl_like.models.prefix_tree import beginnings
from verl_like.parallel.device_peak import DevicePeak
from verl_like.trainer.costs import ModelCosts

logger = logging.getLogger(__name__)

_PAUSE = 50  # steps until an advice is given again: two that take turns would fill the screen


class SpeedReport:
    """Report that turns a step's seconds into perf/mfu/*, perf/floor_ratio/* and a log line.

    memory: metrics of the forecast.
    """

    def __init__(self, shape: RunShape, settings: Settings, memory: Mapping[str, float] | None = None) -> None:
        self.shape, self.settings, self.memory = shape, settings, memory or {}
        self._steps, self._given = 0, dict[str, int]()  # step of each advice, without its numbers

    @classmethod
    def of(
        cls,
        config: PPOConfig,
        plan: BatchPlan,
        costs: ModelCosts,
        peaks: Mapping[str, list[DevicePeak]],
        device: str,
        memory: Mapping[str, float] | None = None,
    ) -> SpeedReport:
        """Build the report. peaks: pool -> one for each rank, as the workers measured or looked them up."""
        totals = {
            name: DevicePeak(
                flops=sum(peak.flops for peak in of_ranks),
                bandwidth=sum(peak.bandwidth for peak in of_ranks),
                source=of_ranks[0].source,
            )
            for name, of_ranks in peaks.items()
        }
        for name, total in totals.items():
            logger.info(
                "device peak (%s): %.4g TFLOP/s and %.4g GB/s over the %d rank(s) of the pool %s",
                *(total.source, total.flops / 1e12, total.bandwidth / 1e9, len(peaks[name]), name),
            )
        policy = config.actor_rollout_ref
        shape = RunShape(
            actor=costs.actor,
            critic=costs.critic,
            peak=totals[MAIN_POOL],
            elsewhere={role: totals[pool.name] for pool in plan.pools[1:] for role in pool.roles},
            weight_bytes=dtype_of(resolve_dtype(policy.rollout.dtype, device)).itemsize,
            responses_per_prompt=policy.rollout.n,
            rollout_replicas=plan.rollout_replicas,
            actor_epochs=policy.actor.ppo_epochs,
            critic_epochs=config.critic.ppo_epochs,
            actor_shares_prompts=shares_prompts(policy.model, policy.actor.router),
            critic_shares_prompts=shares_prompts(config.critic.model),
        )
        return cls(shape, settings_of(config, plan), memory)

    def metrics(
        self, rollouts: Rollouts | Experience, seconds: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Compute perf/mfu/*, perf/floor_ratio/* and perf/memory_forecast/* of a step; its others are known."""
        repeated = beginnings(rollouts).repeated()
        lengths = rollouts.prompt_length_B.tolist(), rollouts.response_length_B.tolist()
        forward_only = metrics.get("perf/forward_only_share", 0.0)
        told = speed_metrics(self.shape, seconds, *lengths, repeated, forward_only)
        return {**self.memory, **told}

    def log(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Log the step's phases against their floors; advice, the same after a pause only."""
        logger.debug("%s", speed_line(seconds, metrics))
        advice = advise(seconds, metrics, self.settings)
        told = re.sub(r"[\d.,]+", "", advice or "")
        self._steps += 1
        if advice and self._steps - self._given.get(told, -_PAUSE) >= _PAUSE:
            logger.info("advice: %s", advice)
            self._given[told] = self._steps


def settings_of(config: PPOConfig, plan: BatchPlan) -> Settings:
    """Collect the choices of this run that advice speaks about."""
    rule = plan.roles[ACTOR].update
    budget = None if rule is None else rule.max_tokens
    return Settings(
        token_budget=budget,
        balance_batch=config.trainer.balance_batch,
        old_log_probs="auto" if driver_needs(config) else config.actor_rollout_ref.actor.old_log_probs,
        optimizer_steps_per_rollout=plan.roles[ACTOR].updates_per_step,
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        async_reward=config.reward_model.launch_reward_fn_async,
        groups_cost=not (config.algorithm.filter_groups.enable or config.distillation.alone),
        num_ranks=plan.world_size,
        save_freq=config.trainer.save_freq,
        test_freq=config.trainer.test_freq,
    )
