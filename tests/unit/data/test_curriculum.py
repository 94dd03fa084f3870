"""Samplers and torch data sets of the user's own, as verl takes them."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data.factory import CharTokenizer, text_of, write_prompts
from tests.unit.observe import factory
from verl_like.config import CustomClassConfig, DataConfig
from verl_like.config.data import SamplerConfig
from verl_like.data.dataset import Dataset
from verl_like.data.foreign import build_dataset
from verl_like.data.loader import PromptLoader
from verl_like.plugins.samplers.curriculum import CustomSampler, scored_batch
from verl_like.user_code import load_class

SAMPLERS = """
import torch
from torch.utils.data import Sampler


class Backwards(Sampler):  # no state of its own; another order each epoch
    def __init__(self, data_source, data_config):
        self.rows, self.epoch = len(data_source), 0
        assert data_config.get("seed") is None and data_config.max_prompt_length == 512
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return iter([(i + self.epoch) % self.rows for i in reversed(range(self.rows))])
    def __len__(self):
        return self.rows


class Easiest(Sampler):  # a curriculum: rows that were answered right come no more
    def __init__(self, data_source):
        rows = [data_source[i] for i in range(len(data_source))]
        self.open = {row["index"]: row["extra_info"]["index"] for row in rows}
    def __iter__(self):
        while self.open:
            yield from list(self.open)
    def update(self, batch):
        right = batch.batch["token_level_scores"].sum(-1) > 0
        for index, ok in zip(batch.non_tensor_batch["index"], right):
            if ok:
                self.open.pop(index, None)
    def state_dict(self):
        return {"open": list(self.open)}
    def load_state_dict(self, state):
        self.open = dict.fromkeys(state["open"])


class Forgetful(Easiest):
    state_dict = load_state_dict = property()


class Wild(Backwards):
    def __iter__(self):
        return iter([99])


class Odd:
    def __init__(self, rows):
        pass
"""

VERLS = """
from omegaconf import DictConfig
from torch.utils.data import Sampler
from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler


class Hardest(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config: DictConfig):
        self.order = list(range(len(data_source)))
    def __iter__(self):
        return iter(self.order)
    def __len__(self):
        return len(self.order)
    def update(self, batch: DataProto | None) -> None:
        assert isinstance(self, Sampler) and isinstance(batch, DataProto)
        right = batch.batch["token_level_scores"].sum(-1) > 0
        done = [int(row) for row, ok in zip(batch.non_tensor_batch["index"], right) if ok]
        self.order = [row for row in self.order if row not in done]
"""

DATASETS = """
from torch.utils.data import Dataset


class Rows(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.rows = [f"{name.rsplit('/', 1)[-1]}:{i}" for name in data_files for i in range(3)]
        self.limit = config.max_prompt_length
        assert config.get("prompt_key") == config["prompt_key"] and config.custom_cls.name == "Rows"
    def __len__(self):
        return len(self.rows)
    def row(self, i):
        return {"data_source": "mine", "reward_model": {"style": "countdown", "ground_truth": i}, "index": 10 + i,
                "extra_info": {"text": self.rows[i]}}
    def __getitem__(self, i):
        import torch
        ids = torch.tensor([0, 0, 65 + i, 66])
        return self.row(i) | {"input_ids": ids, "attention_mask": torch.tensor([0, 0, 1, 1])}


class Raw(Rows):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.rows = ["x", "yy"]
    def __getitem__(self, i):
        return self.row(i) | {"raw_prompt": [{"role": "user", "content": self.rows[i]}]}


class Ids(Raw):
    def __getitem__(self, i):
        return super().__getitem__(i) | {"raw_prompt_ids": [7] * 600}


class Bare(Raw):
    def __getitem__(self, i):
        return self.row(i)


class Wrong(Raw):
    def __init__(self, path):
        pass


class NoDataset:
    pass
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    files = write_prompts(tmp_path / "a.parquet", ["x" * (i + 1) for i in range(6)])
    return build_dataset(DataConfig(), files, CharTokenizer(), split="train")


def sampler(tmp_path: Path, dataset: Dataset, name: str) -> CustomSampler:
    (tmp_path / "samplers.py").write_text(SAMPLERS)
    own = SamplerConfig(class_path=str(tmp_path / "samplers.py"), class_name=name)
    return CustomSampler(DataConfig(sampler=own), dataset)


def test_a_torch_sampler_decides_the_order(tmp_path: Path, dataset: Dataset) -> None:
    own = sampler(tmp_path, dataset, "Backwards")
    loader = PromptLoader(dataset, own, 4)
    indices = [[prompt.row.index for prompt in loader.draw()] for _ in range(2)]
    assert indices == [[5, 4, 3, 2], [0, 5, 4, 3]]  # the rest of an epoch is skipped, set_epoch is called
    assert own.epoch == 1 and own.draws == 8


@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_a_sampler_without_state_is_replayed(tmp_path: Path, dataset: Dataset, before: int) -> None:
    whole = sampler(tmp_path, dataset, "Backwards")
    drawn = [whole.draw(2) for _ in range(8)]
    assert [rows for rows, _ in drawn[:4]] == [[5, 4], [3, 2], [1, 0], [0, 5]]
    first, second = (sampler(tmp_path, dataset, "Backwards") for _ in range(2))
    for _ in range(before):
        first.draw(2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.draw(2) for _ in range(8 - before)] == drawn[before:]


def test_without_drop_last_no_prompt_is_skipped(tmp_path: Path, dataset: Dataset) -> None:
    own = sampler(tmp_path, dataset, "Backwards")
    drawn = [own.draw(4, drop_last=False)[0] for _ in range(3)]
    assert drawn == [[5, 4, 3, 2], [1, 0, 0, 5], [4, 3, 2, 1]]
    own.give_back([(1, 11)])
    again = sampler(tmp_path, dataset, "Backwards")
    again.load_state_dict(json.loads(json.dumps(own.state_dict())))
    assert own.draw(3) == again.draw(3) == ([1, 1, 0], [11, 12, 13])


def test_verls_curriculum_files_run_where_verl_is_not_installed(tmp_path: Path, dataset: Dataset) -> None:
    (tmp_path / "of_verl.py").write_text(VERLS)
    own = CustomSampler(DataConfig(sampler=SamplerConfig(class_path=f"{tmp_path}/of_verl.py:Hardest")), dataset)
    batch = factory.rollouts([[5, 6], [5]]).replace(rows=[dataset[row][1] for row in own.draw(2)[0]])
    own.feedback(batch, factory.scores([0.0, 1.0]))
    assert own.draw(4)[0] == [2, 3, 4, 5] and own.draw(5)[0] == [0, 2, 3, 4, 5] and own.learns


def test_a_curriculum_learns_from_scores_and_remembers_them(tmp_path: Path, dataset: Dataset) -> None:
    own = sampler(tmp_path, dataset, "Easiest")
    assert own.draw(3)[0] == [0, 1, 2]
    batch = factory.rollouts([[5, 6], [5]])
    batch = batch.replace(rows=[dataset[0][1], dataset[1][1]])
    own.feedback(batch, factory.scores([0.0, 1.0]))
    second = sampler(tmp_path, dataset, "Easiest")
    second.load_state_dict(json.loads(json.dumps(own.state_dict())))
    assert second.draw(5)[0] == [0, 2, 3, 4, 5]


def test_what_a_curriculum_gets() -> None:
    batch = scored_batch(factory.rollouts([[5, 6], [5]]), factory.scores([None, 1.0], [{"acc": True}, {}]))
    scores = batch.batch["token_level_scores"]
    assert math.isnan(scores[0, 1]) and torch.equal(scores[1], torch.tensor([1.0, 0.0])) and len(batch) == 2
    assert batch.non_tensor_batch["acc"].tolist() == [True, None]


def test_what_cannot_be_used_is_named(tmp_path: Path, dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"data\.sampler\.class_name=Absent: .*\(it has: Backwards, Easiest"):
        sampler(tmp_path, dataset, "Absent")
    with pytest.raises(ValueError, match=r"data\.sampler=Odd: Odd\(.*\) cannot be called as Odd\(data_source="):
        sampler(tmp_path, dataset, "Odd")
    with pytest.raises(ValueError, match=r"gave the position 99, but the data set has 6 rows"):
        sampler(tmp_path, dataset, "Wild").draw(1)
    with pytest.raises(ValueError, match=r"gives 6 rows in an epoch, fewer than the batch of 7"):
        sampler(tmp_path, dataset, "Backwards").draw(7)
    with caplog.at_level(logging.WARNING, "verl_like"):
        sampler(tmp_path, dataset, "Forgetful")
    assert "draws as if it had learned nothing" in caplog.text
    keys: dict[str, Any] = {"path_key": "data.sampler.class_path", "name_key": "data.sampler.class_name"}
    with pytest.raises(ValueError, match=r"data\.sampler\.class_path=pkg://no\.such"):
        load_class("pkg://no.such", "X", **keys)
    assert load_class("pkg://torch.utils.data", "Sampler", **keys) is torch.utils.data.Sampler


def build(tmp_path: Path, name: str) -> Dataset:
    (tmp_path / "datasets.py").write_text(DATASETS)
    for file in ("a.jsonl", "b.jsonl"):
        (tmp_path / file).write_text("{}")
    data = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "datasets.py"), name=name))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    return build_dataset(data, files, CharTokenizer(), split="train")


def test_a_torch_data_set_of_verls_rows_works_as_it_is(tmp_path: Path) -> None:
    own = build(tmp_path, "Rows")
    assert len(own) == 6 and own.domains() == ["mine"] * 6 and own.reward_styles() == [("mine", "countdown")]
    ids, row = own[4]
    assert ids == [69, 66]  # padding is left out
    assert (row.index, row.data_source, row.ground_truth, row.style) == (14, "mine", 4, "countdown")
    assert row.extra_info == {"text": "b.jsonl:1"}
    prompts = PromptLoader(own, CustomSampler(samplers_of(tmp_path), own), 2).draw()
    assert [prompt.ids for prompt in prompts] == [[70, 66], [69, 66]]
    assert json.loads(json.dumps(own.identity()))["rows"] == 6


def samplers_of(tmp_path: Path) -> DataConfig:
    (tmp_path / "samplers.py").write_text(SAMPLERS)
    return DataConfig(sampler=SamplerConfig(class_path=str(tmp_path / "samplers.py"), class_name="Backwards"))


def test_where_a_torch_data_sets_tokens_come_from(tmp_path: Path) -> None:
    assert text_of(build(tmp_path, "Raw")[1][0]) == "user:yy|assistant:"
    with pytest.raises(ValueError, match=r"Ids of data\.train_files, row 0: the prompt has 600 tokens"):
        build(tmp_path, "Ids")[0]
    with pytest.raises(ValueError, match=r"Bare of data\.train_files, row 1 has no prompt: it needs raw_prompt_ids"):
        build(tmp_path, "Bare")[1]
    with pytest.raises(ValueError, match=r"data\.custom_cls=Wrong: Wrong\(.*cannot be called as Wrong\(data_files="):
        build(tmp_path, "Wrong")
    with pytest.raises(ValueError, match=r"or as a torch data set; it has no __len__, __getitem__"):
        build(tmp_path, "NoDataset")
