"""The roles of a worker that are training engines: actor, critic, reference, and a reward model that gives numbers."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.objectives import PolicyObjective, ValueObjective
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Sequences
from verl_like.config import RewardModelConfig
from verl_like.config.actor import ReplayMode
from verl_like.config.batch_plan import needs_sum_pi_squared, two_policies
from verl_like.config.distillation import TOP_K
from verl_like.config.roles import ACTOR, CRITIC, REF, REWARD
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import ENTROPY, FULL_KL, LOG_PROBS, SUM_PI_SQUARED, VALUES
from verl_like.models import exact
from verl_like.models.heads import TOP_IDS, TOP_LOG_PROBS, PolicyModel
from verl_like.models.routes import ROUTES
from verl_like.observe.metrics import memory_metrics
from verl_like.parallel.dist import ProcessInfo
from verl_like.registry import part
from verl_like.user_code import check_call, load
from verl_like.workers.spec import WorkerSpec


class TrainedRole:
    """Rank of a model with an optimizer. A role adds its forward pass and `train`."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, name: str) -> None:
        self.sizes = spec.plan.roles[name]
        self.engine = build_engine(spec, process, name)

    def update(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        """Take one optimizer step per mini-batch on this rank's rows; the metrics of each step."""
        steps = [self.train(rows, denominators) for rows, denominators in minibatches]
        self.engine.advance_schedule()
        return steps

    def train(self, rows: Experience, denominators: Denominators) -> dict[str, Metric]:
        """Take one optimizer step."""
        raise NotImplementedError

    def checksums(self) -> dict[str, int]:
        """Checksums of every weight in float32, the same however it is sharded (collective)."""
        return self.engine.weight_checksums(torch.float32)

    def write_weights(self, path: str) -> list[tuple[str, torch.Size | Tensor]]:
        """Write every weight in float32, adapters added in, behind each other into a file, by the first rank.

        Collective; returns names and shapes in the file's order. One weight at a time is gathered. path: a file of the
        driver's; where the first rank's machine does not have it, that rank returns the weights themselves.
        """
        found, first = list[tuple[str, torch.Size | Tensor]](), self.engine.process.rank == 0
        is_here = os.path.exists(path)
        with open(path, "wb") if first and is_here else nullcontext() as file:
            for name, tensor in self.engine.export_weights(torch.float32):
                if file is not None:
                    tensor.detach().cpu().numpy().tofile(file)
                by_value = first and not is_here  # a copy: with a view of a stack all of it would travel
                found.append((name, tensor.detach().cpu().clone() if by_value else tensor.shape))
                del tensor  # before the next is gathered
        return found

    def save(self, path: str) -> list[str]:
        """Write a checkpoint, unless it holds tensors that are not finite; return their names (FSDPEngine.save)."""
        checkpoint = self.sizes.config.checkpoint
        return self.engine.save(path, contents=checkpoint.save_contents, background=checkpoint.async_save)

    def saved(self, wait: bool) -> bool:
        """True where no checkpoint is being written in the background; `wait`: wait until that is so."""
        return self.engine.saved(wait=wait)

    def load(self, path: str) -> None:
        """Restore from a checkpoint."""
        self.engine.load(path, contents=self.sizes.config.checkpoint.load_contents)


def build_engine(spec: WorkerSpec, process: ProcessInfo, name: str) -> FSDPEngine:
    """Build the engine of a role of this run (collective)."""
    role = spec.plan.roles[name].config
    engine = FSDPEngine(
        role,
        process,
        num_schedule_steps=None if role.optim is None else spec.plan.total_training_steps,
        tokenizer_size=spec.tokenizer_size if role.kind == "policy" else None,
        seed=spec.config.trainer.seed,
        lowered=spec.lowered.get(name),
    )
    if isinstance(engine.model, PolicyModel):
        engine.model.save_entropy_memory(chunked=role.entropy_in_chunks, recomputed=role.recompute_entropy)
    return engine


class ActorRole(TrainedRole):
    """Rank of the actor."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        super().__init__(spec, process, ACTOR)
        actor, algorithm = spec.config.actor_rollout_ref.actor, spec.config.algorithm
        correction = algorithm.rollout_correction
        kind, distillation = spec.config.trainer.objective, spec.config.distillation
        two = two_policies(actor, correction)
        policy = PolicyObjective(actor, correction, two_policies=two, distillation=distillation)
        self.objective = policy if kind == "rl" else part("loss", kind)(spec.config)
        own = distillation.distillation_loss.kd_temperature
        if policy.distillation is not None and own is not None and isinstance(self.engine.model, PolicyModel):
            self.engine.model.tempered = policy.distillation.wants, own
        self.temperature = spec.config.actor_rollout_ref.rollout.temperature
        more = {SUM_PI_SQUARED} if needs_sum_pi_squared(algorithm) else set[str]()
        more |= {ROUTES} if actor.router_replay.mode == ReplayMode.R2 else set()
        self._wanted = frozenset({LOG_PROBS, ENTROPY, *more}) if kind == "rl" else self.objective.wants

    def log_probs(self, batch: Sequences) -> Evaluated:
        """Compute log-probs, entropy and what else the estimator needs of the current actor on this rank's rows.

        Where nothing is sampled: what the loss needs. There may be no rows.
        """
        out = self.engine.forward(batch, want=self._wanted, rule=self.sizes.forward, temperature=self.temperature)
        return Evaluated(
            response_length_B=batch.response_length_B,
            old_log_probs_T=out.get(LOG_PROBS),
            entropy_T=out.get(ENTROPY),
            sum_pi_squared_T=out.get(SUM_PI_SQUARED),
            values_T=out.get(VALUES),
            routes_T=out.get(ROUTES),
            routed_length_B=batch.num_tokens_B() if ROUTES in out else None,
        )

    def usual_log_probs(self, batch: Sequences) -> Evaluated:
        """Compute `log_probs` by torch's usual kernels, to compare times with `trainer.parity=exact`."""
        with exact.ordinary():
            return self.log_probs(batch)

    def base_log_probs(self, batch: Sequences) -> Evaluated:
        """Compute `log_probs` of the model without its adapters."""
        with self.engine.base_model():
            return self.log_probs(batch)

    def update(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        """Update as every role that is trained; the metrics of the last step also have this rank's memory."""
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


class CriticRole(TrainedRole):
    """Rank of the critic."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo) -> None:
        super().__init__(spec, process, CRITIC)
        self.objective = ValueObjective(spec.config.critic)

    def values(self, batch: Sequences) -> Evaluated:
        """Compute V(state before each response token) of this rank's rows."""
        out = self.engine.forward(batch, want=frozenset({VALUES}), rule=self.sizes.forward)
        return Evaluated(response_length_B=batch.response_length_B, values_T=out[VALUES])

    def train(self, rows: Experience, denominators: Denominators) -> dict[str, Metric]:
        assert self.sizes.update is not None
        return self.engine.train_minibatch(rows, self.objective, denominators, rule=self.sizes.update)


class ReferenceRole:
    """Rank of the reference. actor: of the same process; None where the reference has a pool of its own."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, actor: ActorRole | None) -> None:
        self.sizes, self.wanted = spec.plan.roles[REF], spec.plan.reference_outputs
        self.temperature = spec.config.actor_rollout_ref.rollout.temperature
        self._actor = actor
        self.engine = None if self.sizes.config.is_base_of_actor else build_engine(spec, process, REF)
        if actor is not None and self.engine is not None:
            actor.engine.attach_reference(self.engine)

    def log_probs(self, batch: Sequences) -> Evaluated:
        """Compute what the plan asks of the reference on this rank's rows: its log-probs, the exact KL to it.

        There may be no rows.
        """
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
        """Return the actor of this process.

        A rule sees to it that the two share a pool where the reference needs it (config/placement.py).
        """
        assert self._actor is not None
        return self._actor


class TeacherRole:
    """Rank of a teacher, which is frozen. name: of its role."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, name: str) -> None:
        loss = spec.config.distillation.distillation_loss
        self.rule = spec.plan.roles[name].forward
        self.engine = build_engine(spec, process, name)
        self.temperature, self.wanted = spec.config.actor_rollout_ref.rollout.temperature, frozenset({LOG_PROBS})
        if loss.loss_mode == TOP_K and isinstance(self.engine.model, PolicyModel):
            self.engine.model.top_k, self.wanted = loss.topk, frozenset({TOP_LOG_PROBS, TOP_IDS})
            self.temperature = loss.kd_temperature or self.temperature

    def log_probs(self, batch: Sequences) -> Evaluated:
        """Compute log-probs of this rank's rows: of their tokens, or of the likeliest ids. There may be no rows."""
        out = self.engine.forward(batch, want=self.wanted, rule=self.rule, temperature=self.temperature)
        return Evaluated(
            response_length_B=batch.response_length_B,
            teacher_log_probs_T=out[TOP_LOG_PROBS if TOP_IDS in self.wanted else LOG_PROBS],
            teacher_ids_T=out.get(TOP_IDS),
        )


class RewardWorker:
    """One rank of the reward model, a sequence classifier with one output that only scores. Its engine keeps on the
    device only what its fsdp_config says."""

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
