#!/usr/bin/env bash
# GRPO on the pre-trained stories260k model: it learns to write in sentences of five words. `hf` rollout, because its heads of
# size 8 are too small for vLLM's CPU attention. Settings: MODEL (folder), OUT, SEED. More keys: as arguments.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-outputs/stories}
SEED=${SEED:-1}
MODEL=${MODEL:-$HERE/../../../shared/data/stories260k/hf}
PYTHON=${PYTHON:-python}

[ -f "$MODEL/config.json" ] || { echo "no model in $MODEL: set MODEL to the stories260k folder" >&2; exit 1; }
"$PYTHON" "$HERE/prepare.py" --output-dir "$OUT"

# The tokenizer has no chat template: the text of each user message, after the start token, is the prompt as it is.
exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/train.parquet" \
    data.val_files="$OUT/data/val.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=64 \
    data.max_response_length=64 \
    data.seed="$SEED" \
    custom_reward_function.path="$HERE/reward.py" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.optim.lr=5e-5 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=stories \
    trainer.experiment_name=short_sentences \
    trainer.default_local_dir="$OUT/checkpoints" \
    trainer.rollout_data_dir="$OUT/samples/train" \
    trainer.val_before_train=True \
    trainer.test_freq=20 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.total_training_steps=60 \
    "$@"
