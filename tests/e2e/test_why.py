"""`verl-like compare A B --why`: the first quantity that differs, and the key that was planted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import overrides, write_task

from verl_like.cli.main import main
from verl_like.config.errors import ConfigError
from verl_like.flat_columns import bounds
from verl_like.kit.why import Explanation, explain
from verl_like.trainer.compose import compose
from verl_like.trainer.recording import read_step, step_file
from verl_like.trainer.run import run as train

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SETTINGS: dict[str, Any] = {
    "trainer.record_freq": 1,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": -1,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.optim.lr": 1e-2,
}
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """Make a run of two steps with some keys set otherwise, once for each choice."""
    made: dict[str, Path] = {}
    task = write_task(tmp_path_factory.mktemp("task"))

    def make(**keys: Any) -> Path:
        name = json.dumps(keys, default=str)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("run") / "out"
            train(compose(overrides(task, tiny_model, made[name], **SETTINGS | keys)))
        return made[name]

    return make


def why(first: Path, second: Path) -> Explanation:
    found = explain(first, second, 0.0)
    assert found is not None
    return found


# What is set otherwise -> where the runs part, first.
PLANTED: dict[str, tuple[Any, int, str]] = {
    f"{ROLLOUT}.temperature": (0.5, 1, "rollouts"),
    "trainer.seed": (7, 1, "rollouts"),
    f"{ROLLOUT}.n": (4, 1, "rollouts"),
    f"{ACTOR}.optim.lr": (5e-3, 1, "update"),
    f"{ACTOR}.kl_loss_coef": (0.5, 1, "update"),
    f"{ACTOR}.clip_ratio": (0.01, 1, "update"),
    f"{ACTOR}.shuffle": (True, 1, "update"),
    f"{ACTOR}.fsdp_config.dtype": ("bfloat16", 1, "evaluated"),
    f"{ROLLOUT}.ignore_eos": (True, 1, "rollouts"),
    "data.system_prompt": ("Be brief.", 1, "rollouts"),
    "actor_rollout_ref.model.custom_chat_template": ('"{{ messages[-1].content }}+"', 1, "rollouts"),
}
QUICK = (f"{ROLLOUT}.temperature", f"{ACTOR}.optim.lr")


@pytest.mark.parametrize("key", [key if key in QUICK else pytest.param(key, marks=pytest.mark.slow) for key in PLANTED])
def test_the_planted_key_is_named(run: Run, key: str) -> None:
    value, step, phase = PLANTED[key]
    found = why(run(), run(**{key: value}))
    assert key in {name for name, _, _ in found.keys}, found.text()
    assert (found.difference.step, found.difference.phase) == (step, phase), found.text()


def test_versions_are_hints_where_both_runs_tell_theirs(run: Run, tmp_path: Path) -> None:
    first, second = run(), tmp_path / "copy"
    shutil.copytree(run(**{f"{ACTOR}.optim.lr": 5e-3}), second)
    told = json.loads((second / "environment.json").read_text())
    told["packages"]["torch"] = "0.1"
    (second / "environment.json").write_text(json.dumps(told))
    assert [hint for hint in why(first, second).hints if hint.endswith("| 0.1")] == why(first, second).hints != []
    (second / "environment.json").unlink()
    assert why(first, second).hints == []


def test_two_runs_of_the_same_do_not_differ(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", str(run()), str(run(**{"trainer.seed": SETTINGS.get("trainer.seed", 1)})), "--why"])
    assert capsys.readouterr().out.strip() == "no difference in the steps that both have recorded"


def rows_of(run: Path) -> list[dict[str, Any]]:
    """A run's own first step as another trainer would write it."""
    recorded = read_step(step_file(run / "recorded", 1))
    columns, rows = recorded.columns, []
    prompts, responses = bounds(columns["rollouts.prompt_length_B"]), bounds(columns["rollouts.response_length_B"])
    for row, score in enumerate(columns["scores.score_B"].tolist()):
        inside = slice(responses[row], responses[row + 1])
        rows.append(
            {
                "step": 1,
                "prompt_ids": columns["rollouts.prompt_ids_T"][prompts[row] : prompts[row + 1]].tolist(),
                "response_ids": columns["rollouts.response_ids_T"][inside].tolist(),
                "reward": score,
                "old_log_probs": columns["evaluated.old_log_probs_T"][inside].tolist(),
                "advantages": columns["experience.advantages_T"][inside].tolist(),
            }
        )
    return rows


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda row: row["prompt_ids"].append(3), "prompt_ids at row 2"),
        (lambda row: row.update(reward=row["reward"] + 1), "reward of row 2"),
        (lambda row: row["old_log_probs"].__setitem__(0, -9.0), "old_log_probs at row 2, token 0"),
        (lambda row: row["advantages"].__setitem__(0, 9.0), "advantages at row 2, token 0"),
    ],
    ids=["prompt", "reward", "log-probs", "advantages"],
)
def test_a_table_of_another_trainer(run: Run, tmp_path: Path, change: Callable[[Any], Any], where: str) -> None:
    rows, file = rows_of(run()), tmp_path / "theirs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert explain(run(), file, 1e-6) is None
    change(rows[2])
    file.write_text("\n".join(json.dumps(row) for row in rows))
    found = explain(run(), file, 1e-6)
    assert found is not None and found.difference.where.startswith(where)


def test_what_is_no_table_is_said(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "theirs.jsonl"
    file.write_text('{"step": 1}')
    with pytest.raises(ConfigError, match="row 0 has no prompt_ids, response_ids"):
        explain(run(), file, 0.0)
    for change, message in (
        ({"advantages": [0.0]}, r"row 1: advantages has 1 numbers for \d+ tokens"),
        ({"reward": "x"}, "row 1: reward='x' is no number"),
        ({"step": 1.5}, "row 1: step=1.5 is no whole number"),
        ({"prompt_ids": ["a"]}, "row 1: prompt_ids is no list of tokens"),
        ({"old_log_probs": [None]}, "row 1: old_log_probs is no list of numbers"),
    ):
        rows = rows_of(run())
        rows[1] |= change
        file.write_text("\n".join(json.dumps(row) for row in rows))
        with pytest.raises(ConfigError, match=message):
            explain(run(), file, 0.0)
    with pytest.raises(SystemExit, match="1"):
        main(["compare", "--why", str(run())])


def test_another_reward_file_under_the_same_name(run: Run, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    keys = {"custom_reward_function.path": reward}
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    first = run(**keys)
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n")
    second = run(**keys, **{"trainer.experiment_name": "again"})
    found = why(first, second)
    assert found.difference.phase == "scores"
    (hint,) = found.hints
    assert hint.startswith("custom_reward_function.path: the file's content differs")


@pytest.mark.slow
def test_another_revision_of_the_model(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    """The files have changed in their place: no key differs."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    keys = {"actor_rollout_ref.model.path": folder}
    first = run(**keys)
    weights = load_file(folder / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].numel())
    save_file(weights | {name: weights[name] * 1.01}, folder / "model.safetensors", metadata={"format": "pt"})
    found = why(first, run(**keys, **{"trainer.experiment_name": "again"}))
    assert (found.difference.step, found.difference.phase, found.keys) == (1, "weights", [])
    (hint,) = found.hints
    assert "another revision of the model's files" in hint
