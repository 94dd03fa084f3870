"""Environments and the gateway in the main job: small, and (slow) the frozen_lake recipe whole."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import ROOT, main_ppo, metrics_of, overrides, run_script, write_task

RECIPE = ROOT / "recipes" / "frozen_lake"
PROGRAM = """
from openai import AsyncOpenAI

async def run(data, base_url, api_key, **more):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(data["messages"])
    said = ""
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        said += answer.choices[0].message.content
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": "go on"}]
    return said.count("Left") / 2
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its prepare.py, as Python imports it when it is run."""
    for folder in ("quickstart", "frozen_lake"):
        monkeypatch.syspath_prepend(str(ROOT / "recipes" / folder))
    for module in ("model", "prepare"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    prepare = __import__("prepare")
    # Of two thousand games for three numbers that it prints.
    monkeypatch.setattr(prepare, "success_of", partial(prepare.success_of, games=10))
    return prepare


def small(recipe: ModuleType) -> Any:
    lessons = recipe.Lessons(games=4, knows=0.5, plain=0.5)
    size = {"hidden_size": 32, "num_layers": 1, "steps": (1, 1), "batch_sizes": (4, 4)}
    return recipe.Recipe(reading=lessons, playing=lessons, losing=lessons, **size)


def train(folder: Path, out: Path, *arguments: str, timeout: float = 200) -> list[dict[str, Any]]:
    """The recipe's command line on the model in `folder`; the metrics."""
    line = (RECIPE / "run.sh").read_text().replace('"$PYTHON" "$HERE/prepare.py"', 'true "$HERE"')
    script = folder / "run.sh"
    script.write_text(line.replace('HERE=$(cd "$(dirname "$0")" && pwd)', f"HERE={RECIPE}"))
    own = (f"trainer.default_local_dir={out}", "trainer.report_freq=-1")
    run = run_script(script, *own, *arguments, timeout=timeout, OUT=str(folder))
    assert run.returncode == 0, run.stdout
    return metrics_of(out)


def test_the_main_job_plays(recipe: ModuleType, tmp_path: Path) -> None:
    """Two tags in their shares, GiGPO on the rewards of turns, a GIF of each episode of the validation."""
    recipe.prepare(tmp_path, small(recipe))
    plain = (
        '{type: frozen_lake, instruction: "", max_steps: 3, max_tokens_per_step: 2, config: {action_pattern: "(.*)"}}'
    )
    steps = train(
        tmp_path,
        tmp_path / "out",
        f"env.custom={{A: {plain}, B: {plain}}}",
        *("env.train.tags=[A,B]", "env.train.num_groups=4", "env.train.groups_per_tag=[3,1]"),
        *("env.train.format_penalty=-0.5", "env.val.tags=[A]", "env.val.num_groups=3"),
        f"env.render_save_dir={tmp_path / 'pictures'}",
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4"),
        *("algorithm.adv_estimator=gigpo", "actor_rollout_ref.rollout.multi_turn.turn_rewards=True"),
        *("trainer.total_training_steps=2", "trainer.test_freq=2"),
    )
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 2
    for step in trained:
        assert (step["env/A/episodes"], step["env/B/episodes"]) == (12, 4)
        assert step["num_turns/max"] <= 6 and step["env/A/steps/mean"] > 1 and step["outcomes/lost_fraction"] == 0
        assert step["critic/score/mean"] < 0 and step["actor/grad_norm"] > 0, "most moves name nothing"
        assert step["training/rollout_probs_diff_max"] < 0.01
    assert "val-core/A/acc/mean@1" in steps[-1]
    pictures = sorted(path.parent.name for path in (tmp_path / "pictures").rglob("*.gif"))
    assert len(pictures) == 6 and len(set(pictures)) == 2, "three episodes of each validation, by the weights"


@pytest.mark.engines
@pytest.mark.parametrize(
    "engine", [pytest.param("vllm", marks=pytest.mark.slow), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_the_main_job_plays_with_another_engine(engine: str, recipe: ModuleType, tmp_path: Path) -> None:
    """Games of several turns; the engine's log-probs are the trainer's."""
    recipe.prepare(tmp_path, small(recipe))
    steps = train(
        tmp_path,
        tmp_path / "out",
        *(f"actor_rollout_ref.rollout.name={engine}", "data.train_batch_size=4"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4", "env.val.num_groups=4"),
        *("trainer.total_training_steps=2", "trainer.test_freq=2"),
    )
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 2
    for step in trained:
        assert step["env/FrozenLake/episodes"] == 16 and step["num_turns/max"] > 2
        assert step["outcomes/lost_fraction"] == 0 and step["training/rollout_probs_diff_max"] < 0.01
    assert "val-core/FrozenLake/acc/mean@1" in steps[-1]


def test_a_finished_folder_is_taken_as_it_is(recipe: ModuleType, tmp_path: Path) -> None:
    """And made anew where the recipe is another."""
    recipe.prepare(tmp_path, small(recipe))
    model = tmp_path / "model" / "model.safetensors"
    made = model.stat().st_mtime_ns
    recipe.prepare(tmp_path, small(recipe))
    assert model.stat().st_mtime_ns == made
    recipe.prepare(tmp_path, replace(small(recipe), seed=2))
    assert model.stat().st_mtime_ns > made


def test_the_main_job_trains_on_what_a_program_asked(recipe: ModuleType, tmp_path: Path) -> None:
    """The official client, on a laptop's engine."""
    recipe.prepare(tmp_path, small(recipe))
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "out"
    line = overrides(write_task(tmp_path, 8), tmp_path / "model", out, trainer__total_training_steps=1)
    own = (f"actor_rollout_ref.rollout.gateway.path={tmp_path / 'program.py'}:run", "data.train_batch_size=4")
    lengths = (
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        "actor_rollout_ref.rollout.agent.num_workers=1",
    )
    run = main_ppo([*line, *own, *lengths, "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    assert run.returncode == 0, run.stdout
    (step,) = metrics_of(out)
    assert step["num_turns/mean"] == 4 and step["tools/lost_episodes"] == 0 and step["tools/new_rows"] == 0
    assert step["training/rollout_probs_diff_max"] < 0.01 and step["actor/grad_norm"] >= 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_recipe(recipe: ModuleType, tmp_path: Path) -> None:
    """On maps that nobody trains on, success more than doubles (three seeds: README)."""
    recipe.prepare(tmp_path, recipe.Recipe())
    metric = "val-core/FrozenLake/acc/mean@1"
    won = [step[metric] for step in train(tmp_path, tmp_path / "out", timeout=1500) if metric in step]
    assert recipe.success_of(0.0, "val") < 0.25 and won[0] < 0.45
    assert won[-1] > 0.8 and won[-1] > 2 * won[0], won
