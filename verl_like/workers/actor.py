"""The actor: the policy that is trained."""

from __future__ import annotations

from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Sequences
from verl_like.config.batch_plan import needs_sum_pi_squared, two_policies
from verl_like.config.roles import ACTOR
from verl_like.engine.train_engine import ENTROPY, LOG_PROBS, SUM_PI_SQUARED
from verl_like.observe.metrics import memory_metrics
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.spec import WorkerSpec
from verl_like.workers.trained import TrainedRole


class ActorRole(TrainedRole):
    """One rank of the actor."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        super().__init__(spec, process, ACTOR)
        actor, algorithm = spec.config.actor_rollout_ref.actor, spec.config.algorithm
        correction = algorithm.rollout_correction
        self.objective = PolicyObjective(actor, correction, two_policies=two_policies(actor, correction))
        self.temperature = spec.config.actor_rollout_ref.rollout.temperature
        self._more = {SUM_PI_SQUARED} if needs_sum_pi_squared(algorithm) else set[str]()

    def log_probs(self, batch: Sequences) -> Evaluated:
        """Log-probs, entropy and what else the estimator needs of the current actor on this rank's rows (or none)."""
        out = self.engine.forward(
            batch,
            want=frozenset({LOG_PROBS, ENTROPY, *self._more}),
            rule=self.sizes.forward,
            temperature=self.temperature,
        )
        return Evaluated(
            response_length_B=batch.response_length_B,
            old_log_probs_T=out[LOG_PROBS],
            entropy_T=out[ENTROPY],
            sum_pi_squared_T=out.get(SUM_PI_SQUARED),
        )

    def update(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        """As of every role that is trained; the last step also tells this rank's memory."""
        steps = super().update(minibatches)
        memory = {name: Metric(value=value, reduction="max") for name, value in memory_metrics().items()}
        return [*steps[:-1], steps[-1] | memory] if steps else []

    def train(self, rows: Experience, denominators: Denominators) -> dict[str, Metric]:
        assert self.sizes.update is not None
        return self.engine.train_minibatch(
            rows,
            self.objective,
            denominators,
            rule=self.sizes.update,
            temperature=self.temperature,
            without_gradient_B=self.objective.without_gradient(rows),
        )
