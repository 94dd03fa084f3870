#!/usr/bin/env bash
# A tiny vision-language model learns what colours are called: GRPO in one process. Settings: OUT (folder), SEED,
# ROLLOUT (vllm, sglang or hf), CONTROL=1 (pictures dealt to other questions). More keys: as arguments.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-outputs/vision}
SEED=${SEED:-1}
ROLLOUT=${ROLLOUT:-vllm}
PREFIX=${CONTROL:+shuffled_}
PYTHON=${PYTHON:-python}

"$PYTHON" "$HERE/prepare.py" --output-dir "$OUT" --seed "$SEED"
exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/${PREFIX}train.parquet" \
    data.val_files="$OUT/data/${PREFIX}val.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=16 \
    data.max_response_length=3 \
    data.seed="$SEED" \
    custom_reward_function.path="$HERE/../quickstart/reward.py" \
    actor_rollout_ref.model.path="$OUT/model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.limit_images=1 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=False \
    trainer.nnodes=1 \
    trainer.launcher=local \
    trainer.n_gpus_per_node=1 \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=vision \
    trainer.experiment_name="${PREFIX}disc_color" \
    trainer.default_local_dir="$OUT/checkpoints" \
    trainer.val_before_train=True \
    trainer.test_freq=20 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.total_training_steps=120 \
    "$@"
