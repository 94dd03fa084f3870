"""One record per model of a run: the actor, its reference, the critic, the reward model. What one can, every one can.

A record is a view on the role's keys: what the engine is built from (`engine.fsdp.FSDPEngine`), how its passes are cut,
how its updates walk over the rows. The rollout engine is a role too, but no model of the trainer's: it has no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_like.config.actor import ActorConfig, ReplayMode, RouterConfig
from verl_like.config.algorithm import AlgorithmConfig
from verl_like.config.critic import CriticConfig
from verl_like.config.distillation import TeacherModelConfig
from verl_like.config.fsdp import FSDPConfig, sizes_of_mesh
from verl_like.config.mesh import NAMES, MeshSizes
from verl_like.config.micro_batches import Cut, cuts
from verl_like.config.model import ModelConfig
from verl_like.config.optim import OptimConfig
from verl_like.config.ppo import PPOConfig
from verl_like.config.profiler import CheckpointConfig, ProfilerConfig
from verl_like.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from verl_like.config.trainer import Parity

ACTOR, REF, CRITIC, REWARD, ROLLOUT = "actor", "ref", "critic", "reward", "rollout"
Kind = Literal["policy", "value"]
_ULYSSES = "ulysses_sequence_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """One role. optim, grad_clip, mini_batch_prompts, epochs: None and 0 where it is never trained; then it has no
    checkpoint either."""

    name: str = ACTOR
    kind: Kind = "policy"  # log-probs and entropy, or one number per token
    model: ModelConfig
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    ulysses: int = 1  # [processes] that share one sequence by its heads
    compile_blocks: bool = False
    freeze_vision_tower: bool = False
    router: RouterConfig = field(default_factory=RouterConfig)
    exact: bool = False  # sums in one order, as the rollout engine's
    replay: ReplayMode = ReplayMode.disabled
    routes_sampled: bool = False  # routes of the rollout engine come with the rows
    entropy_in_chunks: bool = False
    recompute_entropy: bool = False
    optim: OptimConfig | None = None
    grad_clip: float | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mini_batch_prompts: int = 0
    epochs: int = 0
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    section: str = "actor_rollout_ref.actor"
    model_section: str = "actor_rollout_ref.model"
    passes: Mapping[str, Cut] = field(default_factory=dict)  # "update", "forward"
    is_base_of_actor: bool = False  # LoRA: the reference is the actor without its adapters, and has no engine
    copies: int = 0  # of its weights in its pool; 0: as fsdp.fsdp_size says
    keys: Mapping[str, str] = field(default_factory=dict)  # "path", "sharding", "ulysses", "context", "tensor": others

    @property
    def routes_key(self) -> str:
        """Key, and its value, for which choices of the model's routers are replayed or compared; empty without one."""
        if self.replay != ReplayMode.disabled:
            return f"actor.router_replay.mode={self.replay}"
        return "rollout.enable_rollout_routing_replay=True" if self.routes_sampled else ""

    @property
    def path_key(self) -> str:
        return self.keys.get("path") or f"{self.model_section}.path"

    @property
    def sharding_section(self) -> str:
        """Section with the keys of `fsdp`."""
        return (
            self.keys.get("sharding") or f"{self.section if self.kind == 'policy' else self.model_section}.fsdp_config"
        )

    @property
    def ulysses_key(self) -> str:
        return self.keys.get("ulysses") or f"{self.section}.{_ULYSSES}"

    @property
    def context_key(self) -> str:
        return self.keys.get("context") or f"{self.sharding_section}.context_parallel_size"

    @property
    def tensor_key(self) -> str:
        return self.keys.get("tensor") or f"{self.sharding_section}.tensor_parallel_size"

    @property
    def expert_key(self) -> str:
        return f"{self.sharding_section}.expert_parallel_size"

    @property
    def pipe_key(self) -> str:
        return f"{self.sharding_section}.pipeline_parallel_size"

    @property
    def pieces_key(self) -> str:
        return f"{self.sharding_section}.virtual_pipeline_size"

    @property
    def context(self) -> int:
        """[processes] that share one sequence by chunks of its tokens."""
        return self.fsdp.context_parallel_size

    @property
    def tensor(self) -> int:
        """[processes] that split every matrix among them."""
        return self.fsdp.tensor_parallel_size

    @property
    def ranks_per_row(self) -> int:
        """Neighbouring processes that get the same rows: of Ulysses, context, tensor or pipeline parallelism."""
        return self.mesh(1).ranks_per_row

    def mesh(self, processes: int) -> MeshSizes:
        """Sizes of its mesh on so many processes."""
        return MeshSizes(world=processes, copies=self.copies, ulysses=self.ulysses, **sizes_of_mesh(self.fsdp))

    def data_parallel(self, problems: list[str], processes: int, processes_text: str) -> int:
        """Number of groups of `ranks_per_row` among its pool's processes; what does not divide goes to `problems`."""
        sizes, replicas = self.mesh(processes), False
        keys = {axis: f"{self.sharding_section}.{name}" for axis, name in NAMES.items()}
        keys |= {"context": self.context_key, "ulysses": self.ulysses_key, "tensor": self.tensor_key}
        keys["slices"] = f"{self.context_key} x {self.ulysses_key}"
        for axis, total in sizes.problems():
            named = f"{keys[axis]}={getattr(sizes, axis)}"
            if self.copies and "copy" in (axis, total):
                replicas = True
            elif total == "copy" and sizes.copy < processes:
                why = f"the processes with one copy of the model are whole {axis}-parallel groups"
                problems.append(f"{named} does not divide {keys['copy']}={sizes.copy}: {why}")
            elif total == "stage":
                beside, each = sizes.beside(axis), "" if axis == "slices" else " with one copy of the model"
                each = f"{beside * sizes.pipe} processes{each}, {self.pipe_key}={sizes.pipe}"
                problems.append(f"{named}: must divide the {beside} processes that have the same stage ({each})")
            else:
                problems.append(f"{named}: must divide the number of processes ({processes_text})")
        if replicas:
            each = f"{processes_text}, in groups of {self.tensor_key}={self.tensor}"
            problems.append(f"{self.section}.num_replicas={self.copies}: must divide the number of processes ({each})")
        return sizes.data_parallel


def roles_of(config: PPOConfig) -> dict[str, RoleConfig]:
    """The roles that this run has, by name."""
    if config.trainer.objective != "rl":  # the loss is on given answers alone
        return {ACTOR: every_role(config)[ACTOR]}
    needed = {
        ACTOR: True,
        REF: needs_reference(config),
        CRITIC: needs_critic(config.critic, config.algorithm),
        REWARD: classifies(config.reward_model, config.custom_reward_function),
    }
    return {name: role for name, role in every_role(config).items() if needed.get(name, True)}


def generates(reward: RewardModelConfig, custom: CustomRewardFunctionConfig) -> bool:
    """Return True where the run serves a reward model that writes text."""
    if reward.model_type is None:
        return reward.enable and reward.rollout.name is not None and custom.path is not None
    return reward.enable and reward.model_type == "generative"


def classifies(reward: RewardModelConfig, custom: CustomRewardFunctionConfig) -> bool:
    """Return True where a sequence classifier scores in the trainer's processes."""
    return reward.enable and not generates(reward, custom)


def hosted_roles(config: PPOConfig) -> tuple[str, ...]:
    """Roles that the worker processes host: those of `roles_of`, a reward model's server, the rollout engine."""
    served = (REWARD,) if generates(config.reward_model, config.custom_reward_function) else ()
    return (*roles_of(config), *served, ROLLOUT)


def every_role(config: PPOConfig) -> dict[str, RoleConfig]:
    """All roles there can be, those that the run lacks as well."""
    passes = cuts(config)
    teachers = {name: each for name, each in config.distillation.teachers().items() if each.local}
    return {
        ACTOR: _actor(config, passes[ACTOR]),
        REF: _reference(config, passes[REF]),
        CRITIC: _critic(config.critic, passes[CRITIC]),
        REWARD: _reward(config.reward_model, passes[REWARD]),
        **{n: _teacher(config, n, each.config, each.place, passes[ACTOR]["forward"]) for n, each in teachers.items()},
    }


def needs_reference(config: PPOConfig) -> bool:
    """A KL term, in the loss or in the reward, needs the frozen reference."""
    kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return kl and config.trainer.objective == "rl"


def needs_critic(critic: CriticConfig, algorithm: AlgorithmConfig) -> bool:
    """critic.enable decides; left open, the advantage estimator does."""
    return algorithm.estimator.critic if critic.enable is None else critic.enable


def trains_rewards(config: PPOConfig) -> bool:
    """Return True where the trained model becomes a reward model, with one number in place of log-probs."""
    return config.trainer.objective == "preference" and config.preference.loss == "reward"


def compares_in_driver(config: PPOConfig) -> bool:
    """Return True where the exact KL to the reference is a pass of its own, before the update."""
    return config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"


def compares_policies(config: PPOConfig) -> bool:
    """Return True where the exact KL to the reference is used, in reward or loss: both models see the same rows."""
    actor: ActorConfig = config.actor_rollout_ref.actor
    return compares_in_driver(config) or (actor.use_kl_loss and actor.kl_loss_type == "full")


def _actor(config: PPOConfig, passes: Mapping[str, Cut]) -> RoleConfig:
    actor = config.actor_rollout_ref.actor
    return RoleConfig(
        name=ACTOR,
        kind="value" if trains_rewards(config) else "policy",
        keys={"sharding": "actor_rollout_ref.actor.fsdp_config"},
        model=config.actor_rollout_ref.model,
        fsdp=actor.fsdp_config,
        ulysses=actor.ulysses_sequence_parallel_size,
        compile_blocks=actor.use_torch_compile,
        freeze_vision_tower=actor.freeze_vision_tower,
        exact=config.trainer.parity == Parity.exact,
        router=actor.router,
        replay=actor.router_replay.mode,
        routes_sampled=config.actor_rollout_ref.rollout.enable_rollout_routing_replay,
        entropy_in_chunks=actor.entropy_from_logits_with_chunking,
        recompute_entropy=actor.entropy_checkpointing,
        optim=actor.optim,
        grad_clip=actor.grad_clip,
        checkpoint=actor.checkpoint,
        mini_batch_prompts=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        profiler=actor.profiler,
        passes=passes,
    )


def _reference(config: PPOConfig, passes: Mapping[str, Cut]) -> RoleConfig:
    """With LoRA its shards and its rows are the actor's."""
    policy, lora = config.actor_rollout_ref, config.actor_rollout_ref.model.lora_rank > 0
    own = policy.actor if lora else policy.ref
    return RoleConfig(
        name=REF,
        model=policy.model,
        fsdp=own.fsdp_config,
        ulysses=own.ulysses_sequence_parallel_size,
        compile_blocks=own.use_torch_compile,
        profiler=policy.ref.profiler,
        section="actor_rollout_ref.actor" if lora else "actor_rollout_ref.ref",
        passes=passes,
        is_base_of_actor=lora,
    )


def _teacher(config: PPOConfig, name: str, teacher: TeacherModelConfig, place: str, passes: Cut) -> RoleConfig:
    """A teacher: cut as the actor's pass for old log-probs, unless it has a token budget of its own."""
    policy, own = config.actor_rollout_ref, teacher.inference
    if own.max_num_batched_tokens is not None:
        key = f"{place}.inference.max_num_batched_tokens"
        passes = replace(passes, dynamic=True, budget_key=key, budget=own.max_num_batched_tokens)
    path, tensor, actor = teacher.model_path or "", own.tensor_model_parallel_size, policy.actor
    fsdp = FSDPConfig(dtype=own.dtype, tensor_parallel_size=tensor, param_offload=own.free_cache_engine)
    return RoleConfig(
        name=name,
        model=replace(policy.model, path=path, override_config={}, lora_rank=0, lora_adapter_path=None),
        fsdp=replace(fsdp, context_parallel_size=actor.fsdp_config.context_parallel_size),
        ulysses=actor.ulysses_sequence_parallel_size,
        copies=teacher.num_replicas,
        section=place,
        model_section=f"{place}.model",
        passes={"forward": passes},
        keys={
            "path": f"{place}.model_path",
            "sharding": f"{place}.inference",
            "ulysses": f"actor_rollout_ref.actor.{_ULYSSES}",
            "context": "actor_rollout_ref.actor.fsdp_config.context_parallel_size",
            "tensor": f"{place}.inference.tensor_model_parallel_size",
        },
    )


def _critic(critic: CriticConfig, passes: Mapping[str, Cut]) -> RoleConfig:
    return RoleConfig(
        name=CRITIC,
        kind="value",
        model=critic.model,
        fsdp=critic.model.fsdp_config,
        ulysses=critic.ulysses_sequence_parallel_size,
        optim=critic.optim,
        grad_clip=critic.grad_clip,
        checkpoint=critic.checkpoint,
        mini_batch_prompts=critic.ppo_mini_batch_size,
        epochs=critic.ppo_epochs,
        profiler=critic.profiler,
        section="critic",
        model_section="critic.model",
        passes=passes,
    )


def _reward(reward: RewardModelConfig, passes: Mapping[str, Cut]) -> RoleConfig:
    return RoleConfig(
        name=REWARD,
        kind="value",
        model=reward_network(reward),
        fsdp=reward.model.fsdp_config,
        ulysses=reward.ulysses_sequence_parallel_size,
        profiler=reward.profiler,
        section="reward_model",
        model_section="reward_model.model",
        passes=passes,
    )


def reward_network(section: RewardModelConfig) -> ModelConfig:
    """reward_model.model as the engines read it; no path where there is no reward model."""
    model = section.model
    return ModelConfig(
        path=model.path or "",
        external_lib=model.external_lib,
        trust_remote_code=model.trust_remote_code,
        use_remove_padding=model.use_remove_padding,
        use_shm=model.use_shm,
    )
