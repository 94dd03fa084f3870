"""`*.profiler.*`, `*.checkpoint.*`: small sections that several roles share."""

from dataclasses import dataclass

from verl_like.config.base import ConfigNode, key, subset_of

_CONTENTS = subset_of("model", "optimizer", "extra", "hf_model")


@dataclass(kw_only=True, slots=True)
class ProfilerConfig(ConfigNode):
    """`*.profiler.*`."""

    enable: bool = True
    """Profile this role in the steps of trainer.profile_steps."""
    discrete: bool = False
    """One trace per call of this role instead of one per step, if the other roles that are profiled on the rank say so
    too; follows the actor's."""
    all_ranks: bool = False
    """Profile every rank."""
    ranks: list[int] | None = None
    """Ranks to profile in the steps of trainer.profile_steps. Null: rank 0, unless all_ranks."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(ConfigNode):
    """`*.checkpoint.*`."""

    save_contents: list[str] = key(["model", "optimizer", "extra"], _CONTENTS)
    """What a checkpoint holds: model, optimizer, extra (schedule, random state), hf_model (Hugging Face folder)."""
    load_contents: list[str] = key(["model", "optimizer", "extra"], _CONTENTS)
    """What is loaded on resume."""
    async_save: bool = False
    """Copy weights and optimizer states to host memory and write them while training goes on."""
