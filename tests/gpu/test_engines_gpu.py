"""What engines have on CUDA alone: 8-bit weights, proposals that are accepted, servers of a reward model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.contracts.engine_ends import within
from tests.contracts.test_speculation import COUNT, DRAFTS, excess, model, requests
from tests.unit.rollout.tiny import MAX_LEN, TOKENIZER_SIZE, FakeTrainEngine, free_port, state, tiny_config
from verl_like.config import EngineKwargsConfig, ModelConfig, RolloutConfig
from verl_like.config.reward import RewardRolloutConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.plugins.reward_models.server import server_command, server_environment
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.build import build_rollout_engine
from verl_like.services.server import Server
from verl_like.weight_sync.ledger import QuantisedLedger

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), "cuda")
    shutdown_distributed()


def vllm(process: ProcessInfo, folder: Path, config: RolloutConfig) -> RolloutEngine:
    pytest.importorskip("vllm")
    tiny_config().save_pretrained(folder)
    return build_rollout_engine(
        config,
        ModelConfig(path=str(folder)),
        process=process,
        hf_config=tiny_config(),
        tokenizer_size=TOKENIZER_SIZE,
        max_model_len=MAX_LEN,
        seed=1,
        run_id="gpu-engines",
    )


def small(**settings: object) -> RolloutConfig:
    common = {"name": "vllm", "max_num_seqs": 32, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    return RolloutConfig(**{**common, **settings})  # pyright: ignore[reportArgumentType]


def test_fp8_weights_are_quantised_at_each_sync_and_proved(process: ProcessInfo, tmp_path: Path) -> None:
    config = small(quantization="fp8")
    rollout, trainer = vllm(process, tmp_path, config), FakeTrainEngine(model())
    sync = within(cast(FSDPEngine, trainer), rollout, config, process, trainer_dtype=torch.bfloat16)
    for version, factor in ((1, 1.0), (2, 8.0)):  # the second would not fit the first one's scales
        for parameter in trainer.model.model.layers.parameters():
            parameter.data *= factor if parameter.ndim == 2 else 1.0
        report = sync(version)
        print(f"fp8, version {version}: gap {report.probe_gap}, {report.num_read_back} of {report.num_tensors} proved")
        assert report.num_read_back == report.num_tensors
    ledger, shapes = QuantisedLedger("fp8"), trainer.weight_names()
    list(ledger.watch((name, tensor.bfloat16().cuda()) for name, tensor in state(trainer.model).items()))
    assert ledger.differences(rollout.weight_sketches(shapes)) == []
    scale = next(p for name, p in rollout._model.named_parameters() if name.endswith("o_proj.weight_scale"))  # pyright: ignore
    scale.data *= 1.1
    (problem,) = ledger.differences(rollout.weight_sketches(shapes))
    assert "o_proj.weight, dequantised" in problem
    rollout.shutdown()


def test_proposals_do_not_change_what_is_sampled(process: ProcessInfo, tmp_path: Path) -> None:
    drafts = EngineKwargsConfig(vllm={"speculative_config": DRAFTS})
    rollout = vllm(process, tmp_path, small(engine_kwargs=drafts, dtype="float32"))
    rollout.load_weights(((name, tensor.cuda()) for name, tensor in state(model()).items()), 1)
    assert excess(rollout.generate(requests(COUNT)), atol=1e-2) < 4.5
    rollout.shutdown()


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engines_own_server_answers(name: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip(name)
    port, path = free_port(), str(tiny_model)
    rollout = RewardRolloutConfig(name=name, gpu_memory_utilization=0.2, prompt_length=64, response_length=16)
    command = server_command(rollout, path, host="127.0.0.1", port=port, device="cuda", trust_remote_code=False)
    server = Server(
        command,
        health=f"http://127.0.0.1:{port}/health",
        log=tmp_path / "log",
        environment=server_environment("cuda", None),
    )
    server.start()
    try:
        server.wait_ready(600)
        body = {"model": path, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"]
    finally:
        server.end()
