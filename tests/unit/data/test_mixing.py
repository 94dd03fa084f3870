"""WeightedSampler: shares in every batch, every row of a source once an epoch, exact resuming."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.data.factory import CharTokenizer, write_prompts
from verl_like.config import DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import PromptLoader
from verl_like.data.sampler import ResumableSampler
from verl_like.plugins.samplers.mixing import WeightedSampler

DOMAINS = ["a"] * 30 + ["b"] * 10 + ["c"] * 5
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def make(weights: dict[str, float] = WEIGHTS, *, shuffle: bool = True, seed: int = 1) -> WeightedSampler:
    return WeightedSampler(DOMAINS, weights, shuffle=shuffle, seed=seed)


def draw(sampler: WeightedSampler, batches: int, size: int = 10) -> list[tuple[list[int], list[int]]]:
    return [sampler.draw(size) for _ in range(batches)]


def test_every_batch_has_the_shares_and_so_has_every_mini_batch() -> None:
    for rows, _ in draw(make(), 50):
        assert Counter(DOMAINS[row] for row in rows) == {"a": 5, "b": 3, "c": 2}
    drawn: list[str] = []
    for rows, _ in draw(make({"a": 3, "b": 1, "c": 3}), 40, size=7):
        drawn += [DOMAINS[row] for row in rows]
        for name, weight in {"a": 3 / 7, "b": 1 / 7, "c": 3 / 7}.items():
            assert abs(drawn.count(name) - weight * len(drawn)) < 1


def test_a_source_gives_each_row_once_an_epoch_in_a_new_order_each_time() -> None:
    rows = [row for batch, _ in draw(make(), 20) for row in batch]
    for name, size in (("a", 30), ("b", 10), ("c", 5)):
        own = [row for row in rows if DOMAINS[row] == name]
        epochs = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == [i for i, d in enumerate(DOMAINS) if d == name] for epoch in epochs)
        assert epochs[0] != epochs[1]
    assert [n for _, numbers in draw(make(), 3) for n in numbers] == list(range(30))
    assert draw(make(), 3) == draw(make(), 3) != draw(make(seed=2), 3)


def test_without_shuffle_rows_come_in_file_order() -> None:
    rows = [row for batch, _ in draw(make(shuffle=False), 2) for row in batch if DOMAINS[row] == "b"]
    assert rows == [30, 31, 32, 33, 34, 35]


def test_weight_zero_leaves_a_source_out() -> None:
    sampler = make({"a": 1, "b": 0, "c": 1})
    assert {DOMAINS[row] for batch, _ in draw(sampler, 5) for row in batch} == {"a", "c"}


@pytest.mark.parametrize("before", [0, 1, 4, 9])
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(before: int) -> None:
    weights = {"a": 0.61, "b": 0.27, "c": 0.12}
    whole = draw(make(weights), 12, size=7)
    first = make(weights)
    draw(first, before, size=7)
    second = make(weights, seed=99)  # the checkpoint's seed counts
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert draw(second, 12 - before, size=7) == whole[before:]
    assert second.epoch == (12 * 7) // len(DOMAINS)


def test_changed_weights_count_from_here_on(caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    seen = [row for batch, _ in draw(first, 2) for row in batch]
    second = make({"a": 1, "b": 1, "c": 0})
    with caplog.at_level(logging.WARNING, "verl_like"):
        second.load_state_dict(first.state_dict())
    assert "data.domain_weights changed" in caplog.text
    ((rows, numbers),) = draw(second, 1)
    assert Counter(DOMAINS[row] for row in rows) == {"a": 5, "b": 5}
    assert not set(rows) & {row for row in seen if DOMAINS[row] == "a"}  # the epoch of a source goes on
    assert numbers[0] == 20


def test_states_of_the_other_sampler_are_refused() -> None:
    plain = ResumableSampler(len(DOMAINS), shuffle=True, seed=1)
    with pytest.raises(ValueError, match=r"written without data\.domain_weights"):
        make().load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"written with data\.domain_weights"):
        plain.load_state_dict(make().state_dict())
    other = WeightedSampler(DOMAINS, WEIGHTS, shuffle=True, seed=1, identity={"rows": 3})
    with pytest.raises(ValueError, match="training data changed"):
        other.load_state_dict(make().state_dict())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1, "b": 1}, r"has no weight for c; give 0"),
        ({"a": 1, "b": 1, "c": 1, "bb": 1}, r"domain_weights\.bb: no row has this source .*did you mean 'b'\?"),
    ],
)
def test_weights_must_name_the_sources(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(weights)


@pytest.mark.parametrize("weights", [{"a": -1}, {"a": float("nan")}, {"a": "x"}, {"a": 0}])
def test_weights_must_be_numbers(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="domain_weights"):
        DataConfig(domain_weights=weights)


def test_a_share_larger_than_its_source_is_refused() -> None:
    make().check_batch(25)
    with pytest.raises(ValueError, match=r"weights\.c: its share of a batch of 26 prompts is 6, but it has 5 rows"):
        make().check_batch(26)


def test_sources_of_a_data_set(tmp_path: Path) -> None:
    files = [
        write_prompts(tmp_path / f"{name}.parquet", ["x" * (i + 1) for i in range(8)], data_source=name)
        for name in ("small", "large")
    ]
    data = DataConfig(filter_overlong_prompts=True, max_prompt_length=6)
    dataset = PromptDataset(data, files, CharTokenizer(template=False), split="train")
    assert dataset.domains() == ["small"] * 5 + ["large"] * 5  # after the filter
    sampler = WeightedSampler(dataset.domains(), {"small": 1, "large": 3}, shuffle=True, seed=1)
    prompts = PromptLoader(dataset, sampler, 4).draw()
    assert Counter(prompt.row.data_source for prompt in prompts) == {"small": 1, "large": 3}


def test_prompts_that_were_given_back_come_first_and_survive_a_resume() -> None:
    first = make()
    rows, numbers = first.draw(10)
    first.give_back([(rows[8], numbers[8]), (rows[9], numbers[9])])
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for sampler in (first, second):
        again, again_numbers = sampler.draw(10, drop_last=False)
        assert again[:2] == rows[8:] and again_numbers == [8, 9, *range(10, 18)]
        assert len(set(again)) == 10
