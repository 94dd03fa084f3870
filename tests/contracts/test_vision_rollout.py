"""Both engines on images and videos: log-probs against transformers' forward, weights of both towers, caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.models import tiny_vision as tiny
from tests.unit.rollout.tiny import build_for, single_process
from verl_like.batch import MediaHandle
from verl_like.config import ModelConfig
from verl_like.models.checkpoint_names import CheckpointNames
from verl_like.models.loading import load_hf_config
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutEngine, Sampled, SamplingParams

CASES = [
    pytest.param(("hf", "qwen2_vl"), id="hf-qwen2_vl"),
    pytest.param(("hf", "qwen2_5_vl"), id="hf-qwen2_5_vl", marks=pytest.mark.slow),
    pytest.param(("hf", "qwen3_vl"), id="hf-qwen3_vl"),
    pytest.param(("vllm", "qwen2_vl"), id="vllm-qwen2_vl", marks=pytest.mark.engines),
    pytest.param(("vllm", "qwen2_5_vl"), id="vllm-qwen2_5_vl", marks=[pytest.mark.engines, pytest.mark.slow]),
    pytest.param(("vllm", "qwen3_vl"), id="vllm-qwen3_vl", marks=pytest.mark.engines),
]
SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


class Bench:
    """An engine, the model whose weights it has, and requests."""

    def __init__(self, folder: Path, name: str, family: str, process: ProcessInfo) -> None:
        self.hf = tiny.save(folder, family)
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
        self.engine: RolloutEngine = build_for(name, model, process, tokenizer_size=80, max_num_seqs=8)
        self.load(1)

    def load(self, version: int) -> None:
        self.engine.load_weights(iter(self.stored()), version)

    def stored(self) -> list[tuple[str, Tensor]]:
        """All weights, under the names of checkpoints."""
        names = CheckpointNames(self.hf)
        return [item for name, p in self.hf.named_parameters() for item in names.views(name, p.detach())]

    def request(self, prompt: int, seed: int, *, sampling: SamplingParams = SAMPLING) -> GenerationRequest:
        ids, media = self.prompts[prompt]
        return GenerationRequest(
            request_id=f"{prompt}-{seed}", prompt_ids=ids, sampling=sampling, seed=seed, media=media
        )

    def check(self, requests: list[GenerationRequest]) -> None:
        for request, completion in zip(requests, self.engine.generate(requests), strict=True):
            files = self.files[int(request.request_id[0])]
            length = len(request.prompt_ids) + len(completion.token_ids)
            at = self.vision.positions(length, request.media)  # transformers' own are others after a long video
            with torch.no_grad():
                expected = tiny.oracle(self.hf, request.prompt_ids, completion.token_ids, files, at)
            found = torch.tensor(completion.log_probs)
            assert (found - expected).abs().max() < 2e-5, completion.token_ids


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
    with torch.no_grad():
        for number, (name, parameter) in enumerate(bench.hf.named_parameters()):
            if "visual" in name or number % 3 == 0:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
    bench.load(2)
    found = dict(bench.engine.weight_checksums({name: tensor.shape for name, tensor in bench.stored()}))
    expected = {name: int(checksum(tensor)) for name, tensor in bench.stored()}
    assert {name: found.get(name) for name in expected} == expected
    bench.check(requests)


def test_a_response_that_is_resumed_keeps_its_image(bench: Bench) -> None:
    request = bench.request(1, 3)
    whole = bench.engine.generate([request])[0].sampled
    begun = Sampled.of(whole.token_ids[:3].tolist(), whole.log_probs[:3].tolist(), 1)
    resumed = dataclasses.replace(request, request_id="1-resumed", resume=begun)
    bench.check([resumed])


def test_the_answer_depends_on_the_picture(bench: Bench) -> None:
    greedy = SamplingParams(max_tokens=1, do_sample=False)
    request = bench.request(0, 1, sampling=greedy)
    other = dataclasses.replace(request, request_id="0-other", media=[_other_picture(bench, request.media[0])])
    first, second = bench.engine.generate([request, other])
    assert first.token_ids != second.token_ids or abs(first.log_probs[0] - second.log_probs[0]) > 1e-3


def _other_picture(bench: Bench, handle: MediaHandle) -> MediaHandle:
    path = Path(handle.path).with_name("other.parquet")
    tiny.write_images(path, [[{"bytes": tiny.picture(9, 56, 84)}]])
    return dataclasses.replace(handle, path=str(path))
