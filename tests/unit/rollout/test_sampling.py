from __future__ import annotations

import dataclasses

import pytest
import torch

from verl_like.config import RolloutConfig
from verl_like.config.rollout import ValKwargsConfig
from verl_like.rollout.sampling import completes_stop, draw, filtered_log_probs, train_sampling, validation_sampling


def _filtered(
    logits: list[float], temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    top_k = len(logits) if top_k is None else top_k
    args = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    return filtered_log_probs(torch.tensor([logits]), *args)[0].exp()


def test_config_to_sampling() -> None:
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, response_length=11, stop=["</s>"], stop_token_ids=[7])
    sampling = train_sampling(config, (1, 2))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
    assert (sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (11, ("</s>",), (1, 2, 7))
    assert train_sampling(RolloutConfig(ignore_eos=True, stop_token_ids=[7]), (1, 2)).stop_token_ids == (7,)
    assert not sampling.greedy
    assert validation_sampling(config, ()).greedy
    own = ValKwargsConfig(stop=["z"], stop_token_ids=[], ignore_eos=True, max_tokens=5, min_tokens=2, bad_words=[])
    ends = validation_sampling(
        dataclasses.replace(config, val_kwargs=own, bad_words=["never"]), (1, 2), LetterTokenizer()
    )
    assert (ends.stop, ends.stop_token_ids, ends.max_tokens, ends.min_tokens) == (("z",), (), 5, 2)
    assert ends.bad_words == () and validation_sampling(config, (1, 2)).stop_token_ids == (1, 2, 7)
    sampled = RolloutConfig(val_kwargs=ValKwargsConfig(temperature=0.5, do_sample=True, top_k=-1))
    assert not validation_sampling(sampled, ()).greedy
    assert validation_sampling(sampled, ()).temperature == 0.5
    assert train_sampling(RolloutConfig(do_sample=False), ()).greedy
    fire = RolloutConfig(use_fire_sampling=True, temperature=0.5, top_p=0.9)
    hot = train_sampling(fire, ()).of_hot_token
    assert hot is not None and (hot.temperature, hot.top_k, hot.top_p) == (30.0, 16, 0.9)
    assert validation_sampling(fire, ()).of_hot_token is None and train_sampling(config, ()).of_hot_token is None


def test_validation_follows_training_where_it_has_no_value_of_its_own() -> None:
    val = ValKwargsConfig(do_sample=True, min_p=0.0, presence_penalty=1.0)
    config = RolloutConfig(min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=3, val_kwargs=val)
    train, validation = train_sampling(config, ()), validation_sampling(config, ())
    assert (train.min_p, train.repetition_penalty, train.presence_penalty, train.min_tokens) == (0.1, 1.2, 0.5, 3)
    assert (validation.min_p, validation.presence_penalty) == (0.0, 1.0)
    assert (validation.repetition_penalty, validation.min_tokens) == (1.2, 3)


class LetterTokenizer:
    """Letters are ids 1.., a space is 0."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0 if letter == " " else ord(letter) - 96 for letter in text]

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(" " if i == 0 else chr(i + 96) for i in ids)


def test_bad_words_become_tokens_at_the_start_of_a_word_and_inside() -> None:
    config = RolloutConfig(bad_words=["ab", " c"])
    assert train_sampling(config, (), LetterTokenizer()).bad_words == ((1, 2), (0, 1, 2), (3,), (0, 3))
    with pytest.raises(ValueError, match=r"bad_words=\['ab', ' c'\] cannot be used here"):
        train_sampling(config, ())


@pytest.mark.parametrize(
    ("ids", "ends"), [([1, 2], True), ([9] * 50 + [1, 2], True), ([1, 2, 3], False), ([1], False), ([3] * 4, False)]
)
def test_the_token_that_completes_a_text_ends_a_response(ids: list[int], ends: bool) -> None:
    assert completes_stop(LetterTokenizer(), ids, ("xyz", "ab")) == ends


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert torch.allclose(_filtered(logits, min_p=0.5), torch.tensor([0.625, 0.375, 0.0]))


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
