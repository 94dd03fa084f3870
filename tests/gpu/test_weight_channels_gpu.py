"""Weights to an engine in another process on CUDA: by handles on one device, by NCCL to a second one."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from tests.contracts.engine_ends import transfer
from tests.unit.rollout.tiny import MAX_LEN, TOKENIZER_SIZE, FakeTrainEngine, free_port, tiny_config, tiny_model
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.engine_process import EngineProcess, EngineSettings, connected
from verl_like.kit.bench.meters import LiveBytes
from verl_like.parallel.dist import init_distributed, shutdown_distributed
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import WeightSyncError

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
BUCKET = 20_000  # bytes; the model has 161 kB in bfloat16


@pytest.mark.parametrize("name", ["hf", "vllm"])
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_weights_arrive_and_a_fault_is_named(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "broadcast" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each process")
    if name == "vllm":
        pytest.importorskip("vllm")
    tiny_config().save_pretrained(tmp_path)
    process = init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), "cuda")
    settings = EngineSettings(
        rollout=RolloutConfig(name=name, max_num_seqs=32, gpu_memory_utilization=0.2, enforce_eager=True),
        model=ModelConfig(path=str(tmp_path)),
        tokenizer_size=TOKENIZER_SIZE,
        max_model_len=MAX_LEN,
        run_id="gpu-channels",
        device="cuda",
        local_rank=1 if kind == "broadcast" else 0,
    )
    engine, trainer = EngineProcess(settings), FakeTrainEngine(tiny_model(seed=3))
    source = WeightSource(cast(FSDPEngine, trainer), process, prove=True, trainer_dtype=torch.bfloat16)
    channel = connected(kind, engine, process.device, run_id="gpu-channels", bucket_bytes=BUCKET)
    try:
        for version in range(3):
            with LiveBytes(process.device) as live:
                report = transfer(source, channel, engine, version)
            assert report.num_read_back == report.num_tensors
            assert 0 < live.peak < 4 * BUCKET  # the allocator rounds up
            trainer.model = tiny_model(seed=4 + version)
        trainer.spoil = lambda items: ((n, t.flip(0) if "k_proj.weight" in n else t) for n, t in items)
        with pytest.raises(WeightSyncError, match=r"differs from the trainer's shards: .*k_proj"):
            transfer(source, channel, engine, 8)
        trainer.spoil = lambda items: items
        transfer(source, channel, engine, 9)
    finally:
        channel.close()
        engine.shutdown()
        shutdown_distributed()
