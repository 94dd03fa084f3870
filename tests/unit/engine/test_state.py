"""What an engine leaves on disk: finite numbers alone, noted file by file, with the model's configuration."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience
from verl_like.checkpoint.checksums import collect, find_faults
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.state import save_sharded
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.sharding import local_tensor

ALL = ["model", "optimizer", "extra"]


def stepped(process: ProcessInfo, path: str) -> FSDPEngine:
    engine, batch = build_engine(process, path), experience(7)
    engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    return engine


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named_and_not_written(
    process: ProcessInfo, path: str, tmp_path: Path, value: float
) -> None:
    engine = stepped(process, path)
    name, parameter = next(iter(engine.sharding.root.named_parameters()))
    local_tensor(parameter.data).view(-1)[5] = value
    for contents, background in ((ALL, False), (ALL, True), (["hf_model"], False)):
        (bad,) = engine.save(str(tmp_path / "out"), contents=contents, background=background)
        assert bad.rpartition(".")[2] == name.rpartition(".")[2] == "weight"
    assert engine.saved(wait=True) and not (tmp_path / "out").exists()


def test_optimizer_states_count_too(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = stepped(process, path)
    assert engine.optimizer is not None
    state = next(iter(engine.optimizer.state.values()))
    local_tensor(state["exp_avg_sq"]).view(-1)[0] = float("inf")
    (bad,) = engine.save(str(tmp_path), contents=ALL)
    assert bad.endswith(".exp_avg_sq")
    assert engine.save(str(tmp_path), contents=["model"]) == []


@pytest.mark.parametrize("background", [False, True])
def test_a_flipped_bit_or_a_cut_in_any_file_is_found(
    process: ProcessInfo, path: str, tmp_path: Path, background: bool
) -> None:
    engine = stepped(process, path)
    assert engine.save(str(tmp_path / "actor"), contents=ALL, background=background) == []
    engine.saved(wait=True)
    collect(tmp_path)
    folders = ["actor/model", "actor/optimizer", "actor/extra"]
    assert find_faults(tmp_path, folders) == []
    files = [file for folder in folders for file in (tmp_path / folder).iterdir()]
    assert sorted(file.name for file in files) == [
        ".metadata",
        ".metadata",
        "__0_0.distcp",
        "__0_0.distcp",
        "rank_0.pt",
    ]
    for file in files:
        data = file.read_bytes()
        for place in (0, len(data) // 3, len(data) - 1):
            file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            assert [str(file) in fault for fault in find_faults(tmp_path, folders)] == [True]
        os.truncate(file, len(data) - 1)
        assert [str(file) in fault for fault in find_faults(tmp_path, folders)] == [True]
        file.write_bytes(data)


def test_every_checkpoint_says_what_model_it_is(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    stepped(process, path).save(str(tmp_path), contents=ALL)
    config = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["hidden_size"] == 64


def test_a_shard_without_checksums_that_cannot_be_read_is_an_error_of_this_rank(
    process: ProcessInfo, path: str, tmp_path: Path
) -> None:
    """torch raises something that passes by whoever reports the errors of a rank."""
    engine = stepped(process, path)
    engine.save(str(tmp_path), contents=["model"])
    os.truncate(tmp_path / "model" / "__0_0.distcp", 100)
    with pytest.raises(RuntimeError, match=r"reading .*model failed"):
        engine.load(str(tmp_path), contents=["model"])


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("file", ["model/.metadata", "optimizer/.metadata", "extra/rank_0.pt"])
def test_a_strangers_checkpoint_runs_nothing(process: ProcessInfo, path: str, tmp_path: Path, file: str) -> None:
    engine = stepped(process, path)
    engine.save(str(tmp_path / "saved"), contents=ALL)
    engine.load(str(tmp_path / "saved"), contents=ALL)  # as it was written, it can be read
    (tmp_path / "saved" / file).write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(Exception, match=r"mkdir|weights_only|not loaded"):
        engine.load(str(tmp_path / "saved"), contents=ALL)
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "made")))
    assert (tmp_path / "made").exists()  # elsewhere it works


def test_the_ranks_own_error_is_told(tmp_path: Path) -> None:
    """torch.distributed.checkpoint says only which ranks have one."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        RuntimeError,
        match=r"writing .*file/model failed \([\d,]+ MB are free there\): rank 0: NotADirectoryError: .*file",
    ):
        save_sharded({"weight": torch.zeros(2)}, tmp_path / "file" / "model")
