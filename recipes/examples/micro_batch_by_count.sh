#!/usr/bin/env bash
# Micro-batches by number of sequences instead of tokens.
set -euo pipefail

python -m verl_like.trainer.main_ppo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    algorithm.adv_estimator=gae \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.rollout.name=vllm \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.use_dynamic_bsz=False \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    critic.ppo_micro_batch_size_per_gpu=32 \
    critic.forward_micro_batch_size_per_gpu=64 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    trainer.project_name=verl_examples \
    trainer.experiment_name=micro_batch_by_count \
    "$@"
