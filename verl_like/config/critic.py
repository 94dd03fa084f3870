"""`critic.*`: the value model of gae."""

from dataclasses import dataclass, field

from verl_like.config.actor import not_both
from verl_like.config.base import ConfigNode, above, at_least, key, one_of, section
from verl_like.config.fsdp import Strategy
from verl_like.config.menus import AGGREGATIONS
from verl_like.config.model import CriticModelConfig
from verl_like.config.optim import OptimConfig
from verl_like.config.profiler import CheckpointConfig, ProfilerConfig


@dataclass(kw_only=True, slots=True)
class CriticConfig(ConfigNode):
    """`critic.*`. Units as the actor's."""

    enable: bool | None = None
    """Train a critic. Null: when algorithm.adv_estimator needs one (gae)."""
    strategy: Strategy = Strategy.fsdp2
    """Sharding backend; follows the actor's."""
    model: CriticModelConfig = section(CriticModelConfig)
    """The value model; its path follows the actor's."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer and schedule."""
    ppo_mini_batch_size: int = key(256, at_least(1), unit="prompts")
    """Prompts of one optimizer step (x rollout.n sequences), over all processes; follows the actor's."""
    ppo_micro_batch_size: int | None = key(None, at_least(1), unit="sequences, all processes")
    """Deprecated: divided by the data-parallel size. Use ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, at_least(1), unit="sequences")
    """Sequences of one forward and backward."""
    forward_micro_batch_size: int | None = key(None, at_least(1), unit="sequences, all processes")
    """Deprecated: divided by the data-parallel size. Use the per_gpu key."""
    forward_micro_batch_size_per_gpu: int | None = key(None, at_least(1), unit="sequences")
    """Sequences of one forward of the values. Null: ppo_micro_batch_size_per_gpu."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; follows the actor's. Null: by tokens, unless a micro-batch size is given."""
    ppo_max_token_len_per_gpu: int = key(32768, at_least(1), unit="tokens")
    """Token budget of one forward and backward."""
    forward_max_token_len_per_gpu: int = key(32768, at_least(1), unit="tokens")
    """Token budget of one forward of the values; follows ppo_max_token_len_per_gpu."""
    ulysses_sequence_parallel_size: int = key(1, at_least(1), unit="processes")
    """Processes that share one sequence."""
    ppo_epochs: int = key(1, at_least(1))
    """Passes over the rollout batch in each step; follows the actor's."""
    shuffle: bool = False
    """Shuffle prompts before cutting mini-batches; follows the actor's."""
    grad_clip: float = key(1.0, above(0))
    """Largest gradient norm; larger gradients are scaled down."""
    cliprange_value: float = key(0.5, above(0))
    """Clip range of the value around the old value."""
    loss_agg_mode: str | None = key(None, one_of(*AGGREGATIONS))
    """How token losses become one number; follows the actor's. Null: token-mean."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """What checkpoints hold."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the critic."""

    def check(self) -> None:
        not_both(self, "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")
        not_both(self, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu")
