"""Code of the user's that the configuration names: looked up and checked on the driver, before any process starts.

Data sets, samplers and reward code are loaded and checked where they are used; all of that is before the workers too.
"""

from __future__ import annotations

from verl_like.algorithms.advantages import ADVANTAGES
from verl_like.algorithms.kl import FULL_KL_KIND, KL_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.config import PPOConfig
from verl_like.observe.trackers import check_trackers
from verl_like.trainer.ppo import PPOTrainer
from verl_like.user_code import UserCodeError, load
from verl_like.workers.reward import reward_worker_class


def check_own_code(config: PPOConfig) -> None:
    """ValueError, naming the key, for code that is not there, cannot be imported or cannot be called as it must."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    ADVANTAGES.lookup(algorithm.adv_estimator)
    POLICY_LOSSES.lookup(actor.policy_loss.loss_mode)
    for used, kind in ((algorithm.use_kl_in_reward, algorithm.kl_penalty), (actor.use_kl_loss, actor.kl_loss_type)):
        if used and kind != FULL_KL_KIND:
            KL_ESTIMATORS.lookup(kind)
    check_trackers(config.trainer)
    trainer_class(config)
    if config.reward_model.enable:
        reward_worker_class(config.reward_model)


def trainer_class(config: PPOConfig) -> type[PPOTrainer]:
    """PPOTrainer, or the class derived from it that trainer.trainer_class names."""
    reference = config.trainer.trainer_class
    if reference is None:
        return PPOTrainer
    found = load(reference, "trainer.trainer_class")
    if not (isinstance(found, type) and issubclass(found, PPOTrainer)):
        raise UserCodeError(
            f"trainer.trainer_class={reference} must be a class derived from {PPOTrainer.__module__}.PPOTrainer"
        )
    return found
