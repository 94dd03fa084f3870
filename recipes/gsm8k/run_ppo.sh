#!/usr/bin/env bash
# PPO on GSM8K: GAE with a critic, KL in the reward. Settings: see common.sh. More keys: as arguments.
set -euo pipefail
OUT=${OUT:-outputs/gsm8k}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    "${COMMON[@]}" \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.rollout.n=4 \
    critic.model.path="$MODEL" \
    critic.optim.lr=1e-4 \
    critic.ppo_mini_batch_size=8 \
    critic.ppo_max_token_len_per_gpu=8192 \
    trainer.critic_warmup=1 \
    trainer.experiment_name=ppo \
    trainer.default_local_dir="$OUT/checkpoints_ppo" \
    "$@"
