"""Rollout and weight sync on CUDA, in bfloat16 and with sleep mode."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.contracts.engine_ends import within
from tests.unit.rollout.tiny import MAX_LEN, TOKENIZER_SIZE, FakeTrainEngine, free_port, tiny_config, tiny_model
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.build import build_rollout_engine
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", free_port(), "cuda")
    shutdown_distributed()


@pytest.fixture(scope="module", params=["hf", "vllm"])
def rollout(
    request: pytest.FixtureRequest, process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_config().save_pretrained(folder)
    engine = build_rollout_engine(
        RolloutConfig(name=request.param, max_num_seqs=32, gpu_memory_utilization=0.2, enforce_eager=True),
        ModelConfig(path=str(folder)),
        process=process,
        hf_config=tiny_config(),
        tokenizer_size=TOKENIZER_SIZE,
        max_model_len=MAX_LEN,
        seed=1,
        run_id="gpu-test",
    )
    yield engine
    engine.shutdown()


def test_sync_generate_sleep_sync(rollout: RolloutEngine, process: ProcessInfo) -> None:
    trainer = FakeTrainEngine(tiny_model(seed=3))
    sync = within(cast(FSDPEngine, trainer), rollout, RolloutConfig(), process, trainer_dtype=torch.bfloat16)
    sampling = SamplingParams(max_tokens=16, stop_token_ids=(3,))
    requests = [
        GenerationRequest(request_id=str(i), prompt_ids=[1 + i, 2], sampling=sampling, seed=i) for i in range(40)
    ]
    for version in (1, 2):
        report = sync(version)
        assert report.probe_gap is not None
        assert report.num_read_back == report.num_tensors
        done = rollout.generate(requests)
        assert all(0 <= t < TOKENIZER_SIZE for c in done for t in c.token_ids)
        gaps = []  # what was sampled is what the log-probs are of
        for request, completion in zip(requests[:8], done, strict=False):
            scored = rollout.score([request.prompt_ids + completion.token_ids])[0][len(request.prompt_ids) - 1 :]
            gaps += [abs(a - b) for a, b in zip(scored, completion.log_probs, strict=True)]
        assert sum(gaps) / len(gaps) < 0.1
        rollout.sleep()
    rollout.wake()
    assert len(rollout.generate(requests)) == 40


def test_what_is_thrown_away_is_nowhere_and_comes_again(rollout: RolloutEngine) -> None:
    """rollout.sleep_level=2: as much of the device is free as at level 1, and the same tokens come after a load."""
    weights = {name: p.detach().cuda() for name, p in tiny_model(seed=3).named_parameters()}
    sampling = SamplingParams(max_tokens=8)
    requests = [GenerationRequest(request_id=str(i), prompt_ids=[1 + i], sampling=sampling, seed=i) for i in range(32)]
    free, found = [], []
    for level in (1, 2):
        rollout.load_weights(iter(weights.items()), 8)
        found.append([completion.token_ids for completion in rollout.generate(requests)])
        rollout.sleep(discard=level == 2)
        free.append(torch.cuda.mem_get_info()[0])
    assert rollout.held is None and free[1] > free[0] - 2**26
    rollout.load_weights(iter(weights.items()), 9)
    found.append([completion.token_ids for completion in rollout.generate(requests)])
    assert sum(a == b for a, b in zip(found[0], found[2], strict=True)) > 24  # other batches may flip a token


def test_generation_begins_after_the_load(rollout: RolloutEngine) -> None:
    """Nothing waits for the device in between: both must be on one stream. A seed gives the same tokens again."""
    sampling = SamplingParams(max_tokens=8)
    requests = [GenerationRequest(request_id=str(i), prompt_ids=[1 + i], sampling=sampling, seed=i) for i in range(32)]
    weights = [{name: p.detach().cuda() for name, p in tiny_model(seed=s).named_parameters()} for s in (3, 4)]
    found: list[list[list[int]]] = []
    for version in range(10, 16):
        rollout.load_weights(iter(weights[version % 2].items()), version)
        found.append([completion.token_ids for completion in rollout.generate(requests)])
    for number, responses in enumerate(found[1:], start=1):  # other batches may flip a token
        equal = [a == b for a, b in zip(found[0], responses, strict=True)]
        assert sum(equal) > 24 if number % 2 == 0 else sum(equal) < 8


def test_fire_draws_first_tokens_evenly_among_sixteen(rollout: RolloutEngine) -> None:
    """A temperature of 30, which vLLM's checks must let through on this model runner too; log-probs say log(1/16)."""
    rollout.load_weights(
        iter({name: p.detach().cuda() for name, p in tiny_model(seed=3).named_parameters()}.items()), 30
    )
    fire = SamplingParams(max_tokens=6, first_temperature=30.0)
    done = rollout.generate(
        [GenerationRequest(request_id=str(i), prompt_ids=[1, 2], sampling=fire, seed=i) for i in range(200)]
    )
    first = [completion.token_ids[0] for completion in done]
    assert len(set(first)) == 16 and all(first.count(token) <= 35 for token in set(first))
    assert all(abs(completion.log_probs[0] + math.log(16)) < 0.5 for completion in done)
    assert {len(completion.token_ids) for completion in done} == {6}


def test_all_names_of_vllm_are_there(rollout: RolloutEngine) -> None:
    """Also those of adapters and images, and of a started engine: which of them does this build lack?"""
    if type(rollout).__name__ != "VLLMRolloutEngine":
        pytest.skip("of vLLM alone")
    from verl_like.plugins.vllm import versions

    cuda, llm = torch.device("cuda"), rollout._llm  # type: ignore[attr-defined]
    versions.require_names(cuda, adapters=True, images=True)
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    versions.require_engine(llm.llm_engine, runner, cuda)


def test_requests_go_on_after_sleep_and_a_load(rollout: RolloutEngine) -> None:
    """Paused with requests under way, put to sleep, given other weights: tokens stay, later ones are of the new."""
    models = [tiny_model(seed=s) for s in (3, 4)]
    old, new = ({name: p.detach().cuda() for name, p in model.named_parameters()} for model in models)
    sampling = SamplingParams(max_tokens=100)
    requests = [GenerationRequest(request_id=str(i), prompt_ids=[1 + i], sampling=sampling, seed=i) for i in range(40)]
    rollout.load_weights(iter(old.items()), 20)
    rollout.open()
    futures = [rollout.submit(request) for request in requests]
    deadline = time.monotonic() + 60
    while min(len(rollout.snapshot()[str(i)]) for i in range(8)) < 3:
        assert time.monotonic() < deadline
    rollout.pause()
    kept = rollout.snapshot()
    rollout.sleep()
    rollout.load_weights(iter(new.items()), 21)
    rollout.open()
    done = [future.result(120) for future in futures]
    rollout.pause()
    for request, completion in zip(requests, done, strict=True):
        begun = kept[request.request_id]
        assert completion.token_ids[: len(begun)] == begun.token_ids.tolist()
        assert completion.sampled.weight_versions.tolist() == [20] * len(begun) + [21] * (100 - len(begun))
        scored = rollout.score([request.prompt_ids + completion.token_ids])[0]
        gaps = [abs(a - b) for a, b in zip(scored, completion.log_probs, strict=True)]
        assert sum(gaps[len(begun) :]) / max(1, len(gaps[len(begun) :])) < 0.1
