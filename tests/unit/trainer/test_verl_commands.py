"""verl's own command lines (../shared/data/verl_commands.jsonl) compose here, or are refused for known reasons.

All 189 take about 7 s: each is composed once, and a check that a verl user's script works is worth that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan, MicroBatchRule
from verl_like.trainer.command_line import run_main

# (version, script) -> what the message must say; docs/differences.md has a row for each.
REFUSED = {
    ("v0.4.1", "examples/ppo_trainer/run_deepseek7b_llm_pfppo.sh"): "an argument is blank",
    ("v0.5.0", "recipe/langgraph_agent/example/run_qwen2.5_3b.sh"): "trainer.nnodes= is empty",
    ("v0.6.1", "recipe/fapo/run_baseline_7b.sh"): "there is no file",
    ("v0.6.1", "recipe/fapo/run_fapo_32b_remote.sh"): "there is no file",
    ("v0.6.1", "recipe/fapo/run_fapo_7b_remote.sh"): "there is no file",
    ("v0.6.1", "recipe/langgraph_agent/example/run_qwen2.5_3b.sh"): "ulysses_sequence_parallel_size=4: must divide",
    ("main", "examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn_vllm_fsdp.sh"): "there is no file",
}


@dataclass(frozen=True)
class Outcome:
    version: str
    script: str
    kind: str
    argv: list[str]
    plan: BatchPlan | None
    error: str


def outcome(command: dict) -> Outcome:
    """Every check that needs neither model nor data: composing, the doctor, the batch plan."""
    seen: list[PPOConfig] = []
    plan, error = None, ""
    try:
        run_main(seen.append, command["argv"])
        per_node = seen[0].trainer.n_gpus_per_node
        processes = seen[0].trainer.nnodes * (1 if isinstance(per_node, str) else per_node)
        plan = BatchPlan.build(seen[0], processes, num_train_prompts=1_000_000)
    except (SystemExit, ValueError) as caught:
        error = str(caught)
    return Outcome(command["version"], command["script"], command["kind"], command["argv"], plan, error)


@pytest.fixture(scope="module")
def outcomes(shared_data: Path) -> list[Outcome]:
    lines = (shared_data / "verl_commands.jsonl").read_text().splitlines()
    return [outcome(json.loads(line)) for line in lines]


def test_scripts_for_our_engines_compose_or_are_refused_for_a_known_reason(outcomes: list[Outcome]) -> None:
    ours = [found for found in outcomes if found.kind in ("vllm", "hf")]
    assert (len(outcomes), len(ours)) == (189, 136)
    refused = {(found.version, found.script): found.error for found in ours if found.plan is None}
    assert refused.keys() == REFUSED.keys()
    assert [key for key, error in refused.items() if REFUSED[key] not in error] == []
    page = (ROOT / "docs" / "differences.md").read_text()
    assert [script for _, script in REFUSED if script not in page] == []


RM_CONFIG = (
    "hydra:\n  searchpath:\n    - file://verl/trainer/config\n\ndefaults:\n  - ppo_trainer\n  - _self_\n\n"
    "reward_model:\n  _target_: verl.workers.config.RewardModelConfig\n"
)


def sglang_configs(folder: Path) -> None:
    """The files that verl's SGLang scripts name with --config-name, whose folders are in its repository alone: the same
    keys in our words."""
    turns = {"enable": True, "max_assistant_turns": 5}
    server = {"timeout": 60, "max_attempts": 3, "retry_delay": 2, "max_connections": 1000, "max_start_wait_time": 300.0}
    rollouts: dict[str, dict[str, Any]] = {
        "gsm8k_multiturn_grpo": {"multi_turn": turns},
        "gsm8k_multiturn_grpo_server": {"multi_turn": turns, "sglang_engine_mode": "server", "server": server},
        "gsm8k_multiturn_grpo_w_interaction": {
            "multi_turn": {"enable": True, "max_user_turns": 5, "format": "qwen"},
        },
        "geo3k_multiturn_grpo": {"multi_turn": {"enable": True, "max_turns": 5}},
    }
    for name in ("gsm8k_multiturn_sf_grpo", "deepeyes_multiturn_grpo"):
        rollouts[name] = rollouts["gsm8k_multiturn_grpo"]
    for name, rollout in rollouts.items():
        config = {
            "hydra": {"searchpath": ["file://verl/trainer/config"]},
            "defaults": ["ppo_trainer", "_self_"],
            "data": {"max_prompt_length": 1024, "max_response_length": 1024, "return_raw_chat": True},
            "actor_rollout_ref": {"hybrid_engine": True, "rollout": {"name": "sglang", **rollout}},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


def test_scripts_for_sglang_compose(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 33, with their configuration files, and with the reward functions that ask a model that generates."""
    sglang_configs(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm_config.yaml").write_text(RM_CONFIG)
    (tmp_path / "recipe" / "fapo").mkdir(parents=True)
    for name in ("reward_fn.py", "reward_fn_reasoning.py"):
        (tmp_path / "recipe" / "fapo" / name).write_text("def compute_score_fapo(**kwargs): ...")
    commands = [json.loads(line) for line in (shared_data / "verl_commands.jsonl").read_text().splitlines()]
    count, served = 0, []
    for command in (command for command in commands if command["kind"] == "sglang"):
        here = [f"--config-path={tmp_path}" if a.startswith("--config-path=") else a for a in command["argv"]]
        here = [str(tmp_path) if argument.endswith("recipe/fapo/config") else argument for argument in here]
        found = outcome({**command, "argv": here})
        assert found.plan is not None, (found.script, found.error)
        count += 1
        if any(pool.roles == ("reward",) for pool in found.plan.pools):
            served.append(found.script)
    assert count == 33
    assert served == ["recipe/fapo/run_fapo_32b.sh", "recipe/fapo/run_fapo_7b.sh", "recipe/fapo/run_fapo_32b.sh"]


# What no mesh can stand in for.
NOT_MEGATRON = {
    "examples/mtp_trainer/test_dapo_mimo_7b_with_mtp_math_megatron.sh": "mtp.enable=True: not available yet",
    "examples/router_replay/run_qwen30_a3b_megatron_sglang.sh": "this engine records none; use name=vllm or hf",
}


def test_scripts_for_megatron_compose_with_the_sizes_of_one_mesh(shared_data: Path, tmp_path: Path) -> None:
    """All 21 of January 2026, with what their recording has put in: $@ at the end, $1 as the engine, an empty path."""
    entry = {"defaults": ["ppo_megatron_trainer", "_self_"], "actor_rollout_ref": {"rollout": {"name": "sglang"}}}
    for name in ("gsm8k_multiturn_megatron_grpo", "geo3k_multiturn_megatron_grpo"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(entry))
    lines = (shared_data / "verl_commands_2026.jsonl").read_text().splitlines()
    found: dict[str, Outcome] = {}
    for command in (json.loads(line) for line in lines if '"megatron"' in line):
        plain = {"actor_rollout_ref.rollout.name=8": "actor_rollout_ref.rollout.name=vllm"}
        plain |= {f"{model}.path=": f"{model}.path=/m" for model in ("actor_rollout_ref.model", "critic.model")}
        argv = [plain.get(text, text) for text in command["argv"] if "=" in text]
        argv = argv if any("n_gpus_per_node" in text for text in argv) else [*argv, "trainer.n_gpus_per_node=8"]
        argv = [f"--config-path={tmp_path}" if text.startswith("--config-path=/") else text for text in argv]
        found[command["script"]] = outcome({**command, "argv": argv})
    assert len(found) == 21 and {name for name, each in found.items() if each.plan is None} == NOT_MEGATRON.keys()
    assert all(NOT_MEGATRON[name] in found[name].error for name in NOT_MEGATRON)
    sizes = {}
    for name, each in found.items():
        if each.plan is not None:
            actor = each.plan.roles["actor"]
            sizes[Path(name).stem] = (actor.config.tensor, actor.config.context, actor.data_parallel_size)
    assert sizes["run_qwen2-7b_math_megatron"] == (2, 1, 2)  # 8 GPUs, two stages
    assert sizes["run_qwen3_vl-8b-megatron"] == (1, 2, 2)  # with context parallelism, tensor parallelism is FSDP's too
    assert sizes["run_moonlight16b_a3b_gsm8k_megatron"] == (1, 1, 16)  # and with experts that are spread


@pytest.mark.parametrize(
    ("prefix", "switch", "rule"),
    [
        ("actor_rollout_ref.actor.ppo_", "actor_rollout_ref.actor.use_dynamic_bsz", ("actor", "update")),
        (
            "actor_rollout_ref.rollout.log_prob_",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
            ("actor", "forward"),
        ),
        ("actor_rollout_ref.ref.log_prob_", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", ("ref", "forward")),
        ("critic.ppo_", "critic.use_dynamic_bsz", ("critic", "update")),
        ("reward_model.", "reward_model.use_dynamic_bsz", ("reward", "forward")),
    ],
)
def test_micro_batches_are_what_the_script_says(
    outcomes: list[Outcome], prefix: str, switch: str, rule: tuple[str, str]
) -> None:
    """verl's rule: sequences, unless use_dynamic_bsz (the pass's own, or else the actor's) asks for tokens."""
    checked = 0
    for found in outcomes:
        given = dict(argument.lstrip("+").split("=", 1) for argument in found.argv if "=" in argument)
        size = given.get(f"{prefix}micro_batch_size_per_gpu")
        follows = "critic.use_dynamic_bsz" if prefix == "reward_model." else "actor_rollout_ref.actor.use_dynamic_bsz"
        dynamic = given.get(switch, given.get(follows, given.get("actor_rollout_ref.actor.use_dynamic_bsz", "False")))
        role = None if found.plan is None else found.plan.roles.get(rule[0])
        if role is not None and size not in (None, "null") and dynamic.lower() == "false":
            assert getattr(role, rule[1]) == MicroBatchRule(max_sequences=int(size)), found.script
            checked += 1
    assert checked > 2


def test_a_yaml_of_verls_recipes_composes(tmp_path: Path) -> None:
    """recipe/fapo: hydra's search path, verl's entry config, a class name."""
    (tmp_path / "rm_config.yaml").write_text(RM_CONFIG)
    seen: list[PPOConfig] = []
    run_main(seen.append, ["--config-path", str(tmp_path), "--config-name", "rm_config.yaml", "data.seed=3"])
    assert seen[0].data.seed == 3
