#!/usr/bin/env bash
# GRPO with a tool: a small model learns to ask a calculator for products that it cannot work out. 2 CPU processes, no download.
# Settings: OUT (folder), SEED, ROLLOUT (vllm or hf), PYTHON. More keys: as arguments.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-outputs/agent_tools}
SEED=${SEED:-1}
ROLLOUT=${ROLLOUT:-vllm}
PYTHON=${PYTHON:-python}

"$PYTHON" "$HERE/prepare.py" --output-dir "$OUT" --seed "$SEED"

exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/train.parquet" \
    data.val_files="$OUT/data/val.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=16 \
    data.max_response_length=40 \
    data.seed="$SEED" \
    custom_reward_function.path="$HERE/reward.py" \
    actor_rollout_ref.model.path="$OUT/model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.format=hermes \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$HERE/tools.py" \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=agent_tools \
    trainer.experiment_name=products \
    trainer.default_local_dir="$OUT/checkpoints" \
    trainer.rollout_data_dir="$OUT/samples/train" \
    trainer.validation_data_dir="$OUT/samples/val" \
    trainer.val_before_train=True \
    trainer.test_freq=10 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.total_training_steps=60 \
    "$@"
