"""One phase of a step alone: the trainer's own policy worker, with only the parts that the phase needs.

The options become the same configuration as a whole run's (`bench grpo`), so that every key of main_ppo acts here too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl_like.batch import Experience
from verl_like.config import resolve_dtype
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.config.roles import ACTOR
from verl_like.kit.bench.inputs import model_config
from verl_like.kit.bench.ranks import on_ranks
from verl_like.kit.bench.report import check_comparable
from verl_like.kit.bench.shapes import MODELS, SMALL, WORKLOADS, BenchError, ModelShape, Workload
from verl_like.kit.speed.roofline import RunShape
from verl_like.models.cost import ModelCost
from verl_like.models.heads import dtype_of
from verl_like.models.loading import load_hf_config, shares_prompts
from verl_like.parallel.device_peak import DevicePeak
from verl_like.parallel.dist import ProcessInfo
from verl_like.trainer.compose import compose
from verl_like.trainer.dispatch import RowBalance, split_rows
from verl_like.trainer.facts import resolve_world
from verl_like.workers.spec import WorkerSpec

POLICY = "actor_rollout_ref"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Description of the work that every rank needs. Picklable."""

    spec: WorkerSpec
    workload: Workload
    device: str
    cost: ModelCost

    @property
    def num_ranks(self) -> int:
        return self.spec.plan.world_size

    def run_shape(self, peaks: Sequence[DevicePeak]) -> RunShape:
        """Make the shape that the floors are computed from.

        peaks: one for each rank.
        """
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


def share_of_rank(job: Job, batch: Experience, process: ProcessInfo) -> Experience:
    """The rows of this rank, balanced as the trainer does it; ranks that share sequences get the same ones."""
    policy = job.spec.config.actor_rollout_ref
    spread = RowBalance(cost=job.cost, share_prompts=shares_prompts(policy.model, policy.actor.router))
    num_shares = job.spec.plan.roles[ACTOR].data_parallel_size
    shares = spread.shares(batch, num_shares)
    return split_rows(batch, shares)[process.rank * num_shares // process.world_size]


def total(peaks: Sequence[DevicePeak]) -> DevicePeak:
    """The devices of all ranks together."""
    return DevicePeak(
        flops=sum(peak.flops for peak in peaks), bandwidth=sum(peak.bandwidth for peak in peaks), source=peaks[0].source
    )


@contextmanager
def phase_job(arguments: argparse.Namespace, *more: str) -> Iterator[Job]:
    """The job that the options ask for; the model's folder lives as long as the context. more: keys of this phase, over
    which the user's win. Raises BenchError for what does not fit together."""
    workload = WORKLOADS[arguments.workload].with_rows(arguments.rows)
    with tempfile.TemporaryDirectory() as folder:
        keys = [*model_keys(arguments.model), *more, *arguments.overrides]
        yield build_job(Path(folder), MODELS[arguments.model], workload, keys, ranks=arguments.ranks)


def build_job(folder: Path, shape: ModelShape, workload: Workload, keys: Sequence[str], *, ranks: int | None) -> Job:
    """The job of a shape and a workload; its model is a config in `folder`, the weights are random. keys: of main_ppo,
    over those that the workload sets."""
    longest = workload.prompt_length + workload.max_response
    model_config(shape, longest).save_pretrained(folder / "model")
    try:
        config = compose([*overrides(folder, workload, ranks), *keys])
        device, num_ranks = resolve_world(config)
        plan = BatchPlan.build(config, num_ranks)
    except (ConfigError, ValueError) as error:
        raise BenchError(str(error)) from error
    spec = WorkerSpec(
        config=config,
        plan=plan,
        tokenizer_size=shape.vocab_size,
        max_model_len=config.actor_rollout_ref.rollout.max_model_len or longest,
        profile_dir=str(folder),
    )
    cost = ModelCost.of(load_hf_config(config.actor_rollout_ref.model))
    return Job(spec=spec, workload=workload, device=device, cost=cost)


def model_keys(model: str) -> list[str]:
    """List the keys that a model needs besides its shape: small ones keep their activations."""
    return [f"{POLICY}.model.enable_gradient_checkpointing=False"] if model in SMALL else []


def overrides(folder: Path, workload: Workload, ranks: int | None) -> list[str]:
    """Keys of main_ppo that a workload sets, for a phase and for whole steps alike."""
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
    if ranks is not None:
        values["trainer.n_gpus_per_node"] = ranks
    return [f"{key}={value}" for key, value in values.items()]


def measure_on_ranks(
    bench: str, measure: Callable[..., Result], arguments: argparse.Namespace, job: Job, *inputs: Any, **more: Any
) -> tuple[dict[str, Any], list[Result]]:
    """Run measure(process, run_id, job, *inputs, rounds) on every rank of the job; return the work and the results.

    The work is what a report compares by: shapes, ranks, threads, changed keys and `more`. Raises BenchError first if
        the report to compare with is of other work.
    """
    work = {
        "model": asdict(MODELS[arguments.model]),
        "workload": asdict(job.workload),
        "ranks": job.num_ranks,
        "threads": arguments.threads,
        "overrides": sorted(arguments.overrides),
    } | more
    check_comparable(bench, work, arguments.compare)
    options: dict[str, Any] = {"num_ranks": job.num_ranks, "device": job.device, "threads": arguments.threads}
    return work, on_ranks(measure, job, *inputs, arguments.rounds, **options)
