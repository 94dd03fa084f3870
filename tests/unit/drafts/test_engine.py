"""Guesses ahead change how soon the hf engine's tokens are known, never which they are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.rollout.tiny import TOKENIZER_SIZE, hf_engines, single_process, tiny_config, tiny_model
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.rollout import RolloutName, SpeculativeConfig
from verl_like.parallel.dist import shutdown_distributed
from verl_like.plugins.vllm.drafts import Proposer
from verl_like.plugins.vllm.engine import engine_arguments
from verl_like.rollout.build import require_plain_cache
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.rollout.hf_batch import Batch
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams
from verl_like.rollout.rows import Row

MODEL = tiny_model(seed=3, num_key_value_heads=1)
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "cut": {"temperature": 1.3, "top_p": 0.8, "top_k": 20},
    "greedy": {"do_sample": False},
    "stops": {"stop_token_ids": tuple(range(0, TOKENIZER_SIZE, 9))},
    "hot": {"first_temperature": 30.0},
    "shaped": {"repetition_penalty": 1.2, "min_tokens": 5, "stop_token_ids": (3, 4)},
}


Make = Callable[..., HFRolloutEngine]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    with engines_on("cpu", tmp_path_factory.mktemp("model")) as build:
        yield build
    shutdown_distributed()


@contextmanager
def engines_on(device: str, folder: Path) -> Iterator[Make]:
    """Maker of engines with guesses by a method, or without."""
    with hf_engines(folder, MODEL, single_process(device)) as build:
        yield lambda method="none": build(
            speculative=SpeculativeConfig(method=method), max_num_seqs=12, dtype="float32"
        )


def requests(count: int, seed: int, drafts: Sequence[Any] = (), **sampling: Any) -> list[GenerationRequest]:
    """Prompts of several lengths, three of each, whose responses end at different times."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(TOKENIZER_SIZE) for _ in range(dice.randint(1, 20))] for _ in range(count)]
    return [
        GenerationRequest(
            request_id=f"{i}-{sample}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=dice.randint(6, 60), **sampling),
            seed=seed * 1000 + 3 * i + sample,
            drafts=drafts,
        )
        for i, prompt in enumerate(prompts)
        for sample in range(3)
    ]


class Told:
    """Guesses from what is going to be sampled; now and then wrong, at any place."""

    def __init__(self, done: dict[str, list[int]], seed: int) -> None:
        self.done, self.dice, self.num_guesses = done, random.Random(seed), 0

    def propose(self, rows: Sequence[Row]) -> list[list[int]]:
        drafts = []
        for row in rows:
            known, params = len(row.token_ids), row.request.sampling
            guess = self.done[row.request.request_id][known : known + self.dice.randint(0, 7)]
            guess = [t if self.dice.random() < 0.8 else self.dice.randrange(TOKENIZER_SIZE) for t in guess]
            hot = row.request.hot_start is not None and not row.token_ids
            drafts.append([] if params.shapes_logits or hot else guess[: params.max_tokens - known - 1])
        self.num_guesses += sum(map(len, drafts))
        return drafts


def same(a: list[Completion], b: list[Completion]) -> None:
    assert [c.token_ids for c in a] == [c.token_ids for c in b]
    assert [c.finish_reason for c in a] == [c.finish_reason for c in b]
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one.sampled.log_probs, other.sampled.log_probs, atol=2e-5)


@pytest.mark.parametrize("name", SAMPLING)
def test_tokens_are_those_of_no_guesses(make: Make, name: str) -> None:
    asked = requests(8, seed=1, **SAMPLING[name])
    plain = make().generate(asked)
    engine = make("history")
    told = engine.proposer = Told({c.request_id: c.token_ids for c in plain}, seed=2)
    guessed = engine.generate(asked)
    same(guessed, plain)
    assert sum(c.drafted for c in guessed) == told.num_guesses
    kept = sum(c.kept for c in guessed)
    if name != "shaped":  # whose rows take no guesses
        assert 0.3 * told.num_guesses < kept < told.num_guesses


def test_columns_of_wrong_guesses_are_given_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step's rows one keeps all guesses, the others none: what they have is moved together now and then."""
    asked = requests(2, seed=5)
    plain = make().generate(asked)
    engine, lucky = make("history"), asked[0].request_id
    told, shares = Told({c.request_id: c.token_ids for c in plain}, seed=2), list[float]()

    def propose(rows: Sequence[Row]) -> list[list[int]]:
        drafts = []
        for row in rows:
            known = len(row.token_ids)
            guess = told.done[row.request.request_id][known : known + 5] if row.request.request_id == lucky else [0] * 5
            drafts.append(guess[: row.request.sampling.max_tokens - known - 1])
        return drafts

    def closed_up(batch: Batch) -> None:
        close_up(batch)
        assert batch.mask_bS.sum(1).tolist() == batch.length_b.tolist()
        shares.append(batch.mask_bS.shape[1] / int(batch.length_b.max()))

    told.propose, close_up = propose, Batch.close_up
    monkeypatch.setattr(Batch, "close_up", closed_up)
    engine.proposer = told
    same(engine.generate(asked), plain)
    assert 1.2 < max(shares) <= 2


def test_earlier_responses_are_found_and_none_is_replayed(make: Make) -> None:
    """Same weights, other seeds: tokens are those of a plain sample, whatever was sampled before."""
    before = make().generate(requests(1, seed=7, temperature=0.04))
    earlier = tuple(c.sampled.token_ids for c in before)
    asked = [
        dataclasses.replace(request, seed=99 + i)
        for i, request in enumerate(requests(1, seed=7, temperature=0.04, drafts=earlier))
    ]
    plain, guessed = make().generate(asked), make("history").generate(asked)
    same(guessed, plain)
    assert sum(c.kept for c in guessed) > 0


def test_equal_runs_guess_equally(make: Make) -> None:
    asked = requests(1, seed=3, temperature=0.02)
    counts = [[(c.drafted, c.kept) for c in make("history").generate(asked)] for _ in "ab"]
    assert counts[0] == counts[1] and sum(kept for _, kept in counts[0]) > 0


@pytest.mark.parametrize("method", ["ngram", "history"])
def test_vllm_asks_our_proposer(tmp_path: Path, method: str) -> None:
    spelled = {"method": "custom_class", "model": f"{Proposer.__module__}.Proposer", "num_speculative_tokens": 5}
    rollout = RolloutConfig(speculative=SpeculativeConfig(method=method, max_tokens=5))
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    assert engine_arguments(rollout, model, torch.float32, 64, 1, sleep_mode=False)["speculative_config"] == spelled
    assert "speculative_config" not in engine_arguments(RolloutConfig(), model, torch.float32, 64, 1, sleep_mode=False)


def test_models_whose_layers_forget_are_refused() -> None:
    rollout = RolloutConfig(name=RolloutName.hf, speculative=SpeculativeConfig(method="ngram"))
    require_plain_cache(rollout, tiny_config())
    windows = tiny_config(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match=r"speculative.method=ngram: layers of this model keep windows.*method=none"):
        require_plain_cache(rollout, windows)
