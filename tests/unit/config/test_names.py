"""Names of other programs: every row of every table is sound, and its names are answered with keys that exist, or with
the reason why there is none."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from verl_like.config import names
from verl_like.config.errors import ConfigError
from verl_like.config.names import (
    MISSING,
    NOTHING,
    PROJECTS,
    VERL,
    Row,
    alternatives,
    foreign_hint,
    pattern,
    plain_names,
    row_of,
    rows_of,
    table,
    value_of,
)
from verl_like.config.schema import find_key, keys, sections, suggest
from verl_like.config.spellings import CONVERSIONS, Change, canonical, renamed, says_nothing
from verl_like.kit.coming_from.colossal import ColossalRun
from verl_like.kit.coming_from.roll import RollFile
from verl_like.trainer.compose import compose

# What the projects' guides and our map of them name (reference/roll_colossal.md, section 4; seeds), in their order.
ROLL_GUIDE = """
exp_name seed rpc_timeout output_dir logging_dir render_save_dir system_envs track_with tracker_kwargs max_steps
save_steps eval_steps logging_steps resume_from_checkpoint checkpoint_config rollout_batch_size val_batch_size
prompt_length response_length sequence_length local_rank num_nodes num_gpus_per_node
num_return_sequences_in_group generate_opt_level is_num_return_sequences_expand max_running_requests
is_use_additional_prompts max_additional_running_prompts ppo_epochs max_grad_norm l2 lambd gamma kl_penalty
init_kl_coef target_kl kl_horizon add_token_level_kl use_kl_loss kl_loss_coef use_reward_scaling use_reward_norm
reward_norm reward_shift reward_scale add_len_reward reward_clip difficulty_loss_weight length_loss_weight
whiten_rewards whiten_advantages advantage_clip adv_estimator critic_warmup entropy_loss_coef sft_loss_coef
use_topr_loss rl_loss_coef dual_clip_loss pg_clip loss_agg_mode max_len_mask grouping method env_groups
group_size tags n_groups max_traj_per_env format_penalty worker_cls device_mapping num_gpus_per_worker
world_size model_update_frequency infer_batch_size dtype disable_gradient_checkpointing template file_name
prompt messages domain_interleave_probs max_new_tokens temperature strategy_name strategy_config
gpu_memory_utilization block_size max_model_len load_format mem_fraction_static per_device_train_batch_size
gradient_accumulation_steps learning_rate weight_decay warmup_steps tensor_model_parallel_size
pipeline_model_parallel_size expert_model_parallel_size context_parallel_size
virtual_pipeline_model_parallel_size sequence_parallel recompute_granularity moe_layer_recompute
moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap overlap_grad_reduce
"""
COLOSSAL_GUIDE = """
--model --dataset --eval-dataset --project --num-episodes --num-trainers --num-inferencer --inference-batch-size
--inference-microbatch-size --train-batch-size --train-minibatch-size --train-microbatch-size --backend --temperature
--top-k --top-p --system-prompt --max-new-tokens --max-prompt-tokens --algo --learning-rate --kl-coeff --reward-type
--eval-interval --save-interval --save-dir --eval-save-dir --rollout-save-dir --ray_dir --master_address --master_port
--num-generations -mnt -mpt -ibs -imbs -tbs -tMbs -tmbs clip_eps_low clip_eps_high loss_variation skip_threshold
filter_truncated_response --filter_range dynamic_batching soft_over_length_punishment cache_length max_norm
tensor_parallel_size n_behind
"""


TRL_MOST_USED = """
model train_dataset eval_dataset output_dir run_name report_to seed max_steps num_train_epochs save_steps eval_steps
per_device_train_batch_size gradient_accumulation_steps num_generations max_prompt_length max_completion_length
num_iterations temperature top_p top_k min_p use_vllm vllm_gpu_memory_utilization vllm_tensor_parallel_size
learning_rate warmup_ratio max_grad_norm beta epsilon epsilon_high loss_type scale_rewards mask_truncated_completions
reward_funcs reward_weights
"""
OPENRLHF_MOST_USED = """
--pretrain --prompt_data --input_key --label_key --apply_chat_template --rollout_batch_size --train_batch_size
--micro_train_batch_size --n_samples_per_prompt --max_epochs --num_episodes --prompt_max_len --generate_max_len
--advantage_estimator --init_kl_coef --use_kl_loss --kl_estimator --eps_clip --gamma --lambd --actor_learning_rate
--critic_learning_rate --zero_stage --vllm_tensor_parallel_size --vllm_gpu_memory_utilization --save_path --save_steps
--rollout.n_samples_per_prompt --train.batch_size --actor.adam.lr --algo.advantage.estimator
"""


READERS: dict[str, Any] = {"ROLL": RollFile, "Colossal-RL": ColossalRun}
ROWS = [
    pytest.param(project, row, id=f"{project}: {row.names[0]}")
    for project in (*PROJECTS, VERL)
    for row in table(project)
]
STAR = "STAR"  # stands for what a star of a name may be


def problems_of(project: str, row: Row) -> Iterator[str]:
    """What is wrong with a row."""
    for name in row.names:
        if not re.fullmatch(r"[-\w.()|*=]+", name) or name.count("(") != name.count(")"):
            yield f"{name} is no pattern"
            return
    if not (row.keys or row.note or row.values or (row.kind == NOTHING) or row.rule):
        yield "there is no key, and no note that says why"
    kind, _, function = row.rule.partition(" ")
    if not re.match(r"fn |under|not$|$|.+>", row.rule):
        yield f"{row.rule} is no rule"
    if project == VERL:
        yield from _problems_of_verls(row)
        return
    if kind == "fn" and not hasattr(READERS[project], f"rule_{function}"):
        yield f"there is no function {function}"
    for key in row.all_keys():
        if not (find_key(key) or key in sections() or key == "preset"):
            yield f"there is no key {key}"


def _problems_of_verls(row: Row) -> Iterator[str]:
    kind, _, function = row.rule.partition(" ")
    texts = [(name, text) for name in row.names for text in alternatives(name)]
    of_ours = {key for name in row.names for key in matched(name, row)}
    if row.conditions and row.kind != MISSING:
        yield "a condition belongs to a section that is not there"
    for name, text in texts:
        match = pattern(name).fullmatch(re.sub(r"\*+", STAR, text))
        for key in row.keys:
            target = match.expand(key.partition("=")[0]) if match else ""
            if not is_key(renamed(target)):
                yield f"{text} leads to {target}, which is no key"
    if row.kept or (row.kind == MISSING and row.values):
        yield from (f"{text} is no key of ours" for _, text in texts if not is_key(re.sub(r"\*+", STAR, text)))
    elif row.kind or row.renames:
        yield from (f"{key} is a key of ours" for key in of_ours)
    if row.kind and not (row.note or row.values):
        yield "no note says why"
    if row.kind == MISSING and not row.values:
        inside = (f"{text}.{name}" for _, text in texts for name in ("enable", "steps", "tool", "path"))
        yield from (f"{key} is another name of a key, and would be hidden" for key in inside if find_key(renamed(key)))
    if kind == "fn" and function not in (*CONVERSIONS, "correction", "rounds"):
        yield f"there is no function {function}"
    if not row.keys and not row.kind:
        yield from _problems_of_values(row, of_ours)


def _problems_of_values(row: Row, of_ours: set[str]) -> Iterator[str]:
    if not of_ours:
        yield "no key of ours has this name"
    pairs = row.translations() if ">" in row.rule else {}
    if pairs and "*" not in pairs:
        yield "other values must stay as they are: *"
    for key in of_ours if "null" in pairs else ():
        if value_of(pairs["null"]) not in (keys()[key].default, []):
            yield f"null is not the default of {key}"


def matched(name: str, row: Row) -> list[str]:
    """Keys and sections of ours that a name is about."""
    compiled = pattern(name.partition("=")[0], below=row.kind == MISSING and not row.values)
    return [key for key in (*keys(), *sections()) if compiled.fullmatch(key)] if "=" not in name else []


def is_key(target: str) -> bool:
    if find_key(target) or target in sections():
        return True
    wanted = re.compile(re.escape(target).replace(STAR, ".+"))
    return STAR in target and any(wanted.fullmatch(key) for key in (*keys(), *sections()))


@pytest.mark.parametrize(("project", "row"), ROWS)
def test_every_row_is_sound(project: str, row: Row) -> None:
    assert list(problems_of(project, row)) == []


@pytest.mark.parametrize("project", (*PROJECTS, VERL))
def test_every_line_is_a_row(project: str) -> None:
    path = (names.Path(names.__file__).with_suffix("") / f"{PROJECTS.get(project, project)}.txt").read_text()
    lines = [line for line in path.splitlines() if not line.startswith("# ")]
    assert [line for line in lines if not 2 <= len(re.split(r" \|(?= |$)", line)) <= 5] == []
    assert len(table(project)) == len(lines) and all(row.section for row in table(project))


def test_no_row_of_verls_is_hidden_by_the_rows_before_it() -> None:
    def decides(row: Row) -> bool:
        return row.renames or (row.kind == NOTHING and not row.values and not row.kept)

    hidden = []
    for row in table(VERL):
        texts = (re.sub(r"\*+", "x", text.partition("=")[0]) for text in row.texts())
        firsts = (next((each for each, _ in rows_of(VERL, text) if decides(each)), row) for text in texts)
        if decides(row) and not any(first is row for first in firsts):
            hidden.append(row.names)
    assert hidden == []


@pytest.mark.parametrize(
    ("start", "changed", "problem"),
    [
        ("critic.(model.|)fsdp(_config|).(strategy", {"keys": (r"critic.\1",)}, "leads to critic.model., which is no"),
        ("trainer.v1.trainer_mode", {"keys": ("trainer.moed",)}, "trainer.v1.trainer_mode leads to trainer.moed, whi"),
        ("trainer.v1.trainer_mode", {"names": ("trainer.v1.(mode",)}, "trainer.v1.(mode is no pattern"),
        ("trainer.v1.trainer_mode", {"names": ("trainer.mode",)}, "trainer.mode is a key of ours"),
        ("trainer.v1.trainer_mode", {"conditions": ("on",)}, "a condition belongs to a section that is not there"),
        ("trainer.use_v1", {"note": ""}, "no note says why"),
        ("trainer.use_v1", {"names": ("trainer.*_freq",)}, "trainer.save_freq is a key of ours"),
        ("transfer_queue", {"names": ("trainer.placement",)}, "trainer.placement is a key of ours"),
        ("transfer_queue", {"names": ("global_profiler",)}, "global_profiler.tool is another name of a key, and"),
        ("trainer.profile_tool", {"names": ("trainer.profile_tol",)}, "no key of ours has this name"),
        ("trainer.profile_tool", {"rule": "npu>torch"}, "other values must stay as they are: *"),
        ("data.val_files", {"rule": "null>x, *"}, "null is not the default of data.val_files"),
        ("actor_rollout_ref.rollout.server", {"rule": "fn no_such"}, "there is no function no_such"),
        ("actor_rollout_ref.rollout.mode", {"names": ("trainer.use_v1",)}, "trainer.use_v1 is no key of ours"),
    ],
)
def test_a_planted_error_is_found(start: str, changed: dict[str, Any], problem: str) -> None:
    row = next(row for row in table(VERL) if row.names[0].startswith(start))
    assert any(problem in found for found in problems_of(VERL, replace(row, **changed)))


def test_names_are_followed_until_they_are_ours() -> None:
    """And the first row of those that speak of a value counts."""
    profiler = "actor_rollout_ref.actor.profiler"
    assert renamed("actor_rollout_ref.profiler.tool_config.nsys.discrete") == f"{profiler}.discrete"
    assert renamed("critic.fsdp.tp") == "critic.model.fsdp_config.tensor_parallel_size"
    assert says_nothing(f"{profiler}.tool_config.nsys.discrete") is None
    assert "trainer.profile_tool" in (says_nothing(f"{profiler}.tool_config.nsys.level") or "")
    assert says_nothing("critic.fsdp.seed") == "trainer.seed seeds all that is drawn"
    router = "actor_rollout_ref.ref.router_replay.mode"
    told = [canonical([Change(router, value)])[1] for value in ("disabled", None, "R2")]
    assert told[0] == [f"{router} has no effect: disabled is what is done anyway"] and told[2] == []
    assert len(told[1]) == 1 and told[1][0].startswith(f"{router} has no effect: it is off, and not available yet")


@pytest.mark.parametrize(
    ("project", "guide"),
    [
        ("ROLL", ROLL_GUIDE),
        ("Colossal-RL", COLOSSAL_GUIDE),
        ("TRL", TRL_MOST_USED),
        ("OpenRLHF", OPENRLHF_MOST_USED),
    ],
)
def test_every_name_of_the_guides_is_in_its_table_and_answered(project: str, guide: str) -> None:
    known = {name for row in table(project) for name in plain_names(row)}
    assert [name for name in guide.split() if name.lstrip("-").replace("-", "_") not in known] == []
    assert [name for name in guide.split() if foreign_hint(name) is None] == []


def test_rows_of_a_role_go_to_the_keys_of_that_role() -> None:
    row = row_of("ROLL", "critic.training_args.learning_rate")
    assert row is not None
    assert row.keys_of("critic") == ["critic.optim.lr"]
    assert row.all_keys() == ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr"]
    assert row_of("ROLL", "reference.training_args.learning_rate") is not row


def test_values_of_a_rule() -> None:
    row = next(row for row in table("ROLL") if "track_with" in row.names)
    assert row.translations()["wandb"] == '["console","wandb"]'


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("rollout_batch_size", "; ROLL's rollout_batch_size is our data.train_batch_size"),
        ("data.rollout_batch_size", "; ROLL's rollout_batch_size is our data.train_batch_size"),
        (
            "actor_train.training_args.weight_decay",
            "; ROLL's weight_decay is our actor_rollout_ref.actor.optim.weight_",
        ),
        ("critic.training_args.warmup_steps", "; ROLL's warmup_steps is our actor_rollout_ref.actor.optim.lr_warmup_"),
        ("num_generations", "; Colossal-RL's and TRL's num_generations is our actor_rollout_ref.rollout.n"),
        (
            "actor_infer.device_mapping",
            "; ROLL's device_mapping is our trainer.nnodes, trainer.n_gpus_per_node (all roles",
        ),
        ("custom_envs", "; ROLL's custom_envs is our env.custom"),
        ("max_completion_length", "; TRL's max_completion_length is our data.max_response_length"),
        ("n_samples_per_prompt", "; OpenRLHF's n_samples_per_prompt is our actor_rollout_ref.rollout.n"),
        ("rollout.gpu_memory_utilization", "; did you mean actor_rollout_ref.rollout.gpu_memory_utilization?"),
        ("lam", "; did you mean algorithm.lam?"),
        ("nope.a", "; docs/configuration.md lists all keys"),  # -a, with its dash, is Colossal-RL's
    ],
)
def test_hints_stand_in_messages_about_unknown_keys(typed: str, hint: str) -> None:
    assert suggest(typed).startswith(hint)


@pytest.mark.parametrize(
    ("objective", "typed", "meant"),
    [
        ("sft", "data.max_lenght", "data.max_length"),
        ("sft", "model.partial_pretrained", "model.partial_pretrain"),
        ("sft", "model.lora_r", "model.lora_rank"),
        ("sft", "engine.optimizer_ofload", "engine.optimizer_offload"),
        ("sft", "optim.beta", "optim.betas"),
        ("sft", "use_remove_pading", "use_remove_padding"),
        ("sft", "trainer.checkpoint.save_content", "trainer.checkpoint.save_contents"),
        ("preference", "data.multiturn.message_key", "data.multiturn.messages_key"),
        ("preference", "dpo.beta", "preference.beta"),
        ("ppo", "actor_rollout_ref.actor.tis_imp_ratio_caps", "actor_rollout_ref.actor.tis_imp_ratio_cap"),
    ],
)
def test_a_misspelt_name_of_verls_is_told_in_that_spelling(objective: str, typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"trainer.objective={'rl' if objective == 'ppo' else objective}", f"{typed}=1"])
    assert caught.value.problems == [f"unknown key {typed}; did you mean {meant}?"]


@pytest.mark.parametrize("typed", ["data.max_length", "data.max_lenght", "model.partial_pretrain"])
def test_a_name_of_the_supervised_trainer_is_known_as_such_elsewhere(typed: str) -> None:
    assert suggest(typed).endswith(" is a name of verl's sft_trainer: `verl-like sft` has it")
