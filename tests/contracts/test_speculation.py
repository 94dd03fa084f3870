"""N-gram speculative decoding of vLLM: proposals are accepted or not, and what is sampled stays what it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.rollout.tiny import TOKENIZER_SIZE, build, single_process, state, tiny_model
from verl_like.config import EngineKwargsConfig
from verl_like.parallel.dist import shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams

pytestmark = pytest.mark.engines

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
TEMPERATURE, COUNT, LENGTH = 0.7, 128, 12


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    pytest.importorskip("vllm")
    drafts = EngineKwargsConfig(vllm={"speculative_config": DRAFTS})
    made = build("vllm", tmp_path_factory.mktemp("model"), single_process(), engine_kwargs=drafts)
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


def requests(count: int, **sampling: object) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=LENGTH, temperature=TEMPERATURE, **sampling)  # pyright: ignore
    return [GenerationRequest(request_id=f"r{i}", prompt_ids=PROMPT, sampling=params, seed=i) for i in range(count)]


@torch.no_grad()
def probabilities(done: Completion) -> Tensor:
    """Of every token at every place of a response [R, V], by one plain forward."""
    ids = PROMPT + done.token_ids
    logits = model()(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1, :TOKENIZER_SIZE]
    return (logits / TEMPERATURE).softmax(-1).double()


def excess(done: list[Completion], atol: float = 1e-5) -> float:
    """Of each token its count minus the sum of its probabilities; the largest, in deviations. Log-probs must agree."""
    excess_V, variance_V = torch.zeros(TOKENIZER_SIZE).double(), torch.zeros(TOKENIZER_SIZE).double()
    for each in done:
        p_RV = probabilities(each)
        drawn_RV = torch.nn.functional.one_hot(torch.tensor(each.token_ids), TOKENIZER_SIZE)
        excess_V += (drawn_RV - p_RV).sum(0)
        variance_V += (p_RV * (1 - p_RV)).sum(0)
        expected = p_RV.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0].log().float()
        torch.testing.assert_close(torch.tensor(each.log_probs), expected, atol=atol, rtol=0)
    return float((excess_V.abs() / variance_V.sqrt()).max())


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
