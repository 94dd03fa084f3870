#!/usr/bin/env bash
# Go on from a chosen checkpoint.
set -euo pipefail

python -m verl_like.trainer.main_ppo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    trainer.resume_mode=resume_path \
    trainer.resume_from_path=checkpoints/verl_examples/gsm8k_grpo/global_step_40 \
    trainer.save_freq=10 \
    trainer.max_actor_ckpt_to_keep=2 \
    actor_rollout_ref.actor.checkpoint.save_contents=['model','optimizer','extra','hf_model'] \
    trainer.project_name=verl_examples \
    trainer.experiment_name=resume \
    "$@"
