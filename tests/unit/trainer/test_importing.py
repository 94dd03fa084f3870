"""Imports of ROLL's files and Colossal-RL's arguments: nothing is lost, units are ours, what comes of it composes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.config.names import plain_names, table
from verl_like.kit.coming_from.colossal import ColossalRun
from verl_like.kit.coming_from.importing import (
    CARRIED,
    NOTHING,
    REFUSED,
    UNKNOWN,
    Imported,
    flat,
    text_of,
    translate,
    write,
)
from verl_like.kit.coming_from.roll import RollFile, _devices
from verl_like.kit.docs.configuration import pages
from verl_like.kit.verbs.import_settings import report
from verl_like.trainer.compose import compose_with_warnings

ROLL_FILES = 16
README = "-t 4 -i 4 -b vllm -ibs 4 -tbs 2 -tMbs 1 -tmbs 2 -imbs 1 -rt boxed -g 4"  # its 8-GPU example, made divisible


def roll(folder: Path, **settings: Any) -> Imported:
    """A small RLVR file with these settings; dots in names are written as __."""
    plain = {name.replace("__", "."): value for name, value in settings.items()}
    base = {"rollout_batch_size": 64, "response_length": 256, "num_return_sequences_in_group": 8, "pretrain": "model"}
    tree = OmegaConf.create({})
    for name, value in (base | plain).items():
        OmegaConf.update(tree, name, value, force_add=True)
    file = folder / "roll.yaml"
    file.write_text(OmegaConf.to_yaml(tree))
    return translate(RollFile(file))


def of(done: Imported, name: str) -> str:
    """The list that a setting ended in."""
    found = [item.status for item in done.items if item.name == name]
    assert len(found) == 1, (name, found)
    return found[0]


@pytest.fixture(scope="module")
def roll_files(shared_data: Path) -> list[Path]:
    files = sorted((shared_data / "roll_configs").glob("*.yaml"))
    if not files:
        pytest.skip("ROLL's configurations are not there")
    assert len(files) == ROLL_FILES
    return files


def test_no_leaf_of_rolls_files_is_lost_and_all_of_them_compose(roll_files: list[Path]) -> None:
    for file in roll_files:
        done = translate(RollFile(file))
        own = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        assert isinstance(own, dict)
        named = [item.name for item in done.items if not item.assumed]
        assert len(named) == len(set(named)), file.name
        for leaf in flat(own):  # ${custom_env.X} has become X's own leaves
            assert leaf in named or any(name.startswith(f"{leaf}.") for name in named), (file.name, leaf)
        assert {item.status for item in done.items} <= {CARRIED, NOTHING, REFUSED} and done.of(UNKNOWN) == []
        assert all(item.note for item in done.of(REFUSED)), file.name
        config, _ = compose_with_warnings(done.overrides())
        assert isinstance(config.trainer.n_gpus_per_node, int)
        plan = BatchPlan.build(config, config.trainer.nnodes * config.trainer.n_gpus_per_node)
        done.check()
        group = own.get("num_return_sequences_in_group", 1)  # the agentic pipeline counts trajectories
        assert plan.prompts_per_step * plan.responses_per_prompt == own["rollout_batch_size"] * group


@pytest.mark.filterwarnings("ignore:.*Defaults list is missing `_self_`")
@pytest.mark.parametrize("file", ["agent_val_frozen_lake", "agent_val_frozen_lake_gigpo", "agentic_val_sokoban_lora"])
def test_defaults_lists_are_read_as_hydra_reads_them(shared_data: Path, tmp_path: Path, file: str) -> None:
    source = shared_data / "roll_configs"
    (tmp_path / "run").mkdir()
    (tmp_path / "config").symlink_to(source / "config")
    (tmp_path / "run" / "file.yaml").write_text((source / f"qwen2.5-0.5B-agentic__{file}.yaml").read_text())
    with initialize_config_dir(str(tmp_path / "run"), version_base=None):
        theirs = OmegaConf.to_container(hydra_compose("file"), resolve=True)
    assert isinstance(theirs, dict)
    read = RollFile(tmp_path / "run" / "file.yaml").leaves
    assert {name: read[name] for name in read if name.split(".")[0] not in ("defaults", "hydra")} == flat(theirs)


@pytest.mark.parametrize(
    ("file", "updates", "warmup", "world"),
    [  # what ROLL computes: B x n / (per_device x accumulation x devices / tp / ulysses); its warm-up in such updates
        ("qwen2.5-7B-rlvr_megatron__rlvr_fsdp2_sp2", 64 * 8 / (1 * 32 * 8 / 2), 20 / 4, 8),
        ("qwen2.5-7B-rlvr_megatron__rlvr_config_async", 64 * 8 / (1 * 64 * 16 / 2), 1, 16),
        ("qwen3-30BA3B-rlvr_fsdp2__rlvr_config_ep", 16 * 8 / (1 * 4 * 32 / 4), 20 / 4, 32),
        ("qwen2_5-vl-3B-rlvr_fsdp2__rlvr_fsdp2_offload", 256 * 8 / (2 * 64 * 8), 0, 8),
        ("qwen2.5-0.5B-agentic__agentic_val_sokoban", 1024 / (2 * 64 * 8), 10, 8),
    ],
)
def test_the_number_of_updates_is_rolls(
    shared_data: Path, roll_files: list[Path], file: str, updates: float, warmup: float, world: int
) -> None:
    first, again = (translate(RollFile(shared_data / "roll_configs" / f"{file}.yaml")) for _ in range(2))
    assert first.overrides() == again.overrides()
    config, _ = compose_with_warnings(first.overrides())
    assert isinstance(config.trainer.n_gpus_per_node, int)
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == world
    assert BatchPlan.build(config, world).roles["actor"].updates_per_step == updates
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == warmup


def test_every_row_of_the_table_translates_its_values(tmp_path: Path) -> None:
    """Each rule meets a value; those that need others get them, so that no function is named that does not exist."""
    for row in table("ROLL"):
        if row.rule.startswith("fn "):
            assert hasattr(RollFile, f"rule_{row.rule[3:]}"), row.names
    for row in table("Colossal-RL"):
        if row.rule.startswith("fn "):
            assert hasattr(ColossalRun, f"rule_{row.rule[3:]}"), row.names


def test_what_a_file_leaves_out_has_rolls_default(tmp_path: Path) -> None:
    done = roll(tmp_path, adv_estimator="reinforce")
    settings = done.settings
    assert settings["actor_rollout_ref.rollout.top_p"] == 0.7
    assert settings["actor_rollout_ref.actor.clip_ratio_c"] is None
    assert settings["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert settings["actor_rollout_ref.actor.optim.lr"] == 5e-5
    assert settings["data.val_files"] == []
    assert "critic.optim.lr" not in settings and "algorithm.lam" not in settings  # no critic
    assert roll(tmp_path, adv_estimator="gae").settings["algorithm.lam"] == 0.95


def test_grpo_stays_grpo_unless_something_comes_between_norm_and_sum(tmp_path: Path) -> None:
    plain = roll(tmp_path, adv_estimator="grpo", reward_clip=10)
    assert plain.settings["algorithm.adv_estimator"] == "grpo" and "algorithm.reward_clip" not in plain.settings
    assert of(plain, "reward_clip") == NOTHING  # 8 responses: at most 2.47 deviations
    clipped = roll(tmp_path, adv_estimator="grpo", reward_clip=1)
    assert clipped.settings["algorithm.adv_estimator"] == "reinforce"
    assert clipped.settings["algorithm.reward_norm.kind"] == "group"
    assert clipped.settings["algorithm.reward_clip"] == clipped.settings["algorithm.token_reward_clip"] == 1


def test_topr_of_rolls_documentation(tmp_path: Path) -> None:
    done = roll(tmp_path, rl_loss_coef=0.0, positive_loss_coef=0.5, use_topr_neg_loss_coef=2.0, use_kl_loss=True)
    prefix = "actor_rollout_ref.actor.policy_loss"
    assert done.settings[f"{prefix}.loss_mode"] == "topr"
    assert done.settings[f"{prefix}.topr.positive_weight"] == 0.5
    assert done.settings[f"{prefix}.topr.negative_weight"] == 2.0
    assert of(done, "rl_loss_coef") == NOTHING and of(done, "use_kl_loss") == NOTHING  # it multiplies the KL term too
    assert of(roll(tmp_path, rl_loss_coef=1.0, positive_loss_coef=0.5), "positive_loss_coef") == REFUSED
    assert of(roll(tmp_path, rl_loss_coef=0.0, positive_loss_coef="x_1"), "positive_loss_coef") == REFUSED


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"dual_clip_loss": True, "pg_clip": 0.1}, {"actor_rollout_ref.actor.clip_ratio_c": 1.2}),
        ({"resume_from_checkpoint": "o/3"}, {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "o/3"}),
        ({"logging_dir": "logs/", "exp_name": "a"}, {"trainer.log_dir": "logs/a"}),
        ({"actor_infer__strategy_args__strategy_config__sleep_level": 2}, {
            "actor_rollout_ref.rollout.free_cache_engine": None, "actor_rollout_ref.rollout.sleep_level": 2}),
        ({"actor_infer__strategy_args__strategy_config__sleep_level": 0}, {
            "actor_rollout_ref.rollout.free_cache_engine": False}),
        ({"sequence_length": 1000, "prompt_length": 300}, {"data.max_response_length": 700}),
        ({"actor_train__model_args__disable_gradient_checkpointing": True}, {
            "actor_rollout_ref.model.enable_gradient_checkpointing": False}),
        ({"add_token_level_kl": True, "target_kl": 0.2}, {"algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": 0.2, "algorithm.kl_ctrl.kl_coef": 0.2}),
        ({"difficulty_mask": True, "difficulty_low_threshold": 0.1}, {"algorithm.filter_groups.range": [0.1, 1.0],
            "algorithm.filter_groups.resample": False}),
        ({"actor_train__data_args__template": "qwen3"}, {"data.apply_chat_template_kwargs": {"enable_thinking": True}}),
        ({"use_additional_prompts": True, "max_additional_running_prompts": 4}, {
            "actor_rollout_ref.rollout.scheduler.additional_prompts.max": 4}),
        ({"checkpoint_config__output_dir": "s3://runs/a", "output_dir": "/data/a",
          "checkpoint_config__async_upload": True}, {"trainer.default_hdfs_dir": "s3://runs/a",
            "trainer.default_local_dir": "/data/a", "actor_rollout_ref.actor.checkpoint.async_save": True}),
        ({"checkpoint_config__output_dir": "/data/b", "output_dir": "/data/a"}, {
            "trainer.default_hdfs_dir": None, "trainer.default_local_dir": "/data/b"}),
        ({"train_infer_correction__is_weight__enabled": True}, {"algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 1.2}),
        ({"rewards__a__tag_included": ["x"], "rewards__a__worker_cls": "roll.MathRuleRewardWorker",
          "rewards__b__tag_included": ["y"], "rewards__b__worker_cls": "roll.CodeSandboxRewardWorker",
          "actor_train__data_args__domain_interleave_probs": {"a": 0.25, "b": 0.75}},
         {"data.domain_weights": {"x": 0.25, "y": 0.75}, "reward_model.rule_by_source": {"x": "math", "y": "code"},
          "data.reward_fn_key": "tag"}),
    ],
)  # fmt: skip
def test_values_of_roll(tmp_path: Path, settings: dict[str, Any], ours: dict[str, Any]) -> None:
    done = roll(tmp_path, adv_estimator="reinforce", **settings)
    assert {key: done.settings.get(key) for key in ours} == ours
    compose_with_warnings(done.overrides())


def test_rolls_rows_with_functions_are_not_given_to_ifevals_grader(tmp_path: Path) -> None:
    """Its ifeval file has {"func_name": ...}: `instruction` would leave every response without a reward."""
    worker = "roll.pipeline.rlvr.rewards.ifeval_rule_reward_worker.GeneralRuleRewardWorker"
    settings = {"rewards__a__tag_included": ["ifeval"], "rewards__a__worker_cls": worker}
    done = roll(tmp_path, adv_estimator="reinforce", **settings)
    assert "reward_model.rule_by_source" not in done.settings
    assert any(item.name == "rewards.a.tag_included" and "no grader of ours" in item.note for item in done.of(REFUSED))


def test_defaults_lists_presets_and_the_files_own_names(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text("seed: 7\nmax_steps: 5\nlength: 64\n")
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "mine.yaml"
    file.write_text(
        "defaults: [../shared/base@_here_, ../config/deepspeed_zero3_cpuoffload@_here_]\n"
        "pretrain: model\nadv_estimator: reinforce\nmax_steps: 6\nresponse_length: ${length}\nno_such_thing: 3\n"
        "actor_train:\n  strategy_args:\n    strategy_name: deepspeed_train\n"
        "    strategy_config: ${deepspeed_zero3_cpuoffload}\n"
    )
    done = translate(RollFile(file))
    assert done.settings["trainer.seed"] == 7 and done.settings["trainer.total_training_steps"] == 6
    assert done.settings["data.max_response_length"] == 64 and of(done, "length") == NOTHING
    assert done.settings["actor_rollout_ref.actor.fsdp_config.offload_policy"] is True
    assert [item.name for item in done.of(UNKNOWN)] == ["no_such_thing"]
    compose_with_warnings(done.overrides())
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        RollFile(tmp_path / "nowhere.yaml")
    file.write_text("pretrain: ${nobody}\n")
    with pytest.raises(ConfigError, match="nobody"):
        RollFile(file)


def test_gae_that_does_not_whiten_is_refused_as_ours_always_does(tmp_path: Path) -> None:
    for settings in ({"adv_estimator": "gae", "whiten_advantages": False}, {"adv_estimator": "gae"}, {}):
        assert of(roll(tmp_path, **settings), "whiten_advantages") == REFUSED  # gae and false are ROLL's defaults
    whitens = roll(tmp_path, adv_estimator="gae", whiten_advantages=True)
    assert of(whitens, "whiten_advantages") == NOTHING and "algorithm.whiten_advantages" not in whitens.settings
    assert roll(tmp_path, adv_estimator="reinforce", whiten_advantages=True).settings["algorithm.whiten_advantages"]


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"pg_variant": "topr", "topr_negative_weight": 0.5}, {
            "policy_loss.loss_mode": "topr", "policy_loss.topr.ratio_level": "token",
            "policy_loss.topr.negative_weight": 0.5}),
        ({"pg_variant": "cispo", "cispo_epsilon_high": 0.3}, {
            "policy_loss.loss_mode": "cispo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.3}),
        ({"pg_variant": "kimi15", "kimi15_tau": 0.2}, {
            "policy_loss.loss_mode": "dro", "policy_loss.dro_beta": 0.2, "policy_loss.kimi_tau": None}),
        ({"pg_variant": "vanilla", "cispo_epsilon_low": 0.2}, {
            "policy_loss.loss_mode": "policy_gradient", "policy_loss.topr.ratio_level": None, "clip_ratio_low": None}),
    ],
)  # fmt: skip
def test_variants_of_the_loss(tmp_path: Path, settings: dict[str, Any], ours: dict[str, Any]) -> None:
    done = roll(tmp_path, adv_estimator="reinforce", actor_train=settings)
    assert {key: done.settings.get(f"actor_rollout_ref.actor.{key}") for key in ours} == ours
    assert done.of(UNKNOWN) == []
    done.check()


def test_the_losses_of_kimi15_and_cispo_are_rolls_on_each_token(tmp_path: Path) -> None:
    """-A logp + tau / 2 (logp - old)^2 of each token, and clip(ratio, 1 - low, 1 + high) A logp of cispo at 0.1."""
    log_probs_BR, old_BR = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.6]])
    batch = PolicyBatch(
        log_probs_BR=log_probs_BR,
        old_log_probs_BR=old_BR,
        advantages_BR=torch.full((1, 2), 0.7),
        mask_BR=torch.ones(1, 2, dtype=torch.bool),
    )
    ratio_BR = (log_probs_BR - old_BR).exp().clamp(0.9, 1.1)
    theirs = {
        "kimi15": -0.7 * log_probs_BR + 0.1 / 2 * (log_probs_BR - old_BR) ** 2,
        "cispo": -ratio_BR * 0.7 * log_probs_BR,
    }
    for variant, expected_BR in theirs.items():
        done = roll(tmp_path, adv_estimator="reinforce", actor_train={"pg_variant": variant}, pg_clip=0.3)
        actor = compose_with_warnings(done.overrides())[0].actor_rollout_ref.actor
        torch.testing.assert_close(
            POLICY_LOSSES.lookup(actor.policy_loss.loss_mode).function(batch, actor).loss_BR, expected_BR
        )


def test_cispo_masks_no_token_and_leaves_the_clip_of_ppo_aside(tmp_path: Path) -> None:
    variant = {"pg_variant": "cispo", "cispo_use_unified_mask": True}
    done = roll(tmp_path, actor_train=variant, use_pg_clip_range=True, pg_clip_low=0.2, pg_clip_high=0.28)
    assert of(done, "actor_train.cispo_use_unified_mask") == REFUSED and of(done, "pg_clip_low") == NOTHING


@pytest.mark.parametrize(
    ("prompts", "accumulation", "status", "size"),
    [(64, 8, CARRIED, 8), (96, 25, REFUSED, 24), (64, 24, REFUSED, 16), (4, 64, REFUSED, 4)],
)
def test_updates_that_are_no_part_of_a_step_are_refused_and_the_warm_up_counts_those_in_their_place(
    tmp_path: Path, prompts: int, accumulation: int, status: str, size: int
) -> None:
    prefix, actor = "actor_train.training_args", "actor_rollout_ref.actor"
    own = {f"{prefix}.gradient_accumulation_steps": accumulation, f"{prefix}.warmup_steps": 100}
    done = roll(
        tmp_path, rollout_batch_size=prompts, adv_estimator="reinforce", **own
    )  # 8 responses of 8 in a micro batch
    assert of(done, f"{prefix}.gradient_accumulation_steps") == status
    assert done.settings[f"{actor}.ppo_mini_batch_size"] == size
    assert done.settings[f"{actor}.optim.lr_warmup_steps"] == math.ceil(100 / (prompts // size))
    own |= {f"{prefix}.per_device_train_batch_size": 4}
    half = roll(tmp_path, rollout_batch_size=prompts, adv_estimator="reinforce", **own)
    assert of(half, f"{prefix}.gradient_accumulation_steps") == (REFUSED if prompts % (accumulation / 2) else CARRIED)
    done.check()


def test_a_temperature_is_said_to_scale_the_loss_too(tmp_path: Path) -> None:
    for settings in ({}, {"actor_infer.generating_args.temperature": 0.8}):
        (item,) = [
            item for item in roll(tmp_path, **settings).items if item.name.endswith("generating_args.temperature")
        ]
        assert item.status == CARRIED and "the loss takes log-probs at this temperature here" in item.note


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prompt_length": "foo"}, r"max_prompt_length='foo'.*\(from ROLL's prompt_length=foo\)"),
        ({"pg_clip": "a"}, r"clip_ratio='a'.*\(from ROLL's pg_clip=a\)"),
        ({"sequence_length": 512, "prompt_length": 1024}, "sequence_length=512 must be above prompt_length=1024"),
        ({"actor_infer.generating_args.temperature": 0}, r"actor_infer\.generating_args\.temperature=0\)"),
        ({"rollout_batch_size": 6, "num_return_sequences_in_group": 1, "actor_infer.num_gpus_per_worker": 3,
          "actor_infer.device_mapping": "0-3", "actor_infer.strategy_args.strategy_name": "vllm"},
         r"num_gpus_per_worker=3"),
    ],
)  # fmt: skip
def test_values_that_train_would_refuse_are_named_as_they_are_called_there(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        roll(tmp_path, adv_estimator="reinforce", **settings).check()


@pytest.mark.parametrize("text", ["-ibs 0", "-tbs x", "-t x", "-g 0", "-temp 0", "-b vllm -t 2 -i 1 -ptp 3"])
def test_values_that_colossal_could_not_run_with_are_errors(text: str) -> None:
    flag = next(names[0] for names in (row.names for row in table("Colossal-RL")) if text.split()[-2] in names)
    with pytest.raises(ConfigError, match=flag.lstrip("-").replace("-", "[-_]")):
        colossal(text).check()


def test_files_that_cannot_be_read_as_theirs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    (tmp_path / "c.yaml").write_text("defaults: foo\n")
    for name, told in (
        ("a.yaml", r"includes itself, by `defaults`: a\.yaml -> b\.yaml -> a\.yaml"),
        ("c.yaml", "defaults=foo must be a list"),
        ("", "a folder: name a file in it"),
    ):
        with pytest.raises(ConfigError, match=told):
            RollFile(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rate", "actor_train.training_args.learning_rate"),
        ("critic.training_args.learning_rat", "critic.training_args.learning_rate"),
        ("device_maping", "actor_train.device_mapping"),
        ("ppo_epoch", "ppo_epochs"),
    ],
)
def test_a_hint_for_an_unknown_name_is_a_whole_name(tmp_path: Path, name: str, meant: str) -> None:
    (item,) = roll(tmp_path, **{name: 1}).of(UNKNOWN)
    assert item.note == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,4))", [0, 1, 2, 3]),
        ("list(range(4)) + [6]", [0, 1, 2, 3, 6]),
        ("list(range(0, 8, 4))", [0, 4]),
        ("2-4", [2, 3, 4]),
        ([1, 5], [1, 5]),
        (None, []),
    ],
)
def test_device_mappings_are_read_not_evaluated(text: Any, devices: list[int]) -> None:
    assert _devices(text) == devices


def colossal(text: str, *inside: str) -> Imported:
    words = text.split()
    known = {name: names[0] for names in (row.names for row in table("Colossal-RL")) for name in names}
    flags = {
        known[flag].lstrip("-").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    return translate(ColossalRun(flags, inside))


def test_batches_of_colossal_are_counted_in_prompts_of_a_step() -> None:
    done = colossal(f"-m model -d data.jsonl {README}")
    config, _ = compose_with_warnings(done.overrides())
    plan = BatchPlan.build(config, 8)
    assert plan.prompts_per_step == 4 * 4  # producers x ibs
    assert plan.roles["actor"].mini_batch_prompts == 2 * 4  # tbs x trainers
    assert plan.responses_per_prompt == 4 and config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    odd = colossal("-m model -t 4 -i 4 -ibs 1 -tbs 2")  # as the README has it: its own launcher refuses that
    assert odd.settings["data.train_batch_size"] == odd.settings["actor_rollout_ref.actor.ppo_mini_batch_size"] == 8


def test_the_readmes_tensor_and_pipeline_parallel_run_of_colossal() -> None:
    """Its plugin_config on 16 trainers: 2 groups read rows, of two stages with split layers each."""
    inside = ("tp_size=4", "pp_size=2", "microbatch_size=2", "zero_stage=1", "max_norm=0.5")
    done = colossal("-m model -t 16 -i 16 -tbs 8 -ibs 1 -imbs 1 -g 8 -tmbs 4", *inside)
    config, _ = compose_with_warnings(done.overrides())
    actor = BatchPlan.build(config, 16).roles["actor"]
    assert (actor.config.tensor, actor.data_parallel_size, actor.mini_batch_prompts) == (4, 2, 16)
    assert actor.config.grad_clip == 0.5 and not actor.config.fsdp.reshard_after_forward
    assert actor.config.fsdp.pipeline_parallel_size == 2
    alone = colossal("-m model -t 16 -i 16 -tbs 8 -ibs 1 -imbs 1", "pp_size=4")
    assert [line for line in alone.overrides() if "pipeline" in line] == [
        "actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size=4"
    ]


def test_megatron_sizes_of_rolls_beside_each_other(tmp_path: Path) -> None:
    config = "strategy_args__strategy_config"
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}
    flags = {"sequence_parallel": True, "overlap_grad_reduce": True, "moe_token_dispatcher_type": "alltoall"}
    given = {f"actor_train__{config}__{name}": value for name, value in (sizes | flags).items()}
    done = roll(tmp_path, actor_train__strategy_args__strategy_name="megatron_train", use_kl_loss=True, **given,
                reference__strategy_args__strategy_config__tensor_model_parallel_size=2)  # fmt: skip
    assert done.settings["actor_rollout_ref.ref.fsdp_config.tensor_parallel_size"] == 2
    assert "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size" not in done.settings
    names = [f"actor_train.strategy_args.strategy_config.{name}" for name in sizes | flags if "pipe" not in name]
    notes = {item.name: item.note for item in done.of(NOTHING)}
    assert done.settings["actor_rollout_ref.actor.fsdp_config.expert_parallel_size"] == 4
    assert [name for name in names if name not in notes and "expert" not in name] == [] and not any(
        "strategy" in item.name for item in done.of(REFUSED)
    )
    assert "expert_model_parallel_size" in notes[names[0]]
    assert done.settings["actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size"] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("-t 4", "num_trainers=4 is no multiple of tensor x pipeline parallel size 3"),
        ("-ibs 12 -imbs 8", "inference_batch_size=12 is no multiple of inference_microbatch_size=8"),
    ],
)
def test_constraints_of_colossal_are_checked_with_their_numbers(text: str, told: str) -> None:
    inside = ("tensor_parallel_size=3",) if text == "-t 4" else ()
    with pytest.raises(ConfigError, match=told):
        colossal(text, *inside)


@pytest.mark.parametrize("text", ["-tbs 12 -tMbs 8", "-tMbs 1 -g 4 -tmbs 8", "-t 4 -i 4 -tbs 2 -tMbs 8 -tmbs 2 -g 4"])
def test_a_minibatch_of_colossal_that_its_launcher_refuses_is_told_and_changes_nothing(text: str) -> None:
    done = colossal(f"-m model -ibs 12 -imbs 4 {text}")
    item = next(item for item in done.of(NOTHING) if item.name == "train_minibatch_size")
    assert f"train_minibatch_size={item.value}" in item.note and "that launcher refuses" in item.note
    without = [word for word in text.split() if word != "-tMbs"]
    without.remove(str(item.value))
    assert done.settings == colossal(f"-m model -ibs 12 -imbs 4 {' '.join(without)}").settings


# The two command lines of its README: flags that are given twice count as they stand last.
README_8 = """-d train.jsonl -m Qwen2.5-3B -t 4 -i 4 -b vllm -ibs 2 -tbs 4 -tMbs 1 -tmbs 4 -imbs 1 -rt boxed -g 4 -ibs 1
    -tbs 2 -tMbs 1 -tmbs 2 -imbs 1 -s Think. -tMbs 8 -p GRPO-Train-Align-Debug"""
README_32 = """-m Qwen2.5-Math-7B -d train.jsonl --master_address 10.0.0.3 -t 16 -i 16 -p GRPO-Train-Align-Debug -g 2
    -ibs 1 -tbs 2 -tMbs 1 -tmbs 2 -imbs 1 -b vllm -e 2 -rt boxed -s Think."""
PLUGIN = ("tp_size=4", "pp_size=2", "microbatch_size=1", "zero_stage=1", "max_norm=1.0")


@pytest.mark.parametrize(
    ("text", "inside", "devices", "prompts"),
    [
        (README_8, (), (1, 8), 2 * 4),
        (README_32, PLUGIN, (4, 8), 16 * 1),
        (README_32, ("tensor_parallel_size=4",), (4, 8), 16 * 1),
        (f"{README_32} -tp 4 -i 8 -ptp 2", (), (4, 8), 8 * 1),
    ],
)
def test_the_command_lines_of_its_readme(
    text: str, inside: tuple[str, ...], devices: tuple[int, int], prompts: int
) -> None:
    done = colossal(text, *inside)
    done.check()
    config, _ = compose_with_warnings(done.overrides())
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == devices
    assert config.data.train_batch_size == prompts
    assert config.actor_rollout_ref.rollout.n == (4 if text is README_8 else 2)
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == (2 if "-ptp" in text else 1)
    actor = config.actor_rollout_ref.actor
    assert actor.fsdp_config.tensor_parallel_size == (1 if text is README_8 else 4)
    assert actor.ppo_mini_batch_size == (8 if text is README_8 else 4 if "pp_size=2" in inside else 8)


def test_no_name_of_colossal_stands_for_two_settings() -> None:
    names = [name for row in table("Colossal-RL") for name in plain_names(row)]
    assert len(names) == len(set(names))


def test_a_report_begins_with_what_is_refused_and_says_nothing_twice(roll_files: list[Path]) -> None:
    for file in roll_files:
        lines = report(translate(RollFile(file)), str(file))
        titles = [line.split(":")[0].split(",")[0] for line in lines[1:] if line and not line.startswith(" ")]
        order = ["refused", "unknown", "carried", "left out there", "needs nothing"]
        assert titles == [title for title in order if title in titles]
        for start, end in itertools.pairwise([*(i for i, line in enumerate(lines) if not line), len(lines)]):
            notes = [line for line in lines[start:end] if line.startswith("      ")]
            assert len(notes) == len(set(notes))


def test_algorithms_of_colossal() -> None:
    dapo = colossal("-a DAPO -mnt 2048 -kl 0.1", "clip_eps_high=0.3", "filter_range=[0.2,0.8]")
    config, _ = compose_with_warnings(dapo.overrides())
    actor, groups = config.actor_rollout_ref.actor, config.algorithm.filter_groups
    assert actor.clip_ratio_high == 0.3 and groups.range == [0.2, 0.8] and groups.metric == "acc"
    assert config.reward_model.overlong_buffer.len == 512 and not actor.use_kl_loss  # DAPO has none
    rloo, _ = compose_with_warnings(colossal("-a RLOO -kl 0").overrides())
    assert rloo.algorithm.adv_estimator == "rloo" and not rloo.actor_rollout_ref.actor.use_kl_loss
    files = colossal("""-ed {"a":"a.jsonl"}""").settings
    assert files["data.val_files"] == {"a": "a.jsonl"} and rloo.data.val_files == []
    tags, _ = compose_with_warnings(colossal("-b vllm").overrides())
    assert tags.reward_model.rule == "think_answer_tags" and tags.actor_rollout_ref.rollout.stop == ["</answer>"]
    assert colossal("-nb 2").settings["async_training.max_staleness"] == 2
    assert colossal("", "buffer_size=4").of(REFUSED)[0].name == "buffer_size"
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        ColossalRun({}, ["stray"])


def test_every_flag_of_colossal_ends_in_one_list() -> None:
    source = ColossalRun({})
    for row in table("Colossal-RL"):
        for name in plain_names(row):
            given = ColossalRun({}, [f"{name}={'1' if row.default is ... else text_of(row.default)}"]).leaves
            ((leaf, value),) = given.items()
            assert source.outcome(leaf, value).status in (CARRIED, NOTHING, REFUSED), name


@pytest.mark.parametrize(
    "text", ["plain", "a b", "it's", '"quoted" \\boxed{}', "1", "null", "a,b", "x=y", "[z]", "~/m", ""]
)
def test_texts_survive_the_command_line(text: str) -> None:
    config, _ = compose_with_warnings(
        [
            f"data.system_prompt={text_of(text)}",
            f"data.train_files={text_of([text])}",
            f"data.extra={text_of({'a': text})}",
        ]
    )
    assert config.data.system_prompt == text and config.data.train_files == [text] and config.data.extra == {"a": text}


def test_the_written_yaml_composes_to_the_same(tmp_path: Path) -> None:
    for done in (colossal("-a DAPO -m model"), roll(tmp_path, adv_estimator="grpo", system_envs={"A": "1"})):
        write(done, tmp_path / "out" / "run.yaml", ["what", "where"])
        assert (
            compose_with_warnings([], [tmp_path / "out" / "run.yaml"])[0] == compose_with_warnings(done.overrides())[0]
        )


def test_the_pages_about_other_projects_are_current() -> None:
    docs = Path(__file__).parents[3] / "docs"
    old = [name for name, text in pages(docs).items() if (docs / name).read_text() != text]
    assert old == [], "run python -m verl_like.kit.docs.configuration"


def test_an_agentic_file_is_carried_over_whole(shared_data: Path, roll_files: list[Path]) -> None:
    files = [file for file in roll_files if "agentic__" in file.name]
    assert len(files) == 5
    for file in files:
        done = translate(RollFile(file))
        refused = {item.name for item in done.of(REFUSED)}
        assert refused <= {"tracker_kwargs.log_dir", "async_generation_ratio"}, file.name
        config, _ = compose_with_warnings(done.overrides())
        env, rollout = config.env, config.actor_rollout_ref.rollout
        assert env.train.num_groups == 128 and rollout.n == 8 and rollout.val_kwargs.n == 1
        assert env.val.groups_per_tag == [256] * 4 and env.render_save_dir == "./output/render"
        lake = env.custom["FrozenLake"]
        assert (lake["type"], lake["max_steps"], lake["max_tokens_per_step"]) == ("frozen_lake", 10, 64)
        assert lake["config"]["is_slippery"] is False and lake["format_penalty"] == -0.01
        assert env.custom["SokobanDifferentGridVocab"]["config"]["grid_vocab"]["."] == "empty"
        gigpo = config.algorithm.adv_estimator == "gigpo"
        assert gigpo == file.name.endswith("gigpo.yaml") == rollout.multi_turn.turn_rewards
        assert (lake.get("history_length") == 5) == gigpo, "each turn is a prompt of its own there"
