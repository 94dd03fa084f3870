"""How many neighbouring processes get the same sequences: those of Ulysses, or of tensor parallelism."""

from dataclasses import dataclass

from verl_like.config.actor import ActorConfig, RefConfig
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.ppo import PPOConfig

ULYSSES = "ulysses_sequence_parallel_size"
TENSOR = "fsdp_config.tensor_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """One role's sizes, and the keys they come from; a role has one of the two above 1."""

    ulysses_key: str
    ulysses: int
    tensor_key: str
    fsdp: FSDPConfig

    @property
    def ranks(self) -> int:
        """[processes] Processes that get the same rows."""
        return self.ulysses * self.fsdp.tensor_parallel_size

    def share(self, problems: list[str], world_size: int) -> int:
        """Number of such groups among the processes; what does not divide is appended to `problems`."""
        tensor, sharded = self.fsdp.tensor_parallel_size, self.fsdp.fsdp_size
        for key, size in ((self.ulysses_key, self.ulysses), (self.tensor_key, tensor)):
            if world_size % size:
                fix = f"must divide the number of processes (trainer.nnodes x trainer.n_gpus_per_node = {world_size})"
                problems.append(f"{key}={size}: {fix}")
        if 0 < sharded < world_size and sharded % tensor:
            problems.append(
                f"{self.tensor_key}={tensor} does not divide {self.tensor_key.rpartition('.')[0]}.fsdp_size={sharded}: "
                "the processes that share one copy of the model are whole tensor-parallel groups"
            )
        return max(1, world_size // self.ranks)


def actor_group(config: PPOConfig) -> RowGroup:
    return _policy_group("actor_rollout_ref.actor", config.actor_rollout_ref.actor)


def reference_group(config: PPOConfig) -> RowGroup:
    """With LoRA the reference is the actor's own base model."""
    if config.actor_rollout_ref.model.lora_rank > 0:
        return actor_group(config)
    return _policy_group("actor_rollout_ref.ref", config.actor_rollout_ref.ref)


def critic_group(config: PPOConfig) -> RowGroup:
    return RowGroup(
        ulysses_key=f"critic.{ULYSSES}",
        ulysses=config.critic.ulysses_sequence_parallel_size,
        tensor_key=f"critic.model.{TENSOR}",
        fsdp=config.critic.model.fsdp_config,
    )


def unequal_groups(actor: RowGroup, reference: RowGroup, *, in_driver: bool) -> list[str]:
    """What the exact KL cannot do: both models read the same rows, cut in the same way.

    in_driver: the driver asks for it by itself, before the update.
    """
    pairs = [(TENSOR, actor.fsdp.tensor_parallel_size, reference.fsdp.tensor_parallel_size)]
    if in_driver:
        pairs.append((ULYSSES, actor.ulysses, reference.ulysses))
    return [
        f"the exact KL (kl_penalty or kl_loss_type=full) needs one {key} for actor and ref, but they are {first} and "
        f"{second}"
        for key, first, second in pairs
        if first != second
    ]


def _policy_group(section: str, role: ActorConfig | RefConfig) -> RowGroup:
    return RowGroup(
        ulysses_key=f"{section}.{ULYSSES}",
        ulysses=role.ulysses_sequence_parallel_size,
        tensor_key=f"{section}.{TENSOR}",
        fsdp=role.fsdp_config,
    )
