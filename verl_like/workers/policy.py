"""Actor, reference and rollout in one process: the hybrid engine.

The actor trains, the rollout engine samples, the weight sync carries weights from one to the other and proves that they
arrived. All methods are SPMD: every rank of the pool is called with its own share of the rows.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import torch

from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Sequences
from verl_like.cluster.worker_group import RankEnv
from verl_like.config import resolve_dtype
from verl_like.config.batch_plan import needs_sum_pi_squared, two_policies
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import ENTROPY, LOG_PROBS, SUM_PI_SQUARED
from verl_like.models.heads import dtype_of
from verl_like.models.loading import load_hf_config
from verl_like.observe.metrics import memory_metrics
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.link_server import LinkServer
from verl_like.rollout.rollout_engine import RolloutEngine
from verl_like.rollout.wire import address_towards
from verl_like.weight_sync.sync import SyncReport, WeightSync
from verl_like.workers.phase import Phase, PhaseSwitch
from verl_like.workers.spec import WorkerSpec

_LEAST_LR, _LEAST_NORM = 1e-7, 1e-3  # under these a step may be lost to rounding


class PolicyWorker:
    """One rank's actor, its frozen reference where the run needs one, and its part of the rollout engine."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, run_id: str) -> None:
        self.spec, self.process = spec, process
        self.temperature = spec.config.actor_rollout_ref.rollout.temperature
        began = time.perf_counter()
        self.actor = self._build_actor()
        self._lora = spec.config.actor_rollout_ref.model.lora_rank > 0
        builds_reference = spec.plan.needs_reference and not self._lora
        self.reference = self._build_reference() if builds_reference else None
        if self.reference is not None:
            self.actor.attach_reference(self.reference)
        actor, correction = spec.config.actor_rollout_ref.actor, spec.config.algorithm.rollout_correction
        self.objective = PolicyObjective(actor, correction, two_policies=two_policies(actor, correction))
        built = time.perf_counter()
        self.rollout = self._build_rollout(run_id)
        ready = time.perf_counter()
        self.start_seconds = {"weights": built - began, spec.config.actor_rollout_ref.rollout.name: ready - built}
        self.link: LinkServer | None = None
        self.weight_sync = WeightSync(
            self.actor,
            self.rollout,
            spec.config.actor_rollout_ref.rollout,
            process,
            trainer_dtype=self.compute_dtype(),
        )
        self.switch = PhaseSwitch(enter_train=self.rollout.sleep, enter_rollout=self._enter_rollout)
        self.rollout.sleep()
        self._changed_since_sync = True  # whether the rollout engine holds other weights than the actor, or none
        self._moved = False  # whether a step since the last sync was large enough to change float32 weights

    def _build_actor(self) -> FSDPEngine:
        policy = self.spec.config.actor_rollout_ref
        return FSDPEngine(
            kind="policy",
            process=self.process,
            model=policy.model,
            fsdp=policy.actor.fsdp_config,
            optim=policy.actor.optim,
            grad_clip=policy.actor.grad_clip,
            num_schedule_steps=self.spec.plan.total_training_steps,
            strategy=policy.actor.strategy,
            compile_blocks=policy.actor.use_torch_compile,
            ulysses_size=policy.actor.ulysses_sequence_parallel_size,
            tokenizer_size=self.spec.tokenizer_size,
            seed=self.spec.config.trainer.seed,
        )

    def _build_reference(self) -> FSDPEngine:
        policy = self.spec.config.actor_rollout_ref
        return FSDPEngine(
            kind="policy",
            process=self.process,
            model=policy.model,
            fsdp=policy.ref.fsdp_config,
            optim=None,
            grad_clip=None,
            num_schedule_steps=None,
            strategy=policy.ref.strategy,
            compile_blocks=policy.ref.use_torch_compile,
            ulysses_size=policy.ref.ulysses_sequence_parallel_size,
            tokenizer_size=self.spec.tokenizer_size,
            seed=self.spec.config.trainer.seed,
        )

    def compute_dtype(self) -> torch.dtype:
        """Precision of the actor's forward and backward passes."""
        fsdp = self.spec.config.actor_rollout_ref.actor.fsdp_config
        return dtype_of(resolve_dtype(fsdp.dtype, self.process.device.type))

    def _build_rollout(self, run_id: str) -> RolloutEngine:
        policy = self.spec.config.actor_rollout_ref
        return build_rollout_engine(
            policy.rollout,
            policy.model,
            process=self.process,
            hf_config=load_hf_config(policy.model),
            tokenizer_size=self.spec.tokenizer_size,
            max_model_len=self.spec.max_model_len,
            seed=self.spec.config.trainer.seed,
            run_id=run_id,
            tokenizer=self.spec.config.data.tokenizer,
        )

    def _enter_rollout(self) -> None:
        """The trainer's engines keep on the device only what their fsdp_config says; make sure of it, then wake."""
        fsdp = self.spec.config.actor_rollout_ref.actor.fsdp_config
        self.actor.offload(params=fsdp.param_offload, optimizer=fsdp.optimizer_offload)
        self.rollout.wake()

    def sync_weights(self, version: int) -> SyncReport | None:
        """Bring the rollout engine to `version` of the trained weights; None when it already holds it."""
        if self.rollout.weight_version == version:
            self._changed_since_sync = False
            self.switch.switch(Phase.rollout)
            return None
        self.enter_train()
        # Wakes the engine's weights first, its cache when they are loaded.
        report = self.weight_sync.sync(version, optimizer_moved=self._moved)
        self._changed_since_sync = self._moved = False
        self.switch.switch(Phase.rollout)
        return report

    def enter_train(self) -> None:
        """Give the device to the trainer's engines; the critic's too, which this worker does not own."""
        self.switch.switch(Phase.train)

    def open_link(self, env: RankEnv) -> tuple[tuple[str, int], bytes] | None:
        """Address and key under which the driver reaches this replica, on its first rank; None on the others."""
        if self.link is not None:
            self.link.close()
        if env.rank % self.spec.plan.tensor_parallel_size:
            return None
        self.link = LinkServer(self.rollout, address_towards(env.master_address, env.master_port))
        return self.link.address, self.link.authkey

    def serve(self, num_orders: int) -> None:
        """Sample what the driver orders through the links until it says pause. num_orders: see LinkServer.serve."""
        if not self._changed_since_sync:  # another engine had the device meanwhile, but the weights are the actor's
            self.switch.switch(Phase.rollout)
        self.switch.require(Phase.rollout, "serve")
        if self.link is not None:
            self.link.serve(num_orders)
        else:
            with self.rollout.opened():
                pass  # a replica's other ranks pause when its first one does

    def old_log_probs(self, batch: Sequences) -> Evaluated:
        """Log-probs, entropy and what else the estimator needs of the current actor on this rank's rows (or none)."""
        self.enter_train()
        more = {SUM_PI_SQUARED} if needs_sum_pi_squared(self.spec.config.algorithm) else set()
        out = self.actor.forward(
            batch,
            want=frozenset({LOG_PROBS, ENTROPY, *more}),
            rule=self.spec.plan.log_prob_micro,
            temperature=self.temperature,
        )
        return Evaluated(
            response_length_B=batch.response_length_B,
            old_log_probs_T=out[LOG_PROBS],
            entropy_T=out[ENTROPY],
            sum_pi_squared_T=out[SUM_PI_SQUARED] if more else None,
        )

    def ref_log_probs(self, batch: Sequences) -> Evaluated:
        """What the plan asks of the reference on this rank's rows (may be none): its log-probs, the exact KL to it."""
        self.enter_train()
        engine = self.actor if self._lora else self.reference
        if engine is None or not self.spec.plan.needs_reference:
            raise RuntimeError("ref_log_probs was called, but this run's plan has no reference model")
        wanted, log_probs, full_kl = self.spec.plan.reference_outputs, None, None
        options: Any = {"rule": self.spec.plan.ref_micro, "temperature": self.temperature}
        if "log_probs" in wanted:
            with self.actor.base_model() if self._lora else nullcontext():  # the reference is the actor's base
                log_probs = engine.forward(batch, want=frozenset({"log_probs"}), **options)["log_probs"]
        if "full_kl" in wanted:
            full_kl = self.actor.forward(batch, want=frozenset({"full_kl"}), **options)["full_kl"]
        return Evaluated(response_length_B=batch.response_length_B, ref_log_probs_T=log_probs, full_kl_T=full_kl)

    def update_actor(self, minibatches: list[tuple[Experience, Denominators]]) -> list[dict[str, Metric]]:
        """One optimizer step per mini-batch on this rank's rows; the metrics of each step."""
        self._changed_since_sync = True
        self.enter_train()
        steps = [
            self.actor.train_minibatch(
                rows,
                self.objective,
                denominators,
                rule=self.spec.plan.actor_micro,
                temperature=self.temperature,
                without_gradient_B=self.objective.without_gradient(rows),
            )
            for rows, denominators in minibatches
        ]
        exact = all(parameter.dtype == torch.float32 for parameter in self.actor.sharding.parameters())
        self._moved = self._moved or (exact and any(map(moves_weights, steps)))
        self.actor.advance_schedule()
        memory = {name: Metric(value=value, reduction="max") for name, value in memory_metrics().items()}
        return [*steps[:-1], steps[-1] | memory] if steps else []

    def save(self, path: str) -> list[str]:
        """Write the actor's checkpoint, unless it holds tensors that are not finite: their names (TrainEngine.save)."""
        self.enter_train()
        checkpoint = self.spec.config.actor_rollout_ref.actor.checkpoint
        return self.actor.save(path, contents=checkpoint.save_contents, background=checkpoint.async_save)

    def saved(self, wait: bool) -> bool:
        """Whether no checkpoint is being written in the background; `wait`: until it is so."""
        return self.actor.saved(wait=wait)

    def load(self, path: str) -> None:
        """Restore the actor from a checkpoint; the rollout engine must be synced afterwards."""
        self._changed_since_sync, self._moved = True, False
        self.enter_train()
        self.rollout.unload()  # whatever version it holds, it is not this one
        self.actor.load(path, contents=self.spec.config.actor_rollout_ref.actor.checkpoint.load_contents)

    def shutdown(self) -> None:
        if self.link is not None:
            self.link.close()
        self.rollout.shutdown()


def moves_weights(step: dict[str, Metric]) -> bool:
    """Whether an optimizer step must change some float32 weight: AdamW moves each by about the learning rate, unless
    its gradient is small beside eps."""
    return step["lr"].value >= _LEAST_LR and _LEAST_NORM <= step["grad_norm"].value < math.inf
