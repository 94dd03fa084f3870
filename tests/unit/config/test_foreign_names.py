"""Names of ROLL and Colossal-RL: every one is answered with keys that exist, or with the reason why there is none."""

import re

import pytest

from verl_like.config.foreign_names import COLOSSAL, ROLL, foreign_hint
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


@pytest.mark.parametrize("table", [ROLL, COLOSSAL], ids=["ROLL", "Colossal-RL"])
def test_answers_name_keys_that_exist(table: dict[str, str]) -> None:
    for name, answer in table.items():
        found = [key.rstrip(".") for key in re.findall(r"\b[a-z_]+(?:\.[a-z0-9_]+)+", answer)]
        if not answer.startswith("none: "):
            assert found or answer.startswith("preset "), name
            assert [key for key in found if not (find_key(key) or key in sections())] == [], name


def test_every_name_of_the_guides_is_answered() -> None:
    assert [name for name in ROLL_GUIDE.split() if not (foreign_hint(name) or "").startswith("ROLL's ")] == []
    assert [name for name in COLOSSAL_GUIDE.split() if foreign_hint(name) is None] == []


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
        ("actor_infer.device_mapping", "; ROLL's device_mapping has no counterpart here: trainer.nnodes and"),
        ("rollout.gpu_memory_utilization", "; did you mean actor_rollout_ref.rollout.gpu_memory_utilization?"),
        ("lam", "; did you mean algorithm.lam?"),
    ],
)
def test_hints_stand_in_messages_about_unknown_keys(typed: str, hint: str) -> None:
    assert suggest(typed).startswith(hint)
