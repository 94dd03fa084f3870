#!/usr/bin/env bash
# GRPO on the scores of a reward model that has a tokenizer and chat template of its own. Settings: MODEL (policy folder),
# TRAIN (parquet with prompts), REWARD_MODEL (folder), OUT. More keys: as arguments.
set -euo pipefail
: "${MODEL:?the folder of the policy}" "${TRAIN:?a parquet file with prompts}" "${REWARD_MODEL:?the folder of the reward model}"

exec "${PYTHON:-python}" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=True \
    data.train_files="$TRAIN" \
    data.val_files=[] \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.n=4 \
    reward_model.enable=True \
    reward_model.model.path="$REWARD_MODEL" \
    reward_model.model.input_tokenizer="$MODEL" \
    reward_model.max_length=1024 \
    trainer.default_local_dir="${OUT:-outputs/reward_model_run}" \
    trainer.test_freq=-1 \
    "$@"
