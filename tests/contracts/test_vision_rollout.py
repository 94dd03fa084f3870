"""All engines on images and videos: log-probs against transformers' forward, weights of both towers, caches."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts.two_ranks import run_on_two_ranks
from tests.unit.models import tiny_vision as tiny
from tests.unit.rollout.tiny import build_for, single_process
from verl_like.batch import MediaHandle
from verl_like.config import ModelConfig
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.loading import load_hf_config
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import GenerationRequest, Sampled, SamplingParams

SGLANG = [pytest.mark.engines, pytest.mark.sglang]
CASES = [
    pytest.param(("hf", "qwen2_vl"), id="hf-qwen2_vl"),
    pytest.param(("hf", "qwen2_5_vl"), id="hf-qwen2_5_vl", marks=pytest.mark.slow),
    pytest.param(("hf", "qwen3_vl"), id="hf-qwen3_vl"),
    pytest.param(("vllm", "qwen2_vl"), id="vllm-qwen2_vl", marks=pytest.mark.engines),
    pytest.param(("vllm", "qwen2_5_vl"), id="vllm-qwen2_5_vl", marks=[pytest.mark.engines, pytest.mark.slow]),
    pytest.param(("vllm", "qwen3_vl"), id="vllm-qwen3_vl", marks=pytest.mark.engines),
    pytest.param(("vllm-server", "qwen2_5_vl"), id="server-qwen2_5_vl", marks=pytest.mark.engines),
    pytest.param(("sglang", "qwen2_vl"), id="sglang-qwen2_vl", marks=[*SGLANG, pytest.mark.slow]),
    pytest.param(("sglang", "qwen2_5_vl"), id="sglang-qwen2_5_vl", marks=[*SGLANG, pytest.mark.slow]),
    pytest.param(("sglang", "qwen3_vl"), id="sglang-qwen3_vl", marks=SGLANG),
]
SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


class Bench:
    """An engine, the model whose weights it has, and requests."""

    def __init__(
        self,
        folder: Path,
        name: str,
        family: str,
        process: ProcessInfo,
        text: Mapping[str, int] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.hf = tiny.save(folder, family, **text)
        model = ModelConfig(path=str(folder))
        found = processor_of(model, load_hf_config(model))
        assert found is not None
        self.vision: VisionProcessor = found
        self.files = [[tiny.picture(0, 56, 84)], [tiny.picture(1, 112, 56), tiny.picture(2, 70, 70)], []]
        handles = tiny.write_images(folder / "rows.parquet", [[{"bytes": f} for f in row] for row in self.files])
        texts = [[7, tiny.START, tiny.IMAGE, tiny.STOP, 8], [tiny.IMAGE, 9, tiny.IMAGE], [10, 11]]
        self.prompts = [self.vision.expand(ids, media, 64) for ids, media in zip(texts, handles, strict=True)]
        film = tiny.film(4, 10, 56, 84)  # longer than it is wide, in Qwen2.5-VL's positions
        video = tiny.write_film(folder, film, sample_fps=3)
        image = tiny.write_images(folder / "more.parquet", [[{"bytes": tiny.picture(5, 70, 70)}]])[0]
        ids = [12, tiny.IMAGE, tiny.START, tiny.VIDEO, tiny.STOP, 13]
        self.prompts.append(self.vision.expand(ids, [video, *image], 64))
        self.files.append([film, tiny.picture(5, 70, 70)])
        self.engine: RolloutEngine = build_for(
            name.removesuffix("-server"),
            model,
            process,
            tokenizer_size=80,
            max_num_seqs=8,
            max_model_len=256,
            limit_images=1,  # of a row's prompt: tools may add to them
            server=name.endswith("-server"),
            **settings,
        )
        self.load(1)

    def load(self, version: int) -> None:
        self.engine.load_weights(iter(self.stored()), version)

    def stored(self) -> list[tuple[str, Tensor]]:
        """All weights, under the names of checkpoints, as the engine takes them."""
        names, dtype = CheckpointNames(self.hf), self.engine.dtype
        return [item for name, p in self.hf.named_parameters() for item in names.views(name, p.detach().to(dtype))]

    def prove(self) -> set[str]:
        """What the engine holds is what was sent, tensor by tensor. The names of those that it does not find."""
        found = dict(self.engine.weight_checksums({name: tensor.shape for name, tensor in self.stored()}))
        expected = {name: int(checksum(tensor)) for name, tensor in self.stored()}
        assert not (wrong := sorted(name for name in found if found[name] != expected[name])), wrong
        return expected.keys() - found.keys()

    def request(self, prompt: int, seed: int, *, sampling: SamplingParams = SAMPLING) -> GenerationRequest:
        ids, media = self.prompts[prompt]
        return GenerationRequest(
            request_id=f"{prompt}-{seed}", prompt_ids=ids, sampling=sampling, seed=seed, media=media
        )

    def disturb(self, *, seed: int = 0) -> None:
        """Other weights in both towers of the model; the engine has the old ones."""
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self.hf.named_parameters(), start=1000 * seed):
                if "visual" in name or number % 3 == 0:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)

    @torch.no_grad()
    def expected(self, request: GenerationRequest, token_ids: list[int]) -> Tensor:
        """Log-probs by transformers' forward with the model's weights."""
        files = self.files[int(request.request_id[0])]
        length = len(request.prompt_ids) + len(token_ids)
        at = self.vision.positions(length, request.media)  # transformers' own are others after a long video
        return tiny.oracle(self.hf, request.prompt_ids, token_ids, files, at)

    def check(self, requests: list[GenerationRequest]) -> None:
        for request, completion in zip(requests, self.engine.generate(requests), strict=True):
            gap = torch.tensor(completion.log_probs) - self.expected(request, completion.token_ids)
            assert gap.abs().max() < 2e-5, completion.token_ids


@pytest.fixture(scope="module", params=CASES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, process: ProcessInfo
) -> Iterator[Bench]:
    name, family = request.param
    found = Bench(tmp_path_factory.mktemp(family), name, family, process)
    yield found
    found.engine.shutdown()


def test_log_probs_are_those_of_transformers(bench: Bench) -> None:
    bench.check([bench.request(prompt, seed) for prompt in range(4) for seed in range(3)])


def test_both_towers_are_synced_proved_and_their_features_computed_anew(bench: Bench) -> None:
    """The features of images that were seen before are of the new weights too."""
    requests = [bench.request(prompt, 5) for prompt in range(4)]
    bench.check(requests)
    bench.disturb()
    bench.load(2)
    assert bench.prove() == set()
    bench.check(requests)


def test_a_response_that_is_resumed_keeps_its_image(bench: Bench) -> None:
    request = bench.request(1, 3)
    whole = bench.engine.generate([request])[0].sampled
    begun = Sampled.of(whole.token_ids[:3].tolist(), whole.log_probs[:3].tolist(), 1)
    resumed = dataclasses.replace(request, request_id="1-resumed", resume=begun)
    bench.check([resumed])


def test_weights_change_under_requests(bench: Bench) -> None:
    """Tokens of the old weights stay, and what was computed for their images does not, also where an image ends the
    prompt; what was aborted goes on from there."""
    long = SamplingParams(max_tokens=200)
    requests = [bench.request(prompt, 20 + prompt, sampling=long) for prompt in (0, 1, 3)]
    bench.engine.open()
    futures = bench.engine.submit_all(requests)
    while not all(len(sampled) for sampled in bench.engine.snapshot().values()):
        time.sleep(0.001)
    bench.engine.abort([requests[0].request_id])
    cut = futures[0].result(60)
    bench.engine.pause()
    assert cut.finish_reason == "abort" and 0 < len(cut.sampled) < 200
    before = bench.engine.snapshot()
    old = [bench.expected(request, before[request.request_id].token_ids.tolist()) for request in requests[1:]]
    bench.disturb(seed=1)
    bench.load(3)
    bench.engine.open()
    done = [future.result(60) for future in futures[1:]]
    bench.engine.pause()
    for request, completion, first in zip(requests[1:], done, old, strict=True):
        assert 0 < len(first) < 200 and set(completion.sampled.weight_versions[len(first) :]) == {3}
        expected = bench.expected(request, completion.token_ids)
        expected[: len(first)] = first
        assert (torch.tensor(completion.log_probs) - expected).abs().max() < 2e-5
    resumed = dataclasses.replace(requests[0], resume=cut.sampled)
    completion = bench.engine.generate([resumed])[0]
    assert completion.token_ids[: len(cut.sampled)] == cut.token_ids
    gap = torch.tensor(completion.log_probs) - bench.expected(requests[0], completion.token_ids)
    assert gap[len(cut.sampled) :].abs().max() < 2e-5


def test_images_that_stand_elsewhere_are_refused(bench: Bench) -> None:
    """Each request is checked before anything is computed: its tokens against its images' places."""
    request = bench.request(0, 1)
    with pytest.raises(
        ValueError, match=r"request 0-1: image 0 of .* has 6 tokens from token 2 on, but 5 placeholders"
    ):
        bench.engine.generate([dataclasses.replace(request, prompt_ids=[7, *request.prompt_ids[:-1]])])
    bench.check([request])


def test_a_damaged_image_fails_its_request_alone(bench: Bench) -> None:
    request = bench.request(0, 1)
    path = Path(request.media[0].path).with_name("damaged.parquet")
    tiny.write_images(path, [[{"bytes": tiny.picture(0, 56, 84)[:400]}]])
    other = dataclasses.replace(
        request, request_id="0-2", media=[dataclasses.replace(request.media[0], path=str(path))]
    )
    good, bad = bench.engine.submit_all([request, other])
    with bench.engine.opened():
        with pytest.raises(ValueError, match=r"damaged\.parquet, row 0: image 0 of column 'images' cannot be decoded"):
            bad.result(60)
        assert len(good.result(60).sampled) == 8


def test_the_answer_depends_on_the_picture(bench: Bench) -> None:
    greedy = SamplingParams(max_tokens=1, do_sample=False)
    request = bench.request(0, 1, sampling=greedy)
    other = dataclasses.replace(request, request_id="0-other", media=[_other_picture(bench, request.media[0])])
    first, second = bench.engine.generate([request, other])
    assert first.token_ids != second.token_ids or abs(first.log_probs[0] - second.log_probs[0]) > 1e-3


@pytest.mark.engines
@pytest.mark.parametrize("name", ["vllm", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.slow])])
def test_two_ranks_are_one_replica(name: str, tmp_path: Path) -> None:
    """Each has a half of both towers, and reads the images itself."""
    for out in run_on_two_ranks(__file__, tmp_path, name):
        assert out["not found"] == []


HALVES = {"num_key_value_heads": 2, "intermediate_size": 128}  # SGLang would pad others on a CPU


def rank_main(rank: int, port: int, folder: Path, name: str) -> None:
    tiny.save(
        folder / f"model{rank}", "qwen2_5_vl", **HALVES
    )  # before transformers knows that there are others, who would save
    process = init_distributed(rank, 2, rank, 2, "127.0.0.1", port, "cpu")
    bench = Bench(folder / f"model{rank}", name, "qwen2_5_vl", process, HALVES, tensor_model_parallel_size=2)
    requests = [bench.request(prompt, seed) for prompt in range(4) for seed in range(2)] if rank == 0 else []
    bench.check(requests)
    bench.disturb()
    bench.load(2)
    bench.check(requests)
    unknown = bench.prove()
    bench.engine.shutdown()
    shutdown_distributed()
    (folder / f"rank{rank}.json").write_text(json.dumps({"not found": sorted(unknown)}))


def _other_picture(bench: Bench, handle: MediaHandle) -> MediaHandle:
    path = Path(handle.path).with_name("other.parquet")
    tiny.write_images(path, [[{"bytes": tiny.picture(9, 56, 84)}]])
    return dataclasses.replace(handle, path=str(path))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
