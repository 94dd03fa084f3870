#!/usr/bin/env bash
# One rank in this process, for a debugger.
set -euo pipefail

python -m verl_like.trainer.main_ppo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    algorithm=grpo \
    trainer=debug \
    rollout=hf \
    trainer.device=cpu \
    data.train_batch_size=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.rollout.n=2 \
    trainer.total_training_steps=2 \
    actor_rollout_ref.model.path=$HOME/models/tiny \
    trainer.project_name=verl_examples \
    trainer.experiment_name=debug_local \
    "$@"
