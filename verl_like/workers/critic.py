"""The critic: a backbone with a value head, trained on returns (PPO with adv_estimator=gae)."""

from __future__ import annotations

from verl_like.algorithms.objectives import ValueObjective
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Sequences
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.spec import WorkerSpec


class CriticWorker:
    """One rank of the critic. Its engine keeps on the device only what critic.model.fsdp_config says."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        self.spec = spec
        critic = spec.config.critic
        self.objective = ValueObjective(critic)
        self.engine = FSDPEngine(
            kind="value",
            process=process,
            model=critic.model,
            fsdp=critic.model.fsdp_config,
            optim=critic.optim,
            grad_clip=critic.grad_clip,
            num_schedule_steps=spec.plan.total_training_steps,
            strategy=critic.strategy,
            ulysses_size=critic.ulysses_sequence_parallel_size,
            tokenizer_size=None,
            seed=spec.config.trainer.seed,
        )

    def values(self, batch: Sequences) -> Evaluated:
        """V(state before each response token) of this rank's rows."""
        out = self.engine.forward(batch, want=frozenset({"values"}), rule=self.spec.plan.critic_forward_micro)
        return Evaluated(response_length_B=batch.response_length_B, values_T=out["values"])

    def update(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        """One optimizer step per mini-batch; the metrics of each."""
        steps = [
            self.engine.train_minibatch(rows, self.objective, denominators, rule=self.spec.plan.critic_micro)
            for rows, denominators in minibatches
        ]
        self.engine.advance_schedule()
        return steps

    def save(self, path: str) -> list[str]:
        """Write the critic's checkpoint, or name the tensors that are not finite (TrainEngine.save)."""
        checkpoint = self.spec.config.critic.checkpoint
        return self.engine.save(path, contents=checkpoint.save_contents, background=checkpoint.async_save)

    def saved(self, wait: bool) -> bool:
        return self.engine.saved(wait=wait)

    def load(self, path: str) -> None:
        self.engine.load(path, contents=self.spec.config.critic.checkpoint.load_contents)
