"""What the models that learn have in common: the actor and the critic."""

from __future__ import annotations

import torch

from verl_like.batch import Denominators, Experience, Metric
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models.heads import PolicyModel
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.spec import WorkerSpec


class TrainedRole:
    """One rank of a model with an optimizer. A role adds its forward pass and `train`."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, name: str) -> None:
        self.sizes = spec.plan.roles[name]
        self.engine = build_engine(spec, process, name)

    def update(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        """One optimizer step per mini-batch on this rank's rows; the metrics of each step."""
        steps = [self.train(rows, denominators) for rows, denominators in minibatches]
        self.engine.advance_schedule()
        return steps

    def train(self, rows: Experience, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step."""
        raise NotImplementedError

    def checksums(self) -> dict[str, int]:
        """Of every weight in float32, the same however it is sharded (collective)."""
        return self.engine.weight_checksums(torch.float32)

    def save(self, path: str) -> list[str]:
        """Write a checkpoint, unless it holds tensors that are not finite: their names (FSDPEngine.save)."""
        checkpoint = self.sizes.config.checkpoint
        return self.engine.save(path, contents=checkpoint.save_contents, background=checkpoint.async_save)

    def saved(self, wait: bool) -> bool:
        """Whether no checkpoint is being written in the background; `wait`: until it is so."""
        return self.engine.saved(wait=wait)

    def load(self, path: str) -> None:
        """Restore from a checkpoint."""
        self.engine.load(path, contents=self.sizes.config.checkpoint.load_contents)


def build_engine(spec: WorkerSpec, process: ProcessInfo, name: str) -> FSDPEngine:
    """The engine of a role of this run (collective)."""
    role = spec.plan.roles[name].config
    engine = FSDPEngine(
        role,
        process,
        num_schedule_steps=None if role.optim is None else spec.plan.total_training_steps,
        tokenizer_size=spec.tokenizer_size if role.kind == "policy" else None,
        seed=spec.config.trainer.seed,
    )
    if isinstance(engine.model, PolicyModel):
        engine.model.save_entropy_memory(chunked=role.entropy_in_chunks, recomputed=role.recompute_entropy)
    return engine
