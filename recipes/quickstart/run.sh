#!/usr/bin/env bash
# The quickstart's training run, as a plain command line: GRPO with 2 worker processes, FSDP2 and an engine in each of them.
# Needs prepare.py first. Settings: OUT (folder), SEED, ROLLOUT (auto, vllm, sglang or hf), REWARD (a file). More keys: as arguments.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-outputs/quickstart}
SEED=${SEED:-1}
ROLLOUT=${ROLLOUT:-auto}
REWARD=${REWARD:-$HERE/reward.py}

exec "${PYTHON:-python}" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/train.parquet" \
    data.val_files="$OUT/data/val.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=8 \
    data.max_response_length=6 \
    data.seed="$SEED" \
    custom_reward_function.path="$REWARD" \
    actor_rollout_ref.model.path="$OUT/model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model] \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.actor.optim.lr=4e-4 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.optim.warmup_style=cosine \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=False \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=quickstart \
    trainer.experiment_name=addition \
    trainer.default_local_dir="$OUT/checkpoints" \
    trainer.rollout_data_dir="$OUT/samples/train" \
    trainer.validation_data_dir="$OUT/samples/val" \
    trainer.val_before_train=True \
    trainer.test_freq=25 \
    trainer.save_freq=150 \
    trainer.resume_mode=disable \
    trainer.total_training_steps=150 \
    "$@"
