#!/usr/bin/env bash
# GRPO in an environment: a small model learns to cross frozen lakes. 2 CPU cores, no download, no data file.
# Settings: OUT (folder), SEED, ROLLOUT (hf, vllm or sglang), PYTHON. More keys: as arguments.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-outputs/frozen_lake}
SEED=${SEED:-1}
ROLLOUT=${ROLLOUT:-hf}
PYTHON=${PYTHON:-python}

"$PYTHON" "$HERE/prepare.py" --output-dir "$OUT" --seed "$SEED"

exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    env.train.tags=[FrozenLake] \
    env.train.num_groups=64 \
    env.val.tags=[FrozenLake] \
    env.val.num_groups=512 \
    'env.custom.FrozenLake={type: frozen_lake, instruction: "", max_tokens_per_step: 4, config: {size: 4, max_steps: 8, action_pattern: "^(.*)$", holdout: 0.1, view: places}}' \
    data.train_batch_size=64 \
    data.max_prompt_length=32 \
    data.max_response_length=216 \
    actor_rollout_ref.model.path="$OUT/model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.optim.lr=4e-4 \
    actor_rollout_ref.actor.optim.warmup_style=cosine \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    trainer.nnodes=1 \
    trainer.launcher=local \
    trainer.n_gpus_per_node=1 \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=frozen_lake \
    trainer.experiment_name=small \
    trainer.default_local_dir="$OUT/checkpoints" \
    trainer.val_before_train=True \
    trainer.test_freq=20 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.total_training_steps=80 \
    "$@"
