"""Conversations with tools in the main job: the agent_tools recipe, small and (slow) whole."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from support import MEASURED, ROOT, metrics_of, run_script

RECIPE = ROOT / "recipes" / "agent_tools"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
ENVIRONMENT = """
class World:
    def reset(self, **row):
        self.calls = 0

    def calculator(self, expression: str):
        '''Work it out.

        Args:
            expression: a product
        '''
        self.calls += 1
        return "42", 0.25

    def get_state(self):
        return self.calls

    def get_reward(self):
        return 1.0
"""

LOOP = r"""
import re
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

CALL = re.compile(r'"expression": "(\d+)\*(\d+)"')


@register("calculates")
class Calculates(AgentLoopBase):
    def __init__(self, *args, fails_at=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.fails_at, self.longest = fails_at, self.rollout_config.response_length

    async def run(self, sampling_params, **row):
        prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        ids, mask, text, num_turns = list(prompt_ids), [], "", 0
        while len(mask) < self.longest:
            sampling = {**sampling_params, "max_tokens": self.longest - len(mask)}
            out = await self.server_manager.generate(request_id="x", prompt_ids=ids, sampling_params=sampling)
            ids, mask, text = ids + out.token_ids, mask + [1] * len(out.token_ids), self.tokenizer.decode(out.token_ids)
            num_turns += 2
            if row["index"] in self.fails_at:
                raise RuntimeError("this row is not to be answered")
            call = CALL.search(text)
            if call is None:
                break
            said = f"\n<|im_start|>tool\n{int(call[1]) * int(call[2])}<|im_end|>\n<|im_start|>assistant\n"
            said = self.tokenizer.encode(said, add_special_tokens=False)
            ids, mask = ids + said, mask + [0] * len(said)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[len(prompt_ids):][:self.longest],
            response_mask=mask[:self.longest],
            reward_score=float(text.removesuffix("<|im_end|>") == row["ground_truth"]),
            num_turns=num_turns,
            metrics={},
        )
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _recipe(monkeypatch)


def _recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its prepare.py, as Python imports it when it is run."""
    for folder in ("quickstart", "agent_tools"):
        monkeypatch.syspath_prepend(str(ROOT / "recipes" / folder))
    for module in ("model", "prepare", "reward", "tools"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return __import__("prepare")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a model that makes some calls."""
    with pytest.MonkeyPatch.context() as patch:
        made, recipe = tmp_path_factory.mktemp("agent_tools"), _recipe(patch)
        size = {"num_training": 64, "num_validation": 16, "hidden_size": 64, "num_layers": 2}
        recipe.prepare(made, recipe.Recipe(asks=1.0, warm_start_steps=150, warm_start_batch=16, **size))
    return made


def train(folder: Path, out: Path, *arguments: str, timeout: float = 300) -> list[dict[str, Any]]:
    """The recipe's command line on the data and model in `folder`, in one process; the metrics."""
    line = (RECIPE / "run.sh").read_text().replace('"$PYTHON" "$HERE/prepare.py"', 'true "$HERE"')
    script = folder / "run.sh"
    script.write_text(line.replace('HERE=$(cd "$(dirname "$0")" && pwd)', f"HERE={RECIPE}"))
    own = ("trainer.launcher=local", "trainer.n_gpus_per_node=1", "trainer.report_freq=-1")
    settings = (*own, f"trainer.default_local_dir={out}", *arguments)
    run = run_script(script, *settings, timeout=timeout, OUT=str(folder), ROLLOUT="hf")
    assert run.returncode == 0, run.stdout
    return metrics_of(out)


def test_the_main_job_trains_on_conversations(folder: Path, tmp_path: Path) -> None:
    """A model that has seen some calls makes some, and reads the answers."""
    small = [f"{key}=8" for key in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")]
    steps = train(folder, tmp_path / "out", *small, "trainer.total_training_steps=2", "trainer.test_freq=2")
    trained = [step for step in steps if "tools/calls/mean" in step]
    assert len(trained) == 2
    for step in trained:
        assert step["tools/calls/mean"] > 0.3 and step["num_turns/max"] >= 4
        assert step["tool/calculator/calls"] > 0 and step["outcomes/lost_fraction"] == 0
        assert step["tools/lost_episodes"] == 0 and step["training/rollout_probs_diff_max"] < 0.01
        assert step["response_length/max"] <= 40
    world = tmp_path / "world.py"
    world.write_text(ENVIRONMENT)
    own = (f"{MULTI_TURN}.environment_path={world}:World", f"{MULTI_TURN}.function_tool_path=null")
    credit = ("algorithm.adv_estimator=gigpo", f"{MULTI_TURN}.turn_rewards=True", "trainer.total_training_steps=1")
    (step,) = train(folder, tmp_path / "credit", *small, *own, *credit, "trainer.val_before_train=False")
    # Scores are 1; the rewards of the turns come on top, and turns with and without a call differ in return.
    assert step["critic/score/mean"] == 1.0
    assert step["critic/rewards/mean"] == pytest.approx(1.0 + 0.25 * step["tools/calls/mean"])
    assert step["critic/advantages/max"] > step["critic/advantages/min"] and step["actor/grad_norm"] > 0


@pytest.mark.slow
def test_two_runs_with_tools_have_equal_metrics(recipe: ModuleType, tmp_path: Path) -> None:
    """One request at a time, as trainer.full_determinism asks. The entropy gives a gradient where all rewards are
    equal."""
    size = {"num_training": 16, "num_validation": 8, "hidden_size": 64, "num_layers": 2}
    recipe.prepare(tmp_path, recipe.Recipe(asks=1.0, warm_start_steps=150, warm_start_batch=16, **size))
    small = [f"{key}=8" for key in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")]
    same = (
        "trainer.full_determinism=True",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        "actor_rollout_ref.rollout.n=4",
    )
    length = ("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1")
    entropy = "actor_rollout_ref.actor.entropy_coeff=0.01"
    first, second = (train(tmp_path, tmp_path / str(number), *small, *same, *length, entropy) for number in range(2))
    other = {
        name
        for one, two in zip(first, second, strict=True)
        for name in one.keys() | two.keys()
        if one.get(name) != two.get(name)
    }
    other = {name for name in other if not name.startswith(MEASURED) and "/seconds/" not in name}
    assert len(first) == 2 and not other
    assert all(step["tools/calls/mean"] > 0.3 and step["actor/grad_norm"] > 0 for step in first)


def test_the_main_job_trains_on_what_an_agent_loop_of_the_users_returns(folder: Path, tmp_path: Path) -> None:
    """verl's class, its file unedited: two steps, a validation, and a row whose episodes all raise."""
    (tmp_path / "loop.py").write_text(LOOP)
    entry = f"- name: calculates\n  _target_: {tmp_path}/loop.py:Calculates\n  fails_at: [3]\n"
    (tmp_path / "loops.yaml").write_text(entry)
    agent = "actor_rollout_ref.rollout.agent"
    loop = (f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=calculates")
    plain = (f"{MULTI_TURN}.enable=False", f"{MULTI_TURN}.function_tool_path=null")
    small = [f"{key}=8" for key in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")]
    pq.write_table(pq.read_table(folder / "data" / "train.parquet").slice(0, 16), tmp_path / "train.parquet")
    rows = (f"data.train_files={tmp_path}/train.parquet", "data.val_max_samples=8")
    length = ("trainer.total_training_steps=2", "trainer.test_freq=2")
    steps = train(folder, tmp_path / "out", *small, *plain, *loop, *rows, *length)
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 2
    assert sum(step["tools/lost_episodes"] for step in trained) == 8  # of one row, in one epoch
    for step in trained:
        assert step["actor/grad_norm"] > 0 and step["training/rollout_probs_diff_max"] < 0.01
        assert step["num_turns/max"] >= 4 and 0 < step["critic/score/mean"] <= 1
        assert step["tools/unsampled_tokens"] == 0 and step["response_length/max"] <= 40
    assert any("val-core" in name for name in steps[-1])


def test_a_template_without_tool_messages_is_refused_before_anything_starts(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.prepare(tmp_path, recipe.Recipe(warm_start_steps=1, warm_start_batch=2, num_training=64, num_validation=8))
    template = tmp_path / "refuses.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(AssertionError, match=f"{MULTI_TURN}.enable=True: the chat template takes no message") as caught:
        train(tmp_path, tmp_path / "out", f"data.chat_template={template}")
    assert "process(es) on cpu" not in str(caught.value)  # the line before workers are started
    with pytest.raises(AssertionError, match=f"{MULTI_TURN}.format"):
        train(tmp_path, tmp_path / "out", f"{MULTI_TURN}.format=morse")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_recipe(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.prepare(tmp_path, recipe.Recipe())
    metric = f"val-core/{recipe.DATA_SOURCE}/acc/mean@1"
    saved = ("trainer.save_freq=60", "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]")
    steps = train(tmp_path, tmp_path / "out", *saved, "trainer.resume_mode=disable", timeout=1500)
    accuracies = [step[metric] for step in steps if metric in step]
    assert 0.15 < accuracies[0] < 0.55 and accuracies[-1] > 0.9
    assert steps[-1]["tools/calls/mean"] > 0.95
    model = tmp_path / "out" / "global_step_60" / "actor" / "huggingface"
    without = (f"{MULTI_TURN}.enable=False", "trainer.val_only=True", f"actor_rollout_ref.model.path={model}")
    (alone,) = train(tmp_path, tmp_path / "alone", *without)
    assert alone[metric] < 0.3
