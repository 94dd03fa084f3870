#!/usr/bin/env bash
# GRPO on GSM8K: 8 responses a prompt, KL loss against the reference. Settings: see common.sh. More keys: as arguments.
set -euo pipefail
OUT=${OUT:-outputs/gsm8k}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${COMMON[@]}" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    trainer.experiment_name=grpo \
    trainer.default_local_dir="$OUT/checkpoints_grpo" \
    "$@"
