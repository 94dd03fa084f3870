"""The critic: a backbone with a value head, trained on returns (PPO with adv_estimator=gae)."""

from __future__ import annotations

from verl_like.algorithms.objectives import ValueObjective
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Sequences
from verl_like.config.roles import CRITIC
from verl_like.engine.train_engine import VALUES
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.spec import WorkerSpec
from verl_like.workers.trained import TrainedRole


class CriticRole(TrainedRole):
    """One rank of the critic."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        super().__init__(spec, process, CRITIC)
        self.objective = ValueObjective(spec.config.critic)

    def values(self, batch: Sequences) -> Evaluated:
        """V(state before each response token) of this rank's rows."""
        out = self.engine.forward(batch, want=frozenset({VALUES}), rule=self.sizes.forward)
        return Evaluated(response_length_B=batch.response_length_B, values_T=out[VALUES])

    def train(self, rows: Experience, denominators: Denominators) -> dict[str, Metric]:
        assert self.sizes.update is not None
        return self.engine.train_minibatch(rows, self.objective, denominators, rule=self.sizes.update)
