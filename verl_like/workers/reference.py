"""The reference: the policy as it was before training, frozen. With LoRA it is the actor without its adapters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from verl_like.batch import Evaluated, Sequences
from verl_like.config.roles import REF
from verl_like.engine.train_engine import FULL_KL, LOG_PROBS
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.actor import ActorRole
from verl_like.workers.spec import WorkerSpec
from verl_like.workers.trained import build_engine


class ReferenceRole:
    """One rank of the reference. actor: of the same process; None where the reference has a pool of its own."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, actor: ActorRole | None) -> None:
        self.sizes, self.wanted = spec.plan.roles[REF], spec.plan.reference_outputs
        self.temperature = spec.config.actor_rollout_ref.rollout.temperature
        self._actor = actor
        self.engine = None if self.sizes.config.is_base_of_actor else build_engine(spec, process, REF)
        if actor is not None and self.engine is not None:
            actor.engine.attach_reference(self.engine)

    def log_probs(self, batch: Sequences) -> Evaluated:
        """What the plan asks of the reference on this rank's rows (may be none): its log-probs, the exact KL to it."""
        log_probs = full_kl = None
        options: dict[str, Any] = {"rule": self.sizes.forward, "temperature": self.temperature}
        if LOG_PROBS in self.wanted:
            engine = self.engine or self._of_actor().engine
            with nullcontext() if self.engine is not None else engine.base_model():
                log_probs = engine.forward(batch, want=frozenset({LOG_PROBS}), **options)[LOG_PROBS]
        if FULL_KL in self.wanted:
            full_kl = self._of_actor().engine.forward(batch, want=frozenset({FULL_KL}), **options)[FULL_KL]
        return Evaluated(response_length_B=batch.response_length_B, ref_log_probs_T=log_probs, full_kl_T=full_kl)

    def _of_actor(self) -> ActorRole:
        """The doctor sees to it that the two share a pool where the reference needs the actor."""
        assert self._actor is not None
        return self._actor
