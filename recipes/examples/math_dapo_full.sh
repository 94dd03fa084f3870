#!/usr/bin/env bash
# Full DAPO. Dynamic sampling is not available yet: this one is refused and names the key.
set -euo pipefail

python -m verl_like.trainer.main_ppo \
    data.train_files=$HOME/data/dapo-math-17k.parquet \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    trainer.project_name=verl_examples \
    trainer.experiment_name=math_dapo_full \
    "$@"
