"""The whole configuration of a PPO or GRPO run, under verl's names."""

from dataclasses import dataclass, field

from verl_like.config.actor import ActorConfig, RefConfig
from verl_like.config.algorithm import AlgorithmConfig
from verl_like.config.asynchronous import AsyncTrainingConfig
from verl_like.config.base import ConfigNode
from verl_like.config.critic import CriticConfig
from verl_like.config.data import DataConfig
from verl_like.config.environments import EnvConfig
from verl_like.config.model import ModelConfig
from verl_like.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from verl_like.config.rollout import RolloutConfig
from verl_like.config.trainer import RayInitConfig, TrainerConfig


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig(ConfigNode):
    """`actor_rollout_ref.*`: the policy in its three roles."""

    hybrid_engine: bool = True
    """Actor and rollout engine share processes. False: the engine has a pool of its own, of rollout.nnodes x
    rollout.n_gpus_per_node processes, and gets the weights by broadcast."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network of actor, reference and rollout."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy's update."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The frozen reference."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""


@dataclass(kw_only=True, slots=True)
class PPOConfig(ConfigNode):
    """The root. Never changed after it is built; derived sizes live in BatchPlan."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """Policy, reference and rollout."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value model."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Scores of models and rules."""
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    """A reward function of the user's."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and KL."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Environments in place of prompts."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    """Groups that live through several versions of the weights."""
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    """Ray."""

    @property
    def asynchronous(self) -> bool:
        """Whether groups are under way across steps."""
        return self.trainer.mode != "sync"
