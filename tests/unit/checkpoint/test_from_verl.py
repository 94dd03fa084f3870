"""Checkpoints as verl's FSDP trainer writes them, by two real ranks with torch's own FSDP, are taken up."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.support import overrides, write_task
from tests.unit.engine import tiny
from verl_like.checkpoint.layout import LATEST_FILE, find_latest
from verl_like.kit.coming_from.verl_checkpoints import converted, is_verl_step
from verl_like.models.heads import HF_PREFIX
from verl_like.observe.run_folder import read_metrics
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.trainer.compose import compose
from verl_like.trainer.dry_run import dry_run
from verl_like.trainer.run import run as train

KINDS = ("fsdp1", "fsdp1_tied", "fsdp2", "fsdp2_tied")


def train_as_verl(process: ProcessInfo, folder: str, models: dict[str, str]) -> dict[str, Any]:
    """Two steps of AdamW under FSDP, and files as verl's checkpoint manager writes them; what torch says it holds."""
    found: dict[str, Any] = {}
    for kind, path in models.items():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (process.world_size,), mesh_dim_names=("fsdp",))
        layers = model.model.layers
        if kind.startswith("fsdp1"):
            policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
            model = FSDP(
                model, auto_wrap_policy=policy, use_orig_params=False, device_mesh=mesh, device_id=torch.device("cpu")
            )
        else:
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for _ in range(2):
            ids = torch.randint(0, 16, (2, 7))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        out = Path(folder) / kind / "global_step_2" / "actor"
        (out / "huggingface").mkdir(parents=True, exist_ok=True)
        about = f"world_size_{process.world_size}_rank_{process.rank}.pt"
        if kind.startswith("fsdp1"):
            FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
        torch.save(model.state_dict(), out / f"model_{about}")
        torch.save(optimizer.state_dict(), out / f"optim_{about}")
        rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
        torch.save({"lr_scheduler": schedule.state_dict(), "rng": rng}, out / f"extra_state_{about}")
        torch.distributed.barrier()
        whole = StateDictOptions(full_state_dict=True)
        states = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
        found[kind] = {"weights": get_model_state_dict(model, options=whole), "states": states}
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """(folder, what torch says, models)."""
    folder = tmp_path_factory.mktemp("verl")
    process = tiny.single_process()
    models = {"": "", "_tied": ""}
    for kind in models:
        models[kind] = tiny.trained_folder(folder / f"model{kind}", process, tie_word_embeddings=bool(kind))
    shutdown_distributed()
    by_kind = {kind: models["_tied" if kind.endswith("tied") else ""] for kind in KINDS} | {"run": str(tiny_model)}
    found = tiny.spawn_ranks(2, train_as_verl, folder, str(folder), by_kind)
    return folder, found[0], by_kind


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_averages_are_verls(written: Any, tmp_path: Path, kind: str) -> None:
    folder, found, models = written
    out, left = converted(folder / kind / "global_step_2", tmp_path)
    assert left == ["its place in the data: it begins with the first row", "the actor's random states"]
    engine = tiny.build_engine(tiny.single_process(), models[kind])
    try:
        engine.load(str(out / "actor"), contents=["model", "optimizer", "extra"])
        own = tiny.weights(engine)
        tiny.assert_same(own, {name: found[kind]["weights"][name] for name in own}, 0.0)
        assert engine.schedule is not None and engine.schedule.steps_done == 2
        assert engine.optimizer is not None
        states = engine.sharding.optimizer_state(engine.optimizer)
        expected = found[kind]["states"]
        assert len(states) == 3 * len(expected)
        for name, state in expected.items():
            for key, value in state.items():
                taken: Any = states[f"{HF_PREFIX}{name}.{key}"]
                taken = taken.full_tensor() if isinstance(taken, DTensor) else taken
                assert torch.equal(taken.reshape(value.shape), value), (name, key)
    finally:
        shutdown_distributed()


def test_a_run_goes_on_from_verls_step(written: Any, tmp_path: Path, tiny_model: Path) -> None:
    """Where the optimizer is not there it begins afresh, and the run says so."""
    source = written[0] / "run" / "global_step_2"
    assert is_verl_step(source)
    for path in source.glob("actor/optim_*"):
        path.rename(path.with_suffix(".gone"))
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(source / "actor" / "huggingface")
    settings = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": source}
    settings["trainer.total_training_steps"] = 3
    config = compose(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    assert f"takes up {source}, which verl wrote" in dict(dry_run(config))["beginning"]
    (source / "data.pt").touch()
    (source.parent / LATEST_FILE).write_text("2")
    with pytest.raises(ValueError, match=r"or verl wrote it: trainer\.resume_from_path"):
        find_latest(source.parent)
    train(config)
    assert list(read_metrics(tmp_path / "out" / "metrics.jsonl")) == [3]
    log = (tmp_path / "out" / "verl_like.log").read_text()
    assert "written by verl, is taken up as" in log and "optim_world_size_2_rank_0.pt is not there" in log
    assert "optimizer begins afresh" in log


def test_what_does_not_fit_is_told(written: Any, tmp_path: Path) -> None:
    folder = written[0]
    actor = tmp_path / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    for path in (folder / "fsdp2" / "global_step_2" / "actor").glob("*.pt"):
        (actor / path.name).symlink_to(path)
    other = folder / "fsdp1" / "global_step_2" / "actor"
    for rank in range(2):
        (actor / f"extra_state_world_size_2_rank_{rank}.pt").unlink()
        file = actor / f"optim_world_size_2_rank_{rank}.pt"
        file.unlink()
        state = torch.load(other / file.name, weights_only=True)
        state["state"][1] = {key: value[:-5] if value.ndim else value for key, value in state["state"][1].items()}
        torch.save(state, file)
    _, left = converted(tmp_path / "global_step_2", tmp_path / "out")
    assert any("its 3 states are neither those of" in line for line in left)
    assert any("place in the learning-rate schedule: 2, as its step (not saved)" in line for line in left)
