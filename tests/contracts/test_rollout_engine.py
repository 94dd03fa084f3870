"""Every rollout engine passes the same tests, on a tiny random Qwen2 in float32."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.contracts.two_ranks import run_on_two_ranks
from tests.unit.rollout.tiny import (
    MAX_LEN,
    TOKENIZER_SIZE,
    VOCAB,
    build,
    log_probs,
    single_process,
    state,
    tiny_model,
)
from verl_like.config.rollout import EngineKwargsConfig
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.rollout.rollout_engine import (
    Completion,
    GenerationRequest,
    ResumeError,
    RolloutError,
    Sampled,
    SamplingParams,
)
from verl_like.workers.remote_engine import RemoteEngine

EOS = (3, 5)
MODEL = tiny_model()
SAMPLING = SamplingParams(max_tokens=24, stop_token_ids=EOS)
ENDLESS = SamplingParams(max_tokens=100)


def requests(count: int = 8, sampling: SamplingParams = SAMPLING, first: int = 0) -> list[GenerationRequest]:
    """Prompts of 1 to 7 tokens, a seed each."""
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_ids=[(7 * i + j) % 60 + 1 for j in range(1 + i % 7)],
            sampling=sampling,
            seed=1000 + i,
        )
        for i in range(first, first + count)
    ]


@contextmanager
def opened(engine: RolloutEngine) -> Iterator[None]:
    """Sampling meanwhile; what is left at the end is aborted."""
    engine.open()
    try:
        yield
    finally:
        engine.abort()
        engine.pause()


def begun(engine: RolloutEngine, request_id: str) -> None:
    """Wait until it has a token."""
    deadline = time.monotonic() + 60
    while len(engine.snapshot()[request_id]) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def gap(request: GenerationRequest, completion: Completion) -> float:
    """Largest difference between the sampled log-probs and the oracle's."""
    expected = log_probs(MODEL, request.prompt_ids + completion.token_ids)[len(request.prompt_ids) - 1 :]
    return float((expected - torch.tensor(completion.log_probs)).abs().max())


def text(token_ids: list[int]) -> str:
    """What `save_tokenizer` makes of tokens: a letter each."""
    return "".join(chr(0x4E00 + token) for token in token_ids)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({text([i]): i for i in range(TOKENIZER_SIZE)}, unk_token=text([0])))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def cut_requests() -> list[GenerationRequest]:
    """16 prompts of 55 to 61 tokens; a step of vllm takes 64 (`build`), so all but the first are cut somewhere."""
    return [dataclasses.replace(r, prompt_ids=[*range(1, 55), *r.prompt_ids]) for r in requests(16)]


def build_with_tokenizer(name: str, folder: Path) -> RolloutEngine:
    small_blocks = EngineKwargsConfig(vllm={"block_size": 32})  # so that prompts of these tests fill some
    return build(name, folder, single_process(), stop=["loads the tokenizer"], engine_kwargs=small_blocks)


SGLANG = pytest.param("sglang", marks=[pytest.mark.engines, pytest.mark.sglang])


@pytest.fixture(scope="module", params=["hf", SGLANG, "vllm"])
def unloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    shared_memory = set(os.listdir("/dev/shm"))
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    engine = build_with_tokenizer(request.param, folder)
    yield engine
    engine.shutdown()
    assert torch.distributed.is_initialized()  # the group is the trainer's
    shutdown_distributed()
    mine = [name for name in set(os.listdir("/dev/shm")) - shared_memory if "verl_like" in name]
    assert not [name for name in mine if str(os.getpid()) in name]
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_memory if name.startswith("sgl")]


@pytest.fixture
def engine(unloaded: RolloutEngine) -> RolloutEngine:
    if unloaded.weight_version != 1:
        unloaded.load_weights(iter(state(MODEL).items()), 1)
    return unloaded


def test_refuses_before_the_first_sync(unloaded: RolloutEngine) -> None:
    unloaded.unload()
    assert unloaded.weight_version is None
    with pytest.raises(RolloutError, match="no weights"):
        unloaded.generate(requests(1))
    with pytest.raises(RolloutError, match="no weights"):
        unloaded.score([[1, 2, 3]])


def test_another_version_of_vllm_is_refused_by_what_it_lacks(
    unloaded: RolloutEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each name is looked for in the real package; here it loses some, and is of a version that nobody has tried."""
    if type(unloaded).__name__ != "VLLMRolloutEngine":
        pytest.skip("of vLLM alone")
    import vllm.v1.core.sched.request_queue as queue
    import vllm.v1.sample.sampler as sampler

    from verl_like.plugins.vllm import versions

    cpu, llm = torch.device("cpu"), unloaded._llm  # type: ignore[attr-defined]
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    versions.require_names(cpu, adapters=True, images=True)
    versions.require_engine(llm.llm_engine, runner, cpu)
    assert not caplog.records
    monkeypatch.setattr(versions, "version", lambda: "9.9.0")
    versions.require_names(cpu, adapters=False, images=False)
    assert "vLLM 9.9.0 is untested (tested: 0.26.0" in caplog.text
    monkeypatch.delattr(queue, "create_request_queue")
    monkeypatch.delattr(sampler, "batched_count_greater_than")
    with pytest.raises(
        ValueError, match=r"vLLM 9.9.0 lacks .*request_queue.create_request_queue, .*greater_than; tested versions are"
    ):
        versions.require_names(cpu, adapters=False, images=False)
    monkeypatch.delattr(runner, "discard_request_mask")
    with pytest.raises(ValueError, match=r"vLLM 9.9.0 lacks model_runner.discard_request_mask.np; tested"):
        versions.require_engine(llm.llm_engine, runner, cpu)
    assert versions.missing_names(["vllm.no_such_module: name"])[0].startswith("vllm.no_such_module (No module")


def test_scores_are_those_of_the_model(engine: RolloutEngine) -> None:
    sequences = [[1, 2, 3, 4, 5, 6], [69, 0], list(range(60))]
    for tokens, scores in zip(sequences, engine.score(sequences), strict=True):
        assert torch.allclose(torch.tensor(scores), log_probs(MODEL, tokens), atol=1e-5)


def test_sampled_log_probs_are_those_of_the_model(engine: RolloutEngine) -> None:
    asked = requests(12)
    done = engine.generate(asked)
    assert [c.request_id for c in done] == [r.request_id for r in asked]
    assert max(gap(r, c) for r, c in zip(asked, done, strict=True)) < 1e-5
    assert {v for c in done for v in c.sampled.weight_versions} == {1}


def test_ends(engine: RolloutEngine) -> None:
    done = engine.generate(requests(16))
    for completion in done:
        ends = [t in EOS for t in completion.token_ids]
        assert not any(ends[:-1])
        assert completion.finish_reason == ("stop" if ends[-1] else "length")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 24
        assert len(completion.log_probs) == len(completion.token_ids)
    assert {c.finish_reason for c in done} == {"stop", "length"}
    ignoring = engine.generate(requests(16, dataclasses.replace(SAMPLING, stop_token_ids=())))
    assert {(c.finish_reason, len(c.token_ids)) for c in ignoring} == {("length", 24)}
    assert any(t in EOS for c in ignoring for t in c.token_ids[:-1])
    for stopped, whole in zip(done, ignoring, strict=True):
        assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_stream_gives_each_response_as_it_ends(engine: RolloutEngine) -> None:
    short, long = dataclasses.replace(SAMPLING, max_tokens=1), dataclasses.replace(SAMPLING, stop_token_ids=())
    asked = [*requests(1, long), *requests(3, short, first=1)]
    lists = list(engine.stream(asked))
    ended = [completion.request_id for completions in lists for completion in completions]
    assert sorted(ended) == ["r0", "r1", "r2", "r3"]
    assert ended[-1] == "r0"  # asked for first, ended last
    alone = {c.request_id: c.token_ids for c in engine.generate(asked)}
    assert {c.request_id: c.token_ids for completions in lists for c in completions} == alone
    assert list(engine.stream([])) == []


def test_many_are_submitted_at_once(engine: RolloutEngine) -> None:
    """What does not fit fails alone, in its own future."""
    large = requests(1, SamplingParams(max_tokens=MAX_LEN), first=6)
    with engine.opened():
        futures = engine.submit_all([*requests(6), *large])
        done = [future.result(60) for future in futures[:6]]
        with pytest.raises(ValueError, match="max_model_len=128"):
            futures[6].result(60)
    assert [c.token_ids for c in done] == [c.token_ids for c in engine.generate(requests(6))]


def test_tokens_do_not_depend_on_the_batch(engine: RolloutEngine) -> None:
    together = {c.request_id: c.token_ids for c in engine.generate(requests(40))}  # more than max_num_seqs
    for request in (*requests(2), *requests(1, first=39)):
        assert engine.generate([request])[0].token_ids == together[request.request_id]
    backwards = engine.generate(requests(10)[::-1])
    assert all(c.token_ids == together[c.request_id] for c in backwards)
    other_seed = [dataclasses.replace(r, seed=r.seed + 1) for r in requests(4) if r.seed is not None]
    assert any(c.token_ids != together[c.request_id] for c in engine.generate(other_seed))


def test_prompts_cut_into_chunks_give_the_same_tokens(engine: RolloutEngine) -> None:
    asked = cut_requests()
    alone = [engine.generate([request])[0] for request in asked]
    engine.load_weights(iter(state(MODEL).items()), 1)  # forgets the prompts: none is taken from the cache
    for request, chunked, whole in zip(asked, engine.generate(asked), alone, strict=True):
        assert chunked.token_ids == whole.token_ids
        assert gap(request, chunked) < 1e-5
    sequences = [r.prompt_ids + c.token_ids for r, c in zip(asked, alone, strict=True)]
    for tokens, scores in zip(sequences, engine.score(sequences), strict=True):
        assert torch.allclose(torch.tensor(scores), log_probs(MODEL, tokens), atol=1e-5)


def test_unknown_ids_are_never_sampled(engine: RolloutEngine) -> None:
    hot = SamplingParams(max_tokens=60, temperature=2.0)
    done = engine.generate(requests(20, hot))
    assert max(t for c in done for t in c.token_ids) < TOKENIZER_SIZE
    with torch.no_grad():
        logits = MODEL(torch.tensor([c.token_ids for c in done])).logits / 2.0
    assert float(logits.softmax(-1)[..., TOKENIZER_SIZE:].sum(-1).mean()) > 0.05  # the model alone would sample them


def test_temperature(engine: RolloutEngine) -> None:
    warm = SamplingParams(max_tokens=8, temperature=2.0)
    for request, completion in zip(requests(4), engine.generate(requests(4, warm)), strict=True):
        tokens = request.prompt_ids + completion.token_ids
        with torch.no_grad():
            logits = MODEL(torch.tensor([tokens])).logits[0, :-1, :TOKENIZER_SIZE] / 2.0
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[len(request.prompt_ids) - 1 :, 0]
        assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=1e-5)


def test_greedy(engine: RolloutEngine) -> None:
    for sampling in (SamplingParams(max_tokens=6, temperature=0.0), SamplingParams(max_tokens=6, do_sample=False)):
        for request, completion in zip(requests(3), engine.generate(requests(3, sampling)), strict=True):
            tokens = list(request.prompt_ids)
            for token in completion.token_ids:
                with torch.no_grad():
                    assert token == int(MODEL(torch.tensor([tokens])).logits[0, -1, :TOKENIZER_SIZE].argmax())
                tokens.append(token)
            assert gap(request, completion) < 1e-5


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.7}])
def test_top_k_and_top_p_support(engine: RolloutEngine, limits: dict[str, float]) -> None:
    sampling = SamplingParams(max_tokens=1, **limits)  # type: ignore[arg-type]
    prompt = [1, 2, 3]
    asked = [GenerationRequest(request_id=f"k{i}", prompt_ids=prompt, sampling=sampling, seed=i) for i in range(300)]
    done = engine.generate(asked)
    with torch.no_grad():
        probs = MODEL(torch.tensor([prompt])).logits[0, -1, :TOKENIZER_SIZE].softmax(-1)
    ordered, order = probs.sort(descending=True)
    kept = int(limits.get("top_k", TOKENIZER_SIZE))
    inside = ordered[:kept] / ordered[:kept].sum()
    if "top_p" in limits:
        kept = int((inside.cumsum(0) < limits["top_p"]).sum()) + 1
    allowed = {int(t): float(p) for t, p in zip(order[:kept], ordered[:kept] / ordered[:kept].sum(), strict=True)}
    assert {c.token_ids[0] for c in done} <= set(allowed)
    assert all(abs(c.log_probs[0] - torch.tensor(allowed[c.token_ids[0]]).log()) < 1e-4 for c in done)
    likeliest = sum(c.token_ids[0] == int(order[0]) for c in done) / 300
    assert abs(likeliest - allowed[int(order[0])]) < 0.12


def oracle(sampling: SamplingParams, prompt: list[int], sampled: list[int]) -> torch.Tensor:
    """Log-probs of the next token, written down token by token."""
    with torch.no_grad():
        logits = MODEL(torch.tensor([prompt + sampled])).logits[0, -1, :TOKENIZER_SIZE]
    for token in range(TOKENIZER_SIZE):
        bad = any(word[-1] == token and text(sampled).endswith(text(list(word[:-1]))) for word in sampling.bad_words)
        if bad or (len(sampled) < sampling.min_tokens and token in sampling.stop_token_ids):
            logits[token] = -torch.inf
        if token in prompt + sampled:
            logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
        logits[token] -= sampling.frequency_penalty * sampled.count(token)
        logits[token] -= sampling.presence_penalty * (token in sampled)
    if not sampling.greedy:
        hot = sampling.first_temperature is not None and not sampled
        logits /= sampling.first_temperature if hot else sampling.temperature
        if hot or sampling.top_k > 0:
            logits[logits < logits.topk(sampling.top_k if sampling.top_k > 0 else 16).values[-1]] = -torch.inf
        logits[logits < logits.max() + torch.tensor(sampling.min_p).log()] = -torch.inf
    return logits.log_softmax(dim=-1)


SHAPES: list[dict[str, Any]] = [
    {"min_p": 0.3, "temperature": 1.3},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5, "temperature": 0.7},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "do_sample": False},
    {"min_tokens": 12},
    {"first_temperature": 30.0},
    {"first_temperature": 30.0, "repetition_penalty": 1.4, "min_p": 0.01, "top_k": 9, "min_tokens": 3},
    {"first_temperature": 30.0, "do_sample": False},
    {"bad_words": ((7,), (9, 11), *((i, j) for i in range(20) for j in (30, 31)))},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: next(iter(shape)))
def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(
    engine: RolloutEngine, shape: dict[str, Any]
) -> None:
    sampling = dataclasses.replace(SAMPLING, max_tokens=16, **shape)
    for request, done in zip(requests(6), engine.generate(requests(6, sampling)), strict=True):
        expected = [oracle(sampling, request.prompt_ids, done.token_ids[:i]) for i in range(len(done.token_ids))]
        chosen = [float(log_probs_V[token]) for log_probs_V, token in zip(expected, done.token_ids, strict=True)]
        assert done.log_probs == pytest.approx(chosen, abs=2e-5)
        if sampling.greedy:
            assert done.token_ids == [int(log_probs_V.argmax()) for log_probs_V in expected]


def test_a_hot_first_token_is_spread_over_the_likeliest_ones_of_the_first_turn(engine: RolloutEngine) -> None:
    """FIRE: nearly even among 16; what follows is the model's own, and no later turn begins so."""
    fire = SamplingParams(max_tokens=2, first_temperature=30.0)
    many = [GenerationRequest(request_id=f"f{i}", prompt_ids=[1, 2, 3], sampling=fire, seed=i) for i in range(300)]
    done = engine.generate(many)
    with torch.no_grad():
        logits = MODEL(torch.tensor([[1, 2, 3]])).logits[0, -1, :TOKENIZER_SIZE]
    likeliest = logits.topk(16).indices.tolist()
    counts = [sum(c.token_ids[0] == token for c in done) for token in likeliest]
    assert sum(counts) == 300 and min(counts) >= 5 and max(counts) <= 45
    later = engine.generate([dataclasses.replace(r, turn=1) for r in many[:20]])
    plain = dataclasses.replace(fire, first_temperature=None)
    same = engine.generate([dataclasses.replace(r, sampling=plain) for r in many[:20]])
    assert [c.token_ids for c in later] == [c.token_ids for c in same]
    alone = engine.generate([many[7]])[0]
    assert alone.token_ids == done[7].token_ids and alone.log_probs == pytest.approx(done[7].log_probs, abs=1e-5)


def test_hot_first_tokens_end_stop_and_are_cut_like_others(engine: RolloutEngine) -> None:
    """An end token may be the first one; one token may be all; an abort in between keeps what there is."""
    fire = dataclasses.replace(SAMPLING, first_temperature=30.0)
    ends = dataclasses.replace(fire, stop_token_ids=tuple(range(0, TOKENIZER_SIZE, 2)))
    done = engine.generate(requests(12, ends))
    assert {1} < {len(c.token_ids) for c in done}
    assert all(c.finish_reason == "stop" for c in done if c.token_ids[-1] % 2 == 0)
    single = engine.generate(requests(4, dataclasses.replace(fire, max_tokens=1, stop_token_ids=())))
    assert [(len(c.token_ids), c.finish_reason) for c in single] == [(1, "length")] * 4
    with opened(engine):
        future = engine.submit(requests(1, dataclasses.replace(ENDLESS, first_temperature=30.0))[0])
        begun(engine, "r0")
        engine.abort(["r0"])
        cut = future.result(60)
    whole = engine.generate(requests(1, dataclasses.replace(ENDLESS, first_temperature=30.0)))[0]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) >= 1


def test_a_text_ends_a_response_with_the_token_that_completes_it(engine: RolloutEngine) -> None:
    whole = engine.generate(requests(4, dataclasses.replace(SAMPLING, stop_token_ids=())))
    for request, endless in zip(requests(4), whole, strict=True):
        stop = text(endless.token_ids[3:5])
        length = text(endless.token_ids).index(stop) + 2
        sampling = dataclasses.replace(SAMPLING, stop_token_ids=(), stop=(stop, "never"))
        ended, later = engine.generate(
            [
                dataclasses.replace(request, sampling=sampling),
                dataclasses.replace(request, request_id="later", sampling=dataclasses.replace(sampling, min_tokens=10)),
            ]
        )
        assert (ended.finish_reason, ended.token_ids) == ("stop", endless.token_ids[:length])
        assert len(ended.log_probs) == length
        assert len(later.token_ids) > 10


def test_a_text_that_the_engine_cannot_read_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_reads_text", False)
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs the tokenizer, .* when rollout.stop is set"):
        engine.generate(requests(1, dataclasses.replace(SAMPLING, stop=("x",))))


def test_finished_responses_come_while_others_go_on(engine: RolloutEngine) -> None:
    with opened(engine):
        long = engine.submit(requests(1, ENDLESS)[0])
        order: list[str] = []
        long.add_done_callback(lambda f: order.append("long"))
        late = engine.submit(requests(1, dataclasses.replace(SAMPLING, max_tokens=1), first=1)[0])
        late.add_done_callback(lambda f: order.append("short"))
        assert len(late.result(60).token_ids) == 1
        assert len(long.result(60).token_ids) == 100
        assert order == ["short", "long"]


def test_a_late_request_gets_its_first_token_before_those_that_run_end(engine: RolloutEngine) -> None:
    """The engine takes 32 at a time."""
    with opened(engine):
        running = [engine.submit(r) for r in requests(31, ENDLESS)]
        begun(engine, "r30")
        late = engine.submit(requests(1, dataclasses.replace(SAMPLING, max_tokens=1), first=31)[0])
        assert len(late.result(60).token_ids) == 1
        assert not any(future.done() for future in running)
        engine.abort()


def test_abort_gives_what_was_sampled(engine: RolloutEngine) -> None:
    whole = {c.request_id: c for c in engine.generate(requests(40, ENDLESS))}
    with opened(engine):
        futures = {r.request_id: engine.submit(r) for r in requests(40, ENDLESS)}
        begun(engine, "r0")
        engine.abort(["r0", "r39", "unknown"])
        for i in ("r0", "r39"):  # one runs, the other waits: the engine takes 32 at a time
            done = futures[i].result(60)
            assert done.finish_reason == "abort"
            assert done.token_ids == whole[i].token_ids[: len(done.token_ids)]
            assert done.log_probs == pytest.approx(whole[i].log_probs[: len(done.token_ids)], abs=1e-5)
            assert (len(done.token_ids) > 0) == (i == "r0")
        engine.abort()
        assert {f.result(60).finish_reason for f in futures.values()} <= {"abort", "length"}
    assert engine.generate(requests(1))[0].finish_reason in ("stop", "length")


def test_requests_stay_while_the_engine_is_paused(engine: RolloutEngine) -> None:
    expected = [c.token_ids for c in engine.generate(requests(20, ENDLESS))]
    engine.open()
    futures = [engine.submit(r) for r in requests(20, ENDLESS)]
    begun(engine, "r0")
    engine.pause()
    before = {i: len(sampled) for i, sampled in engine.snapshot().items()}
    scores = engine.score([[1, 2, 3, 4, 5, 6]])[0]
    assert torch.allclose(torch.tensor(scores), log_probs(MODEL, [1, 2, 3, 4, 5, 6]), atol=1e-5)
    late = engine.submit(requests(1, first=30)[0])
    assert {i: len(sampled) for i, sampled in engine.snapshot().items()} == before | {"r30": 0}
    assert 0 < before["r0"] < 100 and not late.done()
    engine.open()
    assert [f.result(60).token_ids for f in futures] == expected
    assert late.result(60).token_ids == engine.generate(requests(1, first=30))[0].token_ids
    engine.pause()


def test_weights_loaded_under_running_requests(engine: RolloutEngine) -> None:
    """Tokens stay; later ones are drawn from the new model alone, which has read the whole prefix itself."""
    other = tiny_model(seed=9)
    engine.open()
    futures = [engine.submit(r) for r in requests(4, ENDLESS)]
    begun(engine, "r3")
    engine.pause()
    kept = engine.snapshot()
    engine.load_weights(iter(state(other).items()), 2)
    engine.open()
    for request, future in zip(requests(4, ENDLESS), futures, strict=True):
        done, first = future.result(60), len(kept[request.request_id])
        assert done.token_ids[:first] == kept[request.request_id].token_ids.tolist()
        assert done.sampled.weight_versions.tolist() == [1] * first + [2] * (100 - first)
        for model, part in ((MODEL, slice(0, first)), (other, slice(first, 100))):
            expected = log_probs(model, request.prompt_ids + done.token_ids)[len(request.prompt_ids) - 1 :]
            assert torch.allclose(torch.tensor(done.log_probs)[part], expected[part], atol=1e-5)
    engine.pause()


def test_an_engine_that_threw_its_weights_away_goes_on_when_they_come_again(engine: RolloutEngine) -> None:
    """Twice, with requests under way; those of hf leave their memory indeed."""
    engine.open()
    futures = [engine.submit(r) for r in requests(4, ENDLESS)]
    late = []
    for number in (30, 31):
        begun(engine, "r3")
        engine.pause()
        kept = engine.snapshot()
        engine.sleep(discard=True)
        assert engine.held is None
        if isinstance(engine, HFRolloutEngine):
            assert not any(p.untyped_storage().nbytes() for p in engine._module.parameters())
        with pytest.raises(RolloutError, match="no weights"):
            engine.open()
        engine.wake()
        with pytest.raises(RolloutError, match="no weights"):
            engine.generate(requests(1))
        late.append(engine.submit(requests(1, first=number)[0]))  # it waits
        engine.load_weights(iter(state(MODEL).items()), 1)
        assert engine.weight_version == 1
        engine.open()
    for request, future in zip(requests(4, ENDLESS), futures, strict=True):
        done, first = future.result(60), kept[request.request_id]
        assert len(done.token_ids) == 100 and done.token_ids[: len(first)] == first.token_ids.tolist()
        assert gap(request, done) < 1e-5 and set(done.sampled.weight_versions) == {1}
    assert all(gap(r, future.result(60)) < 1e-5 for r, future in zip(requests(2, first=30), late, strict=True))
    engine.pause()


def test_a_response_goes_on_from_what_was_sampled_before(engine: RolloutEngine) -> None:
    """With hf as if it had never been cut; vllm draws other numbers after a cut, the same ones after the same cut."""
    for request, whole in zip(requests(4, ENDLESS), engine.generate(requests(4, ENDLESS)), strict=True):
        beginning = Sampled.of(whole.token_ids[:40], whole.log_probs[:40], range(40))
        cut = dataclasses.replace(request, resume=beginning)
        once, again = engine.generate([cut])[0], engine.generate([cut])[0]
        assert once.token_ids == again.token_ids and len(once.token_ids) == 100
        assert once.token_ids[:40] == whole.token_ids[:40]
        assert once.sampled.weight_versions.tolist() == [*range(40)] + [1] * 60
        assert gap(request, once) < 1e-5
        assert type(engine).__name__ == "VLLMRolloutEngine" or once.token_ids == whole.token_ids
    with pytest.raises(ValueError, match="100 tokens to resume from leave nothing to sample of max_tokens=100"):
        engine.generate([dataclasses.replace(request, resume=whole.sampled)])


@pytest.mark.parametrize("shape", [{"stop": ("x",)}, {"frequency_penalty": 0.5}, {"bad_words": ((7,),)}])
def test_what_cannot_be_resumed_is_refused_as_such(engine: RolloutEngine, shape: dict[str, Any]) -> None:
    cut = requests(1, dataclasses.replace(ENDLESS, **shape))[0]
    cut = dataclasses.replace(cut, resume=Sampled.of([1, 2], [-1.0, -1.0], 0))
    if type(engine).__name__ == "VLLMRolloutEngine":
        with pytest.raises(ResumeError, match="r0 resumes a response"):
            engine.generate([cut])
    else:
        assert engine.generate([cut])[0].token_ids[:2] == [1, 2]


def test_what_has_less_priority_is_taken_up_first(engine: RolloutEngine) -> None:
    short = dataclasses.replace(SAMPLING, max_tokens=8, stop_token_ids=())
    last = [dataclasses.replace(r, priority=5) for r in requests(40, short)]
    first = [dataclasses.replace(r, priority=-1) for r in requests(4, short, first=40)]
    ended: list[str] = []
    futures = [engine.submit(r) for r in [*last, *first]]  # paused: all wait
    for future in futures:
        future.add_done_callback(lambda f: ended.append(f.result().request_id))
    with opened(engine):
        for future in futures:
            future.result(60)
    assert {r.request_id for r in first} <= set(ended[:32])


def test_a_second_turn_takes_the_first_from_the_cache(engine: RolloutEngine) -> None:
    """hf keeps nothing between requests."""
    engine.load_weights(iter(state(MODEL).items()), 1)  # forgets what others have asked
    prompt, twenty = list(range(1, 61)), SamplingParams(max_tokens=20)
    turn = GenerationRequest(request_id="turn0", prompt_ids=prompt, sampling=twenty, seed=1, session="s")
    first = engine.generate([turn])[0]
    answer = [*prompt, *first.token_ids, 7, 8, 9]
    longer = dataclasses.replace(turn, request_id="turn1", turn=1, prompt_ids=answer)
    second = engine.generate([longer])[0]
    known = {"VLLMRolloutEngine": 64, "RemoteEngine": 79}  # two blocks of 32; all that was computed
    assert (first.cached_tokens, second.cached_tokens) == (0, known.get(type(engine).__name__, 0))
    assert gap(longer, second) < 1e-5


def test_a_request_that_does_not_fit_is_refused(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError, match="max_model_len=128"):
        engine.generate(requests(1, SamplingParams(max_tokens=MAX_LEN)))


NO_REQUESTS = {
    "no prompt": {"prompt_ids": []},
    "token ids from 1 to 80, where the model has 0 to 79": {"prompt_ids": [1, VOCAB, 2]},
    "token ids from -1 to 2": {"prompt_ids": [2, -1]},
    "resume: token ids from 80 to 80": {"resume": Sampled.of([VOCAB], [-1.0], 1)},
    "bad_words: token ids from 7 to 99": {"sampling": SamplingParams(max_tokens=4, bad_words=((7, 99),))},
    "must not be empty": {"sampling": SamplingParams(max_tokens=4, bad_words=((),))},
    "must not be empty texts": {"sampling": SamplingParams(max_tokens=4, stop=("",))},
    "or negative ids": {"sampling": SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(-1,))},
}


@pytest.mark.parametrize("message", NO_REQUESTS)
def test_a_request_that_would_break_a_step_is_refused_alone(engine: RolloutEngine, message: str) -> None:
    bad = dataclasses.replace(requests(1)[0], request_id="bad", **NO_REQUESTS[message])
    with opened(engine):
        good = engine.submit(requests(1)[0])
        with pytest.raises(ValueError, match=message):
            engine.submit(bad)
        assert good.result(60).token_ids
    with pytest.raises(ValueError, match="a sequence to score: token ids from 1 to 80"):
        engine.score([[1, VOCAB]])


def test_a_request_that_the_engine_refuses_fails_alone(engine: RolloutEngine) -> None:
    if type(engine).__name__ != "VLLMRolloutEngine":
        pytest.skip("tokens are drawn here, at any temperature")
    bad = dataclasses.replace(requests(1)[0], request_id="bad", sampling=SamplingParams(max_tokens=2, temperature=50.0))
    with opened(engine):
        good = engine.submit(requests(1)[0])
        with pytest.raises(ValueError, match="temperature"):
            engine.submit(bad).result(60)
        assert good.result(60).token_ids


def test_the_trainers_random_numbers_are_left_alone(engine: RolloutEngine) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine.load_weights(iter(state(MODEL).items()), 1)
    engine.generate([dataclasses.replace(r, seed=None) for r in requests(4)])
    engine.score([[1, 2, 3]])
    assert torch.equal(torch.rand(3), expected)


def test_requests_neither_see_nor_change_the_trainers_random_numbers(engine: RolloutEngine) -> None:
    """However they are submitted, while the trainer draws in its own thread; some greedy, some prompts cut."""
    greedy = dataclasses.replace(ENDLESS, do_sample=False)
    asked = [dataclasses.replace(r, seed=None, request_id=f"u{i}") for i, r in enumerate(cut_requests())]
    asked += [*requests(4, ENDLESS), *requests(4, greedy, first=4)]
    drawn: list[list[list[int]]] = []
    for seed in (5, 6):
        set_number_of_unseeded(engine, 1000)
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        expected = [(float(torch.rand(())), float(np.random.rand()), random.random()) for _ in range(4)]
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        with opened(engine):
            futures, got = [engine.submit(r) for r in asked], []
            for name in ("u0", "r0", "r4"):
                got.append((float(torch.rand(())), float(np.random.rand()), random.random()))
                begun(engine, name)
            drawn.append([future.result(60).token_ids for future in futures])
        for _ in engine.stream(asked[:2]):
            pass
        got.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        assert got == expected
    assert drawn[0] == drawn[1]
    assert len({str(tokens) for tokens in drawn[0]}) == len(asked)


def set_number_of_unseeded(engine: RolloutEngine, number: int) -> None:
    """As if so many requests without a seed had come."""
    if isinstance(engine, RemoteEngine):
        pytest.skip("it is in another process")
    engine._unseeded = itertools.count(number)  # type: ignore[attr-defined]


def test_requests_without_a_seed_draw_other_numbers_each_time(engine: RolloutEngine) -> None:
    """The trainer draws none in between."""
    asked = [dataclasses.replace(r, seed=None) for r in requests(4)]
    drawn = [[c.token_ids for c in engine.generate(asked)] for _ in range(2)]
    drawn += [[c.token_ids for part in engine.stream(asked) for c in part] for _ in range(2)]
    assert len({str(sorted(tokens)) for tokens in drawn}) == 4


def test_new_weights_replace_all_old_ones(engine: RolloutEngine) -> None:
    other = tiny_model(seed=9)
    tokens = list(range(20))
    engine.generate([GenerationRequest(request_id="fill", prompt_ids=tokens, sampling=SAMPLING, seed=0)])  # cache it
    engine.load_weights(iter(state(other).items()), 2)
    assert engine.weight_version == 2
    assert torch.allclose(torch.tensor(engine.score([tokens])[0]), log_probs(other, tokens), atol=1e-5)
    done = engine.generate([GenerationRequest(request_id="x", prompt_ids=tokens, sampling=SAMPLING, seed=0)])[0]
    expected = log_probs(other, tokens + done.token_ids)[19:]
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-5)
    assert set(done.sampled.weight_versions) == {2}


@pytest.mark.parametrize("after", [0, 1, 3, 5, 12])
def test_interrupted_load_then_recovery(engine: RolloutEngine, after: int) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(state(tiny_model(seed=9)).items()):
            if i == after:
                raise OSError("the trainer died")
            yield name, tensor

    with pytest.raises(OSError, match="trainer died"):
        engine.load_weights(broken(), 3)
    assert engine.weight_version is None
    with pytest.raises(RolloutError, match="no weights"):
        engine.generate(requests(1))
    engine.load_weights(iter(state(MODEL).items()), 1)
    request = requests(1)[0]
    assert gap(request, engine.generate([request])[0]) < 1e-5


def test_misshapen_weight_then_recovery(engine: RolloutEngine) -> None:
    if isinstance(engine, RemoteEngine):
        pytest.skip("SGLang's loader takes it; the ledger of a weight sync refuses it (test_weight_sync.py)")
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(Exception, match=r"."):
        engine.load_weights(((n, t[:-1] if n == name else t) for n, t in state(MODEL).items()), 3)
    assert engine.weight_version is None
    engine.load_weights(iter(state(MODEL).items()), 1)
    request = requests(1)[0]
    assert gap(request, engine.generate([request])[0]) < 1e-5


def test_checksums_of_what_is_held_are_those_of_what_was_sent(engine: RolloutEngine) -> None:
    """Of every tensor: what vLLM has fused or packed is told by its Hugging Face name too."""
    sent = state(MODEL)
    shapes = {name: tensor.shape for name, tensor in sent.items()}
    held = engine.weight_checksums(shapes)
    assert {name for name, _ in held} == set(sent)
    assert all(number == int(checksum(sent[name])) for name, number in held)
    one = {"lm_head.weight": shapes["lm_head.weight"]}
    assert {name for name, _ in engine.weight_checksums(one)} == {"lm_head.weight"}


def test_no_tokens_of_before_a_load_are_cached(engine: RolloutEngine) -> None:
    engine.load_weights(iter(state(MODEL).items()), 1)
    assert engine.cached_tokens() == 0
    engine.cached_tokens()
    engine.load_weights(iter(state(MODEL).items()), 1)
    assert engine.cached_tokens() == 0


@pytest.mark.engines  # two starts of an engine
def test_tensor_parallel_replica_gives_the_same_tokens(engine: RolloutEngine, tmp_path: Path) -> None:
    if type(engine).__name__ == "HFRolloutEngine":
        with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
            build("hf", tmp_path, single_rank_of_two(), tensor_model_parallel_size=2)
        return
    expected = [[c.token_ids, c.log_probs] for c in engine.generate(cut_requests())]
    scores = engine.score([[1, 2, 3, 4]])[0]
    out, other = run_on_two_ranks(__file__, tmp_path, "sglang" if isinstance(engine, RemoteEngine) else "vllm")
    assert out["version"] == other["version"] == 1
    assert [c[0] for c in out["completions"]] == [c[0] for c in expected]
    for got, wanted in zip(out["completions"], expected, strict=True):
        assert torch.allclose(torch.tensor(got[1]), torch.tensor(wanted[1]), atol=1e-5)
    assert torch.allclose(torch.tensor(out["scores"]), torch.tensor(scores), atol=1e-5)
    assert torch.allclose(torch.tensor(other["scores"]), torch.tensor(scores), atol=1e-5)
    reasons = [reason for reason, _, _ in out["reloaded"]]
    assert reasons[0] in ("abort", "length") and reasons[1:] == ["length"] * 3
    for _, tokens, versions in out["reloaded"][1:]:
        assert len(tokens) == 100 and set(versions) == {1, 2} and versions == sorted(versions)
    assert out["after_abort"] == [c.token_ids for c in engine.generate(requests(2))]
    assert other["completions"] == other["reloaded"] == other["after_abort"] == []
    assert out["shared_memory"] == other["shared_memory"] == []


def single_rank_of_two() -> ProcessInfo:
    return ProcessInfo(rank=0, world_size=2, local_rank=0, device=torch.device("cpu"))


def rank_main(rank: int, port: int, folder: Path, name: str) -> None:
    """One rank of a replica of two: the first is given the requests, the other follows."""
    process = init_distributed(rank, 2, rank, 2, "127.0.0.1", port, "cpu")
    (folder / f"model{rank}").mkdir()
    engine = build(name, folder / f"model{rank}", process, tensor_model_parallel_size=2)
    engine.load_weights(iter(state(MODEL).items()), 1)
    leads = rank == 0
    completions = engine.generate(cut_requests() if leads else [])
    scores = engine.score([[1, 2, 3, 4]])[0]
    engine.open()
    endless = [engine.submit(r) for r in requests(4, ENDLESS)] if leads else []
    if leads:
        begun(engine, "r3")
    engine.pause()
    engine.load_weights(iter(state(tiny_model(seed=9)).items()), 2)
    engine.open()
    engine.abort(["r0"])
    ends = [f.result(60) for f in endless]
    if not leads:
        with pytest.raises(RolloutError, match="only the first rank"):
            engine.submit(requests(1)[0])
    engine.pause()
    reloaded = [[c.finish_reason, c.token_ids, c.sampled.weight_versions.tolist()] for c in ends]
    engine.load_weights(iter(state(MODEL).items()), 1)
    after_abort = [c.token_ids for c in engine.generate(requests(2) if leads else [])]
    version = engine.weight_version
    engine.shutdown()
    names = os.listdir("/dev/shm")
    left = [name for name in names if f"test-{os.getpid()}" in name or name.startswith("sgl_shm")]
    shutdown_distributed()
    out = {
        "version": version,
        "completions": [[c.token_ids, c.log_probs] for c in completions],
        "scores": scores,
        "reloaded": reloaded,
        "after_abort": after_abort,
        "shared_memory": left,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
