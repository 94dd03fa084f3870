#!/usr/bin/env bash
# A laptop without a GPU and without vLLM: a small model, generation with transformers.
set -euo pipefail

python -m verl_like.trainer.main_ppo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    algorithm=grpo \
    rollout=hf \
    trainer.device=cpu \
    trainer.n_gpus_per_node=2 \
    data.train_batch_size=8 \
    data.max_prompt_length=256 \
    data.max_response_length=64 \
    actor_rollout_ref.model.path=$HOME/models/tiny \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.rollout.n=4 \
    trainer.total_training_steps=5 \
    trainer.val_before_train=False \
    trainer.project_name=verl_examples \
    trainer.experiment_name=cpu_hf_grpo \
    "$@"
