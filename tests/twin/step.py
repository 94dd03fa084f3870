"""One training step of one rank on the twin: roles built and sharded, passes, updates, sleep, weights into buckets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tests.twin import others
from tests.twin.mode import Counts, Twin
from verl_like.algorithms.minibatch import denominators_of
from verl_like.batch import Denominators, Experience
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import ACTOR, CRITIC, REF, REWARD
from verl_like.engine import packing_check
from verl_like.kit.forecast.memory import Machine, forecast
from verl_like.models.cost import ModelCost
from verl_like.models.loading import load_hf_config
from verl_like.models.memory import Shape
from verl_like.parallel.dist import ProcessInfo
from verl_like.trainer.compose import compose
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.wired import WiredSender
from verl_like.workers.roles import ActorRole, CriticRole, ReferenceRole, RewardWorker, TrainedRole
from verl_like.workers.spec import WorkerSpec

_MODEL = "actor_rollout_ref.model.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration of a run, and the rows that the looked-at rank gets of its step: the second, where there is one.

    model: a config.json. layers: as many instead of the model's own. lengths: (prompt, response) of each row. ranks:
    such lists of each rank of a small world whose ranks all run, in place of world and lengths. before: a function,
    module:name, that gets the rank first.
    """

    name: str
    model: str
    keys: Sequence[str] = ()
    world: int = 8
    layers: int | None = None
    flash_attn: bool = False  # installed; torch's own varlen attention otherwise
    ranks: Sequence[Sequence[Sequence[int]]] = ()
    before: str = ""
    packing: bool = False  # also the engine's check at its start, which costs four forward passes
    lengths: Sequence[Sequence[int]] = ((128, 384),) * 8


@dataclass(slots=True)
class Outcome:
    """What the phases of a step did, by the names of the step's clock, and what was told of them before."""

    phases: dict[str, Counts] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)  # [bytes] on the device behind the phase
    forecast: dict[str, float] = field(default_factory=dict)  # [bytes]


class Buckets(WiredSender):
    """The sending end of a weight sync that nobody joins: buckets are filled as for the engine of this machine."""

    def __init__(self, megabytes: int, device: torch.device) -> None:
        super().__init__("127.0.0.1", [], bucket_bytes=megabytes * 2**20, device=device)


def spec_of(case: Case, folder: Path) -> WorkerSpec:
    """The run that the case describes, as its workers are told of it; the model's config is written to `folder`."""
    config = json.loads(Path(case.model).read_text())
    if case.layers is not None:
        config |= {"num_hidden_layers": case.layers} | ({"layer_types": None} if "layer_types" in config else {})
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    world, rows = (len(case.ranks), list(chain.from_iterable(case.ranks))) if case.ranks else (case.world, case.lengths)
    nodes = max(1, world // 8)
    given = {key.partition("=")[0] for key in case.keys}
    keys = {
        "data.train_files": folder / "train.parquet", _MODEL: folder / "model", "trainer.device": "cuda",
        "trainer.nnodes": nodes, "trainer.n_gpus_per_node": world // nodes, "trainer.total_training_steps": 2,
        "data.max_prompt_length": max(p for p, _ in rows),
        "data.max_response_length": max(r for _, r in rows), "actor_rollout_ref.rollout.n": len(case.lengths),
        "data.train_batch_size": world, "actor_rollout_ref.actor.ppo_mini_batch_size": world,
        "actor_rollout_ref.actor.old_log_probs": "recompute", "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "actor_rollout_ref.rollout.server": True,  # so that weights go in buckets
    }  # fmt: skip
    composed = compose(
        [
            *(f"{key}={value}" for key, value in keys.items() if key not in given),
            *(key.format(folder=folder) for key in case.keys),
        ]
    )
    longest = max(sum(lengths) for lengths in rows)
    return WorkerSpec(
        config=composed,
        plan=BatchPlan.build(composed, world),
        tokenizer_size=config["vocab_size"],
        max_model_len=longest,
        profile_dir=str(folder),
    )


def experience_of(lengths: Sequence[Sequence[int]]) -> Experience:
    """Rows of these lengths with all columns that an update may read, one prompt for each row."""
    prompt_B, response_B = (torch.tensor([each[i] for each in lengths], dtype=torch.int64) for i in (0, 1))
    num_prompt, num_response = int(prompt_B.sum()), int(response_B.sum())
    column = torch.full((num_response,), -0.5)
    return Experience(
        prompt_ids_T=torch.arange(num_prompt, dtype=torch.int32) % 1000,
        prompt_length_B=prompt_B,
        response_ids_T=torch.arange(num_response, dtype=torch.int32) % 1000,
        response_length_B=response_B,
        response_mask_T=torch.ones(num_response, dtype=torch.bool),
        group_B=torch.arange(len(lengths)),
        advantages_T=column, returns_T=column, old_log_probs_T=column, ref_log_probs_T=column, values_T=column,
    )  # fmt: skip


def run(case: Case, folder: Path, process: ProcessInfo, twin: Twin) -> Outcome:
    """Run the step as this rank. Whatever a device would refuse (a mix of devices, a wrong precision) raises."""
    spec, outcome = spec_of(case, folder), Outcome()
    others.liger()
    others.even_loads()
    if case.flash_attn:
        others.flash_attention()
    if not case.packing:
        packing_check.check_packing = lambda *_: None
    with twin:
        mine, everyone = case.lengths, case.lengths
        if case.ranks:
            mine, everyone = case.ranks[process.rank], list(chain.from_iterable(case.ranks))
        whole = experience_of(everyone)
        batch = experience_of(mine), denominators_of(whole, max(whole.response_length_B.tolist()))
        for name, work in _phases(spec, process, *batch):
            twin.take()
            work()
            outcome.phases[name], outcome.kept[name] = twin.take(), twin.allocated
    outcome.forecast = forecast_of(spec, process.world_size)
    return outcome


def forecast_of(spec: WorkerSpec, world: int) -> dict[str, float]:
    """The forecast's bytes of each phase, without the rollout engine, which the twin has not."""
    config = load_hf_config(spec.config.actor_rollout_ref.model)
    shape = Shape.of(config, ModelCost.of(config))
    critic = shape if CRITIC in spec.plan.roles else None
    told = forecast(spec.config, shape, critic, Machine(on_cpu=False, world=world, capacity=None))
    gone = ("rollout weights", "KV cache", "buffers of the engine")
    return {name: sum(v for part, v in parts.items() if part not in gone) for name, parts in told.phases.items()}


def _phases(
    spec: WorkerSpec, process: ProcessInfo, rows: Experience, denominators: Denominators
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The phases of the step, in the worker's order; each is built when the one before has run."""
    made: dict[str, Any] = {}
    makers: dict[str, Callable[[], Any]] = {
        CRITIC: lambda: CriticRole(spec, process),
        REWARD: lambda: RewardWorker(spec, process),
        ACTOR: lambda: ActorRole(spec, process),
        REF: lambda: ReferenceRole(spec, process, made[ACTOR]),
    }
    for role, make in makers.items():
        if role in spec.plan.roles:
            yield f"build {role}", lambda role=role, make=make: made.update({role: make()})
    trained = [role for role in made.values() if isinstance(role, TrainedRole)]
    engines = [role.engine for role in made.values() if role.engine is not None]
    yield "states", lambda: [_make_states(role) for role in trained]
    batch = [(rows, denominators)]
    if REWARD in made:
        yield "reward", lambda: made[REWARD].scores(rows)
    yield "old_log_prob", lambda: made[ACTOR].log_probs(rows)
    if REF in made:
        yield "ref", lambda: made[REF].log_probs(rows)
    if CRITIC in made:
        yield "values", lambda: made[CRITIC].values(rows)
        yield "update_critic", lambda: made[CRITIC].update(batch)
    yield "update_actor", lambda: made[ACTOR].update(batch)
    yield (
        "sleep",
        lambda: [e.offload(params=e.role.fsdp.param_offload, optimizer=e.role.fsdp.optimizer_offload) for e in engines],
    )
    yield "update_weights", lambda: _sync(spec, process, made[ACTOR])


def _make_states(role: TrainedRole) -> None:
    """The optimizer's states, as after the first step: phases of later steps are what is to be known."""
    engine = role.engine
    with engine._resident(optimizer=True):
        engine.sharding.optimizer_state(engine.optimizer)


def _sync(spec: WorkerSpec, process: ProcessInfo, actor: ActorRole) -> None:
    """Send the weights as to an engine of this machine, checksums and probe included."""
    rollout = spec.config.actor_rollout_ref.rollout
    source = WeightSource(actor.engine, process, prove=rollout.sync_probe, trainer_dtype=actor.engine.compute_dtype)
    wanted = Wanted(
        dtype=torch.bfloat16,
        keeps_adapters=False,
        tokenizer_size=spec.tokenizer_size,
        max_model_len=spec.max_model_len,
        held=None,
    )
    sent = source.send(1, wanted, Buckets(rollout.update_weights_bucket_megabytes, process.device))
    if sent.problems:
        raise RuntimeError(f"the weights could not be sent: {sent.problems}")
