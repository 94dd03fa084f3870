"""An engine that quantises what it is sent: sampled with, scored, proved; and a wrong scale is caught, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.contracts.engine_ends import Sync, within
from tests.unit.rollout.tiny import FakeTrainEngine, build, log_probs, single_process, state, tiny_model
from verl_like.config import RolloutConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.int8 import Int8Linear
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams
from verl_like.weight_sync.verdict import WeightSyncError

Q = "model.layers.0.self_attn.q_proj.weight"
NUM_MATRICES = 14  # of two layers


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.engines)], ids=["within", "beside"])
def rollout(
    request: pytest.FixtureRequest, process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    engine = build("hf", tmp_path_factory.mktemp("model"), process, quantization="int8", server=request.param)
    yield engine
    engine.shutdown()


def sync_of(engine: FakeTrainEngine, rollout: RolloutEngine, process: ProcessInfo) -> Sync:
    return within(cast(FSDPEngine, engine), rollout, RolloutConfig(name="hf", quantization="int8"), process)


def rounded(model: torch.nn.Module) -> None:
    """Every matrix but embedding and head as 8-bit integers make it, in place."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            step = parameter.data.abs().amax(1, keepdim=True) / 127
            parameter.data = (parameter.data / step).round() * step


def test_what_is_sampled_is_of_the_quantised_model(rollout: RolloutEngine, process: ProcessInfo) -> None:
    engine = FakeTrainEngine(tiny_model(seed=3))
    report = sync_of(engine, rollout, process)(1)
    assert report.num_read_back == report.num_tensors  # by checksums and by sketches
    assert report.probe_gap is not None and 1e-4 < report.probe_gap < 0.1
    request = GenerationRequest(request_id="r", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=8), seed=1)
    (done,) = rollout.generate([request])
    rounded(engine.model)
    expected = log_probs(engine.model, request.prompt_ids + done.token_ids)[2:]
    torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-5, rtol=0)
    shapes = {name: tensor.shape for name, tensor in state(engine.model).items()}
    assert len(rollout.weight_sketches(shapes)) == NUM_MATRICES
    assert len(rollout.weight_checksums(shapes)) == len(shapes) - NUM_MATRICES


def test_later_weights_are_quantised_anew(rollout: RolloutEngine, process: ProcessInfo) -> None:
    engine = FakeTrainEngine(tiny_model(seed=3))
    sync = sync_of(engine, rollout, process)
    sync(1)
    engine.model = tiny_model(seed=4)
    engine.model.get_parameter(Q).data *= 50  # its scale of before would be far too small
    assert sync(2).num_read_back == len(engine.weight_names())


def test_a_dropped_matrix_is_missed(rollout: RolloutEngine, process: ProcessInfo) -> None:
    engine = FakeTrainEngine(tiny_model(seed=3))
    engine.spoil = lambda items: ((name, tensor) for name, tensor in items if name != Q)
    with pytest.raises(WeightSyncError, match=f"missing: {Q}"):
        sync_of(engine, rollout, process)(1)


@pytest.mark.parametrize("factor", [1.02, 0.5])
@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)], ids=["all rows", "one row"])
def test_a_wrong_scale_is_caught(
    process: ProcessInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, rows: slice
) -> None:
    take = Int8Linear.take

    def planted(linear: Int8Linear, weight: Tensor) -> None:
        take(linear, weight)
        if linear is wrong:
            linear.scale_O1[rows] *= factor if rows.start is None else 2 * factor

    rollout = build("hf", tmp_path, process, quantization="int8")
    wrong = rollout._module.get_submodule(Q.removesuffix(".weight"))  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(Int8Linear, "take", planted)
    sync = sync_of(FakeTrainEngine(tiny_model(seed=3)), rollout, process)
    if rows.start is not None and factor == 0.5:  # twice a half: nothing is wrong
        assert sync(1).probe_gap is not None
    else:
        with pytest.raises(WeightSyncError, match=f"int8 weights differ in the rollout engine: {Q}, dequantised") as no:
            sync(1)
        assert "down_proj" not in str(no.value) and rollout.weight_version is None
    rollout.shutdown()
