"""Closed sets of values. Member names equal their values, because hydra matches enum members by name."""

from enum import StrEnum


class Strategy(StrEnum):
    """Framework that shards a model for training."""

    fsdp2 = "fsdp2"
    megatron = "megatron"


class Recompute(StrEnum):
    """Activations that gradient checkpointing computes again: all of a layer's, or all but its matrix products."""

    full = "full"
    selective = "selective"


class Experts(StrEnum):
    """Computation of a mixture's experts in transformers: its own choice, one by one, or in grouped products."""

    auto = "auto"
    eager = "eager"
    grouped_mm = "grouped_mm"
    batched_mm = "batched_mm"


class RolloutName(StrEnum):
    """Engine that generates."""

    vllm = "vllm"
    sglang = "sglang"
    hf = "hf"
    recorded = "recorded"
    openai = "openai"


class LoadFormat(StrEnum):
    """Route of trained weights to the rollout engine: tensor by tensor, or the full state dict first."""

    dummy_dtensor = "dummy_dtensor"
    dummy_hf = "dummy_hf"


class SandboxLevel(StrEnum):
    """Levels at which the sandbox locks up programs, from weakest to strongest."""

    limits = "limits"
    filtered = "filtered"
    isolated = "isolated"


class Truncation(StrEnum):
    """Treatment of a prompt longer than data.max_prompt_length."""

    error = "error"
    left = "left"
    right = "right"
    middle = "middle"


class SpelledTokens(StrEnum):
    """Treatment of special tokens that somebody else's text spells out."""

    text = "text"
    keep = "keep"
    error = "error"


class ResumeMode(StrEnum):
    """Starting point of a run."""

    auto = "auto"
    disable = "disable"
    resume_path = "resume_path"


class KLControlType(StrEnum):
    """Control of the coefficient of the KL penalty in the reward."""

    fixed = "fixed"
    adaptive = "adaptive"


class KLKind(StrEnum):
    """Per-token estimator of KL(policy || reference). "+": that value with the gradient of k2."""

    kl = "kl"
    k1 = "k1"
    abs = "abs"
    mse = "mse"
    k2 = "k2"
    low_var_kl = "low_var_kl"
    k3 = "k3"
    full = "full"
    locals()["kl+"] = "kl+"  # a member whose name is no identifier
    locals()["k1+"] = "k1+"
    locals()["abs+"] = "abs+"
    locals()["mse+"] = "mse+"
    locals()["k2+"] = "k2+"
    locals()["low_var_kl+"] = "low_var_kl+"
    locals()["k3+"] = "k3+"


class RatioLevel(StrEnum):
    """Unit of a probability ratio: a whole row, or each token."""

    seq = "seq"
    token = "token"


class RewardSource(StrEnum):
    """Quantity that topr takes as the reward of a row."""

    advantage = "advantage"
    score = "score"


class WeightScope(StrEnum):
    """Over which rows sample weights are computed and normalised."""

    mini_batch = "mini_batch"
    batch = "batch"


class OptimizerName(StrEnum):
    """AdamW with float32 states (in the precision of the weights), bfloat16 states, or 8-bit states."""

    adamw = "adamw"
    adamw_bf16 = "adamw_bf16"
    adamw_8bit = "adamw_8bit"


class WarmupStyle(StrEnum):
    """Learning-rate schedule after the linear warm-up."""

    constant = "constant"
    cosine = "cosine"


class OldLogProbs(StrEnum):
    """Source of the log-probabilities of the policy before the update."""

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"
    detach = "detach"


class Device(StrEnum):
    """Device that the workers compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Launcher(StrEnum):
    """Launcher of the workers: Ray, or none (one rank in this process)."""

    ray = "ray"
    local = "local"


class ProfileTool(StrEnum):
    """Recorder of the steps of trainer.profile_steps: torch's profiler, or Nsight Systems."""

    torch = "torch"
    nsys = "nsys"


class FusedBackend(StrEnum):
    """Implementation of the fused log-prob and entropy function."""

    torch = "torch"
    triton = "triton"


class ReweightMethod(StrEnum):
    """Method by which PF-PPO resamples responses."""

    pow = "pow"
    max_min = "max_min"
    max_random = "max_random"


class AgentNormMethod(StrEnum):
    """Method by which algorithm.agent_reward_norm changes the rewards of a group."""

    identity = "identity"
    mean = "mean"
    mean_std = "mean_std"
    asym_clip = "asym_clip"


class TruncatedRows(StrEnum):
    """Treatment of responses that were cut off, in the overlong buffer."""

    penalise = "penalise"
    zero = "zero"
    keep = "keep"


NORM_SCOPES = ("batch", "group", "running")  # algorithm.reward_norm
DISCOUNTING_ESTIMATORS = ("gae", "reinforce", "reinforce_plus_plus")  # read algorithm.gamma; the others compare a group
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "lite_ppo", "reinforce_plus_plus_baseline",
)  # fmt: skip
OPTIMAL_BASELINE_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")
WHITENING_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
MULTI_REWARD_ESTIMATORS = ("gdpo",)  # read algorithm.gdpo_reward_keys
STEP_ESTIMATORS = ("gigpo", "step_reinforce")  # need the turns of multi-turn rollout
ADV_ESTIMATORS = (
    *DISCOUNTING_ESTIMATORS, *GROUP_ESTIMATORS, *OPTIMAL_BASELINE_ESTIMATORS, *MULTI_REWARD_ESTIMATORS,
    *STEP_ESTIMATORS, "remax",
)  # fmt: skip
LOSS_MODES = (
    "vanilla", "gspo", "gspo_token", "luspo", "geo_mean", "clip_cov", "kl_cov", "cispo", "topr", "vespo", "dppo_tv",
    "dppo_kl", "sapo", "dro", "kimi", "gpg", "policy_gradient",
)  # fmt: skip
KL_MENU = "algorithm.kl_penalty / actor.kl_loss_type"
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DEFAULT_AGGREGATION = "token-mean"  # where loss_agg_mode is null and the loss has none of its own
CHAT_TEMPLATES = ("native", "none", "chatml", "qwen2_5", "llama3", "gemma", "r1_zero")
REWARD_MANAGERS = ("naive", "batch", "prime", "dapo")
ROLLOUT_MODES = ("sync", "async")
TRAINER_MODES = ("sync", "colocate_async", "separate_async")
SCHEDULER_MODES = ("request", "batch")
ABORTED_PROMPTS = ("wait", "drop")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
HEALTH_RULES = (  # those of observe/health.py, in its order
    *("mismatch_drift", "entropy_collapse", "reward_saturation", "score_fell", "groups_without_signal"),
    *("length_growth", "truncated_responses", "clip_storm", "policy_jump", "gradient_spikes", "skipped_updates"),
    *("numbers_not_finite", "stale_weights", "weights_that_do_not_move", "duplicates", "failed_rewards"),
    *("lost_responses", "memory_growth"),
)
HEALTH_ACTIONS = ("warn", "stop", "off")
LOG_FORMATS = ("text", "json")
LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
