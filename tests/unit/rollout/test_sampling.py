from __future__ import annotations

import pytest
import torch

from verl_like.config import RolloutConfig
from verl_like.config.rollout import ValKwargsConfig
from verl_like.rollout.sampling import draw, filtered_log_probs, train_sampling, validation_sampling


def _filtered(
    logits: list[float], temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> torch.Tensor:
    top_k = len(logits) if top_k is None else top_k
    args = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
    return filtered_log_probs(torch.tensor([logits]), *args)[0].exp()


def test_config_to_sampling() -> None:
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, response_length=11, ignore_eos=True)
    sampling = train_sampling(config, (1, 2))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (11, True, (1, 2))
    assert not sampling.greedy
    assert validation_sampling(config, ()).greedy
    sampled = RolloutConfig(val_kwargs=ValKwargsConfig(temperature=0.5, do_sample=True, top_k=-1))
    assert not validation_sampling(sampled, ()).greedy
    assert validation_sampling(sampled, ()).temperature == 0.5
    assert train_sampling(RolloutConfig(do_sample=False), ()).greedy


def test_hand_values() -> None:
    half, quarter = torch.log(torch.tensor([0.5, 0.25])).tolist()
    logits = [half, quarter, quarter - 20]
    assert torch.allclose(_filtered([half, quarter, quarter]), torch.tensor([0.5, 0.25, 0.25]))
    assert torch.allclose(_filtered(logits, temperature=0.5)[:2], torch.tensor([0.8, 0.2]), atol=1e-6)
    assert torch.allclose(_filtered([half, quarter, quarter - 1e-3], top_k=2)[:2], torch.tensor([2 / 3, 1 / 3]))
    assert _filtered([half, quarter, quarter], top_p=0.4).tolist() == [1.0, 0.0, 0.0]
    assert (_filtered([half, quarter, quarter - 1e-3], top_p=0.7) > 0).tolist() == [True, True, False]


def test_ties_at_the_kth_place_stay() -> None:
    assert torch.allclose(_filtered([1.0, 0.0, 0.0, -9.0], top_k=2) > 0, torch.tensor([True, True, True, False]))


def test_never_empty() -> None:
    assert _filtered([0.0, 0.0, 0.0], top_p=1e-9).max() == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_draw_follows_the_distribution(seed: int) -> None:
    probs = torch.tensor([0.0, 0.1, 0.6, 0.0, 0.3])
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(20_000, generator=generator, dtype=torch.float64)
    drawn = draw(probs.log().expand(20_000, 5), uniform)
    frequency = torch.bincount(drawn, minlength=5) / 20_000
    assert frequency[0] == frequency[3] == 0
    assert torch.allclose(frequency, probs, atol=0.015)


def test_draw_at_the_ends_of_the_interval() -> None:
    log_probs = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log()
    assert draw(log_probs, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert draw(log_probs, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 2
