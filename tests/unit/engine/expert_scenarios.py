"""What tests of expert parallelism run in each process: the same numbers with experts handed out and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.unit.engine.scenarios import RULE, gradients, my_rows
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, build_engine, denominators, experience, weights
from verl_like.batch import Experience
from verl_like.config.actor import ReplayMode, RouterConfig
from verl_like.config.fsdp import FSDPConfig, WrapPolicyConfig
from verl_like.engine import sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.engine.train_engine import LOG_PROBS
from verl_like.models.lora_experts import stacks_of
from verl_like.models.routes import ROUTES
from verl_like.parallel import mesh
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.sharding import local_tensor

ALL = ["model", "optimizer", "extra"]
WAYS: dict[str, dict[str, Any]] = {  # of the first model
    "eager": {"model": {"experts_implementation": "eager"}},
    "batched": {"model": {"experts_implementation": "batched_mm"}},
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
    "keep_gathered": {"fsdp": {"reshard_after_forward": False, "sync_every_micro_batch": False}},
    "lora": {"model": {"lora_rank": 4, "lora_alpha": 8, "exclude_modules": ["experts", "gate"]}},
    "wrap_attention": {"fsdp": {"wrap_policy": WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen3MoeAttention"])}},
    "wrap_nested": {
        "fsdp": {
            "wrap_policy": WrapPolicyConfig(
                transformer_layer_cls_to_wrap=["Qwen3MoeDecoderLayer", "Qwen3MoeSparseMoeBlock"]
            )
        }
    },
    "wrap_by_size": {"fsdp": {"wrap_policy": WrapPolicyConfig(min_num_params=3000)}},  # stacks of experts among them
    "router_losses": {"router": RouterConfig(balance_loss_coef=0.7, z_loss_coef=0.05)},
}


def engine_of(
    process: ProcessInfo, path: str, size: int, fsdp: dict[str, Any] | None = None, **more: Any
) -> FSDPEngine:
    return build_engine(process, path, fsdp=FSDPConfig(expert_parallel_size=size, **(fsdp or {})), **more)


def step(engine: FSDPEngine, seed: int) -> float:
    batch = experience(7, seed=seed)
    loss = PolicyLoss() if engine.kind == "policy" else ValueLoss()
    mine = my_rows(engine.process, batch, "first" if seed == 1 else "even")
    metrics = engine.train_minibatch(mine, loss, denominators(batch), rule=RULE)
    engine.advance_schedule()
    return metrics["grad_norm"].value


def everything(
    process: ProcessInfo, paths: dict[str, str], size: int, saved: str, others: str | None, ways: tuple[str, ...]
) -> dict[str, Any]:
    """others: a folder that another number of ranks has saved, to go on from."""
    batch, found = experience(9), dict[str, Any]()
    for name, path in paths.items():
        with routes(engine := engine_of(process, path, size)) as chosen:
            found[f"gradients_{name}"] = gradients(engine, my_rows(process, batch, "even"), batch)
        found[f"routes_{name}"] = chosen
        found[f"gradients_first_{name}"] = gradients(engine, my_rows(process, batch, "first"), batch)
        before = weights(engine)
        found[f"norms_{name}"] = [step(engine, seed) for seed in range(3)]
        found[f"changes_{name}"] = {key: tensor - before[key] for key, tensor in weights(engine).items()}
    first = next(iter(paths.values()))
    for way in ways:
        engine = engine_of(process, first, size, **WAYS[way])
        found[f"gradients_{way}"] = gradients(engine, my_rows(process, batch, "even"), batch)
    engine = engine_of(process, first, size, replay=ReplayMode.R2)
    found["gradients_idle"] = all_to_two_experts(engine, batch)
    found["gradients_replayed"] = replayed(engine, batch)
    critic = engine_of(process, first, size, kind="value")
    found["gradients_critic"] = gradients(critic, my_rows(process, batch, "even"), batch, loss=ValueLoss())
    found["held"] = held(engine_of(process, first, size))
    return found | checkpoints(process, first, size, saved, others)


def replayed(engine: FSDPEngine, batch: Experience) -> dict[str, Tensor]:
    """Gradients with the routes of a pass before the routers took the opposite taste."""
    mine = my_rows(engine.process, batch, "even")
    routes_T = engine.forward(mine, want=frozenset({LOG_PROBS, ROUTES}), rule=RULE)[ROUTES]
    for name, parameter in engine.model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.neg_()
    return gradients(engine, mine.replace(routes_T=routes_T, routed_length_B=mine.num_tokens_B()), batch)


def all_to_two_experts(engine: FSDPEngine, batch: Experience) -> dict[str, Tensor]:
    """Gradients where all tokens are sent to experts 0 and 1, so that other owners have none."""
    mine = my_rows(engine.process, batch, "even")
    routes_T = torch.tensor([0, 1], dtype=torch.uint8).expand(int(mine.num_tokens_B().sum()), 2, 2)
    return gradients(engine, mine.replace(routes_T=routes_T, routed_length_B=mine.num_tokens_B()), batch)


def checkpoints(process: ProcessInfo, path: str, size: int, saved: str, others: str | None) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step; and the last step from `others`."""
    engine = engine_of(process, path, size)
    for seed in range(2):
        step(engine, seed)
    engine.save(saved, contents=[*ALL, "hf_model"])
    step(engine, 2)
    found: dict[str, Any] = {"uninterrupted": weights(engine), "names": [*engine.weight_names()]}
    if others is not None:
        engine = engine_of(process, path, size, seed=50)
        engine.load(others, contents=ALL)
        step(engine, 2)
        found["resumed"] = weights(engine)
    return found


@contextmanager
def routes(engine: FSDPEngine) -> Iterator[list[tuple[Any, ...]]]:
    """Sets of experts chosen inside, of all ranks, without their order."""
    noted: list[Tensor] = []
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, layer=layer: noted.append(_labelled(inputs[1], layer)))
        for layer, part in enumerate(stacks_of(engine.model.hf)[0].values())
    ]
    found: list[tuple[Any, ...]] = []
    yield found
    for hook in hooks:
        hook.remove()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [tuple(row) for part in noted for row in part.tolist()])
    found += sorted(row for part in everyones for row in part)


def _labelled(chosen: Tensor, layer: int) -> Tensor:
    return nn.functional.pad(chosen.detach().sort(-1).values, (1, 0), value=layer)


def held(engine: FSDPEngine) -> float:
    """Share of the experts' weights that this rank holds."""
    stacks = [p for part in stacks_of(engine.model.hf)[0].values() for p in part.parameters()]
    return sum(local_tensor(p).numel() for p in stacks) / sum(p.numel() for p in stacks)


def two(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    found = everything(process, paths, 2, saved, others, tuple(WAYS))
    path, batch = next(iter(paths.values())), experience(9)
    found["gradients_ulysses"] = gradients(engine_of(process, path, 2, ulysses=2), batch, batch)
    found |= with_split_matrices(process, path, 2)
    found["most_held"] = most_held(engine_of(process, path, 2))
    found["gradients_float64"] = in_float64(process, path, 2)
    return found


def with_split_matrices(process: ProcessInfo, path: str, size: int) -> dict[str, Any]:
    """Tensor parallelism over two ranks, which share their rows, beside experts over `size`."""
    engine = engine_of(process, path, size, {"tensor_parallel_size": 2})
    batch, later = experience(9), experience(7, seed=0)
    of_pair = [rows.select(range(process.rank // 2, len(rows), process.world_size // 2)) for rows in (batch, later)]
    found: dict[str, Any] = {"gradients_tensor": gradients(engine, of_pair[0], batch)}
    metrics = engine.train_minibatch(of_pair[1], PolicyLoss(), denominators(later), rule=RULE)
    return found | {"norm_tensor": metrics["grad_norm"].value, "weights_tensor": weights(engine)}


def in_float64(process: ProcessInfo, path: str, size: int) -> dict[str, Tensor]:
    """Gradients in a precision that no key offers, and grouped products have not."""
    batch = experience(9)
    with mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64):
        engine = engine_of(process, path, size, model={"experts_implementation": "eager"})
    engine.accumulate(
        my_rows(process, batch, "even"), Objective(PolicyLoss(), denominators(batch), temperature=1.0), RULE
    )
    return {name: gradient.clone() for name, gradient in engine.sharding.full_gradients(torch.float64)}


def most_held(engine: FSDPEngine) -> tuple[int, int]:
    """Experts of a layer that a rank holds while weights are exported: its own, and others'."""
    axis, own, others = engine.sharding.mesh.expert, list[int](), list[int]()
    assert axis is not None
    gathered, sent, mesh.SENT_AT_ONCE = axis.own_part, axis.parts, 1

    def own_part(*args: Any) -> Tensor:
        part = gathered(*args)
        own.append(len(part))
        return part

    def parts(*args: Any) -> Iterator[Tensor]:
        for part in sent(*args):
            others.append(len(part))
            yield part

    axis.own_part, axis.parts = own_part, parts  # type: ignore[method-assign]
    names = [name for name, _ in engine.export_weights(torch.float32)]
    assert names == [*engine.weight_names()]
    return max(own), max(others)


def four(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    """Experts over two of four ranks, FSDP over what is left; over all four; two copies; and with slices of rows."""
    found = everything(process, paths, 2, saved, others, ())
    path, batch = next(iter(paths.values())), experience(9)
    mine = my_rows(process, batch, "even")
    found["gradients_by_four"] = gradients(engine_of(process, path, 4), mine, batch)
    copies = engine_of(process, path, 2, {"fsdp_size": 2})
    found["gradients_copies"] = gradients(copies, mine, batch)
    found["norm_copies"] = step(copies, 0)
    found["weights_copies"] = weights(copies)
    sliced = batch.select(range(process.rank // 2, len(batch), 2))
    found["gradients_ulysses"] = gradients(engine_of(process, path, 4, ulysses=2), sliced, batch)
    return found | with_split_matrices(process, path, 4)
