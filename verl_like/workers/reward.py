"""Reward model: a sequence classifier with one output, sharded like every other model, that only scores."""

from __future__ import annotations

from verl_like.batch import Evaluated, Sequences
from verl_like.config import RewardModelConfig
from verl_like.config.roles import REWARD
from verl_like.parallel.dist import ProcessInfo
from verl_like.user_code import check_call, load
from verl_like.workers.roles import build_engine
from verl_like.workers.spec import WorkerSpec


class RewardWorker:
    """Rank of the reward model. Its engine keeps on the device only what its fsdp_config says."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        self.rule = spec.plan.roles[REWARD].forward
        self.engine = build_engine(spec, process, REWARD)

    def scores(self, batch: Sequences) -> Evaluated:
        """Score texts: values_T [B] is the head's output at the last token of each row's prompt.

        A row is a whole text as its prompt, with one placeholder as its response: the value in front of that is the one
        at the text's end, and no token of the text sees it.
        """
        out = self.engine.forward(batch, want=frozenset({"values"}), rule=self.rule)
        return Evaluated(response_length_B=batch.response_length_B, values_T=out["values"])


def reward_worker_class(section: RewardModelConfig) -> type[RewardWorker]:
    """Return RewardWorker, or the class that reward_model.worker_class names.

    Raises ValueError if it cannot do its work.
    """
    if section.worker_class is None:
        return RewardWorker
    key = f"reward_model.worker_class={section.worker_class}"
    found = load(section.worker_class, "reward_model.worker_class")
    if not isinstance(found, type) or not callable(getattr(found, "scores", None)):
        raise ValueError(f"{key} must be a class with scores(batch) -> Evaluated, as {__name__}.RewardWorker has it")
    check_call(found, key, "spec", "process")
    return found


def build_reward_worker(spec: WorkerSpec, process: ProcessInfo) -> RewardWorker:
    """Build the scorer of this rank."""
    return reward_worker_class(spec.config.reward_model)(spec, process)
