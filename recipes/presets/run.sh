#!/usr/bin/env bash
# A composed preset on the quickstart's task (two-digit addition), on one CPU process: PRESET=dapo bash recipes/presets/run.sh
# Prepares the quickstart's data and model first (about a minute, once). Settings: PRESET, OUT (folder), SEED, STEPS.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PRESET=${PRESET:-grpo}
OUT=${OUT:-outputs/quickstart}
SEED=${SEED:-1}
STEPS=${STEPS:-100}
PYTHON=${PYTHON:-python}
# 256 responses a step: presets that answer a prompt once need more prompts
case "$PRESET" in ppo | reinforce_plus_plus) PROMPTS=256 ;; *) PROMPTS=32 ;; esac

"$PYTHON" "$HERE/../quickstart/prepare.py" --output-dir "$OUT" --seed "$SEED"

# What belongs to this task and not to the algorithm: short answers, a learning rate for a model of this size.
exec "$PYTHON" -m verl_like.trainer.main_ppo \
    preset="$PRESET" \
    data.train_files="$OUT/data/train.parquet" \
    data.val_files="$OUT/data/val.parquet" \
    data.train_batch_size="$PROMPTS" \
    data.max_prompt_length=8 \
    data.max_response_length=6 \
    data.seed="$SEED" \
    custom_reward_function.path="$HERE/../quickstart/reward.py" \
    reward_model.overlong_buffer.len=1 \
    actor_rollout_ref.model.path="$OUT/model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size="$PROMPTS" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.rollout.name=hf \
    critic.optim.lr=1e-3 \
    trainer.launcher=local \
    trainer.device=cpu \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=presets \
    trainer.experiment_name="$PRESET" \
    trainer.default_local_dir="$OUT/presets/$PRESET" \
    trainer.val_before_train=True \
    trainer.test_freq="$STEPS" \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.total_training_steps="$STEPS" \
    "$@"
