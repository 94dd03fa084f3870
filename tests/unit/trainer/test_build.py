"""What is wrong with a run's files and classes is found before any worker is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models import tiny_vision
from verl_like.config.errors import ConfigError
from verl_like.trainer.build import prepared, started
from verl_like.trainer.compose import compose

SAMPLERS = """
class Takes:
    def __init__(self, rows): ...
class NotOne:
    def __init__(self, data_source): ...
"""


def row(prompt: str, **columns: Any) -> dict[str, Any]:
    return {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": {"ground_truth": "1"}} | columns


def refusal(folder: Path, model: Path, rows: list[dict[str, Any]], *settings: str) -> str:
    """The message of the error that ends the run, which must come before `connect_workers`."""

    def never(*arguments: Any) -> Any:
        raise AssertionError("workers were started")

    (folder / "train.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    config = compose(
        [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={folder}/train.jsonl",
            "data.val_files=[]",
            "data.train_batch_size=2",
            "data.max_prompt_length=8",
            "data.max_response_length=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.agent.num_workers=1",  # each is a Python that starts
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            *settings,
        ]
    )
    with pytest.raises(ConfigError) as caught, prepared(config) as ready, started(ready, never):
        pass
    return str(caught.value)


def test_sampler_classes(tmp_path: Path, tiny_model: Path) -> None:
    rows = [row("1+1="), row("1+2=")]
    (tmp_path / "samplers.py").write_text(SAMPLERS)
    for name, message in [
        ("Absent", r"has no such name 'Absent'"),
        ("Takes", "data.sampler=Takes: Takes(rows) cannot be called as Takes(data_source=)"),
        ("NotOne", "data.sampler=NotOne has no __iter__"),
    ]:
        assert message in refusal(tmp_path, tiny_model, rows, f"data.sampler.class_path={tmp_path}/samplers.py:{name}")
    assert "there is no such file" in refusal(tmp_path, tiny_model, rows, "data.sampler.class_path=/no.py:S")


def test_a_long_prompt_wherever_it_stands(tmp_path: Path, tiny_model: Path) -> None:
    rows = [row("1+1=") for _ in range(40)] + [row("1+1+1+1+1+1+1="), row("1+1=")]
    message = refusal(tmp_path, tiny_model, rows)
    assert "train.jsonl, row 40: the prompt has 14 tokens" in message and "data.max_prompt_length=8" in message


def test_no_reference_answers(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"data_source": "openai/gsm8k", "prompt": "1+1=", "answer": "2"} for _ in range(4)]
    message = refusal(tmp_path, tiny_model, rows)
    assert "4 of 4 rows have no reference answer" in message and "data.ground_truth_key" in message


def test_a_wrong_image_key(tmp_path: Path, tiny_model: Path) -> None:
    """Only one row of many has the tag, and it is not the longest."""
    rows = [row("1+1+1+1="), *(row("1+1+1=") for _ in range(20)), row("<image>1=", images=["a.png"])]
    settings = ["data.image_key=image", "data.truncation=left"]
    message = refusal(tmp_path, tiny_model, rows, *settings)
    assert "row 21: the prompt has <image>, but the file has no column 'image' (data.image_key)" in message
    assert "have images or videos" in refusal(tmp_path, tiny_model, rows, "data.truncation=left")


@pytest.mark.parametrize(
    "setting",
    [
        "actor_rollout_ref.actor.use_torch_compile=True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
        "critic.enable=True",
    ],
)
def test_what_vision_language_models_cannot_have(tmp_path: Path, setting: str) -> None:
    tiny_vision.save(tmp_path / "model")
    message = refusal(tmp_path, tmp_path / "model", [row("w1")] * 2, setting)
    assert "not available for vision-language models (qwen2_vl)" in message


def test_names_of_agent_loops(tmp_path: Path, tiny_model: Path) -> None:
    agent = "actor_rollout_ref.rollout.agent"
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: mine\n  _target_: no_such_module.Mine\n")
    listed = f"{agent}.agent_loop_config_path={loops}"
    named = [row("1+1=", agent_name="mien"), row("1+2=", agent_name=None)]
    said = refusal(tmp_path, tiny_model, named, listed)
    assert "agent_name='mien' is the name of no agent loop. There are: mine, single_turn_agent, tool_agent" in said
    assert "did you mean 'mine'?" in said
    said = refusal(tmp_path, tiny_model, [row("1+1=")] * 2, listed, f"{agent}.default_agent_loop=my")
    assert f"{agent}.default_agent_loop='my' is the name of no agent loop" in said
    tools = [row("1+1=", agent_name="tool_agent")] * 2
    said = refusal(tmp_path, tiny_model, tools)
    assert "rows with agent_name=tool_agent" in said and "multi_turn.enable=False: set it to true" in said
    said = refusal(tmp_path, tiny_model, [row("1+1=", agent_name="mine")] * 2, listed)
    assert "no_such_module" in said and "mine" in said


def test_replicas_that_cannot_share_the_models_heads(tmp_path: Path, tiny_model: Path) -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    said = refusal(tmp_path, tiny_model, [row("1+1=")] * 2, f"{key}=3", "trainer.n_gpus_per_node=3")
    assert f"{key}=3 does not divide the model's" in said and "attention heads; use one of [1" in said
