#!/usr/bin/env bash
# GRPO on four sources at once: GSM8K, MATH, countdown and programs with tests. More keys: as arguments.
# Settings: DATA (folder with the raw sources), MODEL (a Hugging Face model; without it a small new one is made with
# TOKENIZER), OUT, SEED, STEPS, ROLLOUT, N_GPUS.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python}
OUT=${OUT:-outputs/mixed}
SEED=${SEED:-1}
STEPS=${STEPS:-5}
ROLLOUT=${ROLLOUT:-vllm}
DATA=${DATA:-$HERE/../../../shared/data}
TOKENIZER=${TOKENIZER:-$DATA/tok_minimind}
MODEL=${MODEL:-}

"$PYTHON" "$HERE/prepare.py" --source "$DATA" --output-dir "$OUT/data"
if [ -z "$MODEL" ]; then
    MODEL=$OUT/model
    [ -f "$MODEL/model.safetensors" ] ||
        "$PYTHON" "$HERE/../gsm8k/make_small_model.py" --tokenizer "$TOKENIZER" --output-dir "$MODEL" --seed "$SEED"
fi

exec "$PYTHON" -m verl_like.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="[$OUT/data/gsm8k/train.parquet,$OUT/data/math/train.parquet,$OUT/data/countdown/train.parquet,$OUT/data/code/train.parquet]" \
    'data.domain_weights={openai/gsm8k: 2, DigitalLearningGmbH/MATH-lighteval: 1, countdown: 1, codecontests: 1}' \
    data.val_files="{gsm8k: $OUT/data/gsm8k/test.parquet, math: $OUT/data/math/test.parquet, countdown: $OUT/data/countdown/test.parquet, humaneval: $OUT/data/humaneval/test.parquet}" \
    data.train_batch_size=20 \
    data.max_prompt_length=1024 \
    data.max_response_length=64 \
    data.filter_overlong_prompts=True \
    data.val_max_samples=8 \
    data.self_check_rows=8 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=10 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=2 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="${N_GPUS:-2}" \
    trainer.seed="$SEED" \
    trainer.logger=[console] \
    trainer.project_name=mixed \
    trainer.experiment_name=grpo \
    trainer.default_local_dir="$OUT/checkpoints" \
    trainer.validation_data_dir="$OUT/validation" \
    trainer.val_before_train=False \
    trainer.test_freq="$STEPS" \
    trainer.save_freq="$STEPS" \
    trainer.total_training_steps="$STEPS" \
    "$@"
