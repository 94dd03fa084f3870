"""The reward model: a sequence classifier with one output, sharded like every other model, that only scores."""

from __future__ import annotations

from verl_like.batch import Evaluated, Sequences
from verl_like.cluster.worker_group import RankEnv
from verl_like.config import ModelConfig, RewardModelConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.user_code import check_call, load
from verl_like.workers.process import joined
from verl_like.workers.spec import WorkerSpec


class RewardWorker:
    """One rank of the reward model. Its engine keeps on the device only what its fsdp_config says."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        section = spec.config.reward_model
        self.rule = spec.plan.reward_micro
        self.engine = FSDPEngine(
            kind="value",
            process=process,
            model=network_config(section),
            fsdp=section.model.fsdp_config,
            strategy=section.strategy,
            optim=None,
            grad_clip=None,
            ulysses_size=section.ulysses_sequence_parallel_size,
            tokenizer_size=None,
            seed=spec.config.trainer.seed,
        )

    def scores(self, batch: Sequences) -> Evaluated:
        """values_T [B]: the head's output at the last token of each row's prompt.

        A row is a whole text as its prompt, with one placeholder as its response: the value in front of that is the one
        at the text's end, and no token of the text sees it.
        """
        out = self.engine.forward(batch, want=frozenset({"values"}), rule=self.rule)
        return Evaluated(response_length_B=batch.response_length_B, values_T=out["values"])


class RewardPoolWorker:
    """A worker process that hosts nothing but the reward model (reward_model.enable_resource_pool)."""

    def __init__(self, spec: WorkerSpec, env: RankEnv) -> None:
        with joined(spec, env) as process:
            self.reward = build_reward_worker(spec, process)

    def reward_scores(self, batch: Sequences) -> Evaluated:
        return self.reward.scores(batch)

    def shutdown(self) -> None:
        shutdown_distributed()


def reward_worker_class(section: RewardModelConfig) -> type[RewardWorker]:
    """RewardWorker, or the class that reward_model.worker_class names. ValueError if that cannot do its work."""
    if section.worker_class is None:
        return RewardWorker
    key = f"reward_model.worker_class={section.worker_class}"
    found = load(section.worker_class, "reward_model.worker_class")
    if not isinstance(found, type) or not callable(getattr(found, "scores", None)):
        raise ValueError(f"{key} must be a class with scores(batch) -> Evaluated, as {__name__}.RewardWorker has it")
    check_call(found, key, "spec", "process")
    return found


def build_reward_worker(spec: WorkerSpec, process: ProcessInfo) -> RewardWorker:
    """The scorer of this rank."""
    return reward_worker_class(spec.config.reward_model)(spec, process)


def network_config(section: RewardModelConfig) -> ModelConfig:
    """reward_model.model as the engines read it."""
    model = section.model
    assert model.path is not None
    return ModelConfig(
        path=model.path,
        external_lib=model.external_lib,
        trust_remote_code=model.trust_remote_code,
        use_remove_padding=model.use_remove_padding,
    )
