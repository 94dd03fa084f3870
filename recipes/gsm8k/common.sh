# Sourced by run_grpo.sh and run_ppo.sh: data, model, and the keys that both runs share (array COMMON).
# Settings: GSM8K (folder with train.jsonl and test.jsonl), MODEL (a Hugging Face model; without it a small new one is
# made with TOKENIZER), OUT, SEED, STEPS, ROLLOUT.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python}
OUT=${OUT:-outputs/gsm8k}
SEED=${SEED:-1}
STEPS=${STEPS:-5}
ROLLOUT=${ROLLOUT:-vllm}
GSM8K=${GSM8K:-$HERE/../../../shared/data/gsm8k}
TOKENIZER=${TOKENIZER:-$HERE/../../../shared/data/tok_qwen25}
MODEL=${MODEL:-}

if [ ! -f "$OUT/data/test.parquet" ]; then
    "$PYTHON" -m verl_like.kit.datasets.gsm8k --local_dataset_path "$GSM8K" --local_save_dir "$OUT/data"
fi
if [ -z "$MODEL" ]; then
    MODEL=$OUT/model
    [ -f "$MODEL/model.safetensors" ] ||
        "$PYTHON" "$HERE/make_small_model.py" --tokenizer "$TOKENIZER" --output-dir "$MODEL" --seed "$SEED"
fi

COMMON=(
    data.train_files="$OUT/data/train.parquet"
    data.val_files="$OUT/data/test.parquet"
    data.train_batch_size=16
    data.max_prompt_length=384
    data.max_response_length=64
    data.filter_overlong_prompts=True
    data.truncation=error
    data.train_max_samples=512
    data.val_max_samples=32
    data.seed="$SEED"
    custom_reward_function.path="$HERE/reward.py"
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.optim.lr=1e-4
    actor_rollout_ref.rollout.name="$ROLLOUT"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    trainer.nnodes=1
    trainer.n_gpus_per_node="${N_GPUS:-2}"
    trainer.seed="$SEED"
    trainer.logger=[console]
    trainer.project_name=gsm8k
    trainer.val_before_train=False
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.total_training_steps="$STEPS"
)
