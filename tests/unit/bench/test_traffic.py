"""Bytes that ranks send, as the forecast has them, against those that c10d's operators are given on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, denominators, experience
from tests.unit.models import zoo
from verl_like.config import FSDPConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.kit.forecast.memory import Machine
from verl_like.kit.forecast.traffic import by_axis
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.models.cost import ModelCost
from verl_like.models.loading import load_hf_config
from verl_like.models.memory import Shape
from verl_like.parallel.dist import ProcessInfo

_WEIGHTS_OR_TOKENS = ("allgather_base", "reduce_scatter_base")
OPERATORS = {"shard": _WEIGHTS_OR_TOKENS, "expert": ("alltoall_base",), "tensor": _WEIGHTS_OR_TOKENS, "pipe": ("send",)}
ROW, ROWS = 30, 8


class Sent(TorchDispatchMode):
    """Bytes that this rank gives away in two ranks' collectives, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            given = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            size = max((each.nbytes for each in given if isinstance(each, torch.Tensor)), default=0)
            self.bytes[name] = self.bytes.get(name, 0) + size * (1 if "send" in name else 0 if "recv" in name else 0.5)
        return func(*args, **(kwargs or {}))


def scenario(process: ProcessInfo, paths: dict[str, str], recompute: bool) -> dict[str, Any]:
    found = {}
    for axis in OPERATORS:
        sizes = {} if axis == "shard" else {f"{'pipeline' if axis == 'pipe' else axis}_parallel_size": 2}
        model = {"enable_gradient_checkpointing": recompute}
        path = paths["experts" if axis == "expert" else "dense"]
        engine = tiny.build_engine(process, path, fsdp=FSDPConfig(**sizes), model=model)
        batch = experience(ROWS, max_response=ROW)
        mine = batch.select(range(process.rank, ROWS, 2)) if axis in ("shard", "expert") else batch
        rule = MicroBatchRule(max_tokens=10_000)
        minibatch_gradients(engine, mine, PolicyLoss(), denominators(batch), rule=rule)  # what is sent once in a run
        with Sent() as sent:
            minibatch_gradients(engine, mine, PolicyLoss(), denominators(batch), rule=rule)
        role, hf_config = engine.role, load_hf_config(engine.role.model)
        shape = Shape.of(hf_config, ModelCost.of(hf_config))
        tokens = int(sum(mine.prompt_length_B) + sum(mine.response_length_B)) - len(mine)  # the last predicts nothing
        tokens //= 2 if axis == "tensor" else 1
        machine = Machine(on_cpu=True, world=2, capacity=None)
        found[axis] = {
            "sent": sent.bytes,
            "told": by_axis(role, shape, machine, tokens, 1),
            "held": sum(parameter.numel() for _, parameter in engine.sharding.root.named_parameters()),
            "stage": shape.stage(2).all_weights,
        }
    return found


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.engines)])
def test_bytes_by_axis(tmp_path: Path, recompute: bool) -> None:
    paths = {
        "dense": tiny.model_folder(tmp_path / "dense", num_attention_heads=4, num_key_value_heads=2),
        "experts": zoo.folder(tmp_path / "experts", "qwen3_moe"),
    }
    ranks = tiny.spawn_ranks(2, scenario, tmp_path / "ranks", paths, recompute)
    for axis, kinds in OPERATORS.items():
        sent, told, shards = 0.0, 0.0, 0.0
        for found in (rank[axis] for rank in ranks):
            sent += sum(size for name, size in found["sent"].items() if any(kind in name for kind in kinds))
            told += found["told"][axis]
            shards += found["told"].get("shard", 0.0)
        told += shards if axis == "tensor" else 0.0  # the root's weights are gathered by the same operators
        assert told == pytest.approx(sent, rel=0.065 if axis == "expert" else 0.002), axis
        if axis == "expert":  # what is left of FSDP shards the other weights, and not the experts
            gathers = sum(size for rank in ranks for name, size in rank[axis]["sent"].items() if "_base_" in name)
            assert shards == pytest.approx(gathers - sent, rel=0.01)
    assert max(rank["pipe"]["held"] for rank in ranks) == ranks[0]["pipe"]["stage"]
