"""A checkpoint as torch's FullyShardedDataParallel writes it: what runs with strategy=fsdp left behind before it became
another name of fsdp2."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from verl_like.engine import state
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models import loading, lora
from verl_like.models.heads import PolicyModel
from verl_like.parallel.dist import ProcessInfo


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(process: ProcessInfo, engine: FSDPEngine, folder: str, out: str) -> None:
    """Write the weights and averages of `engine`, whose own checkpoint is in `folder`, into `out` (collective)."""
    weights = {name: _full(tensor).clone() for name, tensor in engine.sharding.model_state().items()}
    assert engine.optimizer is not None
    averages = {name: _full(t).clone() for name, t in engine.sharding.optimizer_state(engine.optimizer).items()}
    model = _plain(engine)
    model.load_state_dict(weights, strict=False)  # a tied weight has one name
    mesh = init_device_mesh("cpu", (process.world_size,))
    wrapped = FSDP(model, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    sum(p.sum() for p in trained if p.numel()).backward()
    optimizer.step()
    whole = get_optimizer_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, value in averages.items():
        parameter, _, key = name.rpartition(".")
        whole["state"][parameter][key] = value
    set_optimizer_state_dict(wrapped, optimizer, whole, options=StateDictOptions(full_state_dict=True))
    if process.rank == 0:
        Path(out).mkdir()
        shutil.copytree(Path(folder) / "extra", Path(out) / "extra")
    torch.distributed.barrier()
    state.save_sharded({n: t for n, t in get_model_state_dict(wrapped).items() if n in weights}, Path(out) / "model")
    states = get_optimizer_state_dict(wrapped, optimizer)["state"]
    flat = {f"{name}.{key}": value for name, own in states.items() for key, value in own.items()}
    state.save_sharded(flat, Path(out) / "optimizer")


def _plain(engine: FSDPEngine) -> PolicyModel:
    """The engine's model, whole and unsharded on this rank."""
    config = copy.copy(engine.role.model)
    settings: dict[str, Any] = {"dtype": torch.float32, "vocab_size": None, "seed": 1, "empty": False}
    model = loading.build_token_model(config, engine.hf_config, kind="policy", **settings)
    if config.lora_rank:
        lora.attach(model.hf, config, dtype=torch.float32, seed=1)
    return model  # pyright: ignore[reportReturnType]
