"""Helper sections of users' YAML, and keys for their own data set and sampler classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_like.data.foreign import section_of
from verl_like.trainer.compose import compose
from verl_like.trainer.yaml_anchors import inline

YAML = """
_small: &small
  lr: 1.0e-5
x-more: {unused: 1}
common:
  n: 4
  schedule: {warmup_style: cosine, min_lr_ratio: "${common.low}"}
  low: 0.25
  name: abc
actor_rollout_ref:
  rollout: {n: "${common.n}"}
  actor: {optim: {<<: *small, weight_decay: 0.1}}
critic: {optim: "${common.schedule}"}
trainer: {experiment_name: "run_${common.name}_${common.n}", project_name: "${trainer.experiment_name}"}
"""


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "mine.yaml").write_text(text)
    return tmp_path / "mine.yaml"


def test_helper_sections(tmp_path: Path) -> None:
    config = compose(["algorithm.adv_estimator=gae"], [write(tmp_path, YAML)])
    assert config.actor_rollout_ref.rollout.n == 4
    assert (config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.optim.weight_decay) == (1e-5, 0.1)
    assert (config.critic.optim.warmup_style, config.critic.optim.min_lr_ratio) == ("cosine", 0.25)
    assert config.trainer.project_name == config.trainer.experiment_name == "run_abc_4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("common: {n: 4}\n", r"unknown key common\.n"),  # nobody refers to it
        ("a: {n: 4}\ntrainer: {seed: '${a.m}'}\n", r"trainer\.seed='\$\{a\.m\}': no helper section holds a\.m"),
        ("a: {n: '${b.n}'}\nb: {n: '${a.n}'}\ntrainer: {seed: '${a.n}'}\n", "refer to each other in a circle"),
        ("trainr: {seed: 4}\ndata: {seed: '${trainer.seed}'}\n", r"unknown key trainr\.seed"),
    ],
)
def test_what_is_no_helper_section(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose([], [write(tmp_path, text)])


def test_an_old_spelling_that_others_refer_to_stays_a_setting(tmp_path: Path) -> None:
    text = "global_profiler: {steps: [2]}\n_x: '${global_profiler.steps}'\n"
    assert compose([], [write(tmp_path, text)]).trainer.profile_steps == [2]


def test_values_keep_their_types() -> None:
    helpers = {"a": {"n": 4, "list": [1, "${a.n}"]}}
    assert inline({"x": "${a.list}", "y": "${a.n}/${b.n}", "z": [True]}, helpers) == {
        "x": [1, 4],
        "y": "4/${b.n}",
        "z": [True],
    }


def test_keys_of_ones_own_need_a_class_that_reads_them() -> None:
    own = ["data.custom_cls.path=mine.py:Rows", "data.custom_cls.kwargs={a: 1}"]
    config = compose([*own, "+data.my_key.depth=3", "+data.other=text", "+data.extra.third=1"])
    assert config.data.extra == {"my_key": {"depth": 3}, "other": "text", "third": 1}
    assert config.data.custom_cls.kwargs == {"a": 1}
    seen = section_of(config.data)
    assert (seen.my_key.depth, seen.other, seen.prompt_key) == (3, "text", "prompt")
    for wrong in ([*own, "data.my_key=3"], ["+data.my_key=3"]):
        with pytest.raises(ValueError, match=r"unknown key data\.my_key"):
            compose(wrong)
