"""Samples by vLLM's own engine: adapters of several ranks and targets, beside the log-probs of a training pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.unit.tinker_server import test_shared as shared
from verl_like.plugins.tinker_server.adapters import AdapterSpec
from verl_like.plugins.tinker_server.engine import Answer, Engines, Prompt
from verl_like.plugins.tinker_server.samplers import MOST_SNAPSHOTS, VLLMSampler
from verl_like.rollout.rollout_engine import SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
SPECS = shared.SPECS | {
    "joe": AdapterSpec(rank=16, seed=4, train_attn=False, train_mlp=False),  # the head alone
    **{f"more{i}": AdapterSpec(rank=1 + i, seed=5 + i) for i in range(6)},  # in all more than vLLM takes into a step
}
Asked = tuple[str, Path | None, Prompt]


@pytest.fixture(scope="module", params=["shared", "exact"])
def engines(
    request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Engines whose sampler is vLLM, of a model with a head of its own and of one without.

    Its CPU kernels have no attention heads of less than 32 numbers.
    """
    pytest.importorskip("vllm")
    folder, how = tmp_path_factory.mktemp("model"), request.param
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    tied = {"tie_word_embeddings": how == "shared", "initializer_range": 0.2}
    AutoTokenizer.from_pretrained(shared_data / "tok_minimind").save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=6400, num_key_value_heads=1, **sizes, **tied)).save_pretrained(folder)
    words = ("actor_rollout_ref.rollout.name=vllm", f"serve.isolation={how}", "serve.max_lora_rank=16")
    made = shared.engines_on("cpu", folder, *words, specs=SPECS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path | None]:
    """Where the adapter of each model is written; the base has none."""
    place = tmp_path_factory.mktemp("adapters")
    for name in SPECS:
        engines.saver(name, place / name, optimizer=False)()
    return {name: place / name for name in SPECS} | {None: None}


def prompt(i: int, **sampling: object) -> Prompt:
    asked = replace(SamplingParams(max_tokens=4 + i % 5, stop_token_ids=(2,)), **sampling)
    return Prompt(ids=[1, 300 + i, 41][: 1 + i % 3], sampling=asked, seed=i, num_samples=2)


def answers(engines: Engines, asked: Sequence[Asked]) -> list[Answer]:
    found = engines.sample(asked)
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def check_log_probs(engines: Engines, asked: Asked, answer: Answer) -> None:
    """Compare the log-probs of samples with those of the training engine, which scores prompts, under their adapter."""
    _, folder, given = asked
    for ids, log_probs, _ in answer.samples:
        whole = replace(prompt(0, max_tokens=1), ids=[*given.ids, *ids.tolist()], scored=True)
        expected = answers(engines, [("score", folder, whole)])[0].log_probs
        assert expected is not None
        np.testing.assert_allclose(log_probs, expected[len(given.ids) :], atol=1e-4)


def test_samples_are_those_of_each_alone_with_the_trainers_log_probs(
    engines: Engines, folders: dict[str | None, Path | None]
) -> None:
    """Ten adapters and the base, more than vLLM takes into one step; the same again after others were there."""
    asked = [(f"r{i}", folder, prompt(i)) for i, folder in enumerate(folders.values())]
    alone = [answers(engines, [each])[0] for each in asked]
    for each, answer in zip(asked, alone, strict=True):
        check_log_probs(engines, each, answer)
    together = answers(engines, [*asked, ("twice", *asked[0][1:])])
    again = [answers(engines, [each])[0] for each in asked[::-1]][::-1]
    for mine, other, later in zip([*alone, alone[0]], together, [*again, again[0]], strict=True):
        for (ids, log_probs, stopped), (own, found, ended), (same, last, _) in zip(
            mine.samples, other.samples, later.samples, strict=True
        ):
            assert ids.tolist() == own.tolist() == same.tolist() and stopped == ended
            np.testing.assert_allclose(log_probs, found, atol=1e-4)
            np.testing.assert_allclose(log_probs, last, atol=0 if isolated(engines) else 1e-4)
    same_prompt = [answers(engines, [("p", folder, prompt(7))])[0].samples[0][1] for folder in folders.values()]
    assert len({tuple(each.tolist()) for each in same_prompt}) == len(folders), "every adapter makes a difference"


def isolated(engines: Engines) -> bool:
    assert isinstance(engines.sampler, VLLMSampler)
    return engines.sampler.isolated


def test_adapters_that_were_let_go_come_again(engines: Engines, folders: dict[str | None, Path | None]) -> None:
    """An old snapshot keeps its weights, however many came since, and none but the last are in memory."""
    first = answers(engines, [("old", folders["ann"], prompt(3))])[0]
    place = folders["ann"]
    assert place is not None
    for i in range(MOST_SNAPSHOTS + 1):
        engines.saver("bob", place.with_name(f"bob{i}"), optimizer=False)()
        answers(engines, [(f"new{i}", place.with_name(f"bob{i}"), prompt(3, max_tokens=1))])
    assert isinstance(engines.sampler, VLLMSampler)
    assert len(engines.sampler.adapters) == MOST_SNAPSHOTS and str(place) not in engines.sampler.adapters
    again = answers(engines, [("old", place, prompt(3))])[0]
    for (ids, log_probs, _), (own, found, _) in zip(first.samples, again.samples, strict=True):
        assert ids.tolist() == own.tolist()
        np.testing.assert_allclose(log_probs, found, atol=0 if isolated(engines) else 1e-4)


def test_requests_end_as_they_are_told(
    engines: Engines, folders: dict[str | None, Path | None], shared_data: Path
) -> None:
    """By an id, by a text, greedily, and by their client, who leaves in the middle; what vLLM refuses is the user's."""
    folder = folders["eve"]
    long = answers(engines, [("long", folder, prompt(3, max_tokens=40, stop_token_ids=()))])[0].samples[0][0].tolist()
    ends = answers(engines, [("id", folder, prompt(3, max_tokens=40, stop_token_ids=(long[5],)))])[0].samples[0]
    assert ends[0].tolist() == long[: long.index(long[5]) + 1] and ends[2]
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tok_minimind")
    word = next(text for text in map(tokenizer.decode, long[3:]) if text.isascii() and text.isalnum())
    told = answers(engines, [("text", folder, prompt(3, max_tokens=40, stop_token_ids=(), stop=(word,)))])
    ids, _, stopped = told[0].samples[0]
    assert stopped and word in tokenizer.decode(ids) and ids.tolist() == long[: len(ids)] and len(ids) < 40
    greedy = answers(engines, [("greedy", folder, prompt(4, temperature=0.0))])[0].samples
    assert greedy[0][0].tolist() == greedy[1][0].tolist()
    with pytest.raises(ValueError, match="temperature"):
        engines.sample([("hot", folder, prompt(4, temperature=9.0))])

    ended = threading.Event()

    def leave() -> None:
        while not ended.wait(0.01):  # of a request that is not there yet nothing ends
            engines.cancel("gone")

    thread = threading.Thread(target=leave)
    thread.start()
    gone, stays = engines.sample(
        [("gone", folder, prompt(1, max_tokens=120)), ("stays", folders["bob"], prompt(2, max_tokens=9))]
    )
    ended.set()
    thread.join()
    assert gone is None and stays is not None and len(stays.samples[0][0]) == 9


def test_layers_that_vllm_cannot_adapt_are_refused_by_name(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a model is created, and of a state that a server with another sampler has written."""
    monkeypatch.setattr(engines.sampler, "unadapted", frozenset({"model.layers.0.mlp.up_proj"}))
    engines.check(SPECS["ann"].model_copy(update={"train_mlp": False}))
    with pytest.raises(ValueError, match=r"up_proj'\] get adapters in training, and none .* train_mlp=False"):
        engines.check(SPECS["ann"])
    engines.saver("ann", tmp_path / "ann", optimizer=False)()
    with pytest.raises(ValueError, match=r"vLLM cannot adapt .*up_proj.*rollout\.name=hf"):
        engines.sample([("new", tmp_path / "ann", prompt(1))])
