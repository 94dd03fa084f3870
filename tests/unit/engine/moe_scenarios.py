"""Gradients of several model types in one start of the processes: cut, spread and computed in every way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import RULE, my_rows
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience, weights
from tests.unit.models.matrix import refusals
from verl_like.batch import Experience, pad_rows
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.models import families
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import Completion

TYPES = families.FAMILIES | families.NESTED
FAMILIES = [name for name, family in TYPES.items() if families.RANKS in family.tested]
OFTEN = ["qwen2", "qwen3_moe", "mixtral"]  # the others in `make test-all`


def everything(process: ProcessInfo, paths: dict[str, str], save_to: str | None) -> dict[str, Any]:
    """{model type: {way: gradients}}; the same keys on any number of ranks, as far as a way makes sense there."""
    return {name: _one_family(process, path, save_to and f"{save_to}/{name}") for name, path in paths.items()}


SPREAD: dict[str, dict[str, Any]] = {  # over two ranks, which share their rows but for experts
    "Ulysses": {"ulysses": 2},
    "context": {"fsdp": FSDPConfig(context_parallel_size=2)},
    "tensor": {"fsdp": FSDPConfig(tensor_parallel_size=2)},
    "experts": {"fsdp": FSDPConfig(expert_parallel_size=2)},
    "pipeline": {"fsdp": FSDPConfig(pipeline_parallel_size=2)},
}


def only_gradients(process: ProcessInfo, paths: dict[str, str]) -> dict[str, Any]:
    """{model type: gradients, on several ranks also those of every open way}."""
    batch, found = experience(9), {}
    for name, path in paths.items():
        mine = my_rows(process, batch, "even")
        found[name] = {"gradients": _gradients(build_engine(process, path), mine, batch)}
        open_ways = [way for way, why in refusals(name, path).items() if not why] if process.world_size > 1 else []
        for way in open_ways:
            engine = build_engine(process, path, **SPREAD[way])
            found[name][way] = _gradients(engine, mine if way == "experts" else batch, batch)
    return found


ADAPTED: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}


def adapted_engine(process: ProcessInfo, path: str, save_to: str) -> tuple[FSDPEngine, dict[str, torch.Tensor]]:
    """An engine with adapters on all there is, after a step; saved; the gradients of a second one."""
    engine, batch = build_engine(process, path, model=ADAPTED), experience(9)
    mine = my_rows(process, batch, "even")
    engine.train_minibatch(mine, PolicyLoss(), denominators(batch), rule=RULE)
    engine.save(save_to, contents=["model", "hf_model"])
    return engine, _gradients(engine, mine, batch)


def adapted(process: ProcessInfo, path: str, save_to: str) -> dict[str, torch.Tensor]:
    """The gradients of `adapted_engine`, one rank's own."""
    engine, gradients = adapted_engine(process, path, save_to)
    assert tiny.unlike_shards(engine) == tiny.unlike_shards(engine, "apart") == []
    return gradients


def _one_family(process: ProcessInfo, path: str, save_to: str | None) -> dict[str, Any]:
    batch = experience(9)
    engine = build_engine(process, path)
    result: dict[str, Any] = {"gradients": _gradients(engine, my_rows(process, batch, "even"), batch)}
    if process.world_size == 1:
        result["one_batch"] = _gradients(engine, batch, batch, tiny.ONE_BATCH)
        mixture = families.num_experts(engine.hf_config) > 0
        eager = {"experts_implementation": "eager"} if mixture else {}
        result["eager"] = _gradients(build_engine(process, path, model=eager), batch, batch)
        checkpointed = build_engine(process, path, model={"enable_gradient_checkpointing": True})
        result["checkpointed"] = _gradients(checkpointed, batch, batch)
    else:
        result["first"] = _gradients(engine, my_rows(process, batch, "first"), batch)
        result["ulysses"] = _gradients(build_engine(process, path, ulysses=2), batch, batch)
    metrics = engine.train_minibatch(my_rows(process, batch, "even"), PolicyLoss(), denominators(batch), rule=RULE)
    result["load"] = {name: metric.value for name, metric in metrics.items() if name.startswith("moe_")}
    if save_to is not None:
        engine.save(save_to, contents=["model", "optimizer", "extra", "hf_model"])
        result["weights"] = weights(engine)
    return result


def _gradients(
    engine: FSDPEngine, mine: Experience, whole: Experience, rule: MicroBatchRule = RULE
) -> dict[str, torch.Tensor]:
    return minibatch_gradients(engine, mine, PolicyLoss(), denominators(whole), rule=rule)


def rows(prompts: Sequence[list[int]], done: Sequence[Completion]) -> Experience:
    """Generated responses as the trainer takes them, with the rollout engine's log-probs."""
    responses = [completion.token_ids for completion in done]
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    length_B = torch.tensor([len(response) for response in responses])
    return Experience(
        prompt_ids_BP=pad_rows(prompts, side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids_BR=response_ids_BR,
        response_length_B=length_B,
        response_mask_BR=torch.arange(response_ids_BR.shape[1])[None] < length_B[:, None],
        group_B=torch.arange(len(prompts)),
        advantages_BR=torch.zeros(response_ids_BR.shape),
        rollout_log_probs_BR=pad_rows([c.log_probs for c in done], side="right", dtype=torch.float32),
    )
