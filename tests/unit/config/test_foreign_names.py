"""Names of other projects: every one is answered with keys that exist, or with the reason why there is none."""

import re

import pytest

from verl_like.config.foreign_names import PROJECTS, foreign_hint, plain_names, table
from verl_like.config.schema import find_key, sections, suggest

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


@pytest.mark.parametrize("project", PROJECTS)
def test_every_row_names_keys_that_exist_or_says_why_there_is_none(project: str) -> None:
    for row in table(project):
        unknown = [key for key in row.all_keys() if not (find_key(key) or key in sections() or key == "preset")]
        assert unknown == [], row.names
        assert row.keys or row.note or row.at_rest is not None, row.names
        assert re.match(r"fn |under|not$|$|.+>", row.rule), row.names


@pytest.mark.parametrize(
    ("project", "names"),
    [
        ("ROLL", ROLL_GUIDE),
        ("Colossal-RL", COLOSSAL_GUIDE),
        ("TRL", TRL_MOST_USED),
        ("OpenRLHF", OPENRLHF_MOST_USED),
    ],
)
def test_every_name_of_the_guides_is_in_its_table_and_answered(project: str, names: str) -> None:
    known = {name for row in table(project) for name in plain_names(row)}
    assert [name for name in names.split() if name.lstrip("-").replace("-", "_") not in known] == []
    assert [name for name in names.split() if foreign_hint(name) is None] == []


def test_rows_of_a_role_go_to_the_keys_of_that_role() -> None:
    row = next(row for row in table("ROLL") if row.matches("critic.training_args.learning_rate"))
    assert row.keys_of("critic") == ["critic.optim.lr"]
    assert row.all_keys() == ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr"]
    assert not row.matches("reference.training_args.learning_rate")


def test_values_of_a_rule() -> None:
    row = next(row for row in table("ROLL") if "track_with" in row.names)
    assert row.values()["wandb"] == '["console","wandb"]'


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
        ("num_generations", "; Colossal-RL's num_generations is our actor_rollout_ref.rollout.n"),
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
