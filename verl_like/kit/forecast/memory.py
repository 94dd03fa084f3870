"""Forecast of the memory that each phase of a step takes on one device, before a start, and of the keys that change it.

Pure arithmetic from the configuration and the models' shapes (models/memory.py): no device is asked. What is told is
the largest moment of each phase, with rows at their full lengths. Where a phase does not fit, `remedies` searches
backwards: the largest token budget that fits, else switches, else more devices.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from verl_like.config import PPOConfig, resolve_dtype
from verl_like.config.batch_plan import sampler_is_trainer, takes_own_log_probs, uses_sampler_log_probs
from verl_like.config.micro_batches import Cut
from verl_like.config.placement import pools_of
from verl_like.config.roles import ACTOR, CRITIC, REF, ROLLOUT, RoleConfig, roles_of
from verl_like.config.rules import impossible
from verl_like.config.schema import from_dict, to_dict
from verl_like.kit.forecast.model import Model
from verl_like.models import memory
from verl_like.models.loading import load_hf_config
from verl_like.observe.metrics import memory_gib
from verl_like.trainer.costs import NO_ROOM, ModelCosts

logger = logging.getLogger(__name__)

GIB = 1024**3
SIZES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}
_STATES = {"adamw": None, "adamw_bf16": 4.0, "adamw_8bit": 2.0}  # bytes of both AdamW states; None: two master weights
_KEEPS_FREE = 0.95  # of a device: the rest is the driver's, CUDA's own and fragments
_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
_MOST_DEVICES = 64  # of the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware of a run.

    world: number of ranks.
    capacity: bytes of memory of one device, on a CPU of one process; None: not known.
    """

    on_cpu: bool
    world: int
    capacity: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Bytes of each part of each phase, on one device; phases are named as in the step's clock."""

    phases: Mapping[str, Mapping[str, float]]
    capacity: float | None

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())

    def too_large(self) -> list[str]:
        """Phases that do not fit."""
        return [] if self.capacity is None else [p for p in self.phases if self.total(p) > self.capacity * _KEEPS_FREE]

    def metrics(self) -> dict[str, float]:
        """Report perf/memory_forecast/<phase> in GiB."""
        return {f"perf/memory_forecast/{phase}": self.total(phase) / GIB for phase in self.phases}

    def rows(self) -> list[tuple[str, str]]:
        """List each phase with its memory, for people, the largest parts first."""
        return [(phase, self._text(phase)) for phase in self.phases]

    def text(self) -> str:
        """Write the forecast by phase, for one device."""
        told = [f"{phase:<14}  {text}" for phase, text in self.rows()]
        room = "not known here" if self.capacity is None else f"{self.capacity / GIB:.1f} GiB"
        return "\n".join([f"room for one process: {room}; at full lengths each phase takes", *told])

    def _text(self, phase: str) -> str:
        parts = sorted(self.phases[phase].items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size >= 0.005 * GIB)
        over = f"  {NO_ROOM}" if phase in self.too_large() else ""
        return f"{self.total(phase) / GIB:.2f} GiB ({told}){over}"


def forecast(
    config: PPOConfig,
    actor: memory.Shape,
    critic: memory.Shape | None,
    machine: Machine,
    teachers: Mapping[str, memory.Shape] = {},
) -> Forecast:
    """Forecast every phase of a step of this configuration, in the pool where it runs.

    critic: shape of the critic, where the run trains one.
    teachers: shapes of the teachers, by the name of their role.
    """
    roles, row = roles_of(config), config.data.max_prompt_length + config.data.max_response_length
    pools = {role: pool for pool in pools_of(config, machine.world) for role in pool.roles}
    shapes = {ACTOR: actor, REF: actor, CRITIC: critic, **teachers}
    models = {
        name: model_of(role, shape, machine, pools[name].world_size)
        for name, role in roles.items()
        if (shape := shapes.get(name)) is not None and not role.is_base_of_actor
    }
    samples = config.actor_rollout_ref.rollout.engine.code is not None
    engine, cache = _engine(config, actor, machine, pools[ROLLOUT].world_size, row) if samples else ({}, {})
    kept = cache if config.actor_rollout_ref.rollout.engine.keeps_cache else {}
    stays = {} if _sleeps(config, machine) else engine | kept

    def beside(name: str) -> dict[str, float]:
        """Bytes of everything else on the device while a role of its pool works, by name."""
        found = stays if pools[ROLLOUT] == pools[name] and name != ROLLOUT else {}
        for model in models.values():
            if model.name != name and pools[model.name] == pools[name]:
                found = found | model.between()
        return found

    def forward(name: str) -> dict[str, float]:
        model = models.get(name, models[ACTOR])
        return beside(model.name) | model.forward(
            tokens_of(config, roles[name], "forward", pools[name].world_size, row)[0]
        )

    def update(name: str) -> dict[str, float]:
        tokens, count = tokens_of(config, roles[name], "update", pools[name].world_size, row)
        return beside(name) | models[name].update(tokens, row, count)

    phases = {"gen": beside(ROLLOUT) | engine | cache}
    sent = _sent_bytes(config, actor, machine, apart=pools[ACTOR] != pools[ROLLOUT])
    if config.actor_rollout_ref.rollout.sync_probe and not machine.on_cpu:  # a forward pass of a few tokens, before
        probe = models[ACTOR].forward(1)
        sent = max(sent, probe["gathered weights"] + probe["work"])
    phases["update_weights"] = beside(ACTOR) | models[ACTOR].own(optimizer=False) | {"buffers": sent}
    if pools[ACTOR] == pools[ROLLOUT]:
        phases["update_weights"] |= engine
    own = config.actor_rollout_ref.actor
    sampled = sampler_is_trainer(config) or uses_sampler_log_probs(own, config.algorithm.rollout_correction)
    if not (sampled or takes_own_log_probs(config)):
        phases["old_log_prob"] = forward(ACTOR)
    if REF in roles:
        phases["ref"] = forward(REF)
    known, updated = [name for name in teachers if name in models], update(ACTOR)
    if known and config.distillation.compares:  # they work inside the update
        for name in known:
            tokens = tokens_of(config, roles[ACTOR], "update", pools[name].world_size, row)[0]
            own = models[name].forward(tokens)
            updated |= {
                f"{name} weights": models[name].weights(),
                f"{name} pass": own["gathered weights"] + own["work"],
            }
    elif known:
        phases["teacher"] = max(map(forward, known), key=lambda parts: sum(parts.values()))
    if CRITIC in models:
        phases |= {"values": forward(CRITIC), "update_critic": update(CRITIC)}
    if not samples:
        del phases["gen"], phases["update_weights"]
    return Forecast(phases=phases | {"update_actor": updated}, capacity=machine.capacity)


def tokens_of(config: PPOConfig, role: RoleConfig, name: str, processes: int, row: int) -> tuple[int, int]:
    """Compute (tokens of a rank's micro-batch, micro-batches of a mini-batch or step), at full lengths."""
    parallel = role.mesh(processes).data_parallel
    prompts = role.mini_batch_prompts if name == "update" else config.data.train_batch_size
    rows = max(1, -(-prompts * config.actor_rollout_ref.rollout.n // parallel))
    rule = role.passes[name].rule([], parallel)
    budget = max(rule.max_tokens, row) if rule.max_tokens is not None else (rule.max_sequences or 1) * row
    count = min(budget, rows * row)
    return -(-count // role.mesh(processes).parts_of_row), -(-rows * row // count)


def model_of(role: RoleConfig, shape: memory.Shape, machine: Machine, processes: int) -> Model:
    model, fsdp, optim = role.model, role.fsdp, role.optim
    lora, master = optim is not None and model.lora_rank > 0, SIZES[fsdp.model_dtype]
    recompute: Any = str(model.recompute_granularity) if model.enable_gradient_checkpointing else "none"
    path = memory.Path(
        c=SIZES[resolve_dtype(fsdp.dtype, "cpu" if machine.on_cpu else "cuda")],
        recompute=recompute,
        on_cpu=machine.on_cpu,
        lean_norms=model.use_remove_padding and (model.use_liger or (machine.on_cpu and model.use_lean_ops)),
        fused_head=model.use_fused_kernels,
        lora=lora,
        context=role.context,
    )
    mesh, shape = role.mesh(processes), shape.stage(fsdp.pipeline_parallel_size)
    trained = 0 if optim is None else shape.lora_weights(model.lora_rank) if lora else shape.all_weights
    state = 0.0 if optim is None else _STATES.get(str(optim.optimizer))
    if optim is not None and str(optim.optimizer) == "muon":  # one average of a layer's weights, two of the root's
        state = master * (1 + shape.root_weights / shape.all_weights)
    return Model(
        name=role.name,
        shape=shape,
        path=path,
        fsdp=fsdp,
        shards=mesh.stage,
        master=master,
        trained=trained,
        state=2.0 * master if state is None else state,
        values=role.kind == "value",
        alone=processes == 1 and not fsdp.offload_policy,
    )


def _rollout_bytes(config: PPOConfig, machine: Machine) -> int:
    return SIZES[resolve_dtype(config.actor_rollout_ref.rollout.dtype, "cpu" if machine.on_cpu else "cuda")]


def _sent_bytes(config: PPOConfig, shape: memory.Shape, machine: Machine, *, apart: bool) -> float:
    """Compute the bytes of the weights that are on their way to the rollout engine at once.

    A tensor at a time within a process. To another one two buckets, or one that holds all, and the tensor that is
    gathered: the embedding first, when there is one bucket; a layer's, each beside the one before (spread experts by
    owner), or with an adapter beside itself in float32 and the result; the head. A tensor that is larger than a bucket
    gets one of its size, or is sent from where it is to devices `apart`. On a CPU buckets are files of shared memory.
    """
    rollout, c = config.actor_rollout_ref.rollout, _rollout_bytes(config, machine)
    whole, embedding = float(c * shape.all_weights), float(c * shape.vocab * shape.hidden)
    if rollout.load_format == "dummy_hf":
        return whole
    if not (apart or rollout.server or rollout.engine.own_process):
        return embedding
    bucket = min(rollout.update_weights_bucket_megabytes * 2.0**20, whole)
    first, second = bucket if apart else max(bucket, embedding), bucket if whole > bucket else 0.0
    model = config.actor_rollout_ref.model
    merged = model.lora_rank > 0 and model.lora.merge
    owners = 1 if merged else config.actor_rollout_ref.actor.fsdp_config.expert_parallel_size
    largest = max(shape.hidden * shape.inner, shape.expert_weights * 2 / 3 / owners) * (c + 2.0 * merged)
    head = 0.0 if shape.tied else embedding + (0.0 if apart or not second else max(0.0, embedding - bucket))
    return first + max(embedding, second + 2 * largest, second + head)


def _sleeps(config: PPOConfig, machine: Machine) -> bool:
    """True where the engine leaves the device while the trainer works."""
    rollout = config.actor_rollout_ref.rollout
    goes = not machine.on_cpu if rollout.engine.leaves_device else rollout.sleep_level == 2
    return rollout.free_cache_engine and goes


def _engine(
    config: PPOConfig, shape: memory.Shape, machine: Machine, processes: int, row: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Compute the bytes of the rollout engine's weights and cache.

    hf's are those of all rows at once, at their full lengths; other engines take their share of the device, whatever
    the rows are; on a CPU vLLM takes VLLM_CPU_KVCACHE_SPACE, SGLang 1 GB at most.
    """
    rollout, c = config.actor_rollout_ref.rollout, _rollout_bytes(config, machine)
    tensor, kind = rollout.tensor_model_parallel_size, rollout.engine
    weights = {"rollout weights": c * shape.all_weights / tensor}
    one_row = row * memory.cache_token_bytes(shape, c) / tensor
    if kind.cpu_cache_variable is not None and machine.on_cpu:
        return weights, {"KV cache": float(os.environ.get(kind.cpu_cache_variable, "1")) * GIB}
    if kind.cpu_cache_most is not None and machine.on_cpu:
        return weights, {"KV cache": max(one_row, min(rollout.max_num_seqs * one_row, kind.cpu_cache_most * GIB))}
    if kind.keeps_cache and machine.capacity is not None:
        share = rollout.gpu_memory_utilization * machine.capacity
        return weights, {"KV cache": max(one_row, share - weights["rollout weights"])}
    rows = min(-(-config.data.train_batch_size * rollout.n // max(1, processes // tensor)), rollout.max_num_seqs)
    return weights, {"KV cache": rows * one_row * (1 + 1 / shape.layers), "sampling": 16.0 * rows * shape.vocab}


def of_run(
    config: PPOConfig, hf_config: PretrainedConfig, costs: ModelCosts, machine: Machine
) -> tuple[Forecast, list[str]]:
    """The forecast of a run whose model configs are read, and what makes fit what does not."""
    actor, critic = memory.Shape.of(hf_config, costs.actor), None
    if costs.critic is not None:
        critic = memory.Shape.of(load_hf_config(config.critic.model, "critic.model.path"), costs.critic)
    paths = {name: roles_of(config)[name].model for name in costs.teachers}
    teachers = {n: memory.Shape.of(load_hf_config(model, n), costs.teachers[n]) for n, model in paths.items()}
    told = forecast(config, actor, critic, machine, teachers)
    return told, remedies(config, actor, critic, machine, teachers) if told.too_large() else []


def told_memory(config: PPOConfig, hf_config: PretrainedConfig, costs: ModelCosts, machine: Machine) -> Forecast:
    """Forecast a run's memory with `of_run`, log the table, and warn of each phase that will not fit."""
    told, fixes = of_run(config, hf_config, costs, machine)
    logger.info("memory of one device, by phase\n%s", "\n".join(f"  {name:<14}  {text}" for name, text in told.rows()))
    for fix in fixes:
        logger.warning("memory: %s", fix)
    return told


def of_start(
    config: PPOConfig, hf_config: PretrainedConfig, costs: ModelCosts, device: str, world: int, ranks_per_node: int
) -> Forecast:
    """Forecast with `told_memory` on the machine of a start: world processes in all, ranks_per_node on each machine."""
    return told_memory(config, hf_config, costs, this_machine(device, world, ranks_per_node))


def this_machine(device: str, world: int, ranks_per_node: int) -> Machine:
    """The devices that the driver sees; where it sees none (a head node without GPUs) their size is not known."""
    capacity = None
    if device == "cpu":
        meminfo = Path("/proc/meminfo")
        if meminfo.exists():
            used, total = memory_gib(meminfo.read_text())
            capacity = (total - used) * GIB / ranks_per_node
    elif torch.cuda.is_available():
        capacity = float(torch.cuda.get_device_properties(0).total_memory)
    return Machine(on_cpu=device == "cpu", world=world, capacity=capacity)


# --- search backwards ------------------------------------------------------------------------------------------------

_BUDGETS = {
    "update_actor": (ACTOR, "update"),
    "old_log_prob": (ACTOR, "forward"),
    "ref": (REF, "forward"),
    "update_critic": (CRITIC, "update"),
    "values": (CRITIC, "forward"),
}
_SWITCHES: dict[str, Any] = {  # key -> what saves memory; the cheap ones first
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "critic.model.enable_gradient_checkpointing": True,
    f"{_ROLLOUT}.free_cache_engine": True,
    f"{_ROLLOUT}.sleep_level": 2,  # of hf, whose weights stay otherwise
    f"{_REF}.fsdp_config.param_offload": True,
    "critic.model.fsdp_config.optimizer_offload": True,
    "critic.model.fsdp_config.param_offload": True,
    f"{_ACTOR}.fsdp_config.optimizer_offload": True,
    f"{_ACTOR}.fsdp_config.param_offload": True,
    f"{_ACTOR}.optim.optimizer": "adamw_8bit",
    f"{_ACTOR}.fsdp_config.offload_policy": True,
}


def remedies(
    config: PPOConfig,
    actor: memory.Shape,
    critic: memory.Shape | None,
    machine: Machine,
    teachers: Mapping[str, memory.Shape] = {},
) -> list[str]:
    """A line for every phase that does not fit: what makes it fit."""
    predict = partial(forecast, actor=actor, critic=critic, machine=machine, teachers=teachers)
    return [f"{phase}: {', or '.join(_fixes(config, phase, predict))}" for phase in predict(config).too_large()]


def _fixes(config: PPOConfig, phase: str, predict: Any) -> list[str]:
    found = []
    if phase in _BUDGETS:
        key = _cut_of(config, phase).budget_key
        budget = largest_budget(config, phase, predict)
        found += [] if budget is None else [f"{key}={budget} is the largest that fits"]
    switches = [(key, value) for key, value in _saving(config) if _fits(changed(config, {key: value}), phase, predict)]
    if phase == "gen":
        share = largest_share(config, predict, config.actor_rollout_ref.rollout.gpu_memory_utilization)
        found += [] if share is None else [f"{_ROLLOUT}.gpu_memory_utilization={share} fits"]
    found += [f"{key}={value} fits" for key, value in switches[:2]]
    return found or [_together(config, phase, predict)]


def _together(config: PPOConfig, phase: str, predict: Any) -> str:
    """Switches one after the other, then devices."""
    kept: dict[str, Any] = {}
    for key, value in _saving(config):
        before = predict(changed(config, kept)).total(phase)
        if predict(changed(config, kept | {key: value})).total(phase) < before:
            kept[key] = value
        if kept and _fits(changed(config, kept), phase, predict):
            return " ".join(f"{key}={value}" for key, value in kept.items()) + " together fit"
    machine, count = predict.keywords["machine"], predict.keywords["machine"].world
    while count < _MOST_DEVICES:
        count *= 2
        if _fits(config, phase, partial(predict, machine=replace(machine, world=count))):
            return f"no key alone makes it fit: {count} devices would (trainer.nnodes x trainer.n_gpus_per_node)"
    return "nothing makes it fit: use a smaller model, model.lora_rank, or shorter responses (data.max_response_length)"


def largest_budget(config: PPOConfig, phase: str, predict: Any) -> int | None:
    """The largest token budget of the phase's micro-batches that fits, in steps of 256; None where not even one row
    does, or where they are cut by sequences."""
    cut, row = _cut_of(config, phase), config.data.max_prompt_length + config.data.max_response_length
    if not cut.by_tokens:
        return None
    low, high = -(-row // (256 * cut.slices)), max(1, cut.budget // 256)
    if not _fits(changed(config, {cut.budget_key: 256 * low}), phase, predict):
        return None
    if _fits(changed(config, {cut.budget_key: 256 * high}), phase, predict):
        return 256 * high  # a batch that becomes one micro-batch may need less than with two
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(changed(config, {cut.budget_key: 256 * middle}), phase, predict):
            low = middle
        else:
            high = middle - 1
    return 256 * low


def _cut_of(config: PPOConfig, phase: str) -> Cut:
    role, name = _BUDGETS[phase]
    return roles_of(config)[role].passes[name]


def largest_share(config: PPOConfig, predict: Any, start: float) -> float | None:
    """The largest gpu_memory_utilization up to `start`, in twentieths, with which generation fits."""
    for twentieths in range(round(start * 20), 0, -1):
        if _fits(changed(config, {f"{_ROLLOUT}.gpu_memory_utilization": twentieths / 20}), "gen", predict):
            return twentieths / 20
    return None


def _saving(config: PPOConfig) -> list[tuple[str, Any]]:
    tree = to_dict(config)
    others = [(key, value) for key, value in _SWITCHES.items() if _at(tree, key) != value]
    return [(key, value) for key, value in others if not impossible(changed(config, {key: value}))]


def _fits(config: PPOConfig, phase: str, predict: Any) -> bool:
    return phase not in predict(config).too_large()


def changed(config: PPOConfig, values: Mapping[str, Any]) -> PPOConfig:
    """The configuration with other values at these keys."""
    tree = to_dict(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        _at(tree, section)[name] = value
    return from_dict(tree)


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree
