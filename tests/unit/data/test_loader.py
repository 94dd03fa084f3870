"""ResumableSampler, PromptLoader, iterate_all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.data.factory import CharTokenizer, text_of, write_prompts
from verl_like.config import DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import PromptLoader, iterate_all
from verl_like.data.sampler import ResumableSampler


@pytest.fixture
def dataset(tmp_path: Path) -> PromptDataset:
    files = write_prompts(tmp_path / "a.parquet", ["x" * (i + 1) for i in range(10)])
    return PromptDataset(DataConfig(), files, CharTokenizer(template=False), split="train")


def make_loader(dataset: PromptDataset, batch_size: int = 3, *, shuffle: bool = True, seed: int = 1) -> PromptLoader:
    sampler = ResumableSampler(len(dataset), shuffle=shuffle, seed=seed, identity=dataset.identity())
    return PromptLoader(dataset, sampler, batch_size)


def draw(loader: PromptLoader, batches: int) -> list[tuple[list[int], list[int]]]:
    drawn = [loader.draw() for _ in range(batches)]
    return [([p.row.index for p in prompts], [p.group for p in prompts]) for prompts in drawn]


def test_prompts_are_numbered_as_they_are_drawn(dataset: PromptDataset) -> None:
    loader = make_loader(dataset, shuffle=False)
    prompts = loader.draw()
    assert [text_of(prompt.ids) for prompt in prompts] == ["\x02x", "\x02xx", "\x02xxx"]
    assert [prompt.group for prompt in prompts] == [prompt.position for prompt in prompts] == [0, 1, 2]
    assert [prompt.row.ground_truth for prompt in prompts] == ["0", "1", "2"]
    assert [prompt.group for prompt in loader.draw(5)] == [3, 4, 5, 6, 7] and loader.draws == 8


def test_prompts_that_were_given_back_come_first_under_their_numbers(dataset: PromptDataset) -> None:
    loader = make_loader(dataset)
    drawn = loader.draw(5)
    loader.give_back(drawn[2:4])
    assert loader.num_waiting == 2 and loader.draws == 5
    again = loader.draw()
    assert again[:2] == drawn[2:4] and again[2].group == 5 and loader.num_waiting == 0


def test_epochs_drop_the_last_incomplete_batch_and_reshuffle(dataset: PromptDataset) -> None:
    loader = make_loader(dataset)
    assert loader.steps_per_epoch == 3
    batches = draw(loader, 9)
    assert loader.epoch == 2
    epochs = [[row for rows, _ in batches[e * 3 : e * 3 + 3] for row in rows] for e in range(3)]
    assert all(len(set(rows)) == 9 for rows in epochs)  # no prompt twice in an epoch
    assert epochs[0] != epochs[1] != epochs[2]
    assert [number for _, numbers in batches for number in numbers] == list(range(27))
    assert draw(make_loader(dataset), 9) == batches
    assert draw(make_loader(dataset, seed=2), 9) != batches


def test_without_shuffle_the_files_order_is_kept(dataset: PromptDataset) -> None:
    rows = [rows for rows, _ in draw(make_loader(dataset, 4, shuffle=False), 3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("before", range(8))
def test_a_resumed_run_draws_exactly_what_the_uninterrupted_one_draws(dataset: PromptDataset, before: int) -> None:
    whole = draw(make_loader(dataset), 12)
    first = make_loader(dataset)
    draw(first, before)
    state = json.loads(json.dumps(first.state_dict()))
    second = make_loader(dataset, seed=99)  # the checkpoint's seed counts
    second.load_state_dict(state)
    assert draw(second, 12 - before) == whole[before:]
    assert draw(first, 12 - before) == whole[before:]  # saving changes nothing


def test_another_data_set_is_refused(dataset: PromptDataset, tmp_path: Path) -> None:
    state = make_loader(dataset).state_dict()
    files = write_prompts(tmp_path / "b.parquet", ["y"] * 10)
    other = PromptDataset(DataConfig(), files, CharTokenizer(template=False), split="train")
    with pytest.raises(ValueError, match=r"data changed.*10 prompts of a\.parquet.*Now: 10 prompts of b\.parquet"):
        make_loader(other).load_state_dict(state)
    fewer = PromptDataset(
        DataConfig(train_max_samples=9), str(dataset.files[0].path), CharTokenizer(template=False), split="train"
    )
    with pytest.raises(ValueError, match=r"data changed.*trainer\.resume_mode=disable"):
        make_loader(fewer).load_state_dict(state)


def test_a_batch_larger_than_the_data_set_is_refused(dataset: PromptDataset) -> None:
    with pytest.raises(ValueError, match=r"data\.train_batch_size .*=11 is more than the 10 prompts"):
        make_loader(dataset, 11)
    assert make_loader(dataset, 10).steps_per_epoch == 1


def test_iterate_all_gives_every_prompt_once(dataset: PromptDataset) -> None:
    batches = list(iterate_all(dataset, 4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [prompt.group for batch in batches for prompt in batch] == list(range(10))
    (whole,) = iterate_all(dataset)
    assert [prompt.row.index for prompt in whole] == list(range(10))
    (shuffled,) = iterate_all(dataset, shuffle=True, seed=3)
    order = [prompt.row.index for prompt in shuffled]
    assert order != list(range(10)) and sorted(order) == list(range(10))
    assert [prompt.group for prompt in shuffled] == order
