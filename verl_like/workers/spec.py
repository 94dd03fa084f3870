"""Specification that the driver gives every worker process at its start.

Picklable, the same for all ranks of a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.micro_batches import Lowered
from verl_like.config.pools import MAIN_POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    config: PPOConfig
    plan: BatchPlan
    tokenizer_size: int  # ids from here on are padding of the vocabulary: masked out of every softmax
    max_model_len: int  # tokens, prompt plus response
    profile_dir: str  # where the traces of trainer.profile_steps go
    external_modules: str = ""  # the driver's VERL_USE_EXTERNAL_MODULES
    pool: str = MAIN_POOL  # whose roles this process hosts
    replica: int = 0  # of a pool whose replicas are groups of their own
    lowered: Mapping[str, Lowered] = field(default_factory=dict)  # by role: what an earlier start of this run learned

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that a process of this pool hosts."""
        return next(pool.roles for pool in self.plan.pools if pool.name == self.pool)
