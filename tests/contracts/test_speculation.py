"""Speculative decoding of vLLM, by its own n-grams and by guesses of ours: what is sampled stays what it was."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.rollout.tiny import TOKENIZER_SIZE, build, single_process, state, tiny_model
from verl_like.config import EngineKwargsConfig
from verl_like.config.rollout import SpeculativeConfig
from verl_like.parallel.dist import shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams
from verl_like.rollout.sampling import filtered_log_probs

pytestmark = pytest.mark.engines

OURS = SpeculativeConfig(method="history", max_tokens=4)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
TEMPERATURE, COUNT, LENGTH = 0.7, 128, 12
ATOL = 1e-5  # of log-probs in float32; a device sums up in another order


@pytest.fixture(scope="module", params=["ngram", "history"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RolloutEngine]:
    pytest.importorskip("vllm")
    how: dict[str, Any] = {"engine_kwargs": EngineKwargsConfig(vllm={"speculative_config": DRAFTS})}
    how = {"speculative": OURS} if request.param == "history" else how
    made = build("vllm", tmp_path_factory.mktemp("model"), single_process(), **how)
    try:
        made.load_weights(iter(state(model()).items()), 1)
        yield made
    finally:
        made.shutdown()
        shutdown_distributed()


def model() -> torch.nn.Module:
    made = tiny_model(seed=3)
    for parameter in made.parameters():
        parameter.data *= 0.6  # flat enough that many tokens are likely, and that proposals are refused at times
    return made


def requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_tokens": LENGTH, "temperature": TEMPERATURE} | sampling)
    return [GenerationRequest(request_id=f"r{i}", prompt_ids=PROMPT, sampling=params, seed=i) for i in range(count)]


@torch.no_grad()
def probabilities(done: Completion, temperature: float = TEMPERATURE, top_k: int = -1, top_p: float = 1.0) -> Tensor:
    """Of every token at every place of a response [R, V], by one plain forward."""
    ids = PROMPT + done.token_ids
    logits_RV = model()(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1, :TOKENIZER_SIZE].float()
    knobs = [temperature, top_k if top_k > 0 else TOKENIZER_SIZE, top_p, 0.0]
    return filtered_log_probs(logits_RV, *(torch.full((len(logits_RV),), knob) for knob in knobs)).exp().double()


def counted(done: list[Completion], **sampling: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token [V] its count minus the sum of its probabilities, their sum, and the variance of its count.

    Log-probs must agree.
    """
    excess_V, mean_V, variance_V = (torch.zeros(TOKENIZER_SIZE).double() for _ in range(3))
    for each in done:
        p_RV = probabilities(each, **sampling)
        drawn_RV = torch.nn.functional.one_hot(torch.tensor(each.token_ids), TOKENIZER_SIZE)
        excess_V += (drawn_RV - p_RV).sum(0)
        mean_V += p_RV.sum(0)
        variance_V += (p_RV * (1 - p_RV)).sum(0)
        expected = p_RV.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0].log().float()
        torch.testing.assert_close(torch.tensor(each.log_probs), expected, atol=ATOL, rtol=0)
    return excess_V, mean_V, variance_V


def excess(done: list[Completion]) -> float:
    """Largest deviation of a token's count from the sum of its probabilities, in standard deviations."""
    excess_V, _, variance_V = counted(done)
    return float((excess_V.abs() / variance_V.sqrt()).max())


def chi_square(done: list[Completion], **sampling: Any) -> float:
    """Pearson's statistic of all tokens: at most one for each of them is expected."""
    excess_V, mean_V, _ = counted(done, **sampling)
    return float((excess_V**2 / mean_V.clamp(min=1e-9)).sum())


def test_tokens_come_as_often_as_the_model_says(engine: RolloutEngine) -> None:
    """Those that are proposed all the time (1, 2 and 3) would be 20 deviations too frequent if drafts were taken for
    granted."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    done = engine.generate(requests(COUNT))
    assert torch.equal(torch.get_rng_state(), before)  # the trainer's random numbers
    assert excess(done) < 4.5


def test_tokens_are_a_function_of_the_seed(engine: RolloutEngine) -> None:
    together = engine.generate(requests(6))
    assert [engine.generate([each])[0].token_ids for each in requests(6)] == [each.token_ids for each in together]


def test_greedy_responses_are_the_models_own(engine: RolloutEngine) -> None:
    (done,) = engine.generate(requests(1, do_sample=False))
    assert done.token_ids == probabilities(done).argmax(1).tolist()


class Known:
    """In the lookup's place: guesses what a response of the last epoch has at this place, and nothing behind it."""

    def propose(self, rows: Any) -> list[list[int]]:
        return [self._rest(row)[: max(0, min(4, LENGTH - 1 - len(row.token_ids)))] for row in rows]

    def _rest(self, row: Any) -> list[int]:
        known = row.request.drafts
        return known[0][len(row.token_ids) :].tolist() if known else []


@pytest.fixture
def proposer(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our proposer in the engine; of the engine with vLLM's own there is nothing to see here."""
    found = getattr(engine, "proposer", None)
    if found is None:
        pytest.skip("vLLM's own proposals know no earlier epoch")
    monkeypatch.setattr(found, "lookup", Known())
    return found


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.3}, {"top_p": 0.7}, {"top_k": 5}], ids=str
)
def test_no_response_of_the_last_epoch_is_replayed(
    engine: RolloutEngine, proposer: Any, sampling: dict[str, Any]
) -> None:
    """Guesses are whole responses of the last epoch. Tokens have the model's frequencies (chi-square), and are those of
    the last epoch's response as often as the model says; replayed ones would be tens of deviations too many."""
    told = [each.sampled.token_ids for each in engine.generate(requests(COUNT, **sampling))]
    asked = requests(COUNT, **sampling)
    asked = [dataclasses.replace(r, seed=10_000 + i, drafts=(told[i],)) for i, r in enumerate(asked)]
    after = engine.generate(asked)
    assert sum(each.drafted for each in after) > COUNT and not proposer.rows
    assert 0 < sum(each.kept for each in after) < sum(each.drafted for each in after)
    assert chi_square(after, **sampling) < TOKENIZER_SIZE + 4 * (2 * TOKENIZER_SIZE) ** 0.5
    same = mean = variance = 0.0
    for each, response in zip(after, told, strict=True):
        p_R = probabilities(each, **sampling).gather(1, torch.tensor(response)[:, None].long())[:, 0]
        same += float((each.sampled.token_ids == response).sum())
        mean, variance = mean + float(p_R.sum()), variance + float((p_R * (1 - p_R)).sum())
    assert abs(same - mean) < 4 * variance**0.5


def test_guesses_of_an_aborted_response_are_counted(engine: RolloutEngine, proposer: Any) -> None:
    (told,) = engine.generate(requests(1, do_sample=False, max_tokens=100))
    (asked,) = requests(1, do_sample=False, max_tokens=100)
    with engine.opened():
        future = engine.submit(dataclasses.replace(asked, drafts=(told.sampled.token_ids,)))
        deadline = time.monotonic() + 60
        while len(engine.snapshot().get("r0", ())) < LENGTH:
            assert time.monotonic() < deadline and not future.done()
        engine.abort(["r0"])
        done = future.result(60)
    assert done.finish_reason == "abort" and done.token_ids == told.token_ids[: len(done.token_ids)]
    assert done.drafted == done.kept > 0 and not proposer.rows


def test_guesses_stop_where_a_response_stops(engine: RolloutEngine, proposer: Any) -> None:
    """A stop token among the guesses that are kept ends the response there, and what is counted is in it."""
    (told,) = engine.generate(requests(1, do_sample=False))
    stop = told.token_ids[5]
    at = told.token_ids.index(stop) + 1
    (asked,) = requests(1, do_sample=False, stop_token_ids=(stop,))
    (done,) = engine.generate([dataclasses.replace(asked, drafts=(told.sampled.token_ids,))])
    assert done.token_ids == told.token_ids[:at] and done.finish_reason == "stop"
    assert done.kept == at - 1 - (at - 1) // 5
