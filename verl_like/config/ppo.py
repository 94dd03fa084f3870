"""The whole configuration of a PPO or GRPO run, under verl's names, and what its asynchronous modes add to them."""

import math
from dataclasses import dataclass

from verl_like.config.actor import ActorConfig, RefConfig
from verl_like.config.algorithm import AlgorithmConfig
from verl_like.config.base import ConfigNode, above, at_least, key, one_of, section
from verl_like.config.critic import CriticConfig
from verl_like.config.data import DataConfig
from verl_like.config.distillation import DistillationConfig
from verl_like.config.environments import EnvConfig
from verl_like.config.model import ModelConfig
from verl_like.config.preference import PreferenceConfig
from verl_like.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from verl_like.config.rollout import RolloutConfig
from verl_like.config.serve import ServeConfig
from verl_like.config.sft import SFTConfig
from verl_like.config.trainer import RayInitConfig, TrainerConfig

BEYOND = ("wait", "continue", "drop")


@dataclass(kw_only=True, slots=True)
class AsyncTrainingConfig(ConfigNode):
    """`async_training.*`: of trainer.mode=colocate_async and separate_async."""

    over_sample_rate: float = key(0.5, above(0), unit="share of a batch")
    """What is begun beyond the batch that is wanted next: responses that run, and groups that have ended and wait, are
    together one batch and this share of another."""
    max_staleness: int = key(4, at_least(1), unit="weight versions")
    """How old a group may be when it is trained: the version before the update less the one under which its prompt was
    begun. At most max_staleness + 1 batches of groups are begun and not trained, except with beyond=continue."""
    beyond: str = key("wait", one_of(*BEYOND))
    """What becomes of a group that would be older. wait: the step before waits for it, so none is. continue: it is
    trained when it ends, however old. drop: it is aborted, and its prompt is not trained in this epoch, which favours
    short responses."""

    def groups_running(self, batch: int) -> int:
        """[groups] Whose responses run, or that have ended and wait. batch: data.train_batch_size."""
        return batch + math.ceil(batch * self.over_sample_rate)

    def groups_under_way(self, batch: int) -> float:
        """[groups] That are begun and not trained, at most: a step trains one batch, and none may be too old. Where
        they may (`continue`), a long response keeps no other group out."""
        return math.inf if self.beyond == "continue" else (self.max_staleness + 1) * batch


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig(ConfigNode):
    """`actor_rollout_ref.*`: the policy in its three roles."""

    hybrid_engine: bool = True
    """Actor and rollout engine share processes. False: the engine has a pool of its own, of rollout.nnodes x
    rollout.n_gpus_per_node processes, and gets the weights by broadcast."""
    model: ModelConfig = section(ModelConfig)
    """The network of actor, reference and rollout."""
    actor: ActorConfig = section(ActorConfig)
    """The policy's update."""
    ref: RefConfig = section(RefConfig)
    """The frozen reference."""
    rollout: RolloutConfig = section(RolloutConfig)
    """Generation."""


@dataclass(kw_only=True, slots=True)
class PPOConfig(ConfigNode):
    """The root. Never changed after it is built; derived sizes live in BatchPlan."""

    data: DataConfig = section(DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    """Policy, reference and rollout."""
    critic: CriticConfig = section(CriticConfig)
    """Value model."""
    reward_model: RewardModelConfig = section(RewardModelConfig)
    """Scores of models and rules."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    """A reward function of the user's."""
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    """Advantages and KL."""
    distillation: DistillationConfig = section(DistillationConfig, idle="distillation.enabled is false")
    """Teachers."""
    env: EnvConfig = section(EnvConfig, idle="env.train.tags is empty")
    """Environments in place of prompts."""
    sft: SFTConfig = section(SFTConfig, idle="trainer.objective is rl")
    """Answers that the data hold, in place of sampled ones."""
    preference: PreferenceConfig = section(PreferenceConfig, idle="trainer.objective is not preference")
    """Answers of which one is preferred."""
    serve: ServeConfig = section(ServeConfig, idle="trainer.objective is not serve")
    """A server for many clients with adapters of their own."""
    trainer: TrainerConfig = section(TrainerConfig)
    """The run."""
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig, idle="trainer.mode is sync")
    """Groups that live through several versions of the weights."""
    ray_init: RayInitConfig = section(RayInitConfig, idle="trainer.launcher is local")
    """Ray."""

    @property
    def asynchronous(self) -> bool:
        """True where groups are in flight across steps."""
        return self.trainer.mode != "sync"
