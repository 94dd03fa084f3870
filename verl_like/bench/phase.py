"""One phase of a step alone: the trainer's own policy worker, with only the parts that the phase needs.

The options become the same configuration as a whole run's (`bench grpo`), so that every key of main_ppo acts here too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_like.algorithms.objectives import PolicyObjective
from verl_like.bench.inputs import model_config
from verl_like.bench.shapes import MODELS, WORKLOADS, BenchError, Workload
from verl_like.config import resolve_dtype
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.models.cost import ModelCost
from verl_like.models.heads import dtype_of
from verl_like.models.loading import load_hf_config
from verl_like.observe.roofline import RunShape
from verl_like.parallel.device_peak import DevicePeak
from verl_like.parallel.dist import ProcessInfo
from verl_like.trainer.build import resolve_world
from verl_like.trainer.compose import compose
from verl_like.workers.phase import PhaseSwitch
from verl_like.workers.policy import PolicyWorker
from verl_like.workers.spec import WorkerSpec

POLICY = "actor_rollout_ref"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank needs to know. Picklable."""

    spec: WorkerSpec
    workload: Workload
    device: str
    cost: ModelCost

    @property
    def num_ranks(self) -> int:
        return self.spec.plan.world_size

    def run_shape(self, peaks: Sequence[DevicePeak]) -> RunShape:
        """For the floors; peaks: one for each rank."""
        rollout = self.spec.config.actor_rollout_ref.rollout
        weight_type = dtype_of(resolve_dtype(rollout.dtype, self.device))
        return RunShape(
            actor=self.cost,
            critic=None,
            peak=total(peaks),
            weight_bytes=weight_type.itemsize,
            responses_per_prompt=self.workload.responses_per_prompt,
            rollout_replicas=self.spec.plan.rollout_replicas,
            actor_epochs=1,
            critic_epochs=1,
        )


def total(peaks: Sequence[DevicePeak]) -> DevicePeak:
    """The devices of all ranks together."""
    return DevicePeak(
        flops=sum(peak.flops for peak in peaks),
        bandwidth=sum(peak.bandwidth for peak in peaks),
        source=peaks[0].source,
    )


@contextmanager
def phase_job(arguments: argparse.Namespace, *more: str) -> Iterator[Job]:
    """The job that the options ask for; the model's folder lives as long as the context. more: keys of this phase, over
    which the user's win. Raises BenchError for what does not fit together."""
    workload = WORKLOADS[arguments.workload].with_rows(arguments.rows)
    longest = workload.prompt_length + workload.max_response
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_config(MODELS[arguments.model], longest).save_pretrained(folder / "model")
        try:
            config = compose([*overrides(folder, workload, arguments), *more, *arguments.overrides])
            device, num_ranks = resolve_world(config)
            plan = BatchPlan.build(config, num_ranks)
        except (ConfigError, ValueError) as error:
            raise BenchError(str(error)) from error
        hf_config = load_hf_config(config.actor_rollout_ref.model)
        spec = WorkerSpec(
            config=config,
            plan=plan,
            tokenizer_size=MODELS[arguments.model].vocab_size,
            max_model_len=config.actor_rollout_ref.rollout.max_model_len or longest,
            profile_dir=str(folder),
        )
        yield Job(spec=spec, workload=workload, device=device, cost=ModelCost.of(hf_config))


def overrides(folder: Path, workload: Workload, arguments: argparse.Namespace) -> list[str]:
    """Keys of main_ppo that a workload and a model set, for a phase and for whole steps alike."""
    size = workload.num_prompts
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": size,
        "data.max_prompt_length": workload.prompt_length,
        "data.max_response_length": workload.max_response,
        f"{POLICY}.model.path": folder / "model",
        f"{POLICY}.actor.ppo_mini_batch_size": size,
        f"{POLICY}.actor.use_kl_loss": False,
        f"{POLICY}.rollout.n": workload.responses_per_prompt,
        "trainer.nnodes": 1,
        "trainer.logger": "[]",
        "trainer.total_training_steps": 1,
    }
    if arguments.ranks is not None:
        values["trainer.n_gpus_per_node"] = arguments.ranks
    if arguments.model == "cpu":
        values[f"{POLICY}.model.enable_gradient_checkpointing"] = False
    return [f"{key}={value}" for key, value in values.items()]


def work_of(arguments: argparse.Namespace, job: Job, **more: Any) -> dict[str, Any]:
    """What a report compares by: shapes, ranks, threads, changed keys."""
    return {
        "model": asdict(MODELS[arguments.model]),
        "workload": asdict(job.workload),
        "ranks": job.num_ranks,
        "threads": arguments.threads,
        "overrides": sorted(arguments.overrides),
    } | more


class PhaseWorker(PolicyWorker):
    """A PolicyWorker with the actor, the rollout engine, or (as the whole worker) both."""

    def __init__(self, spec: WorkerSpec, process: ProcessInfo, run_id: str, *, actor: bool, rollout: bool) -> None:
        if actor and rollout:
            super().__init__(spec, process, run_id)
            return
        policy = spec.config.actor_rollout_ref
        self.spec, self.process, self.temperature = spec, process, policy.rollout.temperature
        self._lora, self.reference = policy.model.lora_rank > 0, None
        self.objective = PolicyObjective(policy.actor, spec.config.algorithm.rollout_correction)
        self._changed_since_sync = True
        if actor:
            self.actor = self._build_actor()
        if rollout:
            self.rollout = self._build_rollout(run_id)
        self.switch = PhaseSwitch(enter_train=_nothing, enter_rollout=_nothing)


def _nothing() -> None:
    """There is no other engine to make room for."""
