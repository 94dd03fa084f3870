"""Starts of environments as a data set: shares of tags, seeds, what a row says, what cannot be filled."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like.config import EnvConfig, EnvGroupsConfig
from verl_like.plugins.games.dataset import EnvironmentDataset, kinds_of, tags_of_groups


class Encoder:
    def encode(self, conversations: list[Any]) -> list[list[int]]:
        return [[1, 2, 3] for _ in conversations]


def env(custom: dict[str, Any] | None = None, **train: Any) -> EnvConfig:
    return EnvConfig(
        train=EnvGroupsConfig(**{"tags": ["A", "B"], **train}),
        val=EnvGroupsConfig(tags=["B"], num_groups=3, format_penalty=-1.0),
        custom=custom or {},
        render_save_dir="pictures",
    )


def made(config: EnvConfig, batch_size: int = 5, seed: int = 1) -> EnvironmentDataset:
    return EnvironmentDataset.train(config, Encoder(), seed=seed, batch_size=batch_size, steps=3)


def test_groups_take_turns_so_that_each_tag_has_its_share() -> None:
    assert tags_of_groups(EnvGroupsConfig(tags=["A", "B", "C"]), 7) == ["A", "A", "A", "B", "B", "C", "C"]
    data = made(env(groups_per_tag=[3, 1]), batch_size=8)
    assert [data[i][1].data_source for i in range(8)] == ["A", "A", "A", "B"] * 2
    assert [data[i][1].extra_info["group_ids"] for i in range(8)] == [0, 1, 2, 3] * 2
    assert len(data) % 4 == 0 and len(data.domains()) == len(data)


def test_a_start_is_a_function_of_seed_group_and_round() -> None:
    def seeds(data: EnvironmentDataset) -> list[int]:
        return [data[i][1].extra_info["environment"]["seed"] for i in range(10)]

    assert len(set(seeds(made(env())))) == 10 and seeds(made(env())) == seeds(made(env()))
    assert seeds(made(env())) != seeds(made(env(), seed=2))
    val = EnvironmentDataset.val(env(), Encoder(), seed=1)
    assert len(val) == 3 and not set(seeds(made(env()))) & {
        val[i][1].extra_info["environment"]["seed"] for i in (0, 1, 2)
    }


def test_a_row_says_what_is_played() -> None:
    config = env({"B": {"type": "sokoban", "max_steps": 4, "config": {"num_boxes": 2}}}, format_penalty=-0.5)
    own = made(config)[4][1].extra_info["environment"]
    assert own | {"seed": 0} == {
        **{"tag": "B", "kind": "sokoban", "format_penalty": -0.5, "max_steps": 4, "config": {"num_boxes": 2}},
        **{"seed": 0, "split": "train"},
    }
    row = EnvironmentDataset.val(config, Encoder(), seed=1)[0][1].extra_info["environment"]
    assert (row["format_penalty"], row["split"], row["render"]) == (-1.0, "val", "pictures")
    assert kinds_of(config) == (("A", "{}"), ("sokoban", '{"num_boxes": 2}'))


def test_what_cannot_be_filled_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"max_traj_per_env=2: 2 groups need 3 starts each for data.train_batch_size=5"
    ):
        made(env(num_groups=2, max_traj_per_env=2))
    with pytest.raises(ValueError, match=r"set trainer\.total_training_steps"):
        EnvironmentDataset.train(env(), Encoder(), seed=1, batch_size=5, steps=None)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"train": {"tags": ["A"], "groups_per_tag": [1, 2]}}, "give one number for each of the 1 tags"),
        ({"train": {"tags": ["A", "B"], "num_groups": 4, "groups_per_tag": [1, 2]}}, "their sum must be num_groups=4"),
        ({"val": {"tags": ["A"]}}, "set train.tags too"),
        ({"custom": {"A": {"max_stepz": 3}}}, "did you mean max_steps"),
        ({"custom": {"A": {"max_steps": 0}}}, "must be a whole number of at least 1"),
        ({"custom": {"A": {"template": "{observatoin}"}}}, "a text that may name observation, current_observation"),
        ({"custom": {"A": {"template": "answer {"}}}, "a brace of its own is doubled"),
        ({"custom": {"A": 3}}, "give a mapping"),
    ],
)
def test_mistakes_in_the_configuration(settings: dict[str, Any], told: str) -> None:
    groups = dict.fromkeys(("train", "val"), EnvGroupsConfig)
    with pytest.raises(ValueError, match=told):
        EnvConfig(**{name: groups[name](**value) if name in groups else value for name, value in settings.items()})
